"""The decoder, built once from a model spec (every `match` on the spec happens then) and run once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import Embedded, StepBatch
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.attention import PagedAttention, RotaryTables
from pagoda.backends.reference.model.gated_delta import PagedGatedDelta
from pagoda.backends.reference.model.latent_attention import PagedLatentAttention
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.ops import activation, mix_experts, norm, route, softcap
from pagoda.backends.reference.weights import (
    AttentionParams,
    GatedDeltaParams,
    LatentAttentionParams,
    LayerParams,
    MixerParams,
    MlpParams,
    ModelParams,
    MoeParams,
    NormParams,
)
from pagoda.common.models.mixers import Attention, GatedDelta, LatentAttention, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Ffn, Layer, Mlp, ModelSpec, Moe

FfnStep = Callable[[Tensor], Tensor]


def make_ffn(spec: Ffn, params: MlpParams | MoeParams) -> FfnStep:
    """Return the MLP or mixture of experts as a function of x [T, D]."""
    match spec:
        case Mlp():
            assert isinstance(params, MlpParams)
            return _mlp(spec, params)
        case Moe():
            assert isinstance(params, MoeParams)
            return _moe(spec, params)
        case _:
            assert_never(spec)


def _mlp(spec: Mlp, params: MlpParams) -> FfnStep:
    act, width = activation(spec.activation), spec.width
    inner, down = params.inner, params.down
    if not spec.gated:
        return lambda x: down(act(inner(x)))

    def gated(x: Tensor) -> Tensor:
        both = inner(x)
        return down(act(both[:, :width]).mul_(both[:, width:]))

    return gated


def _moe(spec: Moe, params: MoeParams) -> FfnStep:
    experts = [_mlp(spec.expert, expert) for expert in params.experts]

    def mixture(x: Tensor) -> Tensor:
        weights, chosen = route(params.router(x), spec.router)
        return mix_experts(x, weights, chosen, lambda expert, rows: experts[expert](rows))

    gate = params.shared_gate
    if spec.shared is None or params.shared is None or gate is None:
        return mixture
    shared = _mlp(spec.shared, params.shared)
    return lambda x: mixture(x) + gate(x).sigmoid() * shared(x)


NormStep = Callable[[Tensor], Tensor]


class Decoder:
    """Maps token ids and a batch to hidden states and logits."""

    def __init__(self, spec: ModelSpec, params: ModelParams, numerics: Numerics, max_len: int) -> None:
        self.spec, self.params, self.numerics = spec, params, numerics
        self.embed = TokenEmbedding(spec, params, numerics)
        self.layers = tuple(
            DecoderLayer(layer, p, list(map(make_mixer, layer.mixers, p.mixers, caches)))
            for layer, p, caches in zip(spec.layers, params.layers, spec.cache_numbers)
        )
        self.final_norm = make_norm(spec.final_norm, params.final_norm)
        self.rotary = RotaryTables(spec, max_len, numerics.compute)

    def hidden(
        self, token_ids: Tensor, batch: StepBatch, caches: dict[int, LayerCache], embedded: Embedded | None = None
    ) -> Tensor:
        """token_ids int64 [T] -> hidden states [T, D] after the final norm; K and V are written to the caches."""
        x = self.embed(token_ids, batch.positions, embedded=embedded)
        rotations = self.rotary.at(batch.positions)
        for layer in self.layers:
            x = layer(x, batch, caches, rotations)
        return self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [R, D] -> float32 logits [R, V]."""
        if self.params.embed_out is not None:
            hidden = self.params.embed_out(hidden)
        assert self.params.head is not None, "the model generates"
        logits = self.params.head(hidden).float()
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        return logits if self.spec.logit_softcap is None else softcap(logits, self.spec.logit_softcap)


MixerStep = Callable[..., Tensor]
"""(x [T, D], its other inputs) -> [T, D]"""


def make_mixer(spec: Mixer, params: MixerParams, caches: tuple[int, ...]) -> MixerStep:
    """Return the mixer over the paged caches of these numbers."""
    match spec:
        case Attention():
            assert isinstance(params, AttentionParams)
            return PagedAttention(spec, params, *caches)
        case LatentAttention():
            assert isinstance(params, LatentAttentionParams)
            return PagedLatentAttention(spec, params, caches)
        case GatedDelta():
            assert isinstance(params, GatedDeltaParams)
            return PagedGatedDelta(spec, params, *caches)
        case _:
            assert_never(spec)


