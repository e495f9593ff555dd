"""`Family`: how a model family's config.json becomes a spec and its checkpoint tensors become parameters.

Also the builders and weight-name rules that most families share. A rule states which checkpoint tensor fills which
parameter; `common.weights.rules` applies it. Its pattern is a dotted name in which `{l}` and `{e}` stand for a layer's
and an expert's index, and a number for itself; a leading `[part.]` is optional. Several rules may fill one parameter
from alternative names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from pagoda.common.models import hf_config
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Classifier, Ffn, Layer, Mlp, ModelSpec, Norms, Pooler

Transpose: TypeAlias = bool | Literal["unless_it_fits"]
"""Whether a tensor is stored with its last two axes swapped; by its shape where writers differ."""


@dataclass(frozen=True, slots=True)
class Rename:
    """One tensor fills one parameter; `transpose` swaps its last two axes first."""

    source: str
    target: str
    transpose: Transpose = False


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor is split along `axis` (after `transpose`) into several parameters, sized by their shapes.

    `transpose`: swaps the last two axes. `interleaved`: each of the parameters' groups of heads (Param.groups) has its
    rows of all of them together. `alternating`: the parameters take turns, an entry each. `quantised_pieces`: a
    quantised tensor has that many equal parts, each with rows of all parameters and blocks of scales of its own.
    """

    source: str
    targets: tuple[str, ...]
    transpose: Transpose = False
    interleaved: bool = False
    axis: int = 0
    alternating: bool = False
    quantised_pieces: int = 1


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors numbered `{e}` are stacked along a new axis 0 into one parameter.

    `surplus`: tensors of numbers beyond the axis are dropped; they are of experts that compute nothing.
    """

    source: str
    target: str
    surplus: bool = False


@dataclass(frozen=True, slots=True)
class Reshape:
    """One tensor of another shape fills one parameter; `transpose`: with the parameter's last two axes swapped."""

    source: str
    target: str
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class Zeros:
    """A parameter that checkpoints of the family may leave out, because it is zero."""

    target: str


@dataclass(frozen=True, slots=True)
class Normalise:
    """One tensor fills one parameter, its vectors along `axis` divided by their L2 norms."""

    source: str
    target: str
    axis: int


