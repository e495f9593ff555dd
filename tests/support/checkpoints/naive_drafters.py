"""The definition of every drafter: guesses of one sequence, everything computed anew, without a cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.models.drafters import (
    AttendedInputs,
    DrafterSpec,
    FeatureDrafter,
    HeadsDrafter,
    JoinedInputs,
    LanguageDrafter,
    StagesDrafter,
    drafter_params,
)
from pagoda.common.models.spec import ModelSpec

Weights = Mapping[str, np.ndarray]


def random_drafter(drafter: DrafterSpec, seed: int = 1, scale: float = 0.25) -> dict[str, np.ndarray]:
    """Return random values of a drafter's own parameters; token ids of its own vocabulary are the odd ones."""
    rng = np.random.default_rng(seed)
    values = {}
    for param in drafter_params(drafter).values():
        values[param.name] = (rng.standard_normal(param.shape) * scale).astype(np.float32)
        if param.name == "target_ids":
            values[param.name] = np.arange(param.shape[0], dtype=np.float32) + 1
    return values


class NaiveStates(NaiveModel):
    """A model whose hidden states can be read."""

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Return what the head reads [T, D], and the input of each layer."""
        x, inputs = self._embed(token_ids), []
        for index, layer in enumerate(self.spec.layers):
            inputs.append(x)
            x = self._around(f"layers.{index}", layer, x, inputs[0])
        return self._norm("final_norm", self.spec.final_norm, x), inputs


class NaiveFeatures(NaiveModel):
    """A drafter over embeddings and hidden states. `weights`: its own and, where it shares them, the target's."""

    def __init__(self, drafter: FeatureDrafter, weights: Weights, max_len: int) -> None:
        super().__init__(drafter.model, weights.items(), max_len=max_len)
        self.drafter = drafter

    @torch.inference_mode()
    def chain(self, tokens: list[int], source: Tensor, count: int) -> list[int]:
        """Guess after `tokens` [T + 1]; source [T, W]."""
        inputs, guesses = self.drafter.inputs, []
        read = self._linear("inputs.project", source) if isinstance(inputs, AttendedInputs) else source
        for _ in range(count):
            x = self._run(self._embed([0, *tokens[1:], *guesses])[1:], read)
            normed = self._norm("final_norm", self.spec.final_norm, x)
            guess = int((normed[-1] @ self._weights["head"].T).argmax())
            if self.drafter.head_vocab is not None:
                guess += int(self._weights["target_ids"][guess])
            guesses.append(guess)
            read = torch.cat([read, (normed if self.drafter.chains_normed else x)[-1:]])
        return guesses

    def _run(self, embeds: Tensor, read: Tensor) -> Tensor:
        inputs = self.drafter.inputs
        if isinstance(inputs, JoinedInputs):
            if inputs.blank_first:
                embeds = torch.cat([torch.zeros_like(embeds[:1]), embeds[1:]])
            parts = [
                self._norm("inputs.embed_norm", inputs.embed_norm, embeds),
                self._norm("inputs.hidden_norm", inputs.hidden_norm, read),
            ]
            x = self._linear("inputs.project", torch.cat(parts[::-1] if inputs.hidden_first else parts, -1))
        else:
            normed = self._norm("inputs.hidden_norm", inputs.hidden_norm, read)
            both = torch.cat([self._norm("inputs.embed_norm", inputs.embed_norm, embeds), normed], -1)
            x = normed if inputs.norms_residual else read
            x = x + self._mixer("inputs.attention", inputs.attention, both)
        for index, layer in enumerate(self.spec.layers):
            x = self._around(f"layers.{index}", layer, x, x)
        return x


def naive_guesses(
    spec: ModelSpec, weights: Weights, drafter: DrafterSpec, own: Weights, tokens: list[int], count: int, max_len: int
) -> list[int]:
    """Return `count` guesses after `tokens`, of which the target has computed all but the last."""
    if isinstance(drafter, LanguageDrafter):
        return NaiveModel(drafter.model, own.items(), max_len=max_len).greedy(tokens, count)
    target = NaiveStates(spec, weights.items(), max_len=max_len)
    hidden, inputs = target.states(tokens[:-1])
    if isinstance(drafter, FeatureDrafter):
        shared = {**weights, "head": weights["head" if "head" in weights else "embed"]}
        names = {"embed": drafter.own_embedding, "head": drafter.own_head}
        both = {**own, **{name: shared[name] for name, is_own in names.items() if not is_own}}
        source = torch.cat([inputs[layer] for layer in drafter.captured], -1) if drafter.captured else hidden
        return NaiveFeatures(drafter, both, max_len).chain(tokens, source, count)
    named = {name: torch.from_numpy(value) for name, value in own.items()}
    if isinstance(drafter, HeadsDrafter):
        return [_head(drafter, named, hidden[-1], number) for number in range(count)]
    return _stages(drafter, named, hidden[-1], tokens[-1], count)


def _head(drafter: HeadsDrafter, named: dict[str, Tensor], x: Tensor, number: int) -> int:
    for block in range(drafter.blocks):
        name = f"heads.{number}.blocks.{block}"
        x = x + F.silu(F.linear(x, named[name], named.get(f"{name}_bias")))
    return int((named[f"heads.{number}.head"] @ x).argmax())


def _stages(drafter: StagesDrafter, named: dict[str, Tensor], state: Tensor, token: int, count: int) -> list[int]:
    guesses = []
    if drafter.scales_input:
        state = _scaled(state) / 2**0.5
    for stage in range(count):
        own = 0 if drafter.tied else stage
        project = named[f"stages.{min(stage, 1) if drafter.tied else stage}.project"]
        state = project @ state + drafter.embedding_weight * named[f"stages.{own}.embed"][token]
        state = F.gelu(_scaled(state) * named[f"stages.{own}.norm"] + named[f"stages.{own}.norm_bias"])
        token = int((named[f"stages.{own}.head"] @ state).argmax())
        guesses.append(token)
    return guesses


def _scaled(x: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt()
