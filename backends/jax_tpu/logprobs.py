"""Log-probabilities (or the logits themselves) of the chosen token, its rank, and the best few."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.common.engine.sampling import LogprobsMode
from pagoda.common.engine.step import Float32, Int32, TokenLogprobs

BEST: Final = 20
"""How many of the best the device finds; a request for more has its logits sorted on the host."""


def logprobs(mode: LogprobsMode, logits: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits [n, V], chosen int32 [n] -> ids int32 [n, 1+BEST], values float32 [n, 1+BEST], ranks int32 [n]."""
    values = logits if mode.endswith("logits") else jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(values, chosen[:, None], 1)
    ranks = (values > own).sum(-1).astype(jnp.int32) + 1
    best, ids = jax.lax.top_k(values, min(BEST, logits.shape[1]))
    return jnp.concatenate([chosen[:, None], ids], 1), jnp.concatenate([own, best], 1), ranks


def sorted_logprobs(mode: LogprobsMode, logits: Float32, chosen: Int32, best: int) -> TokenLogprobs:
    """The same on the host for any `best` (-1: all). logits float32 [n, V], chosen int32 [n]."""
    top = logits.max(-1, keepdims=True)
    total = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    values = logits if mode.endswith("logits") else logits - total
    own = np.take_along_axis(values, chosen[:, None], 1)
    ids = np.argsort(-values, axis=-1, kind="stable")[:, : logits.shape[1] if best < 0 else best]
    return TokenLogprobs(
        np.concatenate([chosen[:, None], ids], 1).astype(np.int32),
        np.concatenate([own, np.take_along_axis(values, ids, 1)], 1).astype(np.float32),
        ((values > own).sum(-1) + 1).astype(np.int32),
    )
