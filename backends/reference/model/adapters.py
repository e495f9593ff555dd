"""LoRA adapters: what those in slots add to linear layers and to embeddings, for the tokens of one step.

The matrices of all slots lie in one tensor per layer. A step with few tokens for each adapter multiplies by those of
all slots at once and drops the products of other slots than a token's own; else each adapter's tokens are multiplied
separately. Axis letters: T tokens, S slots, R rank, P parameters that are one fused layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import TokenSlots
from pagoda.backends.reference.model.linear import InvariantLinear, Linear, PlainLinear
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.common.models.primitives import Param
from pagoda.common.weights.lora.weights import (
    AdapterWeights,
    LoraOptions,
    LowRank,
    copy_elements,
    factor_elements,
    slot_elements,
)

_HEAD: Final = "head"
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ActiveAdapters:
    """The adapters of the step that a thread computes."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def tokens(self) -> TokenSlots | None:
        """The slots of the tokens that this thread's layers run on; None: no token has an adapter."""
        tokens: TokenSlots | None = getattr(self._local, "tokens", None)
        return tokens

    @contextmanager
    def of(self, tokens: TokenSlots | None) -> Iterator[None]:
        """Return a context in which the layers of this thread run on tokens with these slots."""
        before = self.tokens
        self._local.tokens = tokens
        try:
            yield
        finally:
            self._local.tokens = before

    @contextmanager
    def at(self, rows: Tensor | slice) -> Iterator[None]:
        """Return a context in which they run on some of the tokens."""
        tokens = self.tokens
        with self.of(None if tokens is None else tokens.at(rows)):
            yield


