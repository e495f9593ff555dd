"""Random weights for a model without a checkpoint: the same for the same seed, small enough to stay finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pagoda.common.backend import Weight
from pagoda.common.models.shapes import Param
from pagoda.common.weights.narrow import to_bfloat16

_SCALE = 0.02  # standard deviation of most published initialisations
_POOL = 1 << 22  # distinct random numbers per dtype; larger parameters repeat them at a shifted start
_DTYPES = ("float32", "float16", "bfloat16")


def dummy_weights(params: Mapping[str, Param], seed: int = 0, dtype: str = "bfloat16") -> Iterator[Weight]:
    """Every parameter once: norms near 1, biases and matrices near 0; the same values for the same seed and `params`.

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
