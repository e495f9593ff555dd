"""Drafter models: hidden states of the target and tokens -> the next guesses, greedily. D: width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.decoder import DecoderStack, TokenEmbedding
from pagoda.backends.torch_decoder.ops import BlockMakers, DecoderOps, Linear
from pagoda.common.models.drafters import (
    AttendedInputs,
    FeatureDrafter,
    HeadsDrafter,
    JoinedInputs,
    StagesDrafter,
)


class FeatureLayers:
    """Layers over embeddings and hidden states of the target."""

    def __init__(
        self,
        spec: FeatureDrafter,
        ops: DecoderOps,
        makers: BlockMakers,
        head: Linear,
        embed_out: Linear | None,
        target_ids: Tensor | None,
    ) -> None:
        """`head`, `embed_out`: its own or the target's. `target_ids`: what is added to a guess for the target's token.

        The caches of the attention in front of the layers, if any, have the first numbers.
        """
        inputs = spec.inputs
        first = len(spec.caches) - len(spec.model.caches)
        own = replace(makers, mixer=lambda mixer, name, at: makers.mixer(mixer, name, tuple(first + n for n in at)))
        self.spec = spec
        self.embed = TokenEmbedding(spec.model.embedding, ops)
        self.stack = DecoderStack(spec.model, ops, own)
        self.embed_norm = ops.norm(inputs.embed_norm, "inputs.embed_norm")
        self.hidden_norm = ops.norm(inputs.hidden_norm, "inputs.hidden_norm")
        self.project = ops.linear("inputs.project")
        self.attend = None
        if isinstance(inputs, AttendedInputs):
            self.attend = makers.mixer(inputs.attention, "inputs.attention", (0,))
        self.head = head
        self.embed_out = embed_out
        self.target_ids = None
        if target_ids is not None:
            self.target_ids = torch.arange(len(target_ids), device=target_ids.device) + target_ids.long()

    def read(self, features: Tensor) -> Tensor:
        """Return what the first pass reads of the target's hidden states [T, W]."""
        return features if self.attend is None else self.project(features)

    def run(self, token_ids: Tensor, positions: Tensor, features: Tensor, *mixer_inputs: object) -> Tensor:
        """Return the output of the last layer [T, D]. `positions`: of the tokens before token_ids [T]."""
        x = self._input(token_ids, positions, features, *mixer_inputs)
        return self.stack.without_norm(x, *mixer_inputs)

    def guess(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return the guesses int64 [S] after outputs of the last layer [S, D], and what the next pass reads of them."""
        normed = self.stack.final_norm(last, None)[0]
        vocab = self.spec.head_vocab or self.spec.model.vocab  # without the padding of a sharded head
        scores = self.head(normed if self.embed_out is None else self.embed_out(normed))[:, :vocab]
        token_ids = scores.argmax(-1)
        if self.target_ids is not None:
            token_ids = self.target_ids[token_ids]
        return token_ids, normed if self.spec.chains_normed else last

    def _input(self, token_ids: Tensor, positions: Tensor, features: Tensor, *mixer_inputs: object) -> Tensor:
        """Return what the first layer reads, [T, D]."""
        inputs = self.spec.inputs
        embeds = self.embed(token_ids, positions + 1)
        normed = self.hidden_norm(features, None)[0]
        if isinstance(inputs, JoinedInputs):
            if inputs.blank_first:
                embeds = embeds * (positions > 0)[:, None]
            parts = [self.embed_norm(embeds, None)[0], normed]
            return self.project(torch.cat(parts[::-1] if inputs.hidden_first else parts, -1))
        assert self.attend is not None, "other inputs are attended to"
        both = torch.cat([self.embed_norm(embeds, None)[0], normed], -1)
        return (normed if inputs.norms_residual else features) + self.attend(both, *mixer_inputs)


class HeadsGuesser:
    """A head per guess."""

    def __init__(self, spec: HeadsDrafter, linear: Callable[[str], Linear], head: Callable[[str], Linear]) -> None:
        """`linear`, `head`: return the linear map of a name, a head's with results in float32 where they are."""
        self.heads = [
            (
                [linear(f"heads.{number}.blocks.{block}") for block in range(spec.blocks)],
                head(f"heads.{number}.head"),
            )
            for number in range(spec.heads)
        ]

    def guess(self, number: int, hidden: Tensor) -> Tensor:
        """Return the guesses `number`, int64 [S], of hidden states [S, D]."""
        blocks, head = self.heads[number]
        for block in blocks:
            hidden = hidden + F.silu(block(hidden))
        return head(hidden).argmax(-1)


@dataclass(frozen=True, slots=True)
class StageParams:
    """One stage: projection of the state, norm [D], head and embedding table [V, D]."""

    project: Linear
    norm: Tensor
    norm_bias: Tensor
    head: Linear
    table: Tensor


class StagesGuesser:
    """A stage per guess over a state and the token before."""

    def __init__(self, spec: StagesDrafter, stages: Sequence[StageParams]) -> None:
        self.spec = spec
        self.stages = tuple(stages)

    @classmethod
    def of(
        cls,
        spec: StagesDrafter,
        linear: Callable[[str], Linear],
        head: Callable[[str], Linear],
        tensor: Callable[[str], Tensor],
    ) -> StagesGuesser:
        """Return the stages of these linear maps, heads and tensors by name, each of which is taken once."""
        sources = range(1 if spec.tied else spec.stages)
        projections = [linear(f"stages.{stage}.project") for stage in range(2 if spec.tied else spec.stages)]
        own = [
            StageParams(
                projections[stage],
                norm=tensor(f"stages.{stage}.norm"),
                norm_bias=tensor(f"stages.{stage}.norm_bias"),
                head=head(f"stages.{stage}.head"),
                table=tensor(f"stages.{stage}.embed"),
            )
            for stage in sources
        ]
        if not spec.tied:
            return cls(spec, own)
        return cls(spec, [replace(own[0], project=projections[min(stage, 1)]) for stage in range(spec.stages)])

    def first_state(self, hidden: Tensor) -> Tensor:
        """Return the state [S, D] before the first stage, of the target's hidden states."""
        return self._scaled(hidden) * 0.5**0.5 if self.spec.scales_input else hidden

    def guess(self, number: int, state: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the guesses `number`, int64 [S], after a state [S, D] and tokens [S], and the next state."""
        stage = self.stages[number]
        embeds = F.embedding(token_ids, stage.table).to(state.dtype)
        mixed = self._scaled(stage.project(state) + self.spec.embedding_weight * embeds)
        state = F.gelu(mixed * stage.norm + stage.norm_bias)
        return stage.head(state).argmax(-1), state

    def _scaled(self, x: Tensor) -> Tensor:
        """Return x divided by its root mean square."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.eps)