class SlotMatrices:
    """The matrices of all slots for one linear layer of P fused parameters.

    A slot of a DoRA adapter has a factor of each output, too, by which the base matrix's product, without the layer's
    bias, is multiplied. A slot may have a layer with a whole copy of the matrix, in place of the base's.
    """

    def __init__(
        self, sizes: Sequence[int], width: int, options: LoraOptions, numerics: Numerics, bias: Tensor | None = None
    ) -> None:
        """`sizes`: outputs of each parameter; `width`: inputs; `bias` [F]: the layer's."""
        self._sizes = tuple(sizes)
        self._rank = options.max_rank
        self._count = options.slots
        self._dtype = numerics.compute
        self._invariant = numerics.batch_invariant
        rounded = options.dtype if options.dtype in _DTYPES else "float32"
        self._rounded = _DTYPES[rounded]
        self.a = torch.zeros(len(sizes), options.slots, options.max_rank, width, dtype=self._dtype)
        self.b = [torch.zeros(size, options.slots, options.max_rank, dtype=self._dtype) for size in sizes]
        self._filled = [[False] * len(sizes) for _ in range(options.slots)]
        self._bias = None if bias is None else bias.float()
        self._factors: dict[int, tuple[Tensor, Tensor | None]] = {}  # slot -> factors [F], what is added then [F]
        self._copies: dict[int, Linear] = {}

    def fill(self, slot: int, factors: Sequence[LowRank | None]) -> None:
        """Replace a slot's matrices; None: zero."""
        for part, pair in enumerate(factors):
            if pair is None:
                if self._filled[slot][part]:
                    self.b[part][:, slot] = 0
            else:
                rank = pair.a.shape[0]
                self.a[part, slot, :rank] = self._rounded_tensor(pair.a)
                self.a[part, slot, rank:] = 0
                self.b[part][:, slot, :rank] = self._rounded_tensor(pair.b)
                self.b[part][:, slot, rank:] = 0
            self._filled[slot][part] = pair is not None
        self._fill_factors(slot, [None if pair is None else pair.factor for pair in factors])

    def replace(self, slot: int, layer: Linear | None) -> None:
        """Let the tokens of a slot be multiplied by this layer in place of the base's; None: by the base's."""
        self._copies.pop(slot, None)
        if layer is not None:
            self._copies[slot] = layer

    def _fill_factors(self, slot: int, factors: Sequence[np.ndarray | None]) -> None:
        self._factors.pop(slot, None)
        if any(part is not None for part in factors):
            ones = [np.ones(size, np.float32) for size in self._sizes]
            factor = torch.from_numpy(
                np.concatenate([one if part is None else part for one, part in zip(ones, factors)])
            )
            self._factors[slot] = factor, None if self._bias is None else (1 - factor) * self._bias

    def _rounded_tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._rounded == torch.float32 else tensor.to(self._rounded)

    def add(self, x: Tensor, y: Tensor, tokens: TokenSlots) -> Tensor:
        """x [T, D], y [T, F] -> y plus what the tokens' adapters add; y may be written to."""
        if len(self._used(tokens)) == 0:
            return y
        if y.dtype != torch.float32 and not y.is_contiguous():
            y = y.contiguous()
        if self._copies:
            self._multiply_copies(x, y, tokens)
        if self._factors:
            self._scale(y, tokens)
        return self._add_apart(x, y, tokens) if tokens.are_apart or self._invariant else self._add_all(x, y, tokens)

    def _multiply_copies(self, x: Tensor, y: Tensor, tokens: TokenSlots) -> None:
        """Write the products of slots that have a copy of the matrix to their rows of y."""
        for slot in tokens.used:
            if (layer := self._copies.get(slot)) is not None:
                rows = tokens.tokens[slot]
                if rows is None:
                    y.copy_(layer(x))
                else:
                    y.index_copy_(0, rows, layer(x[rows]).to(y.dtype))

    def _scale(self, y: Tensor, tokens: TokenSlots) -> None:
        """Multiply the rows of y of DoRA adapters by their factors, in place."""
        for slot in tokens.used:
            if (scaling := self._factors.get(slot)) is not None:
                factor, rest = scaling
                rows = tokens.tokens[slot]
                scaled = (y if rows is None else y[rows]).float() * factor
                scaled = (scaled if rest is None else scaled + rest).to(y.dtype)
                if rows is None:
                    y.copy_(scaled)
                else:
                    y.index_copy_(0, rows, scaled)

    def _used(self, tokens: TokenSlots) -> list[int]:
        return [slot for slot in tokens.used if any(self._filled[slot])]

    def _add_apart(self, x: Tensor, y: Tensor, tokens: TokenSlots) -> Tensor:
        for slot in self._used(tokens):
            rows = tokens.tokens[slot]
            inputs = (x if rows is None else x[rows]).to(self._dtype)
            parts = [part for part, filled in enumerate(self._filled[slot]) if filled]
            inner = [self._product(inputs, self.a[part, slot]) for part in parts]
            for part, low in zip(parts, inner):
                added = self._product(low, self.b[part][:, slot]).to(y.dtype)
                columns = y[:, sum(self._sizes[:part]) : sum(self._sizes[: part + 1])]
                if rows is None:
                    columns += added
                else:
                    columns.index_add_(0, rows, added)
        return y

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return InvariantLinear(PlainLinear(weight, None))(x) if self._invariant else F.linear(x, weight)

    def _add_all(self, x: Tensor, y: Tensor, tokens: TokenSlots) -> Tensor:
        inner = F.linear(x.to(self._dtype), self.a.flatten(0, 2)).view(len(x), len(self._sizes), self._count, -1)
        inner = inner.masked_fill_(tokens.others(self._count)[:, None, :, None], 0).flatten(2)
        begin = 0
        for part, (size, weight) in enumerate(zip(self._sizes, self.b)):
            columns = y[:, begin : begin + size]
            if y.dtype == self._dtype:
                columns.addmm_(inner[:, part], weight.flatten(1).T)
            else:
                columns += F.linear(inner[:, part], weight.flatten(1))
            begin += size
        return y


