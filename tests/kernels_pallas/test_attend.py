"""Parts of the attention kernel's arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.ragged_paged_attention.attend import widen


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_every_byte_is_widened_exactly(dtype: str, place: int) -> None:
    codes = np.arange(256, dtype=np.uint8)
    true = np.asarray(jax.lax.bitcast_convert_type(codes, jnp.dtype(dtype)).astype(jnp.float32))
    # Tokens 2 i and 2 i + 1 share row i: every value in the low half, its mirror in the high one.
    low, high = codes.reshape(2, 128).repeat(4, 0), codes[::-1].reshape(2, 128).repeat(4, 0)
    other = np.uint32(0x5A00A500 >> 8 * place)
    words = low.astype(np.uint32) << 8 * place | high.astype(np.uint32) << (16 + 8 * place) | other

    def body(x, out) -> None:
        out[...] = widen(x[...], place, dtype)

    shape = jax.ShapeDtypeStruct((16, 128), jnp.bfloat16)
    out = pl.pallas_call(body, out_shape=shape, interpret=pltpu.InterpretParams())(jnp.asarray(words))
    actual, expected = np.asarray(out, np.float32), np.stack([true[low], true[high]], 1).reshape(16, 128)
    finite = np.isfinite(expected)
    assert finite.sum() >= 16 * 128 * 247 / 256
    np.testing.assert_array_equal(actual[finite], expected[finite])
    assert np.isfinite(actual).all()
