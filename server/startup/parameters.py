"""The parameters of a model: from its checkpoint (with a progress bar) or random, read ahead in a thread."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any, cast
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pagoda.common.backend import Weight
from pagoda.common.config.engine import EngineConfig
from pagoda.common.models.drafters import drafter_params
from pagoda.common.models.family import Family
from pagoda.common.models.primitives import Param
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.common.weights.dtypes import to_bfloat16
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.quantization.kv_scales import Scales, kv_scale_weights, without_kv_scales
from pagoda.common.weights.quantization.on_the_fly import quantized
from pagoda.common.weights.quantization.read import join_scales
from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.common.weights.quantization.tensors import dequantized, random_quantized
from pagoda.common.weights.rules import (
    apply_rules,
    check_names,
    merge_adapter,
    quantised_pieces,
    sources,
    stored_shapes,
    tensor_uses,
    with_equal_head,
)
from pagoda.common.weights.sentence_modules import module_tensors, side_tensors
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.settings.drafter import ResolvedDrafter, open_drafter
from pagoda.server.settings.resolve import Resolved

_SCALE = 0.02  # Standard deviation of most published initialisations.
_POOL = 1 << 22  # Distinct random numbers per dtype; larger parameters repeat them at a shifted start.
_DTYPES = ("float32", "float16", "bfloat16")


def dummy_weights(
    params: Mapping[str, Param], seed: int = 0, dtype: str = "bfloat16", schemes: Mapping[str, Scheme] | None = None
) -> Iterator[Weight]:
    """Yield every parameter once: norms near 1, biases and matrices near 0, reproducible for a seed.

    `schemes`: of parameters that are quantised.
    Raises ValueError for a dtype other than float32, float16 and bfloat16.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype} is not one of {', '.join(_DTYPES)}")
    largest = max((param.size for param in params.values()), default=0)
    pool = np.random.default_rng(seed).standard_normal(min(_POOL, largest), dtype=np.float32) * np.float32(_SCALE)
    kind = _cast(pool, dtype).dtype
    # As integers: numpy copies the tagged types several times slower.
    small, near_one = (_cast(numbers, dtype).view(f"u{kind.itemsize}") for numbers in (pool, pool + np.float32(1)))
    for name, param in params.items():
        if schemes is not None and name in schemes:
            yield name, random_quantized(schemes[name], param.shape, seed + crc32(name.encode()), _SCALE)
            continue
        source = near_one if _is_norm(name) else small
        start = crc32(name.encode()) % len(source)
        yield name, np.resize(np.roll(source, -start), param.shape).view(kind)


def _cast(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    return to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)


def _is_norm(name: str) -> bool:
    return "norm" in name and not name.endswith("_bias")


def with_progress(tensors: Iterable[Weight], total: int, *, disable: bool = False) -> Iterator[Weight]:
    """Yield the tensors, with a progress bar on stderr of their bytes; no bar if `disable` or without a terminal."""
    if disable or not sys.stderr.isatty():
        yield from tensors
        return
    from tqdm import tqdm

    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr
    ) as bar:
        for name, array in tensors:
            yield name, array
            bar.update(array.nbytes)


def read_weights(config: EngineConfig, checkpoint: Checkpoint, resolved: Resolved) -> Iterator[Weight]:
    """Return every parameter of the model, from its checkpoint or random; none for a sharded checkpoint.

    Of a model that transformers computes: every tensor of the checkpoint, under its own name.
    """
    if isinstance(checkpoint, ShardedCheckpoint):
        return iter(())  # The backend reads its arrays itself.
    modules = resolved.runner.modules if resolved.runner is not None else None
    if isinstance(resolved.spec, TransformersSpec) or resolved.family is None:
        stored = _stored(config, checkpoint)  # The code of transformers renames them.
        if resolved.quantization is not None:
            joined = join_scales(cast(Iterator[NamedTensor], stored), resolved.quantization, stored=checkpoint.names)
            stored = dequantized(joined, "transformers")
        return stored if modules is None else chain(stored, module_tensors(modules))
    shapes = params(resolved.spec)
    if config.load.load_format == "dummy":
        return dummy_weights(shapes, config.model.seed, resolved.dtype, resolved.schemes)
    kv_scales: Scales = {}
    family = checkpoint.family(resolved.family)
    tensors = _model_tensors(resolved, family, checkpoint, _stored(config, checkpoint), kv_scales)
    if resolved.spec.tied and resolved.spec.pooler is None:
        tensors = with_equal_head(family.rules, tensors, checkpoint.names)
    weights = apply_rules(family.rules, shapes, tensors, family.ignored)
    if resolved.quantizes_on_host:
        return quantized(weights, resolved.schemes)
    used = resolved.cache.cache_dtype in ("fp8", "fp8_e4m3") and not resolved.cache.calculate_kv_scales
    return chain(weights, kv_scale_weights(kv_scales, sources(family.rules, shapes), used=used))


