"""Specification of a model's computation, layer by layer: frozen values, logical maths only.

No dtypes, fusing, padding, sharding, kernels, checkpoint names or model names: q, k, v, gate and up stay separate, and
a backend fuses them as it likes. Fields are named after mechanisms. A field needs two users, else it is a new kind.

Axis letters: T tokens, S sequences, P pages, B page size, N query heads, K KV heads, H head dim, D width,
F ffn width, V vocab, E experts, L layers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pagoda.common.config.groups.nested.pooler import PoolingKind
from pagoda.common.errors import ModelError
from pagoda.common.models.mixers import Attention, Mixer
from pagoda.common.models.mixers.caches import CacheSpec
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]  # The activation relu2 is relu(x)^2.
PoolerActivation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "tanh"]


@dataclass(frozen=True, slots=True)
class Xielu:
    """The activation xIELU (arXiv 2411.13010), whose curvatures are parameters.

    p x^2 + beta x for x > 0, else n (expm1(min(x, eps)) - x) + beta x, where p = softplus(curvature_p) and
    n = beta + softplus(curvature_n).
    """

    beta: float = 0.5
    eps: float = -1e-6


@dataclass(frozen=True, slots=True)
class ClampedGlu:
    """The gated activation g * sigmoid(alpha g) * (u + 1), where g = min(gate, limit), u = clamp(up, -limit, limit)."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(act(gate x) * up x) when `gated`, else down(act(up x))."""

    width: int
    activation: Activation
    gated: bool
    bias: bool = False
    down_bias: bool = False  # The matrix down alone has a bias.
    learned: Xielu | None = None  # It takes the place of `activation`, in an ungated Mlp.
    clamped: ClampedGlu | None = None  # It takes the place of `activation`, in a gated Mlp.
    clip: float | None = None  # In a gated Mlp act(gate x) is at most this, and up x within plus or minus this.
    sparsity: float = 0.0
    # Of a gated Mlp: gate x minus this quantile of the normal distribution with its mean and deviation, then relu.
    inner_norm: Norm | None = None  # Norm of what the matrix down reads.

    def __post_init__(self) -> None:
        assert self.learned is None or not self.gated, "a learned activation has no gate"
        assert self.clamped is None or self.gated, "a gated activation needs a gate"
        assert not self.sparsity or (self.gated and self.clamped is None), "sparsity is that of a gate"
        assert self.clip is None or (self.gated and self.clamped is None and not self.sparsity), (
            "a plain gate is clipped"
        )
        assert self.inner_norm is None or self.inner_norm.is_plain, "channels of hidden values have weights alone"


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Consecutive experts in `count` groups of equal size; only experts of the `used` best groups can be chosen."""

    count: int
    used: int
    rank_by: Literal["best", "best_two"]  # A group's score is that of its best expert, or the sum of its best two.


@dataclass(frozen=True, slots=True)
class Router:
    """Scores of E experts in float32; the `top_k` largest are chosen, and weighted by their scores.

    A softmax over the logits of the chosen experts alone is the renormalised softmax over all.
    """

    top_k: int
    renormalise: bool  # The top-k weights are scaled to sum to one.
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False  # A learned number per expert is added to its score for the choice, not for its weight.
    groups: ExpertGroups | None = None
    scale: float = 1.0  # Factor of the weights.
    bias: bool = False  # A learned number per expert is added to its logit.


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """Choose `top_k` experts in turn, each the one with the largest logit of the rest (arXiv 2409.12136).

    Its weight is its share in a softmax over those of the rest that are near it: whose logits are less by at most
    2 * `jitter` times the larger of the largest logit and their own magnitude.
    """

    top_k: int
    jitter: float
    bias: ClassVar[bool] = False
    correction: ClassVar[bool] = False
    groups: ClassVar[ExpertGroups | None] = None


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of `experts` Mlps, weighted by the router, plus a shared Mlp that runs on every token.

    The router also chooses among `identity` experts, numbered after the others, whose output is their input.
    """

    experts: int
    expert: Mlp
    router: Router | SparseMixer
    shared: Mlp | None = None
    shared_gate: bool = False  # The output of the shared Mlp is multiplied by sigmoid(gate x).
    weighs_input: bool = False  # The router's weight multiplies the input of the expert instead of its output.
    latent: int | None = None
    # Channels that the experts read and write: latent_out(sum of experts(latent_in x)). Router and shared Mlp read x.
    identity: int = 0  # Number of experts that return their input.

    def __post_init__(self) -> None:
        """Raise ModelError if groups do not fit the experts, or fewer can be chosen than must be."""
        assert self.expert.learned is None, "experts have no learned activation"
        assert self.expert.inner_norm is None, "experts have no norm of hidden values"
        plain = not self.weighs_input and self.latent is None and self.router.groups is None
        assert plain or not self.identity, "an identity expert returns x, with the router's weight"
        if self.weighs_input and self.router.top_k != 1:
            raise ModelError(f"weighted inputs of {self.router.top_k} experts per token are not supported, only of one")
        available = self.choices
        groups = self.router.groups
        if groups is not None:
            size = self.experts // groups.count
            least = 2 if groups.rank_by == "best_two" else 1
            if self.experts % groups.count or size < least or not 0 < groups.used <= groups.count:
                raise ModelError(f"{groups.used} of {groups.count} groups cannot be formed of {self.experts} experts")
            available = size * groups.used
        if not 0 < self.router.top_k <= available:
            raise ModelError(f"a token cannot choose {self.router.top_k} of {available} experts")

    @property
    def choices(self) -> int:
        """The number of experts that the router chooses among."""
        return self.experts + self.identity

    @property
    def computed(self) -> float:
        """The number of Mlps of experts that a token runs through, if all experts are chosen equally often."""
        return self.router.top_k * self.experts / self.choices


