"""Specification of a model's computation, layer by layer: frozen values, logical maths only.

No dtypes, fusing, padding, sharding, kernels, checkpoint names or model names: q, k, v, gate and up stay separate, and
a backend fuses them as it likes. Fields are named after mechanisms. A field needs two users, else it is a new kind.

Axis letters: T tokens, S sequences, P pages, B page size, N query heads, K KV heads, H head dim, D width,
F ffn width, V vocab, E experts, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagoda.common.config.groups.pooler import PoolingKind

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
PoolerActivation = Literal["silu", "gelu", "gelu_tanh", "relu", "tanh"]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm or LayerNorm over the last axis, computed in float32."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    unit_offset: bool = False  # multiply by (1 + weight)
    bias: bool = False  # LayerNorm only


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK scaling, fixed at the base of the maximum context so that cached keys stay valid."""

    factor: float
    original: int  # trained context in tokens


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones unchanged, a smooth ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): interpolation by frequency band plus an attention factor on cos and sin."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): one divisor per frequency."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]  # applies if the served context exceeds `original` tokens
    original: int
    attention_factor: float  # multiplies cos and sin


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE on the first `dim` channels of each head (partial if dim < head_dim), in half-split pairs."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with grouped KV heads."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # multiplies q.k
    rope: Rope | None
    window: int | None = None  # a query attends to itself and window-1 tokens before it (and after, unless causal)
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    qk_norm: Norm | None = None  # on q and k before RoPE
    qk_norm_over: Literal["per_head", "full"] = "per_head"  # axis of qk_norm: each head, or the whole projection
    qkv_bias: bool = False
    out_bias: bool = False
    causal: bool = True


Mixer = Attention


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
    """Mixture of `experts` Mlps, weighted by the router."""

    experts: int
    expert: Mlp
    router: Router


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
    """x += after_mixer(mixer(before_mixer(x))); x += after_ffn(ffn(before_ffn(x)))."""

    mixer: Mixer
    ffn: Ffn
    norms: Norms
    norm_after_add: bool = False  # apply the after-norms to the sum instead of to the update


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

    @property
    def hidden_width(self) -> int:
        """Width of the hidden state that the head or pooler reads."""
        return self.embedding.width or self.width
