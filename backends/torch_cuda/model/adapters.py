"""LoRA adapters of a rank's model: slots in device memory, and the linear maps that add them.

The adapters of the parts of a fused matrix are one stack: A and B are cut as the matrix is, so that of a matrix whose
outputs are sharded each rank has its rows of B, and of one whose inputs are, its columns of A, and a partial sum.

With --fully-sharded-loras the other matrix is sharded, too. Where the outputs are, each rank multiplies by some rows
of A, whose products are gathered; where the inputs are, A x is summed over the ranks, and each has some rows of B.
Those of experts, and the embedding table's, are not.

DoRA's factors lie beside B: a rank has those of its outputs. The factors of a matrix whose inputs are sharded multiply
each rank's partial sum, the bias left out, which one rank adds. Experts have none, nor has --fully-sharded-loras.

With --lora-modules-to-save each slot has room for a whole embedding table or output head, of which a rank has its rows.
The products of a step's tokens with the head of their slot are those of an A with as many ranks as the rank has tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.kernels.experts.moe import Added, ExpertAdapters
from pagoda.backends.torch_cuda.kernels.linear.lora import (
    AdapterRows,
    AdapterStack,
    add_adapters,
    add_expanded,
    output_sections,
    padded_rank,
    shrunk,
    sort_by_slot,
)
from pagoda.backends.torch_cuda.model.parameters import Empty
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, Comm
from pagoda.backends.torch_cuda.weights.arrange import RankLayout, TensorSlice
from pagoda.backends.torch_decoder.ops import Linear
from pagoda.common.models.primitives import Param
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.lora.weights import AdapterWeights, Float32, LoraOptions, LowRank, adaptable
from pagoda.common.weights.rope_order import half_split

_EMBED = "embed"
_HEAD = "head"
_MATRIX_AXES: Final = 2
_ALIGN: Final = 32
"""Elements: alignment of each stack's ranks."""


Shared = Literal["ranks", "outputs"]
"""What each rank has some of with --fully-sharded-loras: the rows of A, or those of B."""


def adapted_matrices(spec: ModelSpec, layout: RankLayout) -> dict[str, Param]:
    """Return the matrices that adapters may change: all with a place of their own."""
    return {name: param for name, param in adaptable(spec).items() if _placement(layout, name) is not None}


def _placement(layout: RankLayout, name: str) -> TensorSlice | None:
    """Return where a matrix is stored; None: values that are the keys have no place of their own."""
    if name == _HEAD and _HEAD not in layout.placements:
        return layout.placements[_EMBED]
    return layout.placements.get(name)


@dataclass(frozen=True, slots=True)
class SlotCopies:
    """A rank's rows of a whole matrix, of each slot."""

    weights: Tensor  # [slots, V, D]; V: the rank's rows, padded to whole blocks of the kernel
    rows: Tensor  # int32 [slots + 1]: V of a slot that has a copy, else 0; the last one is of rows without an adapter

    def has(self, slots: Tensor) -> Tensor:
        """Return which of these slots, int32 [T], have a copy: bool [T, 1]."""
        return self.rows.index_select(0, slots)[:, None] > 0


