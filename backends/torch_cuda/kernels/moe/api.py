"""A routed mixture of experts: the one entry point."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.ops import activation, mix_experts
from pagoda.backends.reference.model.ops import route as route_plain
from pagoda.backends.torch_cuda.kernels import activation as activation_kernel
from pagoda.backends.torch_cuda.kernels.launch import Chip
from pagoda.backends.torch_cuda.kernels.moe import kernel
from pagoda.backends.torch_cuda.kernels.moe.kernel import TILES
from pagoda.backends.torch_cuda.kernels.moe.routing import align, route
from pagoda.backends.torch_cuda.kernels.weight_only.packing import PackedMatrix, unpack
from pagoda.common.models.spec import Mlp, Router

# The definition of a routed mixture of experts, on the reference backend's own routing and mixing.


def reference(
    x: Tensor,
    router_logits: Tensor,
    inner: Tensor | PackedMatrix,
    down: Tensor | PackedMatrix,
    inner_bias: Tensor | None,
    down_bias: Tensor | None,
    router: Router,
    expert: Mlp,
) -> Tensor:
    """As `api.moe`. An expert runs on the rows routed to it; packed experts are unpacked to x's dtype."""
    weights, experts = route_plain(router_logits, router)
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
    """One expert's matrix [O, I] in the dtype of `like`."""
    return stack[index] if isinstance(stack, Tensor) else unpack(stack.expert(index)).to(like.dtype)


# Experts with many rows each, by torch's own grouped product, which is faster where arithmetic is the bound.

_GROUPED_MM: Final[Any] = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNED: Final = 8
_MAJORS: Final = (9, 10)
"""Compute capabilities that torch has a kernel for; on others it waits for the device to loop over the experts."""


def is_faster(x: Tensor, chosen: Tensor, inner: Tensor, down: Tensor, chip: Chip) -> bool:
    """Whether torch has a grouped product for these on the chip, and they are many."""
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
    """Every pair's row through its expert: [T * k, D]. x [T, D], chosen int32 [T, k]."""
    order, row_experts, ends = align(chosen, inner.shape[0], 1)
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
    """Sum of each token's best experts' outputs, weighted by the router: [T, D] in x's dtype.

    x [T, D]; router_logits float32 [T, E]; inner [E, 2F, D], gate then up, or [E, F, D] of an expert without a gate;
    down [E, D, F]; inner_bias [E, 2F or F], down_bias [E, D]. F may be a rank's share of the expert's width. Matrices
    are in x's dtype or packed. Tokens of padding cost their experts' time and give something. ValueError: shapes.
    """
    count, columns = router_logits.shape[1], inner.shape[1] if isinstance(inner, Tensor) else inner.outputs
    width = columns // 2 if expert.gated else columns
    shapes = {"router_logits": (x.shape[0], count), "inner": (count, columns, x.shape[1])}
    shapes["down"] = (count, x.shape[1], width)
    for name, found in (("router_logits", router_logits), ("inner", inner), ("down", down)):
        if _shape(found) != shapes[name]:
            raise ValueError(f"{name} is {_shape(found)}, not {shapes[name]}")
    if not use_kernel:
        return reference(x, router_logits, inner, down, inner_bias, down_bias, router, expert)
    weights, chosen = route(router_logits, router)
    if isinstance(inner, PackedMatrix) or isinstance(down, PackedMatrix) or not is_faster(x, chosen, inner, down, chip):
        parts = kernel.experts(x, chosen, inner, down, inner_bias, down_bias, expert, chip)
    else:
        parts = grouped_experts(x, chosen, inner, down, inner_bias, down_bias, expert)
    return kernel.mix(parts, weights, x)


def _shape(x: Tensor | PackedMatrix) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, Tensor) else (*x.data.shape[:-1], x.inputs)
