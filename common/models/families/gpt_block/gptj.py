"""GPT-J: interleaved RoPE on a part of each head, mixer and ffn in parallel after one LayerNorm, a biased head."""

from __future__ import annotations

from pagoda.common.models.family import Family, Rename, layer_norm, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Norms


def _gptj(config: HfConfig) -> ModelSpec:
    width = config.size("n_embd")
    heads = config.size("n_head")
    positions = config.size("n_positions")
    if width % heads:
        raise config.error("n_head", f"{heads} does not divide n_embd {width}")
    config.expect("rotary", True)
    config.expect("scale_attn_weights", True)
    config.ignore("n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels")
    config.ignore("summary_type", "summary_use_proj")  # of a classification head
    rope = Rope(10_000.0, config.opt_size("rotary_dim", width // heads), interleaved=True)
    if rope.dim % 2 or rope.dim > width // heads:
        raise config.error("rotary_dim", f"is {rope.dim}; it must be even and at most {width // heads}")
    norm = layer_norm(config, "layer_norm_epsilon")
    activation = config.activation("activation_function", "gelu_new")
    layer = Layer(
        (Attention(heads, heads, width // heads, (width // heads) ** -0.5, rope),),
        Mlp(config.opt_size("n_inner", 4 * width), activation, gated=False, bias=True),
        Norms(before_mixer=norm),
        parallel=True,
    )
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=width,
        layers=(layer,) * config.size("n_layer"),
        final_norm=norm,
        tied=config.opt("tie_word_embeddings", bool, False),
        max_positions=positions,
        head_bias=True,
    )


_SOURCE = "[transformer.]h.{l}"
_TARGET = "layers.{l}.mixers.0"

GPTJ = Family(
    _gptj,
    (
        Rename("[transformer.]wte.weight", "embed"),
        *linear("[transformer.]ln_f", "final_norm"),
        *linear("lm_head", "head"),
        *linear(f"{_SOURCE}.ln_1", "layers.{l}.norms.before_mixer"),
        *(rule for name in "qkv" for rule in linear(f"{_SOURCE}.attn.{name}_proj", f"{_TARGET}.{name}")),
        *linear(f"{_SOURCE}.attn.out_proj", f"{_TARGET}.o"),
        *linear(f"{_SOURCE}.mlp.fc_in", "layers.{l}.ffn.up"),
        *linear(f"{_SOURCE}.mlp.fc_out", "layers.{l}.ffn.down"),
    ),
    ignored=("*.attn.bias", "*.attn.masked_bias", "*.attn.embed_positions", "lm_head.weight"),
)
