"""Low-rank adapters (LoRA): y + B A x for rows of several adapters in one step, with DoRA's factors f y + B A x."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.invariant_linear import invariant_linear_reference
from pagoda.backends.torch_cuda.kernels.linear.lora import kernel
from pagoda.backends.torch_cuda.kernels.linear.lora.kernel import CHANNELS, SMALLEST_RANK, TILES

__all__ = [
    "AdapterRows",
    "AdapterStack",
    "add_adapters",
    "add_expanded",
    "output_sections",
    "padded_rank",
    "shrunk",
    "sort_by_slot",
]

INVARIANT_TILE: Final = TILES[0]
"""Rows per tile with --batch-invariant, however many there are."""

_INVARIANT_SPLITS: Final = 8


def padded_rank(rank: int) -> int:
    """Return the rank of slots for adapters of at most `rank`: whole blocks of the kernels."""
    block = kernel.rank_block(max(rank, SMALLEST_RANK))
    return -(-max(rank, SMALLEST_RANK) // block) * block


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """The adapters of P projections of one input, which are one matrix of O outputs, in every slot.

    Each projection has some of the outputs. R is a `padded_rank`; a smaller adapter's other rows of `a`
    and columns of `b` are 0. `b` includes the adapter's scale.
    """

    a: Tensor  # [slots, P * R, I]
    b: Tensor  # [slots, O, R], of the same type
    ranks: Tensor  # int32 [slots]: the rank of each slot's adapter; 0: none
    sections: Tensor  # int32 [n, 3]: of each block of outputs the projection, the first output and the end
    factors: Tensor | None = None  # float32 [slots, O], of outputs without their bias; None: no adapter has any
    scaled: Tensor | None = None  # int32 [slots], with `factors`: 1 where a slot's are not all 1

    @property
    def slots(self) -> int:
        """Return the number of slots."""
        return len(self.b)

    @property
    def rank(self) -> int:
        """Return R."""
        return self.b.shape[2]

    @property
    def scaling(self) -> tuple[Tensor, Tensor] | None:
        """Return `factors` and `scaled`; None without them."""
        if self.factors is None:
            return None
        assert self.scaled is not None, "slots with factors say whether they are used"
        return self.factors, self.scaled


def output_sections(spans: Iterable[tuple[int, int]]) -> Tensor:
    """Return the `sections` of projections with the outputs from the first to before the end."""
    rows = []
    for projection, (begin, end) in enumerate(spans):
        rows += [(projection, first, end) for first in range(begin, end, CHANNELS)]
    return torch.tensor(rows, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step by slot."""

    slots: Tensor  # int32 [T]; the number of slots for rows without an adapter
    tile: int  # rows per tile
    invariant: bool = False  # sums do not depend on the number of rows
    tiles: tuple[Tensor, Tensor, Tensor] | None = None  # (order, tile_slots, ends); None: without kernels


def sort_by_slot(slots: Tensor, num_slots: int, *, batch_invariant: bool = False, use_kernel: bool) -> AdapterRows:
    """Return the rows of a step with slots int32 [T], in [0, num_slots]; `num_slots`: no adapter."""
    tile = INVARIANT_TILE if batch_invariant else kernel.choose_tile(len(slots))
    return AdapterRows(slots, tile, batch_invariant, kernel.sort_rows(slots, num_slots, tile) if use_kernel else None)


def add_adapters(
    y: Tensor, x: Tensor, stack: AdapterStack, rows: AdapterRows, chip: Chip, *, bias: Tensor | None = None
) -> Tensor:
    """Add B A x to y [T, O] in place, for x [T, I], by the rows' slots; return y. Raise ValueError for other shapes.

    Sums are float32; A x is rounded to the type of B. A slot's factors multiply y without `bias` [O] first.
    """
    if x.shape != (len(y), stack.a.shape[2]) or y.shape[1] != stack.b.shape[1] or len(rows.slots) != len(y):
        raise ValueError(
            f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit adapters of {tuple(stack.a.shape)} and "
            f"{tuple(stack.b.shape)}, or {len(rows.slots)} rows"
        )
    if x.stride(1) != 1 or y.stride(1) != 1 or x.dtype != stack.a.dtype:
        raise ValueError(f"x is {x.dtype} with strides {x.stride()}, y has {y.stride()}; adapters are {stack.a.dtype}")
    return add_expanded(y, shrunk(x, stack.a, stack.ranks, stack.rank, rows, chip), stack, rows, chip, bias=bias)


