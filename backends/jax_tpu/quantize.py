"""The matrices of the layers in 8 bits: which type a chip takes, and how its numbers are made from wider ones.

Every row of a matrix, which makes one output channel, is divided by a scale so that its largest value becomes the
largest number of the type. XLA widens the numbers inside the product, so HBM holds and sends 8 bits. Which float8 it is
depends on the chip: v5e, v5p and v6e multiply e4m3b11fnuz as it is and would widen e4m3fn by a dozen vector operations,
which takes longer than the reading; see benchmarks/LOG.md. Both have the same numbers but for a power of two, as far as
they are used here.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp

from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import ModelSpec, Moe
from pagoda.kernels_pallas.chips import ChipInfo

SCALE: Final = "_scale"
"""What is added to a matrix's name for the name of its scales: float32, one per row."""

_LARGEST: Final = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e4m3b11fnuz": 28.0}


def matrix_dtype(method: str | None, spec: ModelSpec, chip: ChipInfo) -> str | None:
    """The type of the layers' matrices; None: that of the activations. Raises ConfigError where there is none.

    `method`: a value of --quantization, None for none.
    """
    if method is None:
        return None
    if any(isinstance(layer.ffn, Moe) for layer in spec.layers):
        raise ConfigError("--quantization", f"{method}: experts stay as they are; drop it, or use --kv-cache-dtype fp8")
    if method == "int4":
        raise ConfigError("--quantization", f"jax_tpu cannot make weights {method}; use fp8 or int8")
    if method.startswith("fp8"):
        return chip.float8
    if not chip.int8:
        raise ConfigError("--quantization", f"{method}: {chip.name} has no int8; use fp8, which takes as little room")
    return "int8"


def quantized(x: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """X [..., D] in `dtype`, and float32 scales [...]: number * scale = value."""
    wide = x.astype(jnp.float32)
    largest = jnp.abs(wide).max(-1)
    scale = jnp.where(largest > 0, largest / _LARGEST[dtype], 1)
    wide = jnp.clip(wide / scale[..., None], -_LARGEST[dtype], _LARGEST[dtype])
    return (jnp.round(wide) if dtype == "int8" else wide).astype(dtype), scale
