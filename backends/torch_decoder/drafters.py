"""Drafter models: hidden states of the target and tokens -> the next guesses, greedily.

A drafter runs first on all tokens of a step, so that its caches stay complete, then on one token per sequence for each
further guess. Axis letters: T tokens, S sequences, D width, W width of what is read of the target, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.decoder import DecoderStack, TokenEmbedding
from pagoda.backends.torch_decoder.ops import BlockMakers, DecoderOps, Linear, MixerStep
from pagoda.common.models.drafters import AttendedInputs, FeatureDrafter, HeadsDrafter, JoinedInputs, StagesDrafter
from pagoda.common.models.mixers import Mixer

BatchT = TypeVar("BatchT")

TokensOf = Callable[[Tensor], Tensor]
"""Returns the most likely token after each of the hidden states [S, D], int64 [S]."""

RowsOf = Callable[[Tensor], Tensor]
"""Returns the rows [S, D] of a table, of tokens [S]."""


@dataclass(frozen=True, slots=True)
class DraftTokens(Generic[BatchT]):
    """The tokens that a drafter reads in one pass, and what it reads beside them."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T], those of the tokens before them if the drafter `reads_next`
    batch: BatchT  # what the backend's mixers read
    features: Tensor | None  # [T, W] of the target in the first pass, else the drafter's own of the pass before