def shrunk(x: Tensor, a: Tensor, ranks: Tensor, rank: int, rows: AdapterRows, chip: Chip) -> Tensor:
    """Return addends [splits, T, P * R], float32, of A x, for x [T, I] and a [slots, P * R, I]; R: `rank`.

    `ranks`: of `AdapterStack`. Rows without an adapter, and ranks beyond an adapter's, are undefined.
    """
    if rows.tiles is None:
        return shrink_reference(x, a, ranks, rows)[None]
    if rows.invariant:
        splits = min(_INVARIANT_SPLITS, -(-x.shape[1] // kernel.split_size(x.shape[1], _INVARIANT_SPLITS)))
    else:
        splits = kernel.choose_splits(rows.tiles[1].numel(), a.shape[1], rank, x.shape[1], x.dtype, rows.tile, chip)
    return kernel.shrink(x, a, ranks, rank, rows.tiles, rows.tile, splits, chip)


def add_expanded(
    y: Tensor, parts: Tensor, stack: AdapterStack, rows: AdapterRows, chip: Chip, *, bias: Tensor | None = None
) -> Tensor:
    """Add B h to y [T, O] in place, where h [T, P * R] is the sum of parts float32 [splits, T, P * R]; return y.

    `bias`: as of `add_adapters`.
    """
    if rows.tiles is None:
        return expand_reference(y, parts.sum(0), stack, rows, bias)
    kernel.expand(
        parts=parts,
        b=stack.b,
        ranks=stack.ranks,
        sections=stack.sections,
        factors=stack.scaling,
        bias=bias,
        sorted_rows=rows.tiles,
        tile=rows.tile,
        out=y,
        chip=chip,
    )
    return y


def shrink_reference(x: Tensor, a: Tensor, ranks: Tensor, rows: AdapterRows) -> Tensor:
    """Return A x, float32 [T, P * R]; 0 for rows without an adapter."""
    out = x.new_zeros((len(x), a.shape[1]), dtype=torch.float32)
    for slot in _used(rows, ranks):
        mine = rows.slots == slot
        out[mine] = invariant_linear_reference(x[mine], a[slot], None, torch.float32)
    return out


def expand_reference(
    y: Tensor, h: Tensor, stack: AdapterStack, rows: AdapterRows, bias: Tensor | None = None
) -> Tensor:
    """Add B h to y [T, O] in place, a projection's columns of h [T, P * R] to its outputs; return y."""
    rounded = h.to(stack.b.dtype).float()
    for slot in _used(rows, stack.ranks):
        mine = rows.slots == slot
        if stack.scaling is not None and stack.scaling[1][slot]:
            constant = 0 if bias is None else bias.float()
            y[mine] = ((y[mine].float() - constant) * stack.scaling[0][slot] + constant).to(y.dtype)
        for projection, first, end in stack.sections.tolist():
            end = min(end, first + CHANNELS)
            begin = projection * stack.rank
            rank = int(stack.ranks[slot])
            inner = rounded[mine, begin : begin + rank]
            added = invariant_linear_reference(inner, stack.b[slot, first:end, :rank], None, torch.float32)
            y[mine, first:end] = (y[mine, first:end].float() + added).to(y.dtype)
    return y


def _used(rows: AdapterRows, ranks: Tensor) -> list[int]:
    """Return the slots of the rows, without the number of those that have none."""
    return [slot for slot in rows.slots.unique().tolist() if slot < len(ranks) and ranks[slot]]
