"""Routed mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.ops import mix_experts, route
from pagoda.backends.torch_cuda.kernels.experts.moe import kernel
from pagoda.backends.torch_cuda.kernels.experts.moe.kernel import TILES
from pagoda.backends.torch_cuda.kernels.experts.moe_w8a8 import kernel as w8a8
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.invariant_linear import invariant_linear_reference
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import Numbers, quantize_rows_reference
from pagoda.backends.torch_cuda.kernels.linear.weight_only.packing import PackedMatrix, unpack
from pagoda.backends.torch_cuda.kernels.pointwise import activation as activation_kernel
from pagoda.common.models.spec import Mlp, Router, SparseMixer

__all__ = ["Added", "ExpertAdapters", "moe"]

_GROUPED_MM: Final[Any] = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNED: Final = 8
INVARIANT_TILE: Final = TILES[1]
"""Rows of one expert per program with --batch-invariant, however many there are."""

_MAJORS: Final = (9, 10)
"""Compute capabilities with a kernel in torch; on others it synchronizes and loops over the experts."""


Added = Callable[[Tensor, Tensor], Tensor]
"""(y [R, O], x [R, I]) -> y, with what adapters add to the products of x; may write to y."""

ExpertAdapters = Callable[[Tensor, Tensor], tuple[Added, Added]]
"""(token int [R], expert int [R] of each row) -> what LoRA adapters add to the first and the second product."""


def moe(
    x: Tensor,
    router_logits: Tensor,
    inner: Tensor | PackedMatrix,
    down: Tensor | PackedMatrix,
    *,
    router: Router | SparseMixer,
    expert: Mlp,
    correction: Tensor | None = None,
    inner_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    weighs_input: bool = False,
    identity: int = 0,
    adds_identity: bool = True,
    adapters: ExpertAdapters | None = None,
    batch_invariant: bool = False,
    use_kernel: bool,
    chip: Chip,
) -> Tensor:
    """Return the sum of each token's best experts' outputs, weighted by the router: [T, D] in x's dtype.

    x [T, D]; router_logits float32 [T, E]; inner [E, 2F, D], gate then up, or [E, F, D] of experts without a gate; down
    [E, D, F]; inner_bias [E, 2F or F], down_bias [E, D]; correction float32 [E]; expert_scale [E] multiplies the
    weights. F may be a rank's share of the expert's width. Matrices are in x's dtype or packed. With many rows per
    expert x and the hidden values are rounded to 8 bits, where packed matrices say so and the chip multiplies such
    numbers; few are bound by reading the matrices, and stay exact. Padding tokens are computed too. Raise ValueError
    for other shapes. `weighs_input`: the weight of a token's only expert multiplies its input. `batch_invariant`: a
    token's result is the same bits whatever the others are, with matrices that are not packed. `adapters`: added to
    both products. `identity`: the last that many of the router's E have no matrices and return x; of several ranks
    one alone `adds_identity`.
    """
    count = router_logits.shape[1] - identity
    columns = inner.shape[1] if isinstance(inner, Tensor) else inner.outputs
    width = columns // 2 if expert.gated else columns
    shapes = {"router_logits": (x.shape[0], count + identity), "inner": (count, columns, x.shape[1])}
    shapes["down"] = (count, x.shape[1], width)
    for name, argument in (("router_logits", router_logits), ("inner", inner), ("down", down)):
        if _shape(argument) != shapes[name]:
            raise ValueError(f"{name} is {_shape(argument)}, not {shapes[name]}")
    choose = choose_experts if use_kernel else route
    weights, chosen = choose(router_logits, router, correction)
    if expert_scale is not None:
        weights = weights * expert_scale[chosen.long()]
    if weighs_input:
        x = x * weights.to(x.dtype)
        weights = torch.ones_like(weights)
    if identity:
        chosen = chosen.clamp(max=count)  # Kernels sort pairs of experts below `count` only.
    if not use_kernel:
        if adapters is None:
            return moe_reference(
                x, weights, chosen, inner, down, inner_bias, down_bias, expert, chip, batch_invariant, adds_identity
            )
        parts = adapted_reference(
            x, chosen, inner, down, inner_bias, down_bias, expert, chip, adapters, batch_invariant
        )
        returned = x.float()[:, None] if adds_identity else 0.0
        parts = torch.where((chosen < count)[..., None], parts.view(*chosen.shape, -1).float(), returned)
        return (parts * weights[..., None]).sum(1).to(x.dtype)
    tile = INVARIANT_TILE if batch_invariant else None
    if (
        not batch_invariant
        and not identity
        and isinstance(inner, Tensor)
        and isinstance(down, Tensor)
        and use_grouped_mm(x, chosen, inner, down, chip)
    ):
        parts = grouped_experts(x, chosen, inner, down, inner_bias, down_bias, expert, adapters)
    elif adapters is not None:
        parts = adapted_experts(x, chosen, inner, down, inner_bias, down_bias, expert, chip, tile, adapters)
    else:
        parts = kernel.experts(x, chosen, inner, down, inner_bias, down_bias, expert, chip, tile)
    if not identity:
        return kernel.mix(parts, weights, x)
    return kernel.mix(parts, weights, x, chosen, count, kernel.ADDED if adds_identity else kernel.SKIPPED)


def choose_experts(
    router_logits: Tensor, router: Router | SparseMixer, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return weights float32 [T, k] and experts int32 [T, k]; a kernel has the plain softmax, torch the rest."""
    if isinstance(router, Router) and router == Router(router.top_k, router.renormalise, bias=router.bias):
        return kernel.route(router_logits, router)
    weights, chosen = route(router_logits, router, correction)
    return weights, chosen.int()


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
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Return every pair's row through its expert: [T * k, D]. x [T, D], chosen int32 [T, k]."""
    order, row_experts, ends = kernel.align(chosen, inner.shape[0], 1)
    sorted_x = x[order // chosen.shape[1]]
    both: Tensor = _GROUPED_MM(sorted_x, inner.transpose(1, 2), offs=ends)
    if inner_bias is not None:
        both += inner_bias[row_experts]
    added = None if adapters is None else adapters(order // chosen.shape[1], row_experts)
    both = both if added is None else added[0](both, sorted_x)
    hidden = _activated(both, expert, use_kernel=True)
    rows: Tensor = _GROUPED_MM(hidden, down.transpose(1, 2), offs=ends)
    if down_bias is not None:
        rows += down_bias[row_experts]
    rows = rows if added is None else added[1](rows, hidden)
    out = torch.empty_like(rows)
    out[order] = rows
    return out


def _activated(both: Tensor, expert: Mlp, *, use_kernel: bool) -> Tensor:
    """Return the hidden values of rows [R, 2F or F]."""
    if not expert.gated:
        return activation_kernel.plain(both, expert.activation, use_kernel=use_kernel)
    return activation_kernel.gated(
        both, expert.activation, use_kernel=use_kernel, clamped=expert.clamped, limit=expert.clip
    )


def adapted_experts(
    x: Tensor,
    chosen: Tensor,
    inner: Tensor | PackedMatrix,
    down: Tensor | PackedMatrix,
    inner_bias: Tensor | None,
    down_bias: Tensor | None,
    expert: Mlp,
    chip: Chip,
    tile: int | None,
    adapters: ExpertAdapters,
) -> Tensor:
    """Return every pair's row through its expert, and what the token's adapter adds to both products: [T * k, D]."""
    add_inner, add_down = adapters(_tokens(chosen), chosen.flatten())
    products = kernel.Products(chosen, inner, down, x.dtype, chip, tile)
    both = add_inner(products.inner(x, inner_bias), x[_tokens(chosen)])
    hidden = _activated(both, expert, use_kernel=True)
    return add_down(products.down(hidden, down_bias), hidden)


def adapted_reference(
    x: Tensor,
    chosen: Tensor,
    inner: Tensor | PackedMatrix,
    down: Tensor | PackedMatrix,
    inner_bias: Tensor | None,
    down_bias: Tensor | None,
    expert: Mlp,
    chip: Chip,
    adapters: ExpertAdapters,
    batch_invariant: bool = False,
) -> Tensor:
    """The definition of `adapted_experts`."""
    tokens = _tokens(chosen)
    owners = chosen.flatten()
    add_inner, add_down = adapters(tokens, owners)

    def product(values: Tensor, stack: Tensor | PackedMatrix, bias: Tensor | None) -> Tensor:
        outputs = stack.shape[1] if isinstance(stack, Tensor) else stack.outputs
        out = values.new_empty(len(values), outputs)
        for index in owners[owners < _shape(stack)[0]].unique().tolist():
            own = owners == index
            part = _product(values[own], stack, index, owners.numel(), chip, batch_invariant)
            out[own] = part if bias is None else part + bias[index]
        return out

    pairs = x[tokens]
    both = add_inner(product(pairs, inner, inner_bias), pairs)
    hidden = _activated(both, expert, use_kernel=False)
    return add_down(product(hidden, down, down_bias), hidden)


def _tokens(chosen: Tensor) -> Tensor:
    """Return the token of each pair, int64 [T * k], of chosen [T, k]."""
    return torch.arange(chosen.numel(), device=chosen.device) // chosen.shape[1]


def moe_reference(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    inner: Tensor | PackedMatrix,
    down: Tensor | PackedMatrix,
    inner_bias: Tensor | None,
    down_bias: Tensor | None,
    expert: Mlp,
    chip: Chip,
    batch_invariant: bool = False,
    adds_identity: bool = True,
) -> Tensor:
    """An expert runs on the rows routed to it; packed experts are unpacked to x's dtype.

    `adds_identity`: experts without matrices return their rows, else zeros.
    """
    count = _shape(inner)[0]

    def product(rows: Tensor, stack: Tensor | PackedMatrix, index: int) -> Tensor:
        return _product(rows, stack, index, experts.numel(), chip, batch_invariant)

    def run(index: int, rows: Tensor) -> Tensor:
        if index >= count:
            return rows if adds_identity else torch.zeros_like(rows)
        both = product(rows, inner, index)
        if inner_bias is not None:
            both = both + inner_bias[index]
        out = product(_activated(both, expert, use_kernel=False), down, index)
        return out if down_bias is None else out + down_bias[index]

    return mix_experts(x, weights, experts, run)


def _product(
    rows: Tensor, stack: Tensor | PackedMatrix, index: int, pairs: int, chip: Chip, batch_invariant: bool
) -> Tensor:
    """Multiply rows [R, I] by an expert's matrix, in a step of `pairs` pairs: [R, O] in the dtype of the rows."""
    if isinstance(stack, PackedMatrix) and w8a8.rounds(stack, pairs, chip):
        return (rounded(rows, stack) @ unpack(stack.expert(index)).T).to(rows.dtype)
    matrix = _matrix(stack, index, rows)
    return invariant_linear_reference(rows, matrix, None, rows.dtype) if batch_invariant else rows @ matrix.T


def rounded(rows: Tensor, stack: PackedMatrix) -> Tensor:
    """Return float32 rows [R, I] with the values that a product with the stack's 8-bit numbers reads."""
    group = stack.group or None
    numbers: Numbers = "int8" if stack.scheme == "int8" else "float8"
    return quantize_rows_reference(rows, numbers, group=group, scale=w8a8.input_scale(stack)).values(group)


def _matrix(stack: Tensor | PackedMatrix, index: int, like: Tensor) -> Tensor:
    """Return one expert's matrix [O, I] in the dtype of `like`."""
    return stack[index] if isinstance(stack, Tensor) else unpack(stack.expert(index)).to(like.dtype)