class TokenEmbedding:
    """Token, position and type embeddings, summed and normalised as the model specifies."""

    def __init__(self, spec: ModelSpec, params: ModelParams, numerics: Numerics) -> None:
        self.spec, self.params, self.compute = spec.embedding, params, numerics.compute
        self.norm = make_norm(spec.embedding.norm, params.embed_norm)

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        token_types: Tensor | None = None,
        embedded: Embedded | None = None,
    ) -> Tensor:
        """token_ids, positions, token_types (None: all 0) int64 [T] -> [T, D].

        `embedded`: replaces looked-up and scaled rows.
        """
        spec, params = self.spec, self.params
        x = F.embedding(token_ids if embedded is None else embedded.mask_ids(token_ids), params.embed)
        if spec.scale != 1.0:
            x = x * x.new_tensor(spec.scale)  # rounded to the weights' dtype, as in training
        if embedded is not None:
            x = embedded.insert(x)
        x = x.to(self.compute)
        if params.embed_in is not None:
            x = params.embed_in(x)
        if params.positions is not None:
            x = x + params.positions[positions + spec.position_offset]
        if params.token_types is not None:
            x = x + (params.token_types[0] if token_types is None else params.token_types[token_types])
        return self.norm(x)


class DecoderLayer:
    """One layer on the residual stream: mixers and ffn, each between their norms."""

    def __init__(self, spec: Layer, params: LayerParams, mixers: Sequence[MixerStep]) -> None:
        self.mixers = tuple(mixers)
        self.ffn = None if spec.ffn is None or params.ffn is None else make_ffn(spec.ffn, params.ffn)
        self.norm_after_add, self.scale = spec.norm_after_add, spec.residual_scale
        self.parallel, self.shares_norm = spec.parallel, spec.norms.before_ffn is None
        norms = params.norms
        self.before_mixer = make_norm(spec.norms.before_mixer, norms.get("before_mixer"))
        self.after_mixer = make_norm(spec.norms.after_mixer, norms.get("after_mixer"))
        self.before_ffn = make_norm(spec.norms.before_ffn, norms.get("before_ffn"))
        self.after_ffn = make_norm(spec.norms.after_ffn, norms.get("after_ffn"))

    def __call__(self, x: Tensor, *mixer_inputs: object) -> Tensor:
        """X [T, D] -> [T, D]."""
        mixer_input = self.before_mixer(x)
        mixed = self.mixers[0](mixer_input, *mixer_inputs)
        for mixer in self.mixers[1:]:
            mixed = mixed + mixer(mixer_input, *mixer_inputs)
        y = self._add(x, mixed, self.after_mixer)
        if self.ffn is None:
            return y
        if self.parallel:
            return self._add(y, self.ffn(mixer_input if self.shares_norm else self.before_ffn(x)), self.after_ffn)
        return self._add(y, self.ffn(self.before_ffn(y)), self.after_ffn)

    def _add(self, x: Tensor, update: Tensor, after: NormStep) -> Tensor:
        if not self.norm_after_add:
            update = after(update)
        if self.scale != 1.0:
            update = update * self.scale
        return after(x + update) if self.norm_after_add else x + update


def make_norm(spec: Norm | None, params: NormParams | None) -> NormStep:
    """Return the norm as a function of x [T, D]; the identity if there is no norm."""
    if spec is None or params is None:
        return lambda x: x
    if spec.kind == "rms" and params.weight.dtype == torch.float32:
        return _rms(params.weight + 1 if spec.unit_offset else params.weight, spec.eps)
    return lambda x: norm(x, spec, params.weight, params.bias)


def _rms(weight: Tensor, eps: float) -> NormStep:
    """RMSNorm in float32 with half as many operations as torch's."""
    epsilon, per_element = torch.tensor(eps), 1.0 / weight.shape[0]

    def rms(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(epsilon, length, length, value=per_element).rsqrt_()).mul_(weight)

    return rms
