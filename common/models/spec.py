"""Specification of a model's computation, layer by layer: frozen values, logical maths only.

No dtypes, fusing, padding, sharding, kernels, checkpoint names or model names: q, k, v, gate and up stay separate, and
a backend fuses them as it likes. Fields are named after mechanisms. A field needs two users, else it is a new kind.

Axis letters: T tokens, S sequences, P pages, B page size, N query heads, K KV heads, H head dim, D width,
F ffn width, V vocab, E experts, L layers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from pagoda.common.config.groups.pooler import PoolingKind
from pagoda.common.errors import ModelError
from pagoda.common.models.caches import CacheSpec
from pagoda.common.models.mixers import Attention, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
PoolerActivation = Literal["silu", "gelu", "gelu_tanh", "relu", "tanh"]


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(act(gate x) * up x) when `gated`, else down(act(up x))."""

    width: int
    activation: Activation
    gated: bool
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """Softmax over E experts in float32, of which the `top_k` largest are used."""

    top_k: int
    renormalise: bool  # scale the top-k weights to sum to one


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of `experts` Mlps, weighted by the router, plus sigmoid(shared_gate x) * shared(x)."""

    experts: int
    expert: Mlp
    router: Router
    shared: Mlp | None = None  # runs on every token


Ffn = Mlp | Moe


@dataclass(frozen=True, slots=True)
class Norms:
    """A layer's norms, before and after its mixer and its ffn (after: before the residual add)."""

    before_mixer: Norm | None = None
    after_mixer: Norm | None = None
    before_ffn: Norm | None = None
    after_ffn: Norm | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """x += after_mixer(mixer(before_mixer(x))); x += after_ffn(ffn(before_ffn(x))).

    Several mixers run side by side on the same input and their outputs are added.
    """

    mixers: tuple[Mixer, ...]
    ffn: Ffn | None  # None: the layer ends after the mixers
    norms: Norms
    norm_after_add: bool = False  # apply the after-norms to the sum instead of to the update
    parallel: bool = False  # mixers and ffn read the same x; without a before_ffn norm the ffn reads before_mixer(x)
    residual_scale: float = 1.0  # multiplies each update before it is added

    def __post_init__(self) -> None:
        assert self.mixers, "a layer has at least one mixer"
        assert not self.parallel or self.ffn is not None, "a parallel layer has an ffn"
        assert not (self.parallel and self.norm_after_add), "a parallel layer has one sum, so no norm after each"

    @property
    def attention(self) -> Attention:
        """The only mixer of a layer that passed `check_attention_only`."""
        (mixer,) = self.mixers
        assert isinstance(mixer, Attention)
        return mixer

    @property
    def feed_forward(self) -> Ffn:
        """The ffn of a layer that passed `check_attention_only`."""
        assert self.ffn is not None
        return self.ffn


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embedding: norm(scale * token + position + token type)."""

    scale: float = 1.0  # rounded to the weights' dtype
    positions: int | None = None  # rows of a learned position table, indexed by position + position_offset
    position_offset: int = 0
    width: int | None = None  # of the table if it differs from the model's, with projections in and out
    token_types: int = 0  # rows of a learned table, indexed by a token's segment in a text pair
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Dense:
    """norm(act(W x + b)) of a vector."""

    width: int  # of the output
    activation: PoolerActivation | None = None  # None: identity
    bias: bool = True
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Classifier:
    """activation(W x + b), one output per label."""

    labels: int
    activation: Literal["sigmoid", "softmax"] | None = None
    bias: bool = True


@dataclass(frozen=True, slots=True)
class Pooler:
    """Hidden states to outputs: pooling over tokens, then the `dense` layers, then the classifier.

    Without a classifier the output is an embedding. A request for per-token outputs overrides `kind` by "all".
    """

    kind: PoolingKind  # first token, last token, mean, or all: one output per token
    dense: tuple[Dense, ...] = ()
    classifier: Classifier | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model: frozen, hashable, one `Layer` per layer."""

    vocab: int
    width: int
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    tied: bool  # the head is the embedding table
    max_positions: int  # maximum context in tokens, from the checkpoint
    embedding: Embedding = Embedding()
    head_bias: bool = False
    logit_softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    logit_scale: float = 1.0  # multiplies the logits
    pooler: Pooler | None = None  # replaces the head; None: the model generates

    def __post_init__(self) -> None:
        """Raise ModelError if a layer shares a cache that it cannot read."""
        for index, layer in enumerate(self.layers):
            for mixer in layer.mixers:
                if isinstance(mixer, Attention) and mixer.shares_cache_of is not None:
                    self._check_shared_cache(index, mixer, mixer.shares_cache_of)

    def _check_shared_cache(self, index: int, mixer: Attention, owner: int) -> None:
        shares = f"layer {index} shares the cache of layer {owner}"
        if not 0 <= owner < index:
            raise ModelError(f"{shares}, which does not come before it")
        mixers = self.layers[owner].mixers
        if len(mixers) != 1 or not isinstance(mixers[0], Attention) or not mixers[0].caches():
            raise ModelError(f"{shares}, which does not keep the K and V of one Attention")
        if (mixers[0].keys_and_values, mixers[0].rope) != (mixer.keys_and_values, mixer.rope):
            raise ModelError(f"{shares}, whose KV heads, head dim, window or RoPE differ from its own")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Every mixer, layer by layer."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """Every cache kept per sequence, mixer by mixer. A cache's number is its index here."""
        return tuple(cache for mixer in self.mixers for cache in mixer.caches())

    @property
    def cache_numbers(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The numbers of the caches that each mixer reads, layer by layer: its own, or those of an earlier layer."""
        layers: list[tuple[tuple[int, ...], ...]] = []
        numbers = itertools.count()
        for layer in self.layers:
            own = (tuple(itertools.islice(numbers, len(mixer.caches()))) for mixer in layer.mixers)
            shared = (_shared_layer(mixer) for mixer in layer.mixers)
            layers.append(tuple(read if owner is None else layers[owner][0] for read, owner in zip(own, shared)))
        return tuple(layers)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct ropes, in order of appearance."""
        return tuple(dict.fromkeys(rope for mixer in self.mixers for rope in mixer.ropes()))

    @property
    def hidden_width(self) -> int:
        """Width of the hidden state that the head or pooler reads."""
        return self.embedding.width or self.width


def _shared_layer(mixer: Mixer) -> int | None:
    """Return the layer whose cache the mixer reads instead of its own, None for its own."""
    return mixer.shares_cache_of if isinstance(mixer, Attention) else None


def check_attention_only(spec: ModelSpec, backend: str) -> None:
    """Raise ModelError naming the first layer that is not one `Attention`, then an ffn, each added to the stream."""
    for index, layer in enumerate(spec.layers):
        if (problem := _beyond_attention(layer)) is not None:
            raise ModelError(f"layer {index} has {problem}, which {backend} does not support; use --backend reference")


def _beyond_attention(layer: Layer) -> str | None:
    """Return what `check_attention_only` refuses in a layer, None if nothing."""
    for mixer in layer.mixers:
        if not isinstance(mixer, Attention):
            return f"a mixer of kind {type(mixer).__name__}"
        if mixer.rope is not None and mixer.rope.interleaved:
            return "RoPE on interleaved channels"
        if mixer.shares_cache_of is not None:
            return f"attention over the cache of layer {mixer.shares_cache_of}"
        if mixer.output_gate:
            return "attention with an output gate"
    if len(layer.mixers) > 1:
        return f"{len(layer.mixers)} mixers side by side"
    if layer.ffn is None:
        return "no feed-forward block"
    if isinstance(layer.ffn, Moe) and layer.ffn.shared is not None:
        return "a shared expert"
    if layer.parallel:
        return "mixer and feed-forward block in parallel"
    return None if layer.residual_scale == 1.0 else f"a residual scale of {layer.residual_scale}"
