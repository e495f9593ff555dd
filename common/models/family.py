"""`Family`: how a model family's config.json becomes a spec and its checkpoint tensors become parameters.

Also the builders and weight-name rules that most families share. A rule states which checkpoint tensor fills which
parameter; `common.weights.rules` applies it. Its pattern is a dotted name in which `{l}` and `{e}` stand for a layer's
and an expert's index; a leading `[part.]` is optional. Several rules may fill one parameter from alternative names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from pagoda.common.models import hf_config
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Classifier, Ffn, Layer, Mlp, ModelSpec, Norms, Pooler


@dataclass(frozen=True, slots=True)
class Rename:
    """One tensor fills one parameter; `transpose` swaps its two axes first."""

    source: str
    target: str
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor is split along axis 0 (after `transpose`) into several parameters, sized by their shapes.

    `interleaved`: each of the parameters' groups of heads (Param.groups) has its rows of all of them together.
    """

    source: str
    targets: tuple[str, ...]
    transpose: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors numbered `{e}` are stacked along a new axis 0 into one parameter."""

    source: str
    target: str


Rule = Rename | Split | Stack


def linear(source: str, target: str) -> tuple[Rule, ...]:
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
class Family:
    """A model family: a config reader and weight-name rules, for its generating and its pooling models."""

    build: Callable[[HfConfig], ModelSpec]  # reads config.json
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq", "lm_head.weight")  # patterns of tensors to drop if unmatched
    pooler: Callable[[HfConfig, PoolUse], Pooler] = decoder_pooler  # replaces the LM head in a pooling model
    pooler_rules: tuple[Rule, ...] = (
        *linear("score", "pooler.classifier"),
        *linear("classifier", "pooler.classifier"),
    )
    heads: tuple[str, ...] = ("score.*", "classifier.*", "lm_head.*")  # ignored by pooling models
    generates: bool = True  # False for encoders, which can only pool


EMBED_RULES: Final[tuple[Rule, ...]] = (
    Rename("[model.]embed_tokens.weight", "embed"),
    Rename("[model.]norm.weight", "final_norm"),
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

MLP_RULES: Final[tuple[Rule, ...]] = (
    *linear("[model.]layers.{l}.mlp.gate_proj", "layers.{l}.ffn.gate"),
    *linear("[model.]layers.{l}.mlp.up_proj", "layers.{l}.ffn.up"),
    *linear("[model.]layers.{l}.mlp.down_proj", "layers.{l}.ffn.down"),
)

PRE_NORM_RULES: Final[tuple[Rule, ...]] = (
    Rename("[model.]layers.{l}.input_layernorm.weight", "layers.{l}.norms.before_mixer"),
    Rename("[model.]layers.{l}.post_attention_layernorm.weight", "layers.{l}.norms.before_ffn"),
)

FOUR_NORM_RULES: Final[tuple[Rule, ...]] = (
    Rename("[model.]layers.{l}.input_layernorm.weight", "layers.{l}.norms.before_mixer"),
    Rename("[model.]layers.{l}.post_attention_layernorm.weight", "layers.{l}.norms.after_mixer"),
    Rename("[model.]layers.{l}.pre_feedforward_layernorm.weight", "layers.{l}.norms.before_ffn"),
    Rename("[model.]layers.{l}.post_feedforward_layernorm.weight", "layers.{l}.norms.after_ffn"),
)


def rms_norm(config: HfConfig, default: float, *, unit_offset: bool = False) -> Norm:
    return Norm(config.opt("rms_norm_eps", float, default), unit_offset=unit_offset)


def gated_mlp(config: HfConfig, *, bias: bool = False) -> Mlp:
    return Mlp(config.size("intermediate_size"), config.activation("hidden_act", "silu"), gated=True, bias=bias)


def rotary_attention(config: HfConfig, width: int, *, theta: float = 10_000.0) -> Attention:
    """Return grouped-query attention with RoPE on whole heads, without biases, qk norms or sliding window."""
    heads = config.size("num_attention_heads")
    head_dim = hf_config.head_dim(config, width, heads)
    return Attention(
        heads=heads,
        kv_heads=hf_config.kv_heads(config, heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=hf_config.rope(config, head_dim, theta=theta),
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


def classifier(config: HfConfig, *, bias: bool = True) -> Classifier:
    """Return the classification head: one output per label in the config, with the config's activation."""
    labels = len(config.opt("id2label", dict, {})) or config.opt_size("num_labels", 2)
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
