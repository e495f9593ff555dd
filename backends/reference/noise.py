"""The design's sampling noise in torch: the same integers as `common.engine.sampling`, tested for equality.

torch has no uint32 arithmetic on CPU; int32 wraps the same way, and a logical shift is an arithmetic one plus a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.common.engine.sampling import MIX_1, MIX_2, TOKEN_STRIDE


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """lowbias32 of int32 values (as bits of uint32)."""
    x = (x ^ _shift(x, 16)) * _signed(MIX_1)
    x = (x ^ _shift(x, 15)) * _signed(MIX_2)
    return x ^ _shift(x, 16)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [R, n]: noise of tokens int32 [R, n] or [n] under row keys int32 [R] (bits of uint32)."""
    bits = mix(keys[:, None] ^ (token_ids * _signed(TOKEN_STRIDE)))
    uniform = (_shift(bits, 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
