"""Routed mixtures of experts."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.ops import activation, mix_experts, route
from pagoda.backends.torch_cuda.kernels import activation as activation_kernel
from pagoda.backends.torch_cuda.kernels.launch import Chip
from pagoda.backends.torch_cuda.kernels.moe import kernel
from pagoda.backends.torch_cuda.kernels.moe.kernel import TILES
from pagoda.backends.torch_cuda.kernels.weight_only.packing import PackedMatrix, unpack
from pagoda.common.models.spec import Mlp, Router

__all__ = ["moe"]

_GROUPED_MM: Final[Any] = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNED: Final = 8
_MAJORS: Final = (9, 10)
"""Compute capabilities with a kernel in torch; on others it synchronizes and loops over the experts."""


def moe(
    x: Tensor,
    router_logits: Tensor,
    inner: Tensor | PackedMatrix,
    down: Tensor | PackedMatrix,
    *,
    router: Router,
    expert: Mlp,
    inner_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    use_kernel: bool,
    chip: Chip,
) -> Tensor:
    """Return the sum of each token's best experts' outputs, weighted by the router: [T, D] in x's dtype.

    x [T, D]; router_logits float32 [T, E]; inner [E, 2F, D], gate then up, or [E, F, D] of experts without a gate; down
    [E, D, F]; inner_bias [E, 2F or F], down_bias [E, D]. F may be a rank's share of the expert's width. Matrices are in
    x's dtype or packed. Padding tokens are computed too. Raise ValueError for other shapes.
    """
    count, columns = router_logits.shape[1], inner.shape[1] if isinstance(inner, Tensor) else inner.outputs
    width = columns // 2 if expert.gated else columns
    shapes = {"router_logits": (x.shape[0], count), "inner": (count, columns, x.shape[1])}
    shapes["down"] = (count, x.shape[1], width)
    for name, argument in (("router_logits", router_logits), ("inner", inner), ("down", down)):
        if _shape(argument) != shapes[name]:
            raise ValueError(f"{name} is {_shape(argument)}, not {shapes[name]}")
    if not use_kernel:
        return moe_reference(x, router_logits, inner, down, inner_bias, down_bias, router, expert)
    weights, chosen = kernel.route(router_logits, router)
    if isinstance(inner, Tensor) and isinstance(down, Tensor) and use_grouped_mm(x, chosen, inner, down, chip):
        parts = grouped_experts(x, chosen, inner, down, inner_bias, down_bias, expert)
    else:
        parts = kernel.experts(x, chosen, inner, down, inner_bias, down_bias, expert, chip)
    return kernel.mix(parts, weights, x)


def _shape(x: Tensor | PackedMatrix) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, Tensor) else (*x.data.shape[:-1], x.inputs)


def use_grouped_mm(x: Tensor, chosen: Tensor, inner: Tensor, down: Tensor, chip: Chip) -> bool:
    """Return whether torch's grouped product supports these on the chip and is faster: many rows per expert."""
    aligned = x.shape[1] % _ALIGNED == 0 and down.shape[2] % _ALIGNED == 0
    many = chosen.numel() > TILES[-2] * inner.shape[0]
    return _GROUPED_MM is not None and x.dtype == torch.bfloat16 and chip.capability[0] in _MAJORS and aligned and many


def grouped_experts(
    x: Tensor,
    chosen: Tensor,
    inner: Tensor,
    down: Tensor,
    inner_bias: Tensor | None,
    down_bias: Tensor | None,
    expert: Mlp,
) -> Tensor:
    """Return every pair's row through its expert: [T * k, D]. x [T, D], chosen int32 [T, k]."""
    order, row_experts, ends = kernel.align(chosen, inner.shape[0], 1)
    both: Tensor = _GROUPED_MM(x[order // chosen.shape[1]], inner.transpose(1, 2), offs=ends)
    if inner_bias is not None:
        both += inner_bias[row_experts]
    act = activation_kernel.gated if expert.gated else activation_kernel.plain
    hidden = act(both, expert.activation, use_kernel=True)
    rows: Tensor = _GROUPED_MM(hidden, down.transpose(1, 2), offs=ends)
    if down_bias is not None:
        rows += down_bias[row_experts]
    out = torch.empty_like(rows)
    out[order] = rows
    return out


def moe_reference(
    x: Tensor,
    router_logits: Tensor,
    inner: Tensor | PackedMatrix,
    down: Tensor | PackedMatrix,
    inner_bias: Tensor | None,
    down_bias: Tensor | None,
    router: Router,
    expert: Mlp,
) -> Tensor:
    """An expert runs on the rows routed to it; packed experts are unpacked to x's dtype."""
    weights, experts = route(router_logits, router)
    act = activation(expert.activation)

    def run(index: int, rows: Tensor) -> Tensor:
        both = rows @ _matrix(inner, index, rows).T
        if inner_bias is not None:
            both = both + inner_bias[index]
        width = both.shape[1] // 2
        hidden = act(both[:, :width]) * both[:, width:] if expert.gated else act(both)
        out = hidden @ _matrix(down, index, rows).T
        return out if down_bias is None else out + down_bias[index]

    return mix_experts(x, weights, experts, run)


def _matrix(stack: Tensor | PackedMatrix, index: int, like: Tensor) -> Tensor:
    """Return one expert's matrix [O, I] in the dtype of `like`."""
    return stack[index] if isinstance(stack, Tensor) else unpack(stack.expert(index)).to(like.dtype)
