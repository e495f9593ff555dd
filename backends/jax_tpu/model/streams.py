"""What happens between layers beyond one residual stream: per-layer embeddings, several streams, side mixtures.

Modules run inside `shard_map`, see `layers`. Axis letters: T tokens, D width, L layers, A streams, P channels of a
per-layer embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.model.layers import ACTIVATIONS, JaxNorm, MlpFfn, MoeFfn, lookup
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, project
from pagoda.backends.jax_tpu.model.slots import padded
from pagoda.common.models.spec import AltUp, LowRankResidual, PerLayerEmbedding, SecondHalf, Shortcut, SideMoe

_SMALLEST_SQUARE: Final = 1e-5
"""Of the mean square of a projection that is scaled to another's."""


class JaxLayerParts(nnx.Module):
    """The per-layer embeddings of a step's tokens, of which each layer reads its part."""

    def __init__(self, spec: PerLayerEmbedding, layers: int, width: int, build: JaxBuildContext) -> None:
        channels = layers * spec.width
        self.spec = spec
        self.table = build.parameter("V.", padded(spec.vocab, build.tensor), channels)
        self.projection = build.parameter(".D", channels, width)
        self.norm = JaxNorm(spec.norm, spec.width, build)

    def __call__(self, token_ids: jax.Array, x: jax.Array) -> jax.Array:
        """token_ids int32 [T], first hidden states x [T, D] -> [T, L, P]."""
        shape = (len(x), -1, self.spec.width)
        known = jnp.where(token_ids < self.spec.vocab, token_ids, 0)
        tokens = lookup(self.table[...], known).reshape(shape) * self.spec.width**0.5
        projected = project(x, self.projection[...]).reshape(shape) * x.shape[1] ** -0.5
        return (self.norm(projected) + tokens) * 2**-0.5


