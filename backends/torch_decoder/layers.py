"""The layers: mixers and feed-forward block between their norms, on the residual stream; what stands beside them.

`match` runs at build time only. The residual stream and the pending update travel separately, so that a backend can
fuse each addition into the norm that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from pagoda.backends.torch_decoder.feed_forward import make_ffn
from pagoda.backends.torch_decoder.ops import (
    BlockMakers,
    DecoderOps,
    LayerStep,
    Linear,
    MixerStep,
    NormStep,
    Stream,
)
from pagoda.backends.torch_decoder.streams import with_streams
from pagoda.common.models.spec import (
    InputBlock,
    Layer,
    LowRankResidual,
    Mlp,
    ModelSpec,
    SecondHalf,
    Shortcut,
    SideMoe,
)


def make_layers(spec: ModelSpec, ops: DecoderOps, makers: BlockMakers) -> tuple[LayerStep, ...]:
    """Return every layer, for `run_layers`."""
    layers = []
    for index, (layer, caches) in enumerate(zip(spec.layers, spec.cache_numbers)):
        prefix = f"layers.{index}"
        mixers = [
            makers.mixer(mixer, f"{prefix}.mixers.{number}", cache_numbers)
            for number, (mixer, cache_numbers) in enumerate(zip(layer.mixers, caches))
        ]
        built = DecoderLayer(layer, mixers[layer.block is not None :], ops, makers, prefix)
        if layer.block is None:
            layers.append(with_streams(spec, index, built, ops))
        else:
            block = InputBlockStep(layer.block, mixers[0], ops, makers, f"{prefix}.block")
            layers.append(with_streams(spec, index, BlockLayer(block, built, ops), ops))
    return tuple(layers)


class DecoderLayer:
    """One layer: mixers, whose outputs are added, and ffn, each between its norms, on the residual stream."""

    def __init__(
        self, spec: Layer, mixers: Sequence[MixerStep], ops: DecoderOps, makers: BlockMakers, prefix: str
    ) -> None:
        norms = spec.norms
        self.ops = ops
        self.mixers = tuple(mixers if spec.second is None else mixers[:-1])
        self.second = None
        if spec.second is not None:
            self.second = SecondHalfStep(spec.second, mixers[-1], ops, makers, f"{prefix}.second")
        self.ffn = None if spec.ffn is None else make_ffn(spec.ffn, ops, makers, f"{prefix}.ffn")
        self.norm_after_add = spec.norm_after_add
        self.scale = spec.residual_scale
        self.norm_residual = spec.norm_residual
        self.parallel = spec.parallel
        self.shares_norm = norms.before_ffn is None
        self.side = None if spec.side_moe is None else make_side_moe(spec.side_moe, ops, makers, f"{prefix}.side")
        self.low_rank = None if spec.low_rank is None else make_low_rank(spec.low_rank, ops, f"{prefix}.low_rank")
        self.shortcut = None
        if spec.shortcut is not None:
            self.shortcut = make_shortcut(spec.shortcut, ops, makers, f"{prefix}.shortcut")
        of_mixer, of_ffn = only_readers(spec, makers, prefix)
        self.before_mixer = ops.rounding_norm(norms.before_mixer, f"{prefix}.norms.before_mixer", of_mixer)
        self.after_mixer = ops.norm(norms.after_mixer, f"{prefix}.norms.after_mixer")
        self.before_ffn = ops.rounding_norm(norms.before_ffn, f"{prefix}.norms.before_ffn", of_ffn)
        self.after_ffn = ops.norm(norms.after_ffn, f"{prefix}.norms.after_ffn")

    def __call__(self, stream: Stream, *mixer_inputs: object) -> Stream:
        if self.shortcut is None:
            return self._run(stream, *mixer_inputs)
        x = self.ops.add(*stream)
        residual, update = self._run((None, x), *mixer_inputs)
        return self.ops.add_both(residual, update, self.shortcut(x))

    def _run(self, stream: Stream, *mixer_inputs: object) -> Stream:
        if not self.mixers:
            return stream if self.ffn is None else self._feed(stream, *mixer_inputs)
        residual, update = stream
        x, residual = self.before_mixer(update, residual)
        return self._mix(x, residual, *mixer_inputs)

    def after_block(self, x: Tensor, added: Tensor, *mixer_inputs: object) -> Stream:
        """Run on a residual stream x [T, D] of which the mixers read x + added."""
        return self._mix(self.before_mixer(added, x)[0], x, *mixer_inputs)

    def _mix(self, x: Tensor, residual: Tensor, *mixer_inputs: object) -> Stream:
        """Run the mixers on normalised x [T, D], then the ffn."""
        mixed = self.mixers[0](x, *mixer_inputs)
        for mixer in self.mixers[1:]:
            mixed = mixed + mixer(x, *mixer_inputs)
        if self.parallel and self.ffn is not None:
            fed = self.ffn(x if self.shares_norm else self.before_ffn(residual, None)[0])
            mixed = self._update(self.after_mixer, mixed)
            return self.ops.add_both(residual, mixed, self._update(self.after_ffn, fed))
        stream = self._after(self.after_mixer, x if self.norm_residual else residual, mixed)
        if self.low_rank is not None:
            stream = None, (self.ops.add(*stream) + self.low_rank(x)) * 2**-0.5
        return stream if self.ffn is None else self._feed(stream, *mixer_inputs)

    def _feed(self, stream: Stream, *mixer_inputs: object) -> Stream:
        assert self.ffn is not None, "the layer has an ffn"
        residual, update = stream
        x, residual = self.before_ffn(update, residual)
        fed = self.ffn(x)
        fed = fed if self.side is None else self.side(fed, residual)
        stream = self._after(self.after_ffn, x if self.norm_residual else residual, fed)
        return stream if self.second is None else self.second(stream, x, *mixer_inputs)

    def _after(self, norm: NormStep, residual: Tensor, update: Tensor) -> Stream:
        if self.norm_after_add:
            return None, norm(self._scaled(update), residual)[0]
        return residual, self._update(norm, update)

    def _update(self, norm: NormStep, update: Tensor) -> Tensor:
        return self._scaled(norm(update, None)[0])

    def _scaled(self, update: Tensor) -> Tensor:
        return update if self.scale == 1.0 else update * self.scale


def only_readers(spec: Layer, makers: BlockMakers, prefix: str) -> tuple[str | None, str | None]:
    """Return the linear map that alone reads the norm before the mixers, and that before the ffn; None: others do."""
    if spec.parallel or spec.norm_residual or spec.block or spec.low_rank or spec.shortcut or spec.side_moe:
        return None, None
    side_by_side = len(spec.mixers) - (spec.second is not None)
    of_mixer = makers.only_reader(spec.mixers[0], f"{prefix}.mixers.0") if side_by_side == 1 else None
    return of_mixer, f"{prefix}.ffn.inner" if isinstance(spec.ffn, Mlp) and spec.second is None else None


Part = TypeVar("Part")


def with_shared_blocks(parts: Mapping[str, Part], owners: Mapping[int, int]) -> dict[str, Part]:
    """Return the parts of a model with those of input blocks under the names of every layer that uses them.

    `owners`: see `ModelSpec.shared_blocks`.
    """
    named = dict(parts)
    for layer, owner in owners.items():
        for name, part in parts.items():
            if name.startswith((f"layers.{owner}.block.", f"layers.{owner}.mixers.0")):
                named.setdefault(name.replace(f"layers.{owner}.", f"layers.{layer}.", 1), part)
    return named


class InputBlockStep:
    """A transformer block in front of a layer's mixers."""

    def __init__(self, spec: InputBlock, attend: MixerStep, ops: DecoderOps, makers: BlockMakers, prefix: str) -> None:
        self.attend = attend
        self.norm, self.ffn_norm = (ops.norm(spec.norm, f"{prefix}.{norm}") for norm in ("norm", "ffn_norm"))
        self.feed = make_ffn(spec.ffn, ops, makers, f"{prefix}.ffn")
        self.out = ops.linear(f"{prefix}.out")

    def __call__(self, both: Tensor, *mixer_inputs: object) -> Tensor:
        """Return what is added to the mixers' input [T, D], of x and the embedding side by side [T, 2D]."""
        attended = self.attend(self.norm(both, None)[0], *mixer_inputs)
        return self.out(self.feed(self.ffn_norm(attended, None)[0]))