Ffn = Mlp | Moe


@dataclass(frozen=True, slots=True)
class SideMoe:
    """A mixture beside the ffn: after_ffn reads ffn_norm(ffn(h)) + output_norm(moe(input_norm(x))).

    x is the input of the ffn before its norm, h after it. The router reads router_norm(x) / sqrt(D), and a learned
    factor multiplies the weight of each expert.
    """

    moe: Moe
    norm: Norm  # All four norms are alike, each with weights of its own.

    def __post_init__(self) -> None:
        assert self.moe.latent is None, "the experts beside an ffn read the stream"
        assert not self.moe.identity, "the experts beside an ffn have learned factors"


@dataclass(frozen=True, slots=True)
class LowRankResidual:
    """A learned residual (LAuReL, arXiv 2411.07501): h + norm(right left h), where h is the mixers' input.

    It is added to the stream after the mixers, and the sum is divided by sqrt(2).
    """

    rank: int
    norm: Norm


@dataclass(frozen=True, slots=True)
class Blend:
    """The layer reads share * y + (1 - share) * x, y what came before an earlier `layer` and x what comes before it."""

    layer: int
    share: float


@dataclass(frozen=True, slots=True)
class Shortcut:
    """A mixture around a layer: moe(norm(x)), x the layer's input, is added to its output."""

    moe: Moe
    norm: Norm


@dataclass(frozen=True, slots=True)
class SecondHalf:
    """A mixer and an ffn after the layer's own, and a mixture that runs beside all three (arXiv 2509.01322).

    With n what the layer's first ffn reads, and h what its first half returns:

        h += mixer(mixer_norm(h)); h += ffn(ffn_norm(h)) + moe(n)

    The mixer is the layer's last one.
    """

    ffn: Mlp
    moe: Moe
    norm: Norm  # Both norms are alike, each with weights of its own.