class JaxPartUpdate(nnx.Module):
    """What a layer's part of the per-layer embedding adds at its end."""

    def __init__(self, spec: PerLayerEmbedding, width: int, build: JaxBuildContext) -> None:
        self.activation = spec.activation
        self.gate = build.parameter(".D", spec.width, width)
        self.out = build.parameter("D.", width, spec.width)
        self.norm = JaxNorm(spec.norm, width, build)

    def __call__(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """X [T, D], part [T, P] -> [T, D]."""
        gate = ACTIVATIONS[self.activation](project(x, self.gate[...]))
        return self.norm(project(gate * part, self.out[...]))


class JaxAltUp(nnx.Module):
    """Of one layer: how it predicts several streams and corrects them; see `AltUp`."""

    def __init__(self, spec: AltUp, width: int, build: JaxBuildContext) -> None:
        streams = spec.streams
        self.spec = spec
        self.router = build.parameter(".D", streams, width)
        self.norm = JaxNorm(spec.norm, width, build)
        self.prediction = build.parameter("..", streams * streams, streams)
        self.correction = build.parameter("..", streams, streams)
        self.scale = build.parameter("D", width) if spec.scaled else None

    def predict(self, streams: jax.Array) -> jax.Array:
        """[A, T, D] -> [A, T, D]."""
        mixing = project(self._modes(streams[self.spec.active]), self.prediction[...])
        mixing = mixing.reshape(-1, self.spec.streams, self.spec.streams)
        return streams + jnp.einsum("tsi,itd->std", mixing, streams)

    def correct(self, predicted: jax.Array, y: jax.Array) -> jax.Array:
        """Predicted [A, T, D], output y [T, D] of the layer on the active one -> [A, T, D]."""
        correction = 1 + project(self._modes(y), self.correction[...])  # [T, A]
        return predicted + correction.T[:, :, None] * (y - predicted[self.spec.active])

    def add_part(self, streams: jax.Array, update: JaxPartUpdate, part: jax.Array) -> jax.Array:
        """Add the per-layer embedding's update to all streams [A, T, D] but the first."""
        gating = streams[self.spec.active]
        gating = gating if self.scale is None else gating * self.scale[...]
        return streams.at[1:].add(update(gating, part))

    def _modes(self, x: jax.Array) -> jax.Array:
        """Return how much each stream matters for each token, [T, A] of x [T, D]."""
        normed = self.norm(x) / x.shape[1]
        return jnp.tanh(project(normed, self.router[...]).astype(jnp.float32)).astype(x.dtype)


class JaxStreamEnds(nnx.Module):
    """The streams before the first layer, and what is left of them after the last. `first`, `last` [A - 1, D, D]."""

    def __init__(self, spec: AltUp, width: int, build: JaxBuildContext) -> None:
        self.first = build.parameter(".D.", spec.streams - 1, width, width)
        self.last = build.parameter(".D.", spec.streams - 1, width, width)

    def split(self, x: jax.Array) -> jax.Array:
        """X [T, D] -> [A, T, D]."""
        others = jnp.einsum("td,sed->ste", x, self.first[...])
        return jnp.concatenate([x[None], _rescaled(others, x)])

    def join(self, streams: jax.Array) -> jax.Array:
        """[A, T, D] -> [T, D]."""
        others = jnp.einsum("std,sed->ste", streams[1:], self.last[...])
        return jnp.concatenate([streams[:1], _rescaled(others, streams[0])]).mean(0)


class JaxLowRank(nnx.Module):
    """A learned residual of low rank."""

    def __init__(self, spec: LowRankResidual, width: int, build: JaxBuildContext) -> None:
        self.left = build.parameter(".D", spec.rank, width)
        self.right = build.parameter("D.", width, spec.rank)
        self.norm = JaxNorm(spec.norm, width, build)

    def __call__(self, h: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        return h + self.norm(project(project(h, self.left[...]), self.right[...]))


class JaxSideMoe(nnx.Module):
    """A mixture beside the feed-forward block."""

    def __init__(self, spec: SideMoe, width: int, build: JaxBuildContext) -> None:
        self.ffn_norm, self.input_norm, self.output_norm, self.router_norm = (
            JaxNorm(spec.norm, width, build) for _ in range(4)
        )
        self.moe = MoeFfn(spec.moe, width, build.at("moe"))
        self.expert_scale = build.parameter("E", spec.moe.experts)

    def __call__(self, fed: jax.Array, x: jax.Array, repeat: jax.Array, step: AnyStep) -> jax.Array:
        """Output of the block [T, D], its input before the norm [T, D] -> their sum with the mixture's [T, D]."""
        router_input = self.router_norm(x) * x.shape[1] ** -0.5
        mixed = self.moe(self.input_norm(x), repeat, step, router_input, self.expert_scale[...])
        return self.ffn_norm(fed) + self.output_norm(mixed)


class JaxShortcut(nnx.Module):
    """A mixture around a layer."""

    def __init__(self, spec: Shortcut, width: int, build: JaxBuildContext) -> None:
        self.norm = JaxNorm(spec.norm, width, build)
        self.moe = MoeFfn(spec.moe, width, build.at("moe"))

    def __call__(self, x: jax.Array, repeat: jax.Array, step: AnyStep) -> jax.Array:
        """Input of the layer [T, D] -> what is added to its output [T, D]."""
        return self.moe(self.norm(x), repeat, step)


class JaxSecondHalf(nnx.Module):
    """The norms, the ffn and the mixture of a layer's second half; its mixer is among the layer's."""

    def __init__(self, spec: SecondHalf, width: int, build: JaxBuildContext) -> None:
        self.mixer_norm, self.ffn_norm = (JaxNorm(spec.norm, width, build) for _ in range(2))
        self.ffn = MlpFfn(spec.ffn, width, build.at("ffn"))
        self.moe = MoeFfn(spec.moe, width, replace(build, lora=None).at("moe"))

    def feed(self, x: jax.Array, fed: jax.Array, repeat: jax.Array, step: AnyStep) -> jax.Array:
        """[T, D] after the mixer, and what the layer's first ffn read [T, D] -> the layer's output [T, D]."""
        mixed = self.moe(fed, repeat, step)
        return x + self.ffn(self.ffn_norm(x), step) + mixed


def _rescaled(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return x [A, T, D] with the RMS of `like` [T, D]."""
    size = jnp.sqrt(jnp.maximum(jnp.square(x).mean(-1, keepdims=True), _SMALLEST_SQUARE))
    return x * jnp.sqrt(jnp.square(like).mean(-1, keepdims=True)) / size
