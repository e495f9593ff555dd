"""Edited logits -> tokens, on the device and without a sort: top-k, top-p and min-p are one threshold per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.gumbel_max import gumbel_max, remember
from pagoda.backends.torch_cuda.kernels.top_k_top_p import top_k_top_p


@dataclass(frozen=True, slots=True)
class Rules:
    """Per row of logits, cut from what `Chosen.pack` makes. `rows`, `positions`: where in the history the token goes.

    Each [R]; `temperature` 0 is greedy, `keys` are bits of uint32.
    """

    rows: Tensor
    positions: Tensor
    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def unpack(cls, packed: Tensor) -> Rules:
        """The rows of int32 [7, R], not copied."""
        real = packed.view(torch.float32)
        return cls(packed[0], packed[1], packed[2], real[3], packed[4], real[5], real[6])

    def lowest_kept(self, logits: Tensor, *, use_kernel: bool) -> Tensor:
        """float32 [R]: the smallest of the logits [R, V] inside top-k, top-p and min-p; -inf for greedy rows."""
        return top_k_top_p(logits, self.temperature, self.top_k, self.top_p, self.min_p, use_kernel=use_kernel)

    def drawn_from(self, logits: Tensor, *, use_kernel: bool) -> Tensor:
        """Edited logits [R, V] -> those that tokens are drawn from: over temperature, filtered ones minus infinity."""
        floor = self.lowest_kept(logits, use_kernel=use_kernel)
        scaled = logits / torch.where(self.temperature > 0, self.temperature, 1.0)[:, None]
        return torch.where(logits >= floor[:, None], scaled, -torch.inf)


def choose(logits: Tensor, packed: Tensor, last: Tensor, history: Tensor, *, use_kernel: bool) -> Tensor:
    """Logits float32 [R, V] -> tokens int32 [R], also written to `last` and `history`. Nothing waits for the device.

    packed int32 [7, R] of `Chosen.pack`; last int32 [rows + 1]; history int32 [rows + 1, length].
    """
    rules = Rules.unpack(packed)
    floor = rules.lowest_kept(logits, use_kernel=use_kernel)
    tokens = gumbel_max(logits, rules.keys, rules.temperature, floor, use_kernel=use_kernel)
    remember(tokens, rules.rows, rules.positions, last, history, use_kernel=use_kernel)
    return tokens
