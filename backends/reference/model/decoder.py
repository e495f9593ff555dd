"""The decoder on a CPU: the torch decoder over packed parameters, with adapters and recorded programs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from pagoda.backends.reference.execution import StepBatch, TokenSlots
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.adapters import AdapterMatrices
from pagoda.backends.reference.model.feed_forward import paged_makers
from pagoda.backends.reference.model.mixers.rotary import RotaryTables
from pagoda.backends.reference.model.named_ops import ReferenceOps, named_parts
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.params import ModelParams
from pagoda.backends.reference.programs.operators import operators
from pagoda.backends.torch_decoder.decoder import TorchModel
from pagoda.backends.torch_decoder.media_rows import MediaRows
from pagoda.backends.torch_decoder.ops import Linear
from pagoda.common.models.spec import ModelSpec


class Decoder(TorchModel):
    """Maps token ids and a batch to hidden states and logits."""

    def __init__(
        self,
        spec: ModelSpec,
        params: ModelParams,
        numerics: Numerics,
        max_len: int,
        adapters: AdapterMatrices | None = None,
    ) -> None:
        """`adapters`: those whose slots the layers of `params` have."""
        native = operators(numerics)
        ops = ReferenceOps(named_parts(spec, params), numerics, native, adapters)
        super().__init__(spec, ops, paged_makers(ops))
        self.params = params
        self.numerics = numerics
        self.adapters = adapters
        self.is_row_wise = native is not None and native.multiplies(spec.width)
        self.head: Linear = params.parts["head"]
        self.rotary = RotaryTables(spec.ropes, max_len, numerics.compute)
        self.programs = None if native is None else native.programs(self._run_layers, max_len)

    def hidden(
        self, token_ids: Tensor, batch: StepBatch, caches: dict[int, LayerCache], media: MediaRows | None = None
    ) -> Tensor:
        """token_ids int64 [T] -> hidden states [T, D] after the final norm; K and V are written to the caches."""
        with self._adapted(batch.adapters):
            return self._hidden(token_ids, batch, caches, media)

    def _adapted(self, tokens: TokenSlots | None) -> AbstractContextManager[None]:
        """Return a context in which the layers add the adapters of these tokens."""
        return nullcontext() if self.adapters is None or tokens is None else self.adapters.active.of(tokens)

    def _hidden(
        self, token_ids: Tensor, batch: StepBatch, caches: dict[int, LayerCache], media: MediaRows | None
    ) -> Tensor:
        x = self.embed(token_ids, batch.positions, media=media)
        if self.stack.first is not None:
            return self.stack(token_ids, x, batch, caches, self.rotary.at(batch.positions))
        recorded = self.programs is not None and batch.adapters is None
        hidden = self.programs.run(x, batch, caches) if recorded and self.programs is not None else None
        return self._run_layers(x, batch, caches) if hidden is None else hidden

    def records(self, num_tokens: int) -> bool:
        """Return whether a step of sequences with a token each is recorded as a program, and then repeated."""
        return self.stack.first is None and self.programs is not None and self.programs.records(num_tokens)

    def hidden_and_captured(
        self,
        token_ids: Tensor,
        batch: StepBatch,
        caches: dict[int, LayerCache],
        captured: tuple[int, ...],
        media: MediaRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the same, and the inputs of the `captured` layers side by side, [T, C*D]."""
        with self._adapted(batch.adapters):
            x = self.embed(token_ids, batch.positions, media=media)
            return self.stack.captured(captured, x, batch, caches, self.rotary.at(batch.positions))

    def _run_layers(self, x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache]) -> Tensor:
        """Embeddings [T, D] -> hidden states [T, D] after the final norm, in a model whose layers follow each other."""
        return self.stack.in_turn(x, batch, caches, self.rotary.at(batch.positions))

    def logits(self, hidden: Tensor, tokens: TokenSlots | None = None) -> Tensor:
        """Hidden [R, D] -> float32 logits [R, V]. `tokens`: the adapters of these R tokens."""
        with self._adapted(tokens):
            return self.scaled(self.head(self.head_input(hidden)))