@dataclass(frozen=True, slots=True)
class Shift:
    """One tensor plus a constant fills one parameter."""

    source: str
    target: str
    offset: float


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The rows of some tokens in a table [V, D] fill one parameter [n, D].

    `difference`: of two tokens, the second's row minus the first's. `table`: the parameter that the table itself fills.
    """

    source: str
    target: str
    tokens: tuple[int, ...]
    difference: bool = False
    table: str | None = None


TensorRule = Rename | Split | Stack | Reshape | Normalise | Shift | TokenRows
"""Rules that read a tensor."""

Rule = TensorRule | Zeros


def linear(source: str, target: str) -> tuple[TensorRule, ...]:
    """Rules of a linear layer: its weight and its optional bias."""
    return Rename(f"{source}.weight", target), Rename(f"{source}.bias", f"{target}_bias")


def fused_linear(source: str, *targets: str, interleaved: bool = False) -> tuple[Rule, ...]:
    """Rules of several linear layers stored as one fused tensor."""
    biases = tuple(f"{target}_bias" for target in targets)
    return (
        Split(f"{source}.weight", targets, interleaved=interleaved),
        Split(f"{source}.bias", biases, interleaved=interleaved),
    )


PoolUse: TypeAlias = Literal["embed", "classify", "token_classify", "reward"]
"""Task of a pooling model. `reward`: the hidden state of every token."""


def decoder_pooler(config: HfConfig, use: PoolUse) -> Pooler:
    """Return a decoder's pooler: last token, then a linear classifier (without bias when it classifies whole texts)."""
    match use:
        case "embed":
            return Pooler("last")
        case "classify":
            return Pooler("last", classifier=classifier(config, bias=False))
        case "token_classify":
            return Pooler("all", classifier=classifier(config))
        case "reward":
            return Pooler("all")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the models of a family mark up their answers; empty: their chat template tells.

    The names are those of --reasoning-parser and --tool-call-parser. They decide where a chat template does not show
    how the model writes calls, or shows what several formats read; with `fixed`, whatever the template shows.
    """

    reasoning: str = ""
    tools: str = ""
    fixed: bool = False
    ends: tuple[str, ...] = ()  # Texts of tokens that end an answer, besides those that the checkpoint names.


@dataclass(frozen=True, slots=True)
class MergedAdapter:
    """The low-rank adapter that is added to a checkpoint's matrices: weight + scale * B A, of its adapter `index`."""

    index: int
    scale: float


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: a config reader and weight-name rules, for its generating and its pooling models."""

    build: Callable[[HfConfig], ModelSpec]  # Reads config.json.
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq", "lm_head.weight")  # Dropped if no rule matches them.
    # Makes what replaces the LM head in a pooling model.
    pooler: Callable[[HfConfig, PoolUse], Pooler] = decoder_pooler
    pooler_rules: tuple[Rule, ...] = (
        *linear("score", "pooler.classifier"),
        *linear("classifier", "pooler.classifier"),
    )
    heads: tuple[str, ...] = ("score.*", "classifier.*", "lm_head.*")  # Patterns of tensors that pooling models ignore.
    generates: bool = True  # False for encoders, which can only pool.
    answers: AnswerFormat = AnswerFormat()
    config_rules: Callable[[HfConfig], tuple[Rule, ...]] | None = None  # Tried first; they depend on config.json.
    config_adapter: Callable[[HfConfig], MergedAdapter | None] | None = None
    adapter: MergedAdapter | None = None  # The adapter that config.json states, see `configured`.
    side_files: tuple[str, ...] = ()  # State dicts beside the checkpoint; their tensors are named `stem.name`.

    def configured(self, config: HfConfig) -> Family:
        """Return the family with the rules and the adapter of this config.json."""
        rules = () if self.config_rules is None else self.config_rules(config)
        adapter = None if self.config_adapter is None else self.config_adapter(config)
        return replace(self, rules=(*rules, *self.rules), adapter=adapter) if rules or adapter else self


EMBED_RULES: Final[tuple[Rule, ...]] = (
    Rename("[model.]embed_tokens.weight", "embed"),
    *linear("[model.]norm", "final_norm"),
    Rename("lm_head.weight", "head"),
)

ATTENTION_RULES: Final[tuple[Rule, ...]] = (
    *linear("[model.]layers.{l}.self_attn.q_proj", "layers.{l}.mixers.0.q"),
    *linear("[model.]layers.{l}.self_attn.k_proj", "layers.{l}.mixers.0.k"),
    *linear("[model.]layers.{l}.self_attn.v_proj", "layers.{l}.mixers.0.v"),
    *linear("[model.]layers.{l}.self_attn.o_proj", "layers.{l}.mixers.0.o"),
)

QK_NORM_RULES: Final[tuple[Rule, ...]] = (
    Rename("[model.]layers.{l}.self_attn.q_norm.weight", "layers.{l}.mixers.0.q_norm"),
    Rename("[model.]layers.{l}.self_attn.k_norm.weight", "layers.{l}.mixers.0.k_norm"),
)

MLP_RULES: Final[tuple[TensorRule, ...]] = (
    *linear("[model.]layers.{l}.mlp.gate_proj", "layers.{l}.ffn.gate"),
    *linear("[model.]layers.{l}.mlp.up_proj", "layers.{l}.ffn.up"),
    *linear("[model.]layers.{l}.mlp.down_proj", "layers.{l}.ffn.down"),
)

PRE_NORM_RULES: Final[tuple[Rule, ...]] = (
    *linear("[model.]layers.{l}.input_layernorm", "layers.{l}.norms.before_mixer"),
    *linear("[model.]layers.{l}.post_attention_layernorm", "layers.{l}.norms.before_ffn"),
)

FOUR_NORM_RULES: Final[tuple[Rule, ...]] = (
    Rename("[model.]layers.{l}.input_layernorm.weight", "layers.{l}.norms.before_mixer"),
    Rename("[model.]layers.{l}.post_attention_layernorm.weight", "layers.{l}.norms.after_mixer"),
    Rename("[model.]layers.{l}.pre_feedforward_layernorm.weight", "layers.{l}.norms.before_ffn"),
    Rename("[model.]layers.{l}.post_feedforward_layernorm.weight", "layers.{l}.norms.after_ffn"),
)


def rms_norm(config: HfConfig, default: float, *, unit_offset: bool = False) -> Norm:
    return Norm(config.opt("rms_norm_eps", float, default), unit_offset=unit_offset)


def layer_norm(config: HfConfig, key: str = "layer_norm_eps", *, bias: bool = True) -> Norm:
    return Norm(config.opt(key, float, 1e-5), kind="layer", bias=bias)


def plain_mlp(config: HfConfig, activation: str, *, bias: bool) -> Mlp:
    """Return down(act(up x)); `activation`: the family's default."""
    return Mlp(config.size("intermediate_size"), config.activation("hidden_act", activation), gated=False, bias=bias)