class AdaptedLinear:
    """A layer, and what the adapters of the tokens add to it. `add`: `SlotMatrices.add`."""

    def __init__(
        self, layer: Linear, add: Callable[[Tensor, Tensor, TokenSlots], Tensor], active: ActiveAdapters
    ) -> None:
        self.layer = layer
        self._add = add
        self._active = active

    def __call__(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        tokens = self._active.tokens
        return y if tokens is None else self._add(x, y, tokens)


class AdapterMatrices:
    """The slots of a model. `adaptable`: the parameters that adapters may change."""

    def __init__(self, options: LoraOptions, adaptable: Mapping[str, Param], numerics: Numerics) -> None:
        self.options = options
        self.adaptable = adaptable
        self.active = ActiveAdapters()
        self._numerics = numerics
        self._layers: dict[tuple[tuple[str, ...], int | None], SlotMatrices] = {}  # by parameters, and expert
        self._lock = threading.Lock()
        # Of each slot b [V, R], a [R, D], and DoRA's factors [D].
        self._embed: list[tuple[Tensor, Tensor, Tensor | None] | None] = [None] * options.slots
        self._tables: dict[int, Tensor] = {}  # slot -> its embedding table [V, D], in place of the base's
        self._copy_head: Callable[[Tensor], Linear] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        matrices = self.adaptable.values()
        factors = 2 * factor_elements(matrices) * torch.float32.itemsize
        of_slot = slot_elements(matrices, self.options.max_rank) * self._numerics.compute.itemsize
        copies = copy_elements(self.adaptable, self.options.copies) * self._numerics.compute.itemsize
        return self.options.slots * (of_slot + factors + copies)

    def adapted(
        self,
        layer: Linear,
        names: Sequence[str],
        sizes: Sequence[int],
        width: int,
        *,
        bias: Tensor | None,
        expert: int | None = None,
    ) -> Linear:
        """Return the layer of these parameters with what adapters add to it; itself if none of them is adaptable.

        `sizes`: outputs of each parameter; `width`: inputs; `bias`: the layer's, of all outputs; `expert`: its number,
        of a parameter that has all experts.
        """
        if not any(name in self.adaptable for name in names):
            return layer
        key = tuple(names), expert
        with self._lock:  # layers are packed in several threads
            if key not in self._layers:
                self._layers[key] = SlotMatrices(sizes, width, self.options, self._numerics, bias)
        return AdaptedLinear(layer, self._layers[key].add, self.active)

    def head(
        self, layer: Linear, vocab: int, width: int, bias: Tensor | None, make: Callable[[Tensor], Linear]
    ) -> Linear:
        """Return the output head with what adapters add to it. `make`: returns the head with another weight [V, D]."""
        self._copy_head = make
        return self.adapted(layer, (_HEAD,), [vocab], width, bias=bias)

    def fill(self, slot: int, weights: AdapterWeights) -> None:
        """Replace the adapter in a slot."""
        self._fill_copies(slot, weights)
        for (names, expert), matrices in self._layers.items():
            matrices.fill(slot, [_of_expert(weights.matrices.get(name), expert) for name in names])
        table = weights.matrices.get("embed")
        compute = self._numerics.compute
        self._embed[slot] = None
        if table is not None:
            factor = None if table.factor is None else torch.from_numpy(table.factor)
            self._embed[slot] = torch.from_numpy(table.b).to(compute), torch.from_numpy(table.a).to(compute), factor

    def _fill_copies(self, slot: int, weights: AdapterWeights) -> None:
        self._tables.pop(slot, None)
        head = weights.matrices.get(_HEAD)
        if (matrices := self._layers.get(((_HEAD,), None))) is not None:
            layer = None
            if head is not None and head.copy is not None:
                assert self._copy_head is not None, "it has slots"
                layer = self._copy_head(self._rounded_copy(head.copy))
            matrices.replace(slot, layer)
        table = weights.matrices.get("embed")
        if table is not None and table.copy is not None:
            self._tables[slot] = self._rounded_copy(table.copy)

    def _rounded_copy(self, copy: np.ndarray) -> Tensor:
        """Return a whole matrix in the type of the base model's weights."""
        tensor = torch.from_numpy(copy)
        rounded = _DTYPES.get(self.options.dtype, torch.float32)
        return tensor.to(rounded).to(self._numerics.weights, copy=True)

    def add_to_embeddings(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """token_ids int64 [T], rows of the embedding table x [T, D] -> x with what the tokens' adapters add."""
        tokens = self.active.tokens
        if tokens is None:
            return x
        for slot in tokens.used:
            if (factors := self._embed[slot]) is not None:
                table, out, factor = factors
                rows = tokens.tokens[slot]
                ids = token_ids if rows is None else token_ids[rows]
                base = x if rows is None else x[rows]
                if (copy := self._tables.get(slot)) is not None:
                    base = F.embedding(ids, copy).to(x.dtype)
                base = base if factor is None else (base.float() * factor).to(x.dtype)
                adapted = base + (table[ids] @ out).to(x.dtype)
                x = adapted if rows is None else x.index_copy(0, rows, adapted)
        return x


def _of_expert(factors: LowRank | None, expert: int | None) -> LowRank | None:
    return factors if factors is None or expert is None else LowRank(factors.a[expert], factors.b[expert])
