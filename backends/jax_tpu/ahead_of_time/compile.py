"""Compile every program of a model for a topology, without the hardware, and report memory and estimated cycles."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jax

from pagoda.backends.jax_tpu.ahead_of_time.report import CompiledProgram, Report
from pagoda.backends.jax_tpu.ahead_of_time.schedule import Schedule, read_schedule
from pagoda.backends.jax_tpu.ahead_of_time.topology import Target, find_target
from pagoda.backends.jax_tpu.execution.program_kind import ProgramKind
from pagoda.backends.jax_tpu.execution.program_sets import PoolProgramSet, StepProgramSet
from pagoda.backends.jax_tpu.execution.programs import ProgramSet, blocks_of, compile_all, serialisable
from pagoda.backends.jax_tpu.execution.shapes import check_invariant, check_tables, step_shapes
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.memory.measure import ProgramNeeds, exact_blocks, largest_programs
from pagoda.backends.jax_tpu.memory.plan import (
    EXACT_SHARE,
    ProgramMemory,
    cache_dtype,
    fit_pooling,
    make_budget,
    plan_blocks,
    weight_bytes,
)
from pagoda.backends.jax_tpu.model.model import Model, build_model
from pagoda.backends.jax_tpu.model.parameters import LoraForm
from pagoda.backends.jax_tpu.parallel import dtype as dtype_of
from pagoda.backends.jax_tpu.parallel import make_mesh
from pagoda.backends.jax_tpu.weights.formats import matrix_formats
from pagoda.common.backend import BackendOptions
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import DEFAULT_MEMORY_SHARE, CacheConfig
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.errors import ConfigError
from pagoda.common.models.drafters import DrafterSpec
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.transformers_spec import own_spec
from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.kernels_pallas.chips import CHIPS

__all__ = ["compile_ahead", "find_target"]

_DEFAULT_CACHE: Final = CacheConfig()
_SCHEDULES: Final = "*.jit_*.after_codegen.txt"


def compile_ahead(target: Target, options: BackendOptions, *, largest: bool = False, stated: bool = True) -> Report:
    """Compile the programs of a model on devices of the target. Needs no weights.

    `largest`: compile only the largest program of each kind, which is enough for the memory budget. `stated`: the user
    set max_model_len (generation) or max_num_batched_tokens (pooling), so it must not be lowered to fit.

    Raise ConfigError if the heads cannot be sharded that way or the model does not fit.
    """
    begin = time.perf_counter()
    limits = options.limits
    layout = options.layout
    cache = options.cache
    parallel = options.parallel
    tensor = parallel.tensor
    data = parallel.data
    quantization = options.quantization
    schemes = options.schemes
    spec = own_spec(options.spec, "pagoda compile")
    if options.drafter is not None:
        raise ConfigError(
            "--speculative-config", "pagoda compile has no programs for drafter models; use method ngram or suffix"
        )
    if options.batch_invariant:
        check_invariant(options)
    model = model_for(
        target,
        spec,
        limits,
        layout,
        options.dtype,
        tensor,
        data,
        cache,
        quantization,
        schemes,
        batch_invariant=options.batch_invariant,
    )
    program_set: ProgramSet[Any]
    measured: tuple[CompiledProgram, ...] = ()
    if spec.pooler is not None:
        limits = fit_pooling(model, limits, int(target.hbm_bytes * cache.memory_share()), stated=stated)
        program_set = PoolProgramSet(model, limits)
        num_blocks = (0,) * len(layout.pools)
        history = 0
    else:
        num_blocks = plan_blocks(model, target, limits, cache, stated=stated)
        shapes = step_shapes(model, limits, factor=4 if target.chip is None else 2)
        steps = StepProgramSet(
            model=model,
            shapes=shapes,
            num_blocks=num_blocks,
            rows=limits.max_num_seqs,
            mode=options.sampling.logprobs_mode,
            media_rows=limits.media_rows,
        )
        if target.chip is not None and cache.num_gpu_blocks_override is None and cache.kv_cache_memory_bytes is None:
            examples = largest_programs(steps)
            measured = compile_programs(steps, list(examples.values()))
            needs = ProgramNeeds.of(steps, {kind: each.memory for kind, each in zip(examples, measured)})
            room = int(target.hbm_bytes * cache.memory_share(EXACT_SHARE)) - weight_bytes(model)
            num_blocks = exact_blocks(steps, limits, room, needs)
            steps = replace(steps, num_blocks=num_blocks)
        program_set = steps
        history = steps.state_bytes
    if not largest:
        programs = compile_programs(program_set, list(program_set))
    elif measured:
        programs = measured
    else:
        programs = compile_programs(program_set, list(largest_programs(program_set).values()))
    share = EXACT_SHARE if spec.pooler is None else DEFAULT_MEMORY_SHARE
    budget = make_budget(model, target, cache, num_blocks, history, (each.memory for each in programs), share)
    return Report(target, program_set, limits, programs, budget, time.perf_counter() - begin)


def model_for(
    target: Target,
    spec: ModelSpec,
    limits: Limits,
    layout: KvLayout,
    dtype: str,
    tensor: int,
    data: int = 1,
    cache: CacheConfig = _DEFAULT_CACHE,
    quantization: str | None = None,
    schemes: Mapping[str, Scheme] | None = None,
    *,
    batch_invariant: bool = False,
    lora: LoraForm | None = None,
    drafter: DrafterSpec | None = None,
) -> Model:
    """Return the model on the first `tensor` x `data` devices of the target, using Pallas kernels on TPUs.

    Raise ConfigError as `compile_ahead` does.
    """
    mesh = make_mesh(tensor, data, target.devices)
    model_dtype = dtype_of(dtype)
    kv_dtype = cache_dtype(cache, model_dtype, target.chip)
    on_tpu = target.chip is not None
    if on_tpu:
        check_tables(limits)
    kernel = KernelChoice(
        limits.block_size,
        kv_dtype,
        use_kernel=on_tpu,
        chip=target.chip or CHIPS["v6e"],
        batch_invariant=batch_invariant,
    )
    formats = matrix_formats(quantization, spec, kernel.chip, schemes, tensor)
    return build_model(spec, layout, mesh, model_dtype, limits.max_model_len, kernel, formats, lora, drafter)


def compile_programs(program_set: ProgramSet[Any], keys: Sequence[ProgramKind]) -> tuple[CompiledProgram, ...]:
    """Compile these programs in a thread pool and return them in the order of `keys`."""
    with tempfile.TemporaryDirectory(prefix="pagoda-compile-") as folder:
        numbers = iter(range(len(keys)))

        def compile(key: ProgramKind, lowered: jax.stages.Lowered) -> Compilation:
            dump = Path(folder, str(next(numbers)))
            begin = time.perf_counter()
            options: dict[str, str | bool] = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
            executable = lowered.compile(compiler_options=options if on_tpu else None)
            seconds = time.perf_counter() - begin
            return Compilation(seconds, executable, _schedule(dump, key.data_trips))

        on_tpu = program_set.model.kernel.use_kernel
        with serialisable():
            results = dict(compile_all(program_set, keys, compile))
    return tuple(_compiled(program_set, key, results[key]) for key in keys)


@dataclass(frozen=True, slots=True)
class Compilation:
    """What the compiler made of a program."""

    seconds: float
    executable: jax.stages.Compiled
    schedule: Schedule | None  # None: the compiler wrote none


def _compiled(program_set: ProgramSet[Any], key: ProgramKind, compilation: Compilation) -> CompiledProgram:
    model = program_set.model
    assert isinstance(model, Model), "it was built from a spec"
    return CompiledProgram(
        key=key,
        seconds=compilation.seconds,
        memory=ProgramMemory.of(compilation.executable),
        cost=key.cost(model, key.full_load(model, max(blocks_of(program_set.facts)))),
        schedule=compilation.schedule,
        executable=compilation.executable,
    )


def _schedule(dump: Path, data_trips: int) -> Schedule | None:
    """Return the compiler's schedule, None if it wrote none, and delete the dump, which is large."""
    path = next(dump.glob(_SCHEDULES), None)
    schedule = None if path is None else read_schedule(path.read_text(), data_trips)
    for file in dump.glob("*"):
        if file.is_file():
            file.unlink()
    return schedule