class CudaAdapters:
    """The adapters in the slots, and the rows of the step that is being computed."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: RankLayout,
        options: LoraOptions,
        dtype: torch.dtype,
        device: Device,
        empty: Empty,
        comm: Comm = SINGLE_RANK,
    ) -> None:
        """`dtype`: of the matrices in the slots. `empty`: allocates memory, all of which `clear` writes."""
        self._spec = spec
        self._options = options
        self._device = device
        self._comm = comm
        self.matrices = adapted_matrices(spec, layout)
        self._parts: dict[str, dict[str, TensorSlice]] = {}  # stack -> its parameters
        for name in self.matrices:
            placement = _placement(layout, name)
            assert placement is not None, "only those are adapted"
            stack = name if name in (_EMBED, _HEAD) else placement.tensor
            self._parts.setdefault(stack, {})[name] = placement
        self._rank = padded_rank(options.max_rank)
        self._own_rank = padded_rank(-(-options.max_rank // comm.size))  # of an A whose rows are sharded
        self._shared = self._fully_sharded() if options.fully_sharded and comm.size > 1 else {}
        padded_slots = -(-options.slots // _ALIGN) * _ALIGN
        self._ranks = empty((len(self._parts), padded_slots), torch.int32)
        self._own_ranks = empty(tuple(self._ranks.shape), torch.int32)  # the same of the A whose rows are sharded
        self._stacks: dict[str, AdapterStack] = {}
        self._experts: dict[str, int] = {}  # stack of experts -> their number
        for name, ranks in zip(self._parts, self._ranks):
            self._stacks[name] = self._allocate(name, layout, dtype, ranks[: options.slots], empty)
        self._copies = {name: self._allocate_copies(name, layout, dtype, empty) for name in options.copies}
        self._resident: dict[int, AdapterWeights] = {}
        self._rows: AdapterRows | None = None
        self.clear()

    def _fully_sharded(self) -> dict[str, Shared]:
        """Return what is sharded beside the matrix's own sharded side, by stack."""
        shared: dict[str, Shared] = {}
        for name, parts in self._parts.items():
            first = next(iter(parts))
            param = self.matrices[first]
            placement = parts[first]
            if name == _EMBED or len(param.shape) != _MATRIX_AXES:
                continue
            # a small vocabulary may lie on the first ranks alone
            cut_outputs = name == _HEAD or _extent(placement.cut[0]) < param.shape[0]
            if placement.cut_inputs:
                shared[name] = "outputs"
            elif cut_outputs and self._own_rank * self._comm.size == self._rank:
                shared[name] = "ranks"
        return shared

    def _own_outputs(self, outputs: int) -> slice:
        """Return the rows of a B whose rows are shared out."""
        rank = self._comm.rank
        size = self._comm.size
        return slice(outputs * rank // size, outputs * (rank + 1) // size)

    @staticmethod
    def _tensor(name: str, layout: RankLayout) -> str:
        """Return the model's tensor whose products a stack changes."""
        return _EMBED if name == _HEAD and _HEAD not in layout.shapes else name

    def _allocate(self, name: str, layout: RankLayout, dtype: torch.dtype, ranks: Tensor, empty: Empty) -> AdapterStack:
        """Return a stack. Of experts, each of a slot is a slot of its own: expert e of slot s is s * E + e."""
        *experts, outputs, inputs = layout.shapes[self._tensor(name, layout)]
        slots = self._options.slots
        parts = self._parts[name]
        if name == _EMBED:
            table = empty((slots, outputs, self._rank), dtype)
            back = empty((slots, inputs, self._rank), dtype)
            sections = output_sections([(0, inputs)]).to(self._device.torch)
            factors, scaled = self._allocate_factors(inputs, empty)
            return AdapterStack(table, back, ranks, sections, factors=factors, scaled=scaled)
        if experts:
            self._experts[name] = experts[0]
            slots *= experts[0]
            ranks = empty((slots,), torch.int32)
        spans = [(placement.into[-2].start, placement.into[-2].stop) for placement in parts.values()]
        rank = self._own_rank if self._shared.get(name) == "ranks" else self._rank
        if self._shared.get(name) == "outputs":
            outputs = _extent(self._own_outputs(outputs))
            spans = [(0, outputs)]
        factors, scaled = (None, None) if experts else self._allocate_factors(outputs, empty)
        return AdapterStack(
            a=empty((slots, len(parts) * rank, inputs), dtype),
            b=empty((slots, outputs, self._rank), dtype),
            ranks=ranks,
            sections=output_sections(spans).to(self._device.torch),
            factors=factors,
            scaled=scaled,
        )

    def _allocate_factors(self, outputs: int, empty: Empty) -> tuple[Tensor | None, Tensor | None]:
        """Return DoRA's factors of a stack, and which slots have any; None where no adapter may have them."""
        if self._options.fully_sharded:
            return None, None
        return empty((self.slots, outputs), torch.float32), empty((self.slots,), torch.int32)

    def _allocate_copies(self, name: str, layout: RankLayout, dtype: torch.dtype, empty: Empty) -> SlotCopies:
        """Return the room for whole copies of the embedding table or the output head."""
        outputs, inputs = layout.shapes[self._tensor(name, layout)]
        return SlotCopies(
            weights=empty((self.slots, padded_rank(outputs), inputs), dtype),
            rows=empty((self.slots + 1,), torch.int32),
        )

    @property
    def slots(self) -> int:
        """Return the number of slots."""
        return self._options.slots

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all slots on the device."""
        ranks = sum(self._stacks[name].ranks.nbytes for name in self._experts)
        ranks += self._own_ranks.nbytes
        factors = sum(array.nbytes for stack in self._stacks.values() for array in stack.scaling or ())
        matrices = sum(stack.a.nbytes + stack.b.nbytes for stack in self._stacks.values())
        copies = sum(copies.weights.nbytes + copies.rows.nbytes for copies in self._copies.values())
        return self._ranks.nbytes + ranks + factors + matrices + copies

    def clear(self) -> None:
        """Make all slots empty, whatever the memory holds."""
        self._resident.clear()
        self._ranks.zero_()
        self._own_ranks.zero_()
        for stack in self._stacks.values():
            stack.a.zero_()
            stack.b.zero_()
            stack.ranks.zero_()
            for array in stack.scaling or ():
                array.zero_()
        for copies in self._copies.values():
            copies.weights.zero_()
            copies.rows.zero_()

    def restore(self) -> None:
        """Write the adapters again that the slots had before their memory was lost."""
        resident = dict(self._resident)
        self.clear()
        for slot, weights in resident.items():
            self.load(slot, weights)

    @torch.inference_mode()
    def load(self, slot: int, weights: AdapterWeights) -> None:
        """Queue the replacement of a slot's adapter on the current stream."""
        self._resident[slot] = weights
        matrices = _half_split(self._spec, weights.matrices)
        ranks = np.zeros(len(self._stacks), np.int32)
        for number, (name, parts) in enumerate(self._parts.items()):
            given = {part: matrices[part] for part in parts if part in matrices}
            stack = self._stacks[name]
            if (experts := self._experts.get(name)) is not None:
                stack.ranks.view(-1, experts)[slot].fill_(weights.rank if given else 0)
            if stack.scaled is not None:
                stack.scaled[slot].fill_(int(any(matrix.factor is not None for matrix in given.values())))
            if not given:
                continue
            ranks[number] = weights.rank
            if stack.factors is not None and any(matrix.factor is not None for matrix in given.values()):
                stack.factors[slot].copy_(self._factors(name, stack.factors.shape[1], given, parts))
            if name == _EMBED:
                self._write_embedding(stack, slot, given[_EMBED], parts[_EMBED])
            else:
                self._write(name, slot, given, parts)
        for name, copies in self._copies.items():
            matrix = matrices.get(name)
            self._write_copy(copies, slot, None if matrix is None else matrix.copy, self._parts[name][name])
        self._ranks[:, slot].copy_(torch.from_numpy(ranks))
        self._own_ranks[:, slot].copy_(torch.from_numpy(np.where(ranks, self._own_rank, 0).astype(np.int32)))

    def _write(self, name: str, slot: int, given: Mapping[str, LowRank], parts: Mapping[str, TensorSlice]) -> None:
        """Assemble A and B of a slot, or of those of its experts, on the host, zero but for `given`, and copy them."""
        stack = self._stacks[name]
        shared = self._shared.get(name)
        count = self._experts.get(name, 1)
        _, rows_of_a, inputs = stack.a.shape
        a = torch.zeros(count, len(parts), rows_of_a // len(parts), inputs, dtype=stack.a.dtype)
        b = torch.zeros(count, *stack.b.shape[1:], dtype=stack.b.dtype)
        for projection, (part, placement) in enumerate(parts.items()):
            if (matrix := given.get(part)) is None:
                continue
            rows, columns = placement.cut[-2:]
            into = placement.into[-2]
            down = matrix.a[..., columns]
            if shared == "ranks":
                first = self._comm.rank * self._own_rank
                down = down[first : first + self._own_rank]
            if shared == "outputs":
                rows = self._own_outputs(len(matrix.b))
                into = slice(None)
            a[:, projection, : down.shape[-2]] = torch.from_numpy(np.ascontiguousarray(down))
            b[:, into, : matrix.a.shape[-2]] = torch.from_numpy(np.ascontiguousarray(matrix.b[..., rows, :]))
        first_slot = slot * count
        stack.a[first_slot : first_slot + count].copy_(a.flatten(1, 2))
        stack.b[first_slot : first_slot + count].copy_(b)

    @staticmethod
    def _factors(name: str, outputs: int, given: Mapping[str, LowRank], parts: Mapping[str, TensorSlice]) -> Tensor:
        """Return a rank's factors [O] of a slot, 1 but for those of `given`."""
        factors = torch.ones(outputs)
        for part, matrix in given.items():
            if matrix.factor is not None and name == _EMBED:
                factors[: len(matrix.factor)] = torch.from_numpy(matrix.factor)
            elif matrix.factor is not None:
                rows = np.ascontiguousarray(matrix.factor[parts[part].cut[0]])
                factors[parts[part].into[0]] = torch.from_numpy(rows)
        return factors

    def _write_embedding(self, stack: AdapterStack, slot: int, matrix: LowRank, placement: TensorSlice) -> None:
        table = torch.zeros(stack.a.shape[1:], dtype=stack.a.dtype)
        back = torch.zeros(stack.b.shape[1:], dtype=stack.b.dtype)
        rank = len(matrix.a)
        rows = np.ascontiguousarray(matrix.b[placement.cut[0]])
        table[: len(rows), :rank] = torch.from_numpy(rows)
        back[:, :rank] = torch.from_numpy(np.ascontiguousarray(matrix.a.T))
        stack.a[slot].copy_(table)
        stack.b[slot].copy_(back)

    @staticmethod
    def _write_copy(copies: SlotCopies, slot: int, copy: Float32 | None, placement: TensorSlice) -> None:
        """Write this rank's rows of a whole matrix [V, D]; None: the slot has none."""
        _, rows, _ = copies.weights.shape
        copies.rows[slot].fill_(0 if copy is None else rows)
        if copy is not None:
            own = torch.from_numpy(np.ascontiguousarray(copy[placement.cut[0]]))
            copies.weights[slot, placement.into[0]].copy_(own)

    # A step.

    def begin(self, slots: Tensor | None, *, batch_invariant: bool = False) -> None:
        """Let the maps compute rows with these slots, int32 [T], `self.slots` for none; None: no row has an adapter."""
        self._rows = None if slots is None else self._sorted(slots, batch_invariant)

    def _sorted(self, slots: Tensor, batch_invariant: bool) -> AdapterRows:
        return sort_by_slot(slots, self.slots, batch_invariant=batch_invariant, use_kernel=self._device.use_kernels)

    def wrap(self, name: str, layer: Linear, bias: Tensor | None) -> Linear:
        """Return a linear map with its adapters; the map itself if it has none. `bias`: what this rank's map adds."""
        stack = self._stacks.get(name)
        if stack is None:
            return layer

        def adapted(x: Tensor) -> Tensor:
            y = layer(x)
            return y if self._rows is None else self._add_named(name, y, x, self._rows, bias)

        return adapted

    def _add_named(self, name: str, y: Tensor, x: Tensor, rows: AdapterRows, bias: Tensor | None) -> Tensor:
        """Add those of a stack to y [T, O], which has `bias`, in place; return y."""
        stack = self._stacks[name]
        shared = self._shared.get(name)
        comm = self._comm
        if shared is None:
            return self._add(y, x, stack, rows, bias)
        x = x.to(stack.a.dtype)
        chip = self._device.chip
        parts = len(self._parts[name])
        if shared == "outputs":
            low = comm.all_reduce(shrunk(x, stack.a, stack.ranks, self._rank, rows, chip).sum(0))
            add_expanded(y[:, self._own_outputs(y.shape[1])], low[None], stack, rows, chip)
            return y
        number = list(self._parts).index(name)
        ranks = self._own_ranks[number, : self.slots]
        low = comm.gather_last(shrunk(x, stack.a, ranks, self._own_rank, rows, chip).sum(0))
        low = low.view(len(x), comm.size, parts, self._own_rank).transpose(1, 2).reshape(len(x), -1)
        return add_expanded(y, low[None], stack, rows, chip)

    def _add(self, y: Tensor, x: Tensor, stack: AdapterStack, rows: AdapterRows, bias: Tensor | None = None) -> Tensor:
        return add_adapters(y, x.to(stack.a.dtype), stack, rows, self._device.chip, bias=bias)

    def of_experts(self, inner: str, down: str, *, batch_invariant: bool = False) -> ExpertAdapters | None:
        """Return what is added to the products of a mixture's experts in the current step; None: nothing.

        `batch_invariant`: never None, so that tokens without an adapter are computed the same way in every step.
        """
        rows = self._rows
        stacks = (self._stacks.get(inner), self._stacks.get(down))
        if rows is None or stacks == (None, None):
            return _add_nothing if batch_invariant else None
        experts = self._experts[inner if stacks[0] is not None else down]
        none = self.slots * experts

        def added(tokens: Tensor, of_rows: Tensor) -> tuple[Added, Added]:
            slots = (rows.slots[tokens] * experts + of_rows).clamp_(max=none).to(torch.int32)
            pairs = sort_by_slot(slots, none, batch_invariant=rows.invariant, use_kernel=self._device.use_kernels)

            def add(stack: AdapterStack | None) -> Added:
                return lambda y, x: y if stack is None else self._add(y, x, stack, pairs)

            return add(stacks[0]), add(stacks[1])

        return added

    def add_to_embeddings(self, x: Tensor, token_ids: Tensor, comm: Comm) -> Tensor:
        """Add those of tokens [T] to their embeddings x [T, D], in place; return x."""
        stack = self._stacks[_EMBED]
        rows = self._rows
        if rows is None:
            return x
        if (copies := self._copies.get(_EMBED)) is not None:
            x = self._copied_embeddings(copies, x, token_ids, stack.a.shape[1], rows, comm)
        count = stack.a.shape[1]
        row = token_ids - comm.rank * count
        absent = (row < 0) | (row >= count) | (rows.slots == self.slots)
        index = (rows.slots * count + row).masked_fill(absent, 0)
        h = F.embedding(index, stack.a.flatten(0, 1)).float().masked_fill(absent[:, None], 0)
        return add_expanded(x, comm.all_reduce(h)[None], stack, rows, self._device.chip)

    def _copied_embeddings(
        self, copies: SlotCopies, x: Tensor, token_ids: Tensor, count: int, rows: AdapterRows, comm: Comm
    ) -> Tensor:
        """Return embeddings x [T, D] with those of the tables of slots that have one. `count`: a rank's tokens."""
        row = token_ids - comm.rank * count
        copied = copies.has(rows.slots)
        absent = (row < 0) | (row >= count) | ~copied[:, 0]
        index = (rows.slots * copies.weights.shape[1] + row).masked_fill(absent, 0)
        own = F.embedding(index, copies.weights.flatten(0, 1)).to(x.dtype).masked_fill(absent[:, None], 0)
        return torch.where(copied, comm.all_reduce(own), x)

    def _copied_logits(
        self, copies: SlotCopies, logits: Tensor, hidden: Tensor, rows: AdapterRows, bias: Tensor | None
    ) -> Tensor:
        """Return a rank's logits [R, V] with those of the heads of slots that have one."""
        weights = copies.weights
        x = hidden.to(weights.dtype)
        product = shrunk(x, weights, copies.rows[:-1], weights.shape[1], rows, self._device.chip).sum(0)
        product = product[:, : logits.shape[1]]
        product = product if bias is None else product + bias
        return torch.where(copies.has(rows.slots), product.to(logits.dtype), logits)

    def add_to_logits(
        self, logits: Tensor, hidden: Tensor, slots: Tensor, bias: Tensor | None, *, batch_invariant: bool = False
    ) -> Tensor:
        """Add those of the head to a rank's logits [R, V] of hidden [R, D] with these slots; return the result.

        `bias` [V]: the head's, which the logits have.
        """
        rows = self._sorted(slots, batch_invariant)
        if (copies := self._copies.get(_HEAD)) is not None:
            logits = self._copied_logits(copies, logits, hidden, rows, bias)
        return self._add_named(_HEAD, logits, hidden, rows, bias)


def _extent(part: slice) -> int:
    extent: int = part.stop - part.start
    return extent


def _add_nothing(tokens: Tensor, experts: Tensor) -> tuple[Added, Added]:
    return (lambda y, x: y), (lambda y, x: y)


def _half_split(spec: ModelSpec, matrices: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """Return the matrices with the rows of B, and their factors, in the order of the model's."""
    ordered = half_split(spec, ((name, matrix.b) for name, matrix in matrices.items()))
    scaled = ((name, matrix.factor[:, None]) for name, matrix in matrices.items() if matrix.factor is not None)
    factors = {name: np.asarray(factor)[:, 0] for name, factor in half_split(spec, scaled)}
    return {
        name: LowRank(matrices[name].a, np.asarray(b), factors.get(name), matrices[name].copy) for name, b in ordered
    }
