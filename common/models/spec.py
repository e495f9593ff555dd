"""The vocabulary in which every model is written down: frozen values, logical maths only.

Knows: which computation a model performs, layer by layer. Does not know: dtypes, fusing, padding, sharding,
kernels, checkpoint names or any model's name. q, k, v, gate and up always stay separate here; a backend's
`layout` fuses what it likes. Fields are named after mechanisms. A field needs two users, else it is a new kind.

Axis letters: T tokens, S rows, P pages, B page size, N query heads, K KV heads, H head dim, D width,
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
    """RMSNorm or LayerNorm over the last axis, computed in float32.

    `unit_offset`: multiply by (1 + weight). `bias`: has an additive bias (LayerNorm only).
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    unit_offset: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK scaling whose base grows with the sequence; `original` is the trained context in tokens.

    Served with the base of the longest context allowed (`max_positions`), so that a token's key never changes.
    """

    factor: float
    original: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth ramp between (Llama 3.1)."""

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
    """LongRoPE (arXiv 2402.13753): one factor per frequency, from a short or a long list.

    `attention_factor` multiplies cos and sin.

    The long list applies when the served context exceeds `original` tokens.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original: int
    attention_factor: float


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions on the first `dim` channels of each head (dim < head_dim: partial), half-split pairs."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with grouped KV heads.

    `scale` multiplies q.k. `causal`: a query sees no token after it. `window`: a query sees itself and the window-1
    tokens before it, and as many after it unless `causal`; None sees all.
    `softcap`: scores become softcap * tanh(scores / softcap). `qk_norm`: norm on q and k before RoPE, over each
    head (`per_head`) or over the whole projection (`full`).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    window: int | None = None
    softcap: float | None = None
    qk_norm: Norm | None = None
    qk_norm_over: Literal["per_head", "full"] = "per_head"
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
    """Softmax over E experts in float32, the best `top_k` kept; `renormalise`: the kept weights sum to one."""

    top_k: int
    renormalise: bool


@dataclass(frozen=True, slots=True)
class Moe:
    """`experts` copies of one Mlp, mixed by the router's weights."""

    experts: int
    expert: Mlp
    router: Router


Ffn = Mlp | Moe


@dataclass(frozen=True, slots=True)
class Norms:
    """Where a layer normalises: before and after its mixer and its ffn (after: before the residual add)."""

    before_mixer: Norm | None = None
    after_mixer: Norm | None = None
    before_ffn: Norm | None = None
    after_ffn: Norm | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """x += after_mixer(mixer(before_mixer(x))); x += after_ffn(ffn(before_ffn(x))).

    `norm_after_add`: the after-norms apply to the sum instead of to the update.
    """

    mixer: Mixer
    ffn: Ffn
    norms: Norms
    norm_after_add: bool = False


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embedding. `scale`, rounded to the weights' dtype, multiplies it.

    `positions`: learned table of that many rows, indexed by position + `position_offset`.
    `width`: of the table when it differs from the model's width, with projections in and out; None: the same.
    `token_types`: rows of a learned table that is added too, by the text of a pair that a token is of. `norm`: of the
    sum of all these.
    """

    scale: float = 1.0
    positions: int | None = None
    position_offset: int = 0
    width: int | None = None
    token_types: int = 0
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Dense:
    """norm(act(W x + b)) of a vector, to `width` numbers; None: the identity."""

    width: int
    activation: PoolerActivation | None = None
    bias: bool = True
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Classifier:
    """W x + b, to one number for each of `labels`; `activation`: what turns them into answers, None: nothing."""

    labels: int
    activation: Literal["sigmoid", "softmax"] | None = None
    bias: bool = True


@dataclass(frozen=True, slots=True)
class Pooler:
    """How hidden states become answers: those of all tokens become one, then `dense` after each other, then classifier.

    `kind`: the first token's, the last one's, their mean; `all` keeps every token's, each an answer of its own.
    A request for every token's answer keeps all of them whatever the kind. Without a classifier the answer is an
    embedding.
    """

    kind: PoolingKind
    dense: tuple[Dense, ...] = ()
    classifier: Classifier | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model: frozen, hashable, one `Layer` per layer.

    `max_positions`: the longest context in tokens the checkpoint states. `tied`: the head is the embedding table.
    `logit_softcap`: logits become softcap * tanh(logits / softcap). `logit_scale` multiplies the logits.
    `pooler`: in place of the head, of a model that pools; None: the model generates.
    """

    vocab: int
    width: int
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    tied: bool
    max_positions: int
    embedding: Embedding = Embedding()
    head_bias: bool = False
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    pooler: Pooler | None = None

    @property
    def hidden_width(self) -> int:
        """Numbers in what the head, or the pooler, reads of a token."""
        return self.embedding.width or self.width
