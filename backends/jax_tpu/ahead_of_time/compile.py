"""Compiling every program of a model for chips that need not be there, and what that tells about it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax

from pagoda.backends.jax_tpu.ahead_of_time.report import Compiled, Report
from pagoda.backends.jax_tpu.ahead_of_time.roofline import Key, load_of, need
from pagoda.backends.jax_tpu.ahead_of_time.schedule import Schedule, read_schedule
from pagoda.backends.jax_tpu.ahead_of_time.topology import Target, find_target
from pagoda.backends.jax_tpu.execution.compile_cache import ProgramSet
from pagoda.backends.jax_tpu.execution.executable import writable
from pagoda.backends.jax_tpu.execution.packed_input import PackedShape
from pagoda.backends.jax_tpu.execution.pool_program_keys import PoolCatalogue
from pagoda.backends.jax_tpu.execution.program_keys import (
    Catalogue,
    Choose,
    Forward,
    ForwardRows,
    OnLogits,
    Remember,
    Score,
)
from pagoda.backends.jax_tpu.execution.programs import compile_all
from pagoda.backends.jax_tpu.execution.shapes import check_tables
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.memory.budget import ProgramMemory, make_budget, plan_blocks
from pagoda.backends.jax_tpu.memory.plan import cache_dtype, fit_pooling
from pagoda.backends.jax_tpu.model.model import Model, build_model
from pagoda.backends.jax_tpu.parallel.platform import dtype as dtype_of
from pagoda.backends.jax_tpu.parallel.sharding import make_mesh
from pagoda.backends.jax_tpu.weights.placement import matrix_dtype
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.sampling import LogprobsMode
from pagoda.common.engine.shapes import StepShapes
from pagoda.common.models.spec import ModelSpec
from pagoda.kernels_pallas.chips import CHIPS

__all__ = ["compile_ahead", "find_target"]

_USUAL: Final = CacheConfig()
_SCHEDULES: Final = "*.jit_*.after_codegen.txt"


def compile_ahead(
    target: Target,
    spec: ModelSpec,
    *,
    limits: Limits,
    layout: KvLayout,
    cache: CacheConfig,
    dtype: str,
    tensor: int,
    data: int = 1,
    mode: LogprobsMode = "raw_logprobs",
    largest: bool = False,
    stated: bool = True,
    quantization: str | None = None,
) -> Report:
    """Compile the programs of `data` copies of a model, each on `tensor` of the target's devices; needs no weights.

    `largest`: only the program of each kind that takes most memory, which is enough for the budget. `stated`: somebody
    asked for this max_model_len, or, of a model that pools, for this batch.

    Raises ConfigError when the mesh does not suit the heads or the model does not fit.
    """
    begin = time.perf_counter()
    model = model_for(target, spec, limits, layout, dtype, tensor, data, cache, quantization)
    catalogue: ProgramSet[Any]
    if spec.pooler is not None:
        limits = fit_pooling(model, limits, int(target.hbm_bytes * cache.gpu_memory_utilization), stated=stated)
        catalogue, num_blocks, history = PoolCatalogue(model, limits), 0, 0
    else:
        num_blocks = plan_blocks(model, target, limits, cache, stated=stated)
        shapes = StepShapes.of(limits, len(layout.groups), factor=4 if target.chip is None else 2)
        catalogue = Catalogue(model, shapes, num_blocks, limits.max_num_seqs, mode)
        history = catalogue.history.size * catalogue.history.dtype.itemsize
    keys = _largest(catalogue) if largest else list(catalogue)
    found = compile_programs(catalogue, keys)
    budget = make_budget(model, target, cache, num_blocks, history, (each.memory for each in found))
    return Report(target, catalogue, limits, found, budget, time.perf_counter() - begin)


def model_for(
    target: Target,
    spec: ModelSpec,
    limits: Limits,
    layout: KvLayout,
    dtype: str,
    tensor: int,
    data: int = 1,
    cache: CacheConfig = _USUAL,
    quantization: str | None = None,
) -> Model:
    """The model on the first `tensor` x `data` devices, with the kernel where they are TPUs. Raises ConfigError."""
    mesh, number = make_mesh(tensor, data, target.devices), dtype_of(dtype)
    stored, on_tpu = cache_dtype(cache, number, target.chip), target.chip is not None
    if on_tpu:
        check_tables(limits)
    kernel = KernelChoice(limits.block_size, stored, use_kernel=on_tpu, chip=target.chip or CHIPS["v6e"])
    matrices = matrix_dtype(quantization, spec, kernel.chip)
    return build_model(spec, layout, mesh, number, limits.max_model_len, kernel, matrices)


def compile_programs(catalogue: ProgramSet[Any], keys: Sequence[Key]) -> tuple[Compiled, ...]:
    """Compile these programs, by several threads. In the order of `keys`."""
    with tempfile.TemporaryDirectory(prefix="pagoda-compile-") as folder:
        numbers = iter(range(len(keys)))

        def compile(lowered: jax.stages.Lowered) -> tuple[float, jax.stages.Compiled, Schedule | None]:
            dump = Path(folder, str(next(numbers)))
            begin = time.perf_counter()
            options: dict[str, str | bool] = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
            executable = lowered.compile(compiler_options=options if on_tpu else None)
            seconds = time.perf_counter() - begin
            return seconds, executable, _schedule(dump)

        on_tpu = catalogue.model.kernel.use_kernel
        with writable():
            done = dict(compile_all(catalogue, keys, compile))
    return tuple(_compiled(catalogue, key, *done[key]) for key in keys)


def _compiled(
    catalogue: ProgramSet[Any], key: Key, seconds: float, executable: jax.stages.Compiled, schedule: Schedule | None
) -> Compiled:
    needed = need(catalogue.model, key, load_of(catalogue.model, key, catalogue.facts["num_blocks"]))
    return Compiled(key, seconds, ProgramMemory.of(executable), needed, schedule, executable)


def _schedule(dump: Path) -> Schedule | None:
    """The compiler's schedule, if it wrote one; the rest of its dump is large and goes at once."""
    found = next(dump.glob(_SCHEDULES), None)
    schedule = None if found is None else read_schedule(found.read_text())
    for file in dump.glob("*"):
        if file.is_file():
            file.unlink()
    return schedule


def _largest(catalogue: ProgramSet[Any]) -> list[Key]:
    """The largest program of each kind."""
    found: dict[object, Key] = {}
    for key in catalogue:
        kind = (
            type(key),
            getattr(key, "kind", None),
            getattr(key, "name", None),
            _decodes(key),
            getattr(key, "of_tokens", None),
        )
        found[kind] = max(found.get(kind, key), key, key=_size)
    return list(found.values())


def _decodes(key: Key) -> bool:
    return isinstance(key, Forward) and key.shape.decode_only


def _size(key: Key) -> tuple[int, ...]:
    match key:
        case Forward(shape) | ForwardRows(shape):
            return shape.tokens, shape.seqs, shape.pages
        case Score(tokens) | PackedShape(tokens):
            return (tokens,)
        case Choose(seqs, _) | OnLogits(_, seqs):
            return (seqs,)
        case Remember():
            return (0,)
