"""The parameters of a model, from its checkpoint (with a progress bar) or random."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pagoda.common.backend import Weight
from pagoda.common.config.engine import EngineConfig
from pagoda.common.models.shapes import Param, params
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.common.weights.dtypes import to_bfloat16
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.settings.resolve import Resolved

_SCALE = 0.02  # standard deviation of most published initialisations
_POOL = 1 << 22  # distinct random numbers per dtype; larger parameters repeat them at a shifted start
_DTYPES = ("float32", "float16", "bfloat16")


def dummy_weights(params: Mapping[str, Param], seed: int = 0, dtype: str = "bfloat16") -> Iterator[Weight]:
    """Yield every parameter once: norms near 1, biases and matrices near 0, reproducible for a seed.

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
        source = near_one if _is_norm(name) else small
        start = crc32(name.encode()) % len(source)
        yield name, np.resize(np.roll(source, -start), param.shape).view(kind)


def _cast(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    return to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)


def _is_norm(name: str) -> bool:
    return "norm" in name and not name.endswith("_bias")


def with_progress(
    tensors: Iterable[NamedTensor], total: int, *, description: str = "Loading weights", disable: bool = False
) -> Iterator[NamedTensor]:
    """Yield the tensors, with a progress bar on stderr of their bytes; no bar if `disable` or without a terminal."""
    if disable or not sys.stderr.isatty():
        yield from tensors
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=description, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr) as bar:
        for name, array in tensors:
            yield name, array
            bar.update(array.nbytes)


def read_weights(config: EngineConfig, checkpoint: Checkpoint, resolved: Resolved) -> Iterator[Weight]:
    """Return every parameter of the model, from its checkpoint or random; none for a sharded checkpoint."""
    shapes = params(resolved.spec)
    if isinstance(checkpoint, ShardedCheckpoint):
        return iter(())  # the backend reads its arrays itself
    if config.load.load_format == "dummy":
        return dummy_weights(shapes, config.model.seed, resolved.dtype)
    tensors = with_progress(checkpoint.tensors(), checkpoint.num_bytes, disable=not config.load.use_tqdm_on_load)
    modules = resolved.purpose.modules if resolved.purpose is not None else None
    return resolved.family.weights(shapes, tensors if modules is None else chain(tensors, modules.tensors()))