@dataclass(frozen=True, slots=True)
class InputBlock:
    """A transformer block in front of a layer's mixers, whose weights several layers share (arXiv 2405.16712).

    With e the token's first hidden state (its embedding), the mixers' norm reads x + y instead of x, where

        y = out ffn(ffn_norm(attention(norm([x, e]))))

    without residuals. The residual stream stays x. The layer's first mixer is this `attention`, beside the embedding.
    The layers with the same `weights_of` have the same weights, except low-rank adapters (of q, k, v; of gate and up:
    gate x + gate_adapter_out ffn_adapter x) and `out`.
    """

    ffn: Mlp
    norm: Norm  # Both norms are alike, each with its own weights; the one before the attention is over [x, e].
    weights_of: int  # The first layer with these weights; its own number in that layer.
    adapter_rank: int | None  # Rank of the adapters of gate and up.

    def __post_init__(self) -> None:
        assert self.ffn.gated, "the block has a gated ffn"


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

    Several mixers run side by side on the same input and their outputs are added; not those of a block or second half.
    """

    mixers: tuple[Mixer, ...]  # There may be none: the layer begins with the ffn, or does nothing.
    ffn: Ffn | None  # None: the layer ends after the mixers.
    norms: Norms
    norm_after_add: bool = False  # The after-norms apply to the sum instead of to the update.
    parallel: bool = False  # Mixers and ffn read the same x; without a before_ffn norm the ffn reads before_mixer(x).
    residual_scale: float = 1.0  # Factor of each update before it is added.
    norm_residual: bool = False  # Updates are added to what the norm before returns, not to what it reads.
    side_moe: SideMoe | None = None
    low_rank: LowRankResidual | None = None
    output_scale: bool = False  # A learned number multiplies the layer's output.
    blend: Blend | None = None
    shortcut: Shortcut | None = None
    block: InputBlock | None = None  # Its attention is the first mixer.
    second: SecondHalf | None = None  # Its mixer is the last one.

    def __post_init__(self) -> None:
        assert not self.parallel or (self.mixers and self.ffn is not None), "a parallel layer has mixers and an ffn"
        assert not (self.parallel and self.norm_residual), "a parallel layer has one sum, so one residual"
        assert not (self.parallel and self.norm_after_add), "a parallel layer has one sum, so no norm after each"
        beside = self.side_moe is not None or self.low_rank is not None
        assert not beside or (self.ffn is not None and not self.parallel), "mixers and ffn come one after the other"
        besides = [mixer for mixer in self.mixers if mixer.reads_embedding]
        blocks = [] if self.block is None else list(self.mixers[:1])
        assert besides == blocks, "the attention of an input block, and no other, reads the embedding"
        assert self.block is None or len(self.mixers) > 1, "a block has mixers that read its output"
        changed = self.norm_residual or self.parallel or self.output_scale or self.shortcut or self.low_rank
        assert self.block is None or not changed, "a block comes before mixers on a plain residual stream"
        if self.second is not None:
            assert len(self.mixers) > 1, "each half has a mixer"
            assert self.ffn is not None, "each half has an ffn"
            scaled = self.norm_after_add or self.residual_scale != 1.0
            plain = not (changed or beside or scaled or self.block)
            assert plain, "a second half follows a plain one"

    @property
    def attends_before(self) -> Attention:
        """The attention of a layer's input block."""
        (mixer, *_) = self.mixers
        assert self.block is not None, "the layer has a block"
        assert isinstance(mixer, Attention), "its first mixer attends"
        return mixer

    @property
    def attention(self) -> Attention:
        """The only mixer of a layer of one `Attention`."""
        (mixer,) = self.mixers
        assert isinstance(mixer, Attention)
        return mixer

    @property
    def ffns(self) -> dict[str, Ffn]:
        """The feed-forward blocks but that of an input block, by what the names of their parameters begin with."""
        blocks = {
            "ffn": self.ffn,
            "side.moe": None if self.side_moe is None else self.side_moe.moe,
            "shortcut.moe": None if self.shortcut is None else self.shortcut.moe,
            "second.ffn": None if self.second is None else self.second.ffn,
            "second.moe": None if self.second is None else self.second.moe,
        }
        return {name: ffn for name, ffn in blocks.items() if ffn is not None}

    @property
    def feed_forward(self) -> Ffn:
        """The ffn of a layer that has one."""
        assert self.ffn is not None
        return self.ffn


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embedding: norm(scale * token + position + token type)."""

    scale: float = 1.0  # The factor is rounded to the weights' dtype.
    positions: int | None = None  # Rows of a learned position table, indexed by position + position_offset.
    position_offset: int = 0
    width: int | None = None  # Width of the table if it differs from the model's; projections lead in and out.
    token_types: int = 0  # Rows of a learned table, indexed by a token's segment in a text pair.
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """A further embedding of each token for each layer, which gates an update at the layer's end.

    Of the first hidden states x: (norm(projection x / sqrt(D)) + sqrt(width) * table[token]) / sqrt(2), in L parts.
    Layer l ends with x += norm(out(activation(gate x) * part l)).
    """

    vocab: int  # Number of rows of the table; tokens beyond it have the first row.
    width: int  # Channels per layer.
    activation: Activation
    norm: Norm


@dataclass(frozen=True, slots=True)
class AltUp:
    """Several residual streams, of which the layers compute one (alternating updates, arXiv 2301.13310).

    Stream 0 starts as the embedding, each other as a projection of it with the same RMS. With
    m(x) = tanh(router(norm(x) / D)) a layer computes, for each stream s and y = layer(predicted[active]):

        predicted[s] = streams[s] + sum over i of (prediction m(streams[active]))[s, i] * streams[i]
        streams[s] = predicted[s] + (1 + (correction m(y))[s]) * (y - predicted[active])

    A per-layer embedding is gated by streams[active] (if `scaled`, times a learned vector); its update is added to all
    streams but 0. The final norm reads the mean of stream 0 and of a projection of each other with the same RMS.
    """

    streams: int
    active: int
    norm: Norm
    scaled: bool


@dataclass(frozen=True, slots=True)
class Dense:
    """norm(act(W x + b)) of a vector."""

    width: int  # Width of the output.
    activation: PoolerActivation | None = None  # None: the identity.
    bias: bool = True
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Classifier:
    """activation(W x + b), one output per label."""

    labels: int
    activation: Literal["sigmoid", "softmax"] | None = None
    bias: bool = True


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """The tokens of a prompt that have an output, by their ids."""

    tag: int | None = None  # Only tokens with this id have an output.
    skip_first: int | None = None  # The first token has no output if it has this id.
    skip_last: int | None = None  # The last token has no output if it has this id.


@dataclass(frozen=True, slots=True)
class TokenHead:
    """W x + b of every token's hidden state: the output of one per-token task."""

    task: Literal["token_embed", "token_classify"]
    width: int
    activation: Literal["relu"] | None = None  # The activation of token_classify.
    selection: TokenSelection = TokenSelection()


