"""The distances of ALiBi, for the attention kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def behind(keys, queries, ROOT: tl.constexpr):
    """Return minus the distance [rows, keys] of queries [rows] and the keys [keys] before them, or minus its root."""
    ahead = (keys[None, :] - queries[:, None]).to(tl.float32)
    if ROOT:
        ahead = -tl.sqrt(tl.maximum(-ahead, 0.0))
    return ahead
