"""The design's sampling noise in jnp: the same integers as `common.engine.sampling`, tested for equality."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.common.engine.sampling import MIX_1, MIX_2, TOKEN_STRIDE


def mix(x: jax.Array) -> jax.Array:
    """lowbias32 of uint32 values."""
    x = (x ^ (x >> 16)) * np.uint32(MIX_1)
    x = (x ^ (x >> 15)) * np.uint32(MIX_2)
    return x ^ (x >> 16)


def gumbel(keys: jax.Array, token_ids: jax.Array) -> jax.Array:
    """float32 [R, n]: noise of tokens uint32 [n] under row keys uint32 [R]."""
    bits = mix(keys[:, None] ^ (token_ids * np.uint32(TOKEN_STRIDE)))
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))