@dataclass(frozen=True, slots=True)
class Pooler:
    """Hidden states to outputs: pooling over tokens, then the `dense` layers, then the classifier.

    Without a classifier the output is an embedding. A request for per-token outputs overrides `kind` by "all"; with
    `token_heads` its output is that of its task's head instead.
    """

    kind: PoolingKind  # First token, last token, mean, or all: one output per token.
    dense: tuple[Dense, ...] = ()
    classifier: Classifier | None = None
    token_heads: tuple[TokenHead, ...] = ()
    selection: TokenSelection = TokenSelection()  # Tokens that have an output, if outputs are per token without heads.

    def token_head(self, task: str) -> TokenHead | None:
        """Return the head of a task, None if it has none."""
        return next((head for head in self.token_heads if head.task == task), None)

    def activation(self, task: str) -> Literal["sigmoid", "softmax", "relu"] | None:
        """Return the activation of a task that classifies."""
        if (head := self.token_head(task)) is not None:
            return head.activation
        return None if self.classifier is None else self.classifier.activation


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model: frozen, hashable, one `Layer` per layer."""

    vocab: int
    width: int
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    tied: bool  # The head is the embedding table.
    max_positions: int  # Maximum context in tokens, from the checkpoint.
    embedding: Embedding = Embedding()
    per_layer: PerLayerEmbedding | None = None
    alt_up: AltUp | None = None
    head_bias: bool = False
    logit_softcap: float | None = None  # Logits become softcap * tanh(logits / softcap).
    logit_scale: float = 1.0  # Factor of the logits.
    pooler: Pooler | None = None  # It replaces the head; None: the model generates.
    weight_scales: tuple[tuple[str, float], ...] = ()
    # Shell-style patterns of parameters' names, each with a factor on the checkpoint's values.

    def __post_init__(self) -> None:
        """Raise ModelError if a layer shares a cache that it cannot read, or blends in what does not come before it."""
        for index, layer in enumerate(self.layers):
            self._check_blend(index, layer)
            self._check_block(index, layer)
            for mixer in layer.mixers:
                if mixer.cache_owner is not None:
                    self._check_shared_cache(index, mixer, mixer.cache_owner)
        self._check_shared_selections()

    def _check_shared_selections(self) -> None:
        selected = None
        for index, layer in enumerate(self.layers):
            for mixer in layer.mixers:
                if not mixer.shares_selection:
                    selected = mixer.selected_tokens or selected
                elif mixer.selected_tokens != selected:
                    raise ModelError(
                        f"layer {index} shares the selection of {mixer.selected_tokens} tokens of a layer before it, "
                        f"where the last indexer selects {selected}"
                    )

    def _check_blend(self, index: int, layer: Layer) -> None:
        if layer.blend is not None and not 0 <= layer.blend.layer < index:
            raise ModelError(f"layer {index} reads the input of layer {layer.blend.layer}, which is not before it")

    def _check_block(self, index: int, layer: Layer) -> None:
        if layer.block is None:
            return
        assert self.alt_up is None, "a block reads the only residual stream"
        assert self.per_layer is None, "layers read the embedding, or a part of one for each layer"
        shares = f"layer {index} shares the weights of layer {layer.block.weights_of}"
        owner = layer.block.weights_of
        if not 0 <= owner <= index or (first := self.layers[owner].block) is None:
            raise ModelError(f"{shares}, which does not come before it or has no input block")
        adapted = replace(layer.block, adapter_rank=first.adapter_rank)
        if first != adapted or self.layers[owner].mixers[0].without_adapters() != layer.mixers[0].without_adapters():
            raise ModelError(f"{shares}, whose block differs")

    def _check_shared_cache(self, index: int, mixer: Mixer, owner: int) -> None:
        shares = f"layer {index} shares the cache of layer {owner}"
        if not 0 <= owner < index:
            raise ModelError(f"{shares}, which does not come before it")
        mixers = self.layers[owner].mixers
        if len(mixers) != 1 or mixers[0].shared_form is None or not mixers[0].caches():
            raise ModelError(f"{shares}, which does not keep the K and V of one Attention")
        if mixers[0].shared_form != mixer.shared_form:
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
            kept = (tuple(itertools.islice(numbers, len(mixer.caches()))) for mixer in layer.mixers)
            owners = (mixer.cache_owner for mixer in layer.mixers)
            layers.append(tuple(mine if owner is None else layers[owner][0] for mine, owner in zip(kept, owners)))
        return tuple(layers)

    @property
    def shared_top_k(self) -> int | None:
        """The least number of tokens selected for layers that share a selection; None: no layer shares any."""
        return min(
            (mixer.selected_tokens for mixer in self.mixers if mixer.shares_selection and mixer.selected_tokens),
            default=None,
        )

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct ropes, in order of appearance."""
        return tuple(dict.fromkeys(rope for mixer in self.mixers for rope in mixer.ropes()))

    @property
    def block_owners(self) -> tuple[int, ...]:
        """The first layer with each input block's weights."""
        owners = (layer.block.weights_of for layer in self.layers if layer.block is not None)
        return tuple(dict.fromkeys(owners))

    @property
    def shared_blocks(self) -> dict[int, int]:
        """The layers whose input block has the weights of an earlier layer's, and that layer's number."""
        owners = {index: layer.block.weights_of for index, layer in enumerate(self.layers) if layer.block is not None}
        return {index: owner for index, owner in owners.items() if owner != index}

    @property
    def blended(self) -> frozenset[int]:
        """The layers whose input later ones blend into theirs."""
        return frozenset(layer.blend.layer for layer in self.layers if layer.blend is not None)

    @property
    def hidden_width(self) -> int:
        """Width of the hidden state that the head or pooler reads."""
        return self.embedding.width or self.width
