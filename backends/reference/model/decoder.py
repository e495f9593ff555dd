"""The decoder, built once from a model spec (every `match` on the spec happens then) and run once per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import NormalDist
from typing import Any, Final, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import Embedded, StepBatch, TokenSlots
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.adapters import ActiveAdapters, AdapterMatrices
from pagoda.backends.reference.model.mixers.interface import MixerBuild, MixerStep
from pagoda.backends.reference.model.mixers.registry import ops_of
from pagoda.backends.reference.model.mixers.rotary import RotaryTables
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.ops import (
    activation,
    clamped_glu,
    clipped,
    mix_experts,
    norm,
    route,
    sigmoid,
    softcap,
    sparse,
    xielu,
)
from pagoda.backends.reference.model.params import NormParams
from pagoda.backends.reference.model.quantized.blocks import look_up
from pagoda.backends.reference.model.streams import make_streams
from pagoda.backends.reference.programs.operators import Operators, operators
from pagoda.backends.reference.weights.params import LayerParams, MlpParams, ModelParams, MoeParams
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Ffn, InputBlock, Layer, LowRankResidual, Mlp, ModelSpec, Moe, Shortcut, SideMoe

FfnStep = Callable[[Tensor], Tensor]

CHUNK: Final = 512
"""Tokens that an MLP runs on at a time."""


def make_ffn(
    spec: Ffn,
    params: MlpParams | MoeParams,
    *,
    batch_invariant: bool = False,
    native: Operators | None = None,
    active: ActiveAdapters | None = None,
) -> FfnStep:
    """Return the MLP or mixture of experts as a function of x [T, D]. `active`: adapters of the tokens."""
    match spec:
        case Mlp():
            assert isinstance(params, MlpParams)
            return _mlp(spec, params, batch_invariant, native, active)
        case Moe():
            assert isinstance(params, MoeParams)
            return _moe(spec, params, batch_invariant, native, active)
        case _:
            assert_never(spec)


def _mlp(
    spec: Mlp,
    params: MlpParams,
    batch_invariant: bool,
    native: Operators | None = None,
    active: ActiveAdapters | None = None,
) -> FfnStep:
    act = activation(spec.activation, batch_invariant=batch_invariant)
    width = spec.width
    inner = params.inner
    down = params.down
    if (learned := spec.learned) is not None and (curvatures := params.curvatures) is not None:
        return lambda x: down(xielu(inner(x), learned, *curvatures))
    if not spec.gated:
        return lambda x: down(act(inner(x)))
    plain = not spec.sparsity and spec.clip is None and spec.clamped is None
    if plain and native is not None and (fed := native.gated(inner, spec.activation)) is not None:
        return in_chunks(lambda x: down(fed(x)))
    if plain and native is not None and (gate_up := native.gate(width, spec.activation)) is not None:
        return in_chunks(lambda x: down(gate_up(inner(x))), active)

    quantile = NormalDist().inv_cdf(spec.sparsity) if spec.sparsity else None

    def gated(x: Tensor) -> Tensor:
        both = inner(x)
        gate = both[:, :width] if quantile is None else sparse(both[:, :width], quantile)
        if spec.clip is not None:
            return down(clipped(act(gate), both[:, width:], spec.clip))
        return down(act(gate).mul_(both[:, width:]))

    if (clamped := spec.clamped) is None:
        return gated

    def clamped_gate(x: Tensor) -> Tensor:
        gate, up = inner(x).split(width, -1)
        return down(clamped_glu(gate, up, clamped))

    return clamped_gate


def in_chunks(feed: FfnStep, active: ActiveAdapters | None = None) -> FfnStep:
    """Return the ffn, run on CHUNK tokens at a time: what is in between then stays in the processor's cache."""

    def chunked(x: Tensor) -> Tensor:
        if x.shape[0] <= CHUNK:
            return feed(x)
        if active is None or active.tokens is None:
            return torch.cat([feed(part) for part in x.split(CHUNK)])
        parts = []
        for begin in range(0, x.shape[0], CHUNK):
            with active.at(slice(begin, begin + CHUNK)):
                parts.append(feed(x[begin : begin + CHUNK]))
        return torch.cat(parts)

    return chunked


SideStep = Callable[[Tensor, Tensor], Tensor]
"""(output of the ffn [T, D], its input before the norm [T, D]) -> their sum with a mixture's [T, D]."""