class BlockLayer:
    """A layer with an input block, which reads the first hidden states."""

    def __init__(self, block: InputBlockStep, layer: DecoderLayer, ops: DecoderOps) -> None:
        self.block = block
        self.layer = layer
        self.ops = ops

    def __call__(self, stream: Stream, first: Tensor, *mixer_inputs: object) -> Stream:
        x = self.ops.add(*stream)
        added = self.block(torch.cat((x, first), -1), *mixer_inputs)
        return self.layer.after_block(x, added, *mixer_inputs)


def make_side_moe(
    spec: SideMoe, ops: DecoderOps, makers: BlockMakers, prefix: str
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the sum of the ffn and a mixture, of the ffn's output and of its input before the norm, both [T, D]."""
    names = ("ffn_norm", "input_norm", "output_norm", "router_norm")
    ffn, before, after, router = (ops.norm(spec.norm, f"{prefix}.{name}") for name in names)
    routed = makers.routed(spec.moe, f"{prefix}.moe", ops.get(f"{prefix}.expert_scale"))

    def side(fed: Tensor, x: Tensor) -> Tensor:
        router_input = router(x, None)[0] * x.shape[1] ** -0.5
        mixed = ops.sum_over_ranks(routed(before(x, None)[0], router_input))
        return ffn(fed, None)[0] + after(mixed, None)[0]

    return side


def make_shortcut(spec: Shortcut, ops: DecoderOps, makers: BlockMakers, prefix: str) -> Linear:
    """Return the mixture around a layer as a function of the layer's input [T, D]."""
    norm = ops.norm(spec.norm, f"{prefix}.norm")
    mixture = make_ffn(spec.moe, ops, makers, f"{prefix}.moe")
    return lambda x: mixture(norm(x, None)[0])


class SecondHalfStep:
    """The mixer and the ffn after those of a layer, and the mixture beside them."""

    def __init__(self, spec: SecondHalf, mixer: MixerStep, ops: DecoderOps, makers: BlockMakers, prefix: str) -> None:
        self.second_mixer = mixer
        self.mixer_norm = ops.norm(spec.norm, f"{prefix}.mixer_norm")
        self.ffn_norm = ops.norm(spec.norm, f"{prefix}.ffn_norm")
        self.ffn = make_ffn(spec.ffn, ops, makers, f"{prefix}.ffn")
        self.mixture = make_ffn(spec.moe, ops, makers, f"{prefix}.moe")
        self.add_both = ops.add_both

    def __call__(self, stream: Stream, fed: Tensor, *mixer_inputs: object) -> Stream:
        """Return the layer's output; `fed` [T, D]: what its first ffn reads."""
        mixed = self.mixture(fed)
        residual, update = stream
        x, residual = self.mixer_norm(update, residual)
        x, residual = self.ffn_norm(self.second_mixer(x, *mixer_inputs), residual)
        return self.add_both(residual, self.ffn(x), mixed)


def make_low_rank(spec: LowRankResidual, ops: DecoderOps, prefix: str) -> Linear:
    """Return the learned residual as a function of the mixers' input [T, D]."""
    left = ops.linear(f"{prefix}.left")
    right = ops.linear(f"{prefix}.right")
    norm = ops.norm(spec.norm, f"{prefix}.norm")
    return lambda h: h + norm(right(left(h)), None)[0]
