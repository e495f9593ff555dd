"""What one model family is to the rest: a reader of its config and the rules of its tensor names.

Also the pieces that most families spell alike. Does not know any family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt

from pagoda.common.backend import Weight
from pagoda.common.models import hf_config
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.shapes import Param
from pagoda.common.models.spec import Attention, Ffn, Layer, Mlp, ModelSpec, Norm, Norms
from pagoda.common.weights.rules import Rename, Rule, apply, linear


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models. `build` reads a config; `ignored`: patterns of tensors that hold nothing to learn.

    A head among the tensors of a model whose head is its embedding table is ignored too.
    """

    build: Callable[[HfConfig], ModelSpec]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq", "lm_head.weight")

    def weights(self, params: Mapping[str, Param], tensors: Iterable[tuple[str, npt.NDArray[Any]]]) -> Iterator[Weight]:
        """Checkpoint tensors as parameters. Raises WeightError, see common.weights.rules.apply."""
        return apply(self.rules, params, tensors, self.ignored)


EMBED_RULES: Final[tuple[Rule, ...]] = (
    Rename("[model.]embed_tokens.weight", "embed"),
    Rename("[model.]norm.weight", "final_norm"),
    Rename("lm_head.weight", "head"),
)

ATTENTION_RULES: Final[tuple[Rule, ...]] = (
    *linear("[model.]layers.{l}.self_attn.q_proj", "layers.{l}.mixer.q"),
    *linear("[model.]layers.{l}.self_attn.k_proj", "layers.{l}.mixer.k"),
    *linear("[model.]layers.{l}.self_attn.v_proj", "layers.{l}.mixer.v"),
    *linear("[model.]layers.{l}.self_attn.o_proj", "layers.{l}.mixer.o"),
)

QK_NORM_RULES: Final[tuple[Rule, ...]] = (
    Rename("[model.]layers.{l}.self_attn.q_norm.weight", "layers.{l}.mixer.q_norm"),
    Rename("[model.]layers.{l}.self_attn.k_norm.weight", "layers.{l}.mixer.k_norm"),
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
    """RMSNorm with the config's `rms_norm_eps`."""
    return Norm(config.opt("rms_norm_eps", float, default), unit_offset=unit_offset)


def gated_mlp(config: HfConfig, *, bias: bool = False) -> Mlp:
    """The gated feed-forward of most families."""
    return Mlp(config.size("intermediate_size"), config.activation("hidden_act", "silu"), gated=True, bias=bias)


def rotary_attention(config: HfConfig, width: int, *, theta: float = 10_000.0) -> Attention:
    """Grouped-query attention over full rotary heads, without biases, norms or window."""
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
    config: HfConfig, mixers: Iterable[Attention], ffns: Iterable[Ffn], norm: Norm, *, tied: bool = False
) -> ModelSpec:
    """Layers x += mixer(norm(x)); x += ffn(norm(x)), a norm at the end. `tied`: the family's default."""
    norms = Norms(before_mixer=norm, before_ffn=norm)
    return decoder(config, (Layer(mixer, ffn, norms) for mixer, ffn in zip(mixers, ffns)), norm, tied=tied)


def decoder(config: HfConfig, layers: Iterable[Layer], final_norm: Norm, *, tied: bool = False) -> ModelSpec:
    """A model of rotary layers between an embedding and a head. `tied`: the family's default."""
    stack = tuple(layers)
    rope = stack[0].mixer.rope
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=config.size("hidden_size"),
        layers=stack,
        final_norm=final_norm,
        tied=config.opt("tie_word_embeddings", bool, tied),
        max_positions=hf_config.context_length(config, rope) if rope else config.size("max_position_embeddings"),
    )