def make_side_moe(spec: SideMoe, params: MoeParams, extras: dict[str, Tensor], batch_invariant: bool) -> SideStep:
    """Return the mixture beside the ffn."""
    experts = [_mlp(spec.moe.expert, expert, batch_invariant) for expert in params.experts]

    def normed(name: str, x: Tensor) -> Tensor:
        return norm(x, spec.norm, extras[f"side.{name}"])

    def side(fed: Tensor, x: Tensor) -> Tensor:
        logits = params.router(normed("router_norm", x) * x.shape[1] ** -0.5)
        weights, chosen = route(logits, spec.moe.router, params.correction)
        weights = weights * extras["side.expert_scale"][chosen]
        mixed = mix_experts(normed("input_norm", x), weights, chosen, lambda expert, rows: experts[expert](rows))
        return normed("ffn_norm", fed) + normed("output_norm", mixed)

    return side


def _moe(
    spec: Moe,
    params: MoeParams,
    batch_invariant: bool,
    native: Operators | None = None,
    active: ActiveAdapters | None = None,
) -> FfnStep:
    experts = [_mlp(spec.expert, expert, batch_invariant, native, active) for expert in params.experts]
    at: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext if active is None else active.at

    def mixture(x: Tensor) -> Tensor:
        weights, chosen = route(params.router(x), spec.router, params.correction)
        if spec.weighs_input:
            x = x * weights.to(x.dtype)
            weights = torch.ones_like(weights)
        return mix_experts(x, weights, chosen, lambda expert, rows: experts[expert](rows), at)

    if spec.shared is None or params.shared is None:
        return mixture
    shared = _mlp(spec.shared, params.shared, batch_invariant, native, active)
    gate = params.shared_gate
    if gate is None:
        return lambda x: mixture(x) + shared(x)
    return lambda x: mixture(x) + sigmoid(gate(x)) * shared(x)


NormStep = Callable[[Tensor], Tensor]


