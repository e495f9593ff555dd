"""GPT-2 (matrices stored as [in, out]) and GPT-BigCode (one KV head): learned positions, LayerNorm, fused q-k-v."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import Family, Rename, Rule, Split, fused_linear, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Embedding, Layer, Mlp, ModelSpec, Norms


def _gpt_bigcode(config: HfConfig) -> ModelSpec:
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "max_batch_size")
    config.ignore("pad_key_length", "pre_allocate_kv_cache", "validate_runner_input")  # of the first implementation
    config.default("activation_function", "gelu_pytorch_tanh")
    spec = _gpt2(config)
    layer = spec.layers[0]
    kv_heads = 1 if config.opt("multi_query", bool, True) else layer.attention.heads
    config.expect("num_key_value_heads", kv_heads)
    grouped = replace(layer, mixers=(replace(layer.attention, kv_heads=kv_heads),))
    return replace(spec, layers=(grouped,) * len(spec.layers))


def _gpt2(config: HfConfig) -> ModelSpec:
    width = config.size("n_embd")
    positions = config.size("n_positions")
    for key, supported in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("n_special", 0),  # rows of the embedding beyond vocab_size
        ("attention_bias", True),
    ):
        config.expect(key, supported)
    config.ignore("predict_special_tokens")  # training only
    config.ignore("n_ctx", "reorder_and_upcast_attn", *(f"summary_{name}" for name in _SUMMARY))
    norm = Norm(config.opt("layer_norm_epsilon", float, 1e-5), kind="layer", bias=True)
    ffn = Mlp(
        config.opt_size("n_inner", 4 * width),
        config.activation("activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    layer = Layer((_attention(config, width),), ffn, Norms(before_mixer=norm, before_ffn=norm))
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=width,
        layers=(layer,) * config.size("n_layer"),
        final_norm=norm,
        tied=config.opt("tie_word_embeddings", bool, True),
        max_positions=positions,
        embedding=Embedding(positions=positions),
    )


def _attention(config: HfConfig, width: int) -> Attention:
    heads = config.size("n_head")
    if width % heads:
        raise config.error("n_head", f"{heads} does not divide n_embd {width}")
    head_dim = width // heads
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=None,
        qkv_bias=True,
        out_bias=True,
    )


def _transposed(source: str, target: str) -> tuple[Rule, ...]:
    return Rename(f"{source}.weight", target, transpose=True), Rename(f"{source}.bias", f"{target}_bias")


_SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")  # of a classification head
_QKV = ("layers.{l}.mixers.0.q", "layers.{l}.mixers.0.k", "layers.{l}.mixers.0.v")

_TABLES = (
    Rename("[transformer.]wte.weight", "embed"),
    Rename("[transformer.]wpe.weight", "positions"),
    *linear("[transformer.]ln_f", "final_norm"),
    *linear("[transformer.]h.{l}.ln_1", "layers.{l}.norms.before_mixer"),
    *linear("[transformer.]h.{l}.ln_2", "layers.{l}.norms.before_ffn"),
    Rename("lm_head.weight", "head"),
)
_BUFFERS = ("*h.*.attn.bias", "*h.*.attn.masked_bias", "lm_head.weight")

GPT2 = Family(
    _gpt2,
    (
        *_TABLES,
        Split("[transformer.]h.{l}.attn.c_attn.weight", _QKV, transpose=True),
        Split("[transformer.]h.{l}.attn.c_attn.bias", tuple(f"{name}_bias" for name in _QKV)),
        *_transposed("[transformer.]h.{l}.attn.c_proj", "layers.{l}.mixers.0.o"),
        *_transposed("[transformer.]h.{l}.mlp.c_fc", "layers.{l}.ffn.up"),
        *_transposed("[transformer.]h.{l}.mlp.c_proj", "layers.{l}.ffn.down"),
    ),
    ignored=_BUFFERS,
)

GPT_BIGCODE = Family(
    _gpt_bigcode,
    (
        *_TABLES,
        *fused_linear("[transformer.]h.{l}.attn.c_attn", *_QKV, interleaved=True),
        *linear("[transformer.]h.{l}.attn.c_proj", "layers.{l}.mixers.0.o"),
        *linear("[transformer.]h.{l}.mlp.c_fc", "layers.{l}.ffn.up"),
        *linear("[transformer.]h.{l}.mlp.c_proj", "layers.{l}.ffn.down"),
    ),
    ignored=_BUFFERS,
)