def _model_tensors(
    resolved: Resolved, family: Family, checkpoint: Checkpoint, stored: Iterator[Weight], kv_scales: Scales
) -> Iterator[Weight]:
    """Return the tensors that the family's rules read, from those of the checkpoint; scales of K and V go to
    `kv_scales`, while the tensors are read.
    """
    modules = resolved.runner.modules if resolved.runner is not None else None
    assert isinstance(resolved.spec, ModelSpec), "the model has a spec"
    shapes = params(resolved.spec)
    tensors = stored
    if resolved.quantization is not None:
        # As a folder's are, before they are joined.
        dense = cast(Iterator[NamedTensor], without_kv_scales(tensors, kv_scales))
        pieces = partial(quantised_pieces, family.rules)
        shape_of = stored_shapes(family.rules, shapes)
        tensors = join_scales(dense, resolved.quantization, pieces, checkpoint.names, shape_of)
    tensors = tensors if modules is None else chain(tensors, module_tensors(modules))
    tensors = chain(tensors, side_tensors(checkpoint.folder, family.side_files))
    return tensors if family.adapter is None else merge_adapter(tensors, family.adapter)


def read_matrices(resolved: Resolved, checkpoint: Checkpoint, names: Collection[str]) -> Iterator[Weight]:
    """Yield these parameters of a running model again, as its checkpoint has them, in any order.

    `--quantization` does not change them. A sharded checkpoint yields none. Raises WeightError.
    """
    if isinstance(checkpoint, ShardedCheckpoint):
        return
    assert resolved.family is not None, "the model has a spec"
    assert isinstance(resolved.spec, ModelSpec)
    config = resolved.config
    shapes = params(resolved.spec)
    if config.load.load_format == "dummy":
        weights = dummy_weights(shapes, config.model.seed, resolved.dtype, resolved.schemes)
        yield from ((name, value) for name, value in weights if name in names)
        return
    family = checkpoint.family(resolved.family)
    wanted = frozenset(names)
    use = tensor_uses(family.rules, shapes)
    tensors = _model_tensors(resolved, family, checkpoint, iter(checkpoint.tensors()), {})
    needed = ((name, each) for name, each in tensors if not wanted.isdisjoint(param.name for param in use(name).params))
    found = (weight for weight in apply_rules(family.rules, shapes, needed) if weight[0] in wanted)
    yield from islice(found, len(wanted))


def read_drafter(config: EngineConfig, drafter: ResolvedDrafter, checkpoint: Checkpoint) -> Iterator[Weight]:
    """Return every parameter of a drafter's own. `checkpoint`: the target's, which may hold them."""
    shapes = drafter_params(drafter.spec)
    family = drafter.family
    settings = config.extension.speculative
    if config.load.load_format == "dummy":
        return dummy_weights(shapes, config.model.seed)
    if settings is not None and settings.model is not None:
        checkpoint = open_drafter(config, settings)
    stored = family.own_tensors(checkpoint.tensors())
    if drafter.quantization is not None:
        names = [family.known_name(name) for name in checkpoint.names if name.startswith(family.only)]
        dense = cast(Iterator[NamedTensor], without_kv_scales(stored, {}))
        pieces = partial(quantised_pieces, family.rules)
        stored = join_scales(dense, drafter.quantization, pieces, names, stored_shapes(family.rules, shapes))
    return apply_rules(family.rules, shapes, stored, family.ignored)


def check_weights(resolved: Resolved) -> None:
    """Raise WeightError if the names of the checkpoint's tensors do not fit the model.

    Only where they are known without reading the weights and nothing but the family's rules maps them to parameters.
    """
    spec = resolved.spec
    names = resolved.checkpoint.names
    if (
        resolved.family is None
        or isinstance(spec, TransformersSpec)
        or not names
        or resolved.quantization is not None
        or resolved.config.load.load_format == "dummy"
    ):
        return
    modules = None if resolved.runner is None else resolved.runner.modules
    family = resolved.checkpoint.family(resolved.family)
    if family.adapter is None and not family.side_files and modules is None:
        check_names(family.rules, params(spec), names, family.ignored)


def _stored(config: EngineConfig, checkpoint: Checkpoint) -> Iterator[Weight]:
    return with_progress(checkpoint.tensors(), checkpoint.num_bytes, disable=not config.load.use_tqdm_on_load)


class Prefetch:
    """Iterates over `weights`, read in a thread at most `max_bytes` ahead. Re-raises the source's exception.

    Weights are read and dequantised while the main thread imports the backend or packs the last tensor.
    """

    def __init__(self, weights: Iterable[Weight], max_bytes: int) -> None:
        self._source = weights
        self._max_bytes = max_bytes
        self._ready: deque[Weight] = deque()
        self._bytes = 0
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._read, name="pagoda-weights", daemon=True).start()

    def __iter__(self) -> Iterator[Weight]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._ended)
                if not self._ready:
                    break
                weight = self._ready.popleft()
                self._bytes -= weight[1].nbytes
                self._changed.notify_all()
            yield weight
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop reading."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            for weight in self._source:
                with self._changed:
                    self._changed.wait_for(lambda: self._bytes < self._max_bytes or self._ended)
                    if self._ended:
                        return
                    self._ready.append(weight)
                    self._bytes += weight[1].nbytes
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            self.close()