class DraftModel(ABC, Generic[BatchT]):
    """A loaded drafter."""

    num_bytes: int  # of its own weights
    reads_next: bool  # at each position the token after it, with a hidden state; else that token alone

    def first(self, tokens: DraftTokens[BatchT]) -> Tensor:
        """Run on all tokens of a step. Return what the first guesses are made of, [T, D]."""
        return self.run(tokens)

    @abstractmethod
    def run(self, tokens: DraftTokens[BatchT]) -> Tensor:
        """Run on the guesses before, one token per sequence. Return what the next guesses are made of, [S, D]."""

    @abstractmethod
    def guess(self, number: int, last: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the guesses `number`, from 0, int64 [S], and the features [S, D] that the next pass reads.

        `last` [S, D]: what a pass returned of each sequence's last token; token_ids [S]: those tokens.
        """

    def records(self, num_tokens: int) -> bool:
        """Return whether a pass over sequences with a token each is recorded as a program, and then repeated."""
        return False


class LanguageModel(DraftModel[BatchT]):
    """A language model that reads tokens alone."""

    reads_next = False

    def __init__(
        self,
        hidden: Callable[[DraftTokens[BatchT]], Tensor],
        most_likely: TokensOf,
        num_bytes: int,
        records: Callable[[int], bool] | None = None,
    ) -> None:
        """`hidden`: runs the model, [T, D]; `most_likely`: of its hidden states; `records`: see `DraftModel`."""
        self.num_bytes = num_bytes
        self._hidden = hidden
        self._most_likely = most_likely
        self._records = records

    def run(self, tokens: DraftTokens[BatchT]) -> Tensor:
        return self._hidden(tokens)

    def guess(self, number: int, last: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._most_likely(last), None

    def records(self, num_tokens: int) -> bool:
        return self._records is not None and self._records(num_tokens)


class FeatureModel(DraftModel[BatchT]):
    """Layers over embeddings and hidden states of the target."""

    reads_next = True

    def __init__(
        self,
        spec: FeatureDrafter,
        ops: DecoderOps,
        makers: BlockMakers,
        *,
        mixer_inputs: Callable[[DraftTokens[BatchT]], tuple[object, ...]],
        most_likely: TokensOf,
        embed_out: Linear | None,
        target_ids: Tensor | None,
        num_bytes: int,
    ) -> None:
        """`most_likely`, `embed_out`: of its own head or the target's.

        `target_ids`: what is added to a guess for the target's token. `mixer_inputs`: what the mixers read beside rows.
        The caches of the attention in front of the layers, if any, have the first numbers.
        """
        inputs = spec.inputs
        first = len(spec.caches) - len(spec.model.caches)

        def mixer_of_layer(mixer: Mixer, prefix: str, numbers: tuple[int, ...]) -> MixerStep:
            return makers.mixer(mixer, prefix, tuple(first + number for number in numbers))

        self.num_bytes = num_bytes
        self.spec = spec
        self.embed = TokenEmbedding(spec.model.embedding, ops)
        self.stack = DecoderStack(spec.model, ops, replace(makers, mixer=mixer_of_layer))
        self.embed_norm = ops.norm(inputs.embed_norm, "inputs.embed_norm")
        self.hidden_norm = ops.norm(inputs.hidden_norm, "inputs.hidden_norm")
        self.project = ops.linear("inputs.project")
        self.attend = None
        if isinstance(inputs, AttendedInputs):
            self.attend = makers.mixer(inputs.attention, "inputs.attention", (0,))
        self.mixer_inputs = mixer_inputs
        self.most_likely = most_likely
        self.embed_out = embed_out
        self.target_ids = None
        if target_ids is not None:
            self.target_ids = torch.arange(len(target_ids), device=target_ids.device) + target_ids.long()

    def first(self, tokens: DraftTokens[BatchT]) -> Tensor:
        """Of attended inputs the target's hidden states [T, W] are projected to the drafter's width first."""
        if self.attend is None or tokens.features is None:
            return self.run(tokens)
        return self.run(replace(tokens, features=self.project(tokens.features)))

    def run(self, tokens: DraftTokens[BatchT]) -> Tensor:
        """Return the output of the last layer [T, D]."""
        mixer_inputs = self.mixer_inputs(tokens)
        return self.stack.without_norm(self._input(tokens, mixer_inputs), *mixer_inputs)

    def guess(self, number: int, last: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        normed = self.stack.final_norm(last, None)[0]
        token_ids = self.most_likely(normed if self.embed_out is None else self.embed_out(normed))
        if self.target_ids is not None:
            token_ids = self.target_ids[token_ids]
        return token_ids, normed if self.spec.chains_normed else last

    def _input(self, tokens: DraftTokens[BatchT], mixer_inputs: tuple[object, ...]) -> Tensor:
        """Return what the first layer reads, [T, D]."""
        inputs = self.spec.inputs
        features = tokens.features
        assert features is not None, "of the target, or of the pass before"
        embeds = self.embed(tokens.token_ids, tokens.positions + 1)
        normed = self.hidden_norm(features, None)[0]
        if isinstance(inputs, JoinedInputs):
            if inputs.blank_first:
                embeds = embeds * (tokens.positions > 0)[:, None]
            parts = [self.embed_norm(embeds, None)[0], normed]
            return self.project(torch.cat(parts[::-1] if inputs.hidden_first else parts, -1))
        assert self.attend is not None, "other inputs are attended to"
        both = torch.cat([self.embed_norm(embeds, None)[0], normed], -1)
        return (normed if inputs.norms_residual else features) + self.attend(both, *mixer_inputs)


class FeaturesAlone(DraftModel[BatchT]):
    """A drafter without layers: its passes compute nothing."""

    reads_next = True

    def run(self, tokens: DraftTokens[BatchT]) -> Tensor:
        assert tokens.features is not None, "of the target, or of the guess before"
        return tokens.features


class HeadsModel(FeaturesAlone[BatchT]):
    """A head per guess."""

    def __init__(
        self,
        spec: HeadsDrafter,
        linear: Callable[[str], Linear],
        most_likely: Callable[[str], TokensOf],
        num_bytes: int,
    ) -> None:
        """`linear`: returns the linear map of a name; `most_likely`: what gives the tokens of a head."""
        self.num_bytes = num_bytes
        self.heads = [
            (
                [linear(f"heads.{number}.blocks.{block}") for block in range(spec.blocks)],
                most_likely(f"heads.{number}.head"),
            )
            for number in range(spec.heads)
        ]

    def guess(self, number: int, last: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        blocks, most_likely = self.heads[number]
        hidden = last
        for block in blocks:
            hidden = hidden + F.silu(block(hidden))
        return most_likely(hidden), last


@dataclass(frozen=True, slots=True)
class StageParams:
    """One stage: projection of the state, norm [D], head, and embedding of the token before."""

    project: Linear
    norm: Tensor
    norm_bias: Tensor
    most_likely: TokensOf
    embed: RowsOf


class StagesModel(FeaturesAlone[BatchT]):
    """A stage per guess over a state and the token before."""

    def __init__(
        self,
        spec: StagesDrafter,
        *,
        linear: Callable[[str], Linear],
        most_likely: Callable[[str], TokensOf],
        rows: Callable[[str], RowsOf],
        tensor: Callable[[str], Tensor],
        num_bytes: int,
    ) -> None:
        """`linear`, `most_likely`, `rows`, `tensor`: return by name a linear map, what gives the tokens of a head, what
        gives rows of a table, and a tensor; each is taken once.
        """
        self.num_bytes = num_bytes
        self.spec = spec
        sources = range(1 if spec.tied else spec.stages)
        projections = [linear(f"stages.{stage}.project") for stage in range(2 if spec.tied else spec.stages)]
        stages = [
            StageParams(
                projections[stage],
                norm=tensor(f"stages.{stage}.norm"),
                norm_bias=tensor(f"stages.{stage}.norm_bias"),
                most_likely=most_likely(f"stages.{stage}.head"),
                embed=rows(f"stages.{stage}.embed"),
            )
            for stage in sources
        ]
        if spec.tied:
            stages = [replace(stages[0], project=projections[min(stage, 1)]) for stage in range(spec.stages)]
        self.stages = tuple(stages)

    def guess(self, number: int, last: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        state = last
        if number == 0 and self.spec.scales_input:
            state = self._scaled(last) * 0.5**0.5
        stage = self.stages[number]
        embeds = stage.embed(token_ids).to(state.dtype)
        mixed = self._scaled(stage.project(state) + self.spec.embedding_weight * embeds)
        state = F.gelu(mixed * stage.norm + stage.norm_bias)
        return stage.most_likely(state), state

    def _scaled(self, x: Tensor) -> Tensor:
        """Return x divided by its root mean square."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.eps)