def gated_mlp(config: HfConfig, *, bias: bool = False) -> Mlp:
    return Mlp(config.size("intermediate_size"), config.activation("hidden_act", "silu"), gated=True, bias=bias)


def rotary_attention(
    config: HfConfig, width: int, *, theta: float = 10_000.0, partial: float = 1.0, interleaved: bool = False
) -> Attention:
    """Return grouped-query attention with RoPE, without biases, qk norms or sliding window.

    `theta`, `partial`: the family's default base and rotated part of a head.
    """
    head_dim = hf_config.head_dim(config, width, config.size("num_attention_heads"))
    rope = hf_config.rope(config, head_dim, theta=theta, partial=partial)
    return grouped_attention(config, width, replace(rope, interleaved=interleaved))


def grouped_attention(config: HfConfig, width: int, rope: Rope | None) -> Attention:
    """Return grouped-query attention without biases, qk norms or sliding window."""
    heads = config.size("num_attention_heads")
    head_dim = hf_config.head_dim(config, width, heads)
    return Attention(
        heads=heads,
        kv_heads=hf_config.kv_heads(config, heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
    )


def pre_norm_decoder(
    config: HfConfig, mixers: Iterable[Mixer], ffns: Iterable[Ffn], norm: Norm, *, tied: bool = False
) -> ModelSpec:
    """Return a pre-norm decoder: x += mixer(norm(x)); x += ffn(norm(x)); a final norm. `tied`: the family's default."""
    norms = Norms(before_mixer=norm, before_ffn=norm)
    return decoder(config, (Layer((mixer,), ffn, norms) for mixer, ffn in zip(mixers, ffns)), norm, tied=tied)


def decoder(config: HfConfig, layers: Iterable[Layer], final_norm: Norm, *, tied: bool = False) -> ModelSpec:
    """Return a decoder whose positions come from RoPE alone. `tied`: the family's default."""
    stack = tuple(layers)
    ropes = [rope for layer in stack for mixer in layer.mixers for rope in mixer.ropes()]
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=config.size("hidden_size"),
        layers=stack,
        final_norm=final_norm,
        tied=config.opt("tie_word_embeddings", bool, tied),
        max_positions=hf_config.context_length(config, ropes[0]) if ropes else config.size("max_position_embeddings"),
    )


def classifier(config: HfConfig, *, bias: bool = True, labels: int = 0) -> Classifier:
    """Return the classification head, with the config's activation. `labels`: 0 for those in the config."""
    labels = labels or len(config.opt("id2label", dict, {})) or config.opt_size("num_labels", 2)
    return Classifier(labels, _label_activation(config, labels), bias)


_BY_PROBLEM_TYPE: Final[dict[str, Literal["sigmoid", "softmax"] | None]] = {
    "regression": None,
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_BY_MODULE_NAME: Final[dict[str, Literal["sigmoid", "softmax"] | None]] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.linear.Identity": None,
}


def _label_activation(config: HfConfig, labels: int) -> Literal["sigmoid", "softmax"] | None:
    """From `problem_type`, else from a cross-encoder's stated activation, else softmax (sigmoid for one label)."""
    problem = config.opt("problem_type", str, "")
    if problem in _BY_PROBLEM_TYPE:
        activation = _BY_PROBLEM_TYPE[problem]
        return "sigmoid" if activation == "softmax" and labels == 1 else activation
    cross_encoder = config.opt("sentence_transformers", dict, {}).get("activation_fn")
    name = cross_encoder or config.opt("sbert_ce_default_activation_function", str, "")
    if name and name not in _BY_MODULE_NAME:
        raise config.error("activation_fn", f"is {name!r}; supported: {', '.join(_BY_MODULE_NAME)}")
    return _BY_MODULE_NAME[name] if name else "sigmoid" if labels == 1 else "softmax"