class Decoder:
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
        self.spec = spec
        self.params = params
        self.numerics = numerics
        self.adapters = adapters
        self.embed = TokenEmbedding(spec, params, numerics, adapters)
        native = operators(numerics)
        self.is_row_wise = native is not None and native.multiplies(spec.width)
        make = partial(make_paged_mixer, build=MixerBuild(numerics.batch_invariant, native))
        active = None if adapters is None else adapters.active
        self.layers = make_layers(spec, params, make, numerics.batch_invariant, native, active)
        self.streams = make_streams(spec, params)
        self.final_norm = make_norm(spec.final_norm, params.final_norm, native)
        self.rotary = RotaryTables(spec.ropes, max_len, numerics.compute)
        self.programs = None if native is None else native.programs(self._run_layers, max_len)

    def hidden(
        self, token_ids: Tensor, batch: StepBatch, caches: dict[int, LayerCache], embedded: Embedded | None = None
    ) -> Tensor:
        """token_ids int64 [T] -> hidden states [T, D] after the final norm; K and V are written to the caches."""
        with self._adapted(batch.adapters):
            return self._hidden(token_ids, batch, caches, embedded)

    def _adapted(self, tokens: TokenSlots | None) -> AbstractContextManager[None]:
        """Return a context in which the layers add the adapters of these tokens."""
        return nullcontext() if self.adapters is None or tokens is None else self.adapters.active.of(tokens)

    def _hidden(
        self, token_ids: Tensor, batch: StepBatch, caches: dict[int, LayerCache], embedded: Embedded | None
    ) -> Tensor:
        x = self.embed(token_ids, batch.positions, embedded=embedded)
        if self.streams is not None:
            rotations = self.rotary.at(batch.positions)
            x = self.streams.run(token_ids, x, lambda index, x: self.layers[index](x, batch, caches, rotations))
            return self.final_norm(x)
        recorded = self.programs is not None and batch.adapters is None
        hidden = self.programs.run(x, batch, caches) if recorded and self.programs is not None else None
        return self._run_layers(x, batch, caches) if hidden is None else hidden

    def records(self, num_tokens: int) -> bool:
        """Return whether a step of sequences with a token each is recorded as a program, and then repeated."""
        return self.streams is None and self.programs is not None and self.programs.records(num_tokens)

    def hidden_and_captured(
        self, token_ids: Tensor, batch: StepBatch, caches: dict[int, LayerCache], captured: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the same, and the inputs of the `captured` layers side by side, [T, C*D]."""
        assert self.streams is None, "layers have one residual stream"
        with self._adapted(batch.adapters):
            *inputs, x = self.run_layers(self.embed(token_ids, batch.positions), batch, caches, captured)
            return self.final_norm(x), torch.cat(inputs, -1)

    def _run_layers(self, x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache]) -> Tensor:
        """Embeddings [T, D] -> hidden states [T, D] after the final norm."""
        return self.final_norm(self.run_layers(x, batch, caches)[-1])

    def run_layers(
        self, x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], captured: tuple[int, ...] = ()
    ) -> list[Tensor]:
        """Embeddings [T, D] -> the inputs of the `captured` layers, then the output of the last layer, each [T, D]."""
        rotations = self.rotary.at(batch.positions)
        inputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in captured:
                inputs[index] = x
            x = layer(x, batch, caches, rotations)
        return [*(inputs[index] for index in captured), x]

    def logits(self, hidden: Tensor, tokens: TokenSlots | None = None) -> Tensor:
        """Hidden [R, D] -> float32 logits [R, V]. `tokens`: the adapters of these R tokens."""
        with self._adapted(tokens):
            return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.params.embed_out is not None:
            hidden = self.params.embed_out(hidden)
        assert self.params.head is not None, "the model generates"
        logits = self.params.head(hidden)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        return logits if self.spec.logit_softcap is None else softcap(logits, self.spec.logit_softcap)


MakeMixer = Callable[[Mixer, Any, tuple[int, ...]], MixerStep]
"""(spec, parameters, numbers of its caches) -> the mixer"""


def make_layers(
    spec: ModelSpec,
    params: ModelParams,
    make: MakeMixer,
    batch_invariant: bool = False,
    native: Operators | None = None,
    active: ActiveAdapters | None = None,
) -> tuple[DecoderLayer, ...]:
    """Return every layer."""
    layers = []
    for layer, own, caches in zip(spec.layers, params.layers, spec.cache_numbers):
        block = None
        numbers = caches[len(caches) - len(own.mixers) :]
        if layer.block is not None and own.block is not None:
            first = params.layers[layer.block.weights_of].block
            assert first is not None
            attention, ffn = own.block.adapted(first)
            feed = _mlp(layer.block.ffn, ffn, batch_invariant)
            attend = make(layer.attends_before, attention, caches[0])
            block = InputBlockStep(layer.block, first.norms, attend, feed, own.block.out)
        specs = layer.mixers[len(layer.mixers) - len(own.mixers) :]
        mixers = [make(*mixer) for mixer in zip(specs, own.mixers, numbers)]
        layers.append(
            DecoderLayer(layer, own, mixers, block, batch_invariant=batch_invariant, native=native, active=active)
        )
    return tuple(layers)


class InputBlockStep:
    """A transformer block in front of a layer's mixers."""

    def __init__(
        self, spec: InputBlock, norms: dict[str, NormParams], attend: MixerStep, feed: FfnStep, out: FfnStep
    ) -> None:
        self.attend = attend
        self.feed = feed
        self.out = out
        self.norm, self.ffn_norm = (make_norm(spec.norm, norms.get(name)) for name in ("norm", "ffn_norm"))

    def __call__(self, both: Tensor, *mixer_inputs: object) -> Tensor:
        """x and the embedding side by side [T, 2D] -> what is added to the mixers' input [T, D]."""
        return self.out(self.feed(self.ffn_norm(self.attend(self.norm(both), *mixer_inputs))))


def make_paged_mixer(spec: Mixer, params: object, caches: tuple[int, ...], *, build: MixerBuild) -> MixerStep:
    """Return the mixer over the paged caches of these numbers."""
    return ops_of(spec).paged(spec, params, caches, build)


class TokenEmbedding:
    """Token, position and type embeddings, summed and normalised as the model specifies."""

    def __init__(
        self, spec: ModelSpec, params: ModelParams, numerics: Numerics, adapters: AdapterMatrices | None = None
    ) -> None:
        self.spec = spec.embedding
        self.params = params
        self.compute = numerics.compute
        self.adapters = adapters
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
        spec = self.spec
        params = self.params
        known = token_ids if embedded is None else embedded.mask_ids(token_ids)
        x = look_up(known, params.embed)
        if self.adapters is not None:
            x = self.adapters.add_to_embeddings(known, x)
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

    def __init__(
        self,
        spec: Layer,
        params: LayerParams,
        mixers: Sequence[MixerStep],
        block: InputBlockStep | None = None,
        *,
        batch_invariant: bool = False,
        native: Operators | None = None,
        active: ActiveAdapters | None = None,
    ) -> None:
        self.mixers = tuple(mixers)
        self.block = block
        self.ffn = None
        if spec.ffn is not None and params.ffn is not None:
            self.ffn = make_ffn(spec.ffn, params.ffn, batch_invariant=batch_invariant, native=native, active=active)
        self.norm_after_add = spec.norm_after_add
        self.scale = spec.residual_scale
        self.add: Callable[[Tensor, Tensor], Tensor] = torch.add if native is None else native.add
        self.norm_residual = spec.norm_residual
        self.parallel = spec.parallel
        self.shares_norm = spec.norms.before_ffn is None
        self.side = None
        if spec.side_moe is not None and params.side_moe is not None:
            self.side = make_side_moe(spec.side_moe, params.side_moe, params.extras, batch_invariant)
        self.low_rank = None if spec.low_rank is None else make_low_rank(spec.low_rank, params.extras)
        self.shortcut = None
        if spec.shortcut is not None and params.shortcut is not None:
            self.shortcut = make_shortcut(spec.shortcut, params.shortcut, params.extras, batch_invariant)
        norms = params.norms
        self.before_mixer = make_norm(spec.norms.before_mixer, norms.get("before_mixer"), native)
        self.after_mixer = make_norm(spec.norms.after_mixer, norms.get("after_mixer"), native)
        self.before_ffn = make_norm(spec.norms.before_ffn, norms.get("before_ffn"), native)
        self.after_ffn = make_norm(spec.norms.after_ffn, norms.get("after_ffn"), native)

    def __call__(self, x: Tensor, *mixer_inputs: object) -> Tensor:
        """X [T, D], with an input block [x, embedding] [T, 2D] -> [T, D]."""
        y = self._run(x, *mixer_inputs)
        return y if self.shortcut is None else y + self.shortcut(x)

    def _run(self, x: Tensor, *mixer_inputs: object) -> Tensor:
        if not self.mixers:
            return x if self.ffn is None else self._feed(x)
        added = None if self.block is None else self.block(x, *mixer_inputs)
        x = x if added is None else x[:, : added.shape[1]]
        mixer_input = self.before_mixer(x if added is None else x + added)
        mixed = self.mixers[0](mixer_input, *mixer_inputs)
        for mixer in self.mixers[1:]:
            mixed = mixed + mixer(mixer_input, *mixer_inputs)
        y = self._add(mixer_input if self.norm_residual else x, mixed, self.after_mixer)
        if self.low_rank is not None:
            y = (y + self.low_rank(mixer_input)) * 2**-0.5
        if self.ffn is None:
            return y
        if self.parallel:
            return self._add(y, self.ffn(mixer_input if self.shares_norm else self.before_ffn(x)), self.after_ffn)
        return self._feed(y)

    def _feed(self, x: Tensor) -> Tensor:
        assert self.ffn is not None, "the layer has an ffn"
        ffn_input = self.before_ffn(x)
        fed = self.ffn(ffn_input)
        fed = fed if self.side is None else self.side(fed, x)
        return self._add(ffn_input if self.norm_residual else x, fed, self.after_ffn)

    def _add(self, x: Tensor, update: Tensor, after: NormStep) -> Tensor:
        if not self.norm_after_add:
            update = after(update)
        if self.scale != 1.0:
            update = update * self.scale
        total = self.add(x, update)
        return after(total) if self.norm_after_add else total


def make_shortcut(spec: Shortcut, params: MoeParams, extras: dict[str, Tensor], batch_invariant: bool) -> FfnStep:
    """Return the mixture around a layer as a function of the layer's input [T, D]."""
    mixture = _moe(spec.moe, params, batch_invariant)
    weight = extras["shortcut.norm"]
    return lambda x: mixture(norm(x, spec.norm, weight))


def make_low_rank(spec: LowRankResidual, extras: dict[str, Tensor]) -> FfnStep:
    """Return the learned residual as a function of the mixers' input [T, D]."""
    left, right, weight = (extras[f"low_rank.{name}"] for name in ("left", "right", "norm"))
    return lambda h: h + norm(F.linear(F.linear(h, left), right), spec.norm, weight)


def make_norm(spec: Norm | None, params: NormParams | None, native: Operators | None = None) -> NormStep:
    """Return the norm as a function of x [T, D]; the identity if there is no norm."""
    if spec is None:
        return lambda x: x
    if params is None:
        assert not spec.scale, "the weights are complete"
        return lambda x: norm(x, spec, None)
    if spec.kind == "rms" and params.bias is None and native is not None:
        compiled = native.norm(params.weight, spec.eps, unit_offset=spec.unit_offset)
        if compiled is not None:
            return compiled
    if spec.kind == "rms" and params.weight.dtype == torch.float32:
        return _rms(params.weight + 1 if spec.unit_offset else params.weight, spec.eps)
    return lambda x: norm(x, spec, params.weight, params.bias)


def _rms(weight: Tensor, eps: float) -> NormStep:
    """RMSNorm in float32 with half as many operations as torch's."""
    epsilon = torch.tensor(eps)
    per_element = 1.0 / weight.shape[0]

    def rms(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(epsilon, length, length, value=per_element).rsqrt_()).mul_(weight)

    return rms
