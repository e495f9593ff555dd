"""Dense decoders of LayerNorm or plain MLPs, as GPT has them.

The families, in the order of this file:

- `GPT2LMHeadModel`, `GPTBigCodeForCausalLM`: GPT-2 (matrices stored as [in, out]) and GPT-BigCode (one KV head):
  learned positions, LayerNorm, fused q-k-v.
- `OPTForCausalLM`: OPT: learned positions from row 2, LayerNorm, ReLU; the 350M size is post-norm with a narrower
  embedding.
- `GPTNeoXForCausalLM`: GPT-NeoX and Pythia: LayerNorm, RoPE on a part of each head, mixer and ffn in parallel, q-k-v
  fused head by head.
- `GPTJForCausalLM`: GPT-J: interleaved RoPE on a part of each head, mixer and ffn in parallel after one LayerNorm, a
  biased head.
- `BloomForCausalLM`, `MPTForCausalLM`, `MptForCausalLM`: Bloom and MPT: ALiBi instead of positions, LayerNorm, a plain
  MLP, fused q-k-v.
- `FalconForCausalLM`, `RWForCausalLM`: Falcon: LayerNorm, mixer and ffn in parallel, few KV heads, q-k-v fused by KV
  head.
- `Starcoder2ForCausalLM`: StarCoder 2: LayerNorm, biases everywhere, a plain MLP, RoPE, sliding window.
- `OrionForCausalLM`, `StableLMEpochForCausalLM`, `StableLmForCausalLM`: StableLM: LayerNorm, RoPE on a part of each
  head; some sizes have mixer and ffn in parallel. Orion: full RoPE.
- `PersimmonForCausalLM`: Persimmon: LayerNorm, also of q and k; RoPE on half of each head; a plain MLP with relu^2;
  q-k-v fused by head.
- `ArceeForCausalLM`, `Jais2ForCausalLM`, `NemotronForCausalLM`: Nemotron (dense), Jais 2 and Arcee: plain MLPs with
  relu^2; LayerNorm but for Arcee.
- `Cohere2ForCausalLM`, `CohereForCausalLM`: Command R (Cohere), Command A (Cohere 2): mixer and ffn in parallel after
  one LayerNorm, scaled logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pagoda.common.models import hf_config
from pagoda.common.models.families.llama_block import LLAMA_RULES
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    Family,
    Rename,
    Rule,
    Split,
    Stack,
    decoder,
    fused_linear,
    gated_mlp,
    layer_norm,
    linear,
    plain_mlp,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.mixers.attention import alibi_slopes
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Embedding, Layer, Mlp, ModelSpec, Norms

# GPT-2 and GPT-BigCode.


def _gpt_bigcode(config: HfConfig) -> ModelSpec:
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "max_batch_size")
    # Only the first implementation reads these keys.
    config.ignore("pad_key_length", "pre_allocate_kv_cache", "validate_runner_input")
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
        ("n_special", 0),  # The embedding has these rows beyond vocab_size.
        ("attention_bias", True),
    ):
        config.expect(key, supported)
    config.ignore("predict_special_tokens")  # Only training reads this key.
    config.ignore("n_ctx", "reorder_and_upcast_attn", *(f"summary_{name}" for name in _GPT2_SUMMARY))
    norm = Norm(config.opt("layer_norm_epsilon", float, 1e-5), kind="layer", bias=True)
    ffn = Mlp(
        config.opt_size("n_inner", 4 * width),
        config.activation("activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    layer = Layer((_gpt2_attention(config, width),), ffn, Norms(before_mixer=norm, before_ffn=norm))
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=width,
        layers=(layer,) * config.size("n_layer"),
        final_norm=norm,
        tied=config.opt("tie_word_embeddings", bool, True),
        max_positions=positions,
        embedding=Embedding(positions=positions),
    )


def _gpt2_attention(config: HfConfig, width: int) -> Attention:
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


def _gpt2_transposed(source: str, target: str) -> tuple[Rule, ...]:
    return Rename(f"{source}.weight", target, transpose=True), Rename(f"{source}.bias", f"{target}_bias")


# These keys are of a classification head.
_GPT2_SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
_GPT2_QKV = ("layers.{l}.mixers.0.q", "layers.{l}.mixers.0.k", "layers.{l}.mixers.0.v")

_GPT2_TABLES = (
    Rename("[transformer.]wte.weight", "embed"),
    Rename("[transformer.]wpe.weight", "positions"),
    *linear("[transformer.]ln_f", "final_norm"),
    *linear("[transformer.]h.{l}.ln_1", "layers.{l}.norms.before_mixer"),
    *linear("[transformer.]h.{l}.ln_2", "layers.{l}.norms.before_ffn"),
    Rename("lm_head.weight", "head"),
)
_GPT2_BUFFERS = ("*h.*.attn.bias", "*h.*.attn.masked_bias", "lm_head.weight")

GPT2 = Family(
    _gpt2,
    (
        *_GPT2_TABLES,
        Split("[transformer.]h.{l}.attn.c_attn.weight", _GPT2_QKV, transpose=True),
        Split("[transformer.]h.{l}.attn.c_attn.bias", tuple(f"{name}_bias" for name in _GPT2_QKV)),
        *_gpt2_transposed("[transformer.]h.{l}.attn.c_proj", "layers.{l}.mixers.0.o"),
        *_gpt2_transposed("[transformer.]h.{l}.mlp.c_fc", "layers.{l}.ffn.up"),
        *_gpt2_transposed("[transformer.]h.{l}.mlp.c_proj", "layers.{l}.ffn.down"),
    ),
    ignored=_GPT2_BUFFERS,
)

GPT_BIGCODE = Family(
    _gpt_bigcode,
    (
        *_GPT2_TABLES,
        *fused_linear("[transformer.]h.{l}.attn.c_attn", *_GPT2_QKV, interleaved=True),
        *linear("[transformer.]h.{l}.attn.c_proj", "layers.{l}.mixers.0.o"),
        *linear("[transformer.]h.{l}.mlp.c_fc", "layers.{l}.ffn.up"),
        *linear("[transformer.]h.{l}.mlp.c_proj", "layers.{l}.ffn.down"),
    ),
    ignored=_GPT2_BUFFERS,
)


# OPT.


def _opt(config: HfConfig) -> ModelSpec:
    width = config.size("hidden_size")
    positions = config.size("max_position_embeddings")
    table_width = config.opt_size("word_embed_proj_dim", width)
    pre_norm = config.opt("do_layer_norm_before", bool, True)
    for key, supported in (
        ("layer_norm_elementwise_affine", True),
        ("learned_embeddings", True),
        ("scale_embeddings", False),
    ):
        config.expect(key, supported)
    no_final_norm = config.opt("_remove_final_layer_norm", bool, False) or not pre_norm
    norm = Norm(1e-5, kind="layer", bias=True)
    norms = Norms(before_mixer=norm, before_ffn=norm) if pre_norm else Norms(after_mixer=norm, after_ffn=norm)
    layer = Layer((_opt_attention(config, width),), _opt_mlp(config), norms, norm_after_add=not pre_norm)
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=width,
        layers=(layer,) * config.size("num_hidden_layers"),
        final_norm=None if no_final_norm else norm,
        tied=config.opt("tie_word_embeddings", bool, True),
        max_positions=positions,
        embedding=Embedding(
            positions=positions, position_offset=2, width=None if table_width == width else table_width
        ),
    )


def _opt_attention(config: HfConfig, width: int) -> Attention:
    heads = config.size("num_attention_heads")
    head_dim = hf_config.head_dim(config, width, heads)
    bias = config.opt("enable_bias", bool, True)
    config.expect("attention_bias", bias)
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=None,
        qkv_bias=bias,
        out_bias=bias,
    )


def _opt_mlp(config: HfConfig) -> Mlp:
    activation = config.activation("activation_function", "relu")
    return Mlp(config.size("ffn_dim"), activation, gated=False, bias=config.opt("enable_bias", bool, True))


# One pair of tensors per norm; `do_layer_norm_before` decides whether it is a before- or an after-norm.
_OPT_NORM_RULES = tuple(
    rule
    for side in ("before", "after")
    for rule in (
        *linear("[model.]decoder.layers.{l}.self_attn_layer_norm", f"layers.{{l}}.norms.{side}_mixer"),
        *linear("[model.]decoder.layers.{l}.final_layer_norm", f"layers.{{l}}.norms.{side}_ffn"),
    )
)

OPT = Family(
    _opt,
    (
        Rename("[model.]decoder.embed_tokens.weight", "embed"),
        Rename("[model.]decoder.embed_positions.weight", "positions"),
        Rename("[model.]decoder.project_in.weight", "embed_in"),
        Rename("[model.]decoder.project_out.weight", "embed_out"),
        *linear("[model.]decoder.final_layer_norm", "final_norm"),
        *linear("[model.]decoder.layers.{l}.self_attn.q_proj", "layers.{l}.mixers.0.q"),
        *linear("[model.]decoder.layers.{l}.self_attn.k_proj", "layers.{l}.mixers.0.k"),
        *linear("[model.]decoder.layers.{l}.self_attn.v_proj", "layers.{l}.mixers.0.v"),
        *linear("[model.]decoder.layers.{l}.self_attn.out_proj", "layers.{l}.mixers.0.o"),
        *linear("[model.]decoder.layers.{l}.fc1", "layers.{l}.ffn.up"),
        *linear("[model.]decoder.layers.{l}.fc2", "layers.{l}.ffn.down"),
        *_OPT_NORM_RULES,
        Rename("lm_head.weight", "head"),
    ),
)


# GPT-NeoX.


def _gpt_neox(config: HfConfig) -> ModelSpec:
    config.alias("partial_rotary_factor", "rotary_pct")
    config.alias("rope_theta", "rotary_emb_base")
    bias = config.opt("attention_bias", bool, True)
    attention = rotary_attention(config, config.size("hidden_size"), partial=0.25)
    attention = replace(attention, qkv_bias=bias, out_bias=bias)
    norm = layer_norm(config)
    layer = Layer(
        (attention,),
        plain_mlp(config, "gelu", bias=True),
        Norms(before_mixer=norm, before_ffn=norm),
        parallel=config.opt("use_parallel_residual", bool, True),
    )
    return decoder(config, [layer] * config.size("num_hidden_layers"), norm)


_GPT_NEOX_SOURCE = "[gpt_neox.]layers.{l}"
_TARGET = "layers.{l}.mixers.0"

GPT_NEOX = Family(
    _gpt_neox,
    (
        Rename("[gpt_neox.]embed_in.weight", "embed"),
        Rename("embed_out.weight", "head"),
        *linear("[gpt_neox.]final_layer_norm", "final_norm"),
        *linear(f"{_GPT_NEOX_SOURCE}.input_layernorm", "layers.{l}.norms.before_mixer"),
        *linear(f"{_GPT_NEOX_SOURCE}.post_attention_layernorm", "layers.{l}.norms.before_ffn"),
        *fused_linear(
            f"{_GPT_NEOX_SOURCE}.attention.query_key_value",
            f"{_TARGET}.q",
            f"{_TARGET}.k",
            f"{_TARGET}.v",
            interleaved=True,
        ),
        *linear(f"{_GPT_NEOX_SOURCE}.attention.dense", f"{_TARGET}.o"),
        *linear(f"{_GPT_NEOX_SOURCE}.mlp.dense_h_to_4h", "layers.{l}.ffn.up"),
        *linear(f"{_GPT_NEOX_SOURCE}.mlp.dense_4h_to_h", "layers.{l}.ffn.down"),
    ),
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq", "embed_out.weight"),
    heads=("score.*", "classifier.*", "embed_out.*"),
)


# GPT-J.


def _gptj(config: HfConfig) -> ModelSpec:
    width = config.size("n_embd")
    heads = config.size("n_head")
    positions = config.size("n_positions")
    if width % heads:
        raise config.error("n_head", f"{heads} does not divide n_embd {width}")
    config.expect("rotary", True)
    config.expect("scale_attn_weights", True)
    config.ignore("n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels")
    config.ignore("summary_type", "summary_use_proj")  # These keys are of a classification head.
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


_GPTJ_SOURCE = "[transformer.]h.{l}"

GPTJ = Family(
    _gptj,
    (
        Rename("[transformer.]wte.weight", "embed"),
        *linear("[transformer.]ln_f", "final_norm"),
        *linear("lm_head", "head"),
        *linear(f"{_GPTJ_SOURCE}.ln_1", "layers.{l}.norms.before_mixer"),
        *(rule for name in "qkv" for rule in linear(f"{_GPTJ_SOURCE}.attn.{name}_proj", f"{_TARGET}.{name}")),
        *linear(f"{_GPTJ_SOURCE}.attn.out_proj", f"{_TARGET}.o"),
        *linear(f"{_GPTJ_SOURCE}.mlp.fc_in", "layers.{l}.ffn.up"),
        *linear(f"{_GPTJ_SOURCE}.mlp.fc_out", "layers.{l}.ffn.down"),
    ),
    ignored=("*.attn.bias", "*.attn.masked_bias", "*.attn.embed_positions", "lm_head.weight"),
)


# Bloom and MPT.


def _bloom(config: HfConfig) -> ModelSpec:
    config.alias("hidden_size", "n_embed")
    config.alias("n_layer", "num_hidden_layers")
    config.alias("n_head", "num_attention_heads")
    config.expect("apply_residual_connection_post_layernorm", False)
    config.ignore("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi")
    config.ignore("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact")  # Only the training code reads these keys.
    norm = layer_norm(config, "layer_norm_epsilon")
    width = config.size("hidden_size")
    heads = config.size("n_head")
    spec = _bloom_model(config, width, heads, norm, Mlp(4 * width, "gelu_tanh", gated=False, bias=True))
    layer = replace(spec.layers[0], mixers=(replace(spec.layers[0].attention, qkv_bias=True, out_bias=True),))
    stack = (layer,) * config.size("n_layer")
    positions = config.opt_size("seq_length", 2048)
    return replace(spec, layers=stack, embedding=Embedding(norm=norm), max_positions=positions)


def _mpt(config: HfConfig) -> ModelSpec:
    config.expect("no_bias", True)
    config.expect("embedding_fraction", 1.0)
    config.expect("logit_scale", 1.0)
    config.ignore("learned_pos_emb", "norm_type", "init_device", "init_config", "verbose", "emb_pdrop")
    section = config.section("attn_config") or HfConfig({})
    for key, supported in (
        *(("attn_type", "multihead_attention"), ("alibi", True), ("prefix_lm", False), ("qk_ln", False)),
        ("attn_uses_sequence_id", False),
    ):
        section.expect(key, supported)
    section.ignore("attn_impl", "attn_pdrop", "model_type")
    width = config.size("d_model")
    heads = config.size("n_heads")
    ffn = Mlp(config.opt_size("expansion_ratio", 4) * width, "gelu", gated=False)
    spec = _bloom_model(config, width, heads, layer_norm(config, "layer_norm_epsilon", bias=False), ffn)
    mixer = spec.layers[0].attention
    mixer = replace(
        mixer,
        scale=section.opt("softmax_scale", float, mixer.scale),
        qkv_clip=section.nullable("clip_qkv", float),
        alibi_slopes=alibi_slopes(heads, section.opt("alibi_bias_max", float, 8.0)),
    )
    section.finish()
    stack = (replace(spec.layers[0], mixers=(mixer,)),) * config.size("n_layers")
    return replace(spec, layers=stack, max_positions=config.size("max_seq_len"))


def _bloom_model(config: HfConfig, width: int, heads: int, norm: Norm, ffn: Mlp) -> ModelSpec:
    """Return a model of one layer."""
    if width % heads:
        raise config.error("n_head", f"{heads} does not divide the width {width}")
    dim = width // heads
    attention = Attention(heads, heads, dim, dim**-0.5, None, alibi_slopes=alibi_slopes(heads))
    layer = Layer((attention,), ffn, Norms(before_mixer=norm, before_ffn=norm))
    tied = config.opt("tie_word_embeddings", bool, True)
    return ModelSpec(config.size("vocab_size"), width, (layer,), norm, tied, max_positions=1)


_BLOOM_SOURCE = "[transformer.]h.{l}"
_BLOOM_QKV = tuple("layers.{l}.mixers.0." + name for name in "qkv")
_BLOOM_BLOCK = "[transformer.]blocks.{l}"

BLOOM = Family(
    _bloom,
    (
        Rename("[transformer.]word_embeddings.weight", "embed"),
        *linear("[transformer.]word_embeddings_layernorm", "embed_norm"),
        Rename("lm_head.weight", "head"),
        *linear("[transformer.]ln_f", "final_norm"),
        *linear(f"{_BLOOM_SOURCE}.input_layernorm", "layers.{l}.norms.before_mixer"),
        *linear(f"{_BLOOM_SOURCE}.post_attention_layernorm", "layers.{l}.norms.before_ffn"),
        *fused_linear(f"{_BLOOM_SOURCE}.self_attention.query_key_value", *_BLOOM_QKV, interleaved=True),
        *linear(f"{_BLOOM_SOURCE}.self_attention.dense", "layers.{l}.mixers.0.o"),
        *linear(f"{_BLOOM_SOURCE}.mlp.dense_h_to_4h", "layers.{l}.ffn.up"),
        *linear(f"{_BLOOM_SOURCE}.mlp.dense_4h_to_h", "layers.{l}.ffn.down"),
    ),
)

MPT = Family(
    _mpt,
    (
        Rename("[transformer.]wte.weight", "embed"),
        Rename("lm_head.weight", "head"),
        Rename("[transformer.]norm_f.weight", "final_norm"),
        Rename(f"{_BLOOM_BLOCK}.norm_1.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_BLOOM_BLOCK}.norm_2.weight", "layers.{l}.norms.before_ffn"),
        Split(f"{_BLOOM_BLOCK}.attn.Wqkv.weight", _BLOOM_QKV),
        Rename(f"{_BLOOM_BLOCK}.attn.out_proj.weight", "layers.{l}.mixers.0.o"),
        Rename(f"{_BLOOM_BLOCK}.ffn.up_proj.weight", "layers.{l}.ffn.up"),
        Rename(f"{_BLOOM_BLOCK}.ffn.down_proj.weight", "layers.{l}.ffn.down"),
    ),
)


# Falcon.


def _falcon(config: HfConfig) -> ModelSpec:
    grouped = config.opt("new_decoder_architecture", bool, "n_head_kv" in config)
    config.alias("hidden_size", "n_embed")
    config.alias("num_attention_heads", "n_head")
    config.alias("num_hidden_layers", "n_layer")
    config.default("max_position_embeddings", 2048)
    config.expect("apply_residual_connection_post_layernorm", False)
    width = config.size("hidden_size")
    bias = config.opt("bias", bool, False)
    attention = rotary_attention(config, width)
    attention = replace(attention, kv_heads=_falcon_kv_heads(config, grouped), qkv_bias=bias, out_bias=bias)
    if config.opt("alibi", bool, False):  # ALiBi's slopes are scaled like the scores.
        slopes = tuple(slope * attention.scale for slope in alibi_slopes(attention.heads))
        attention = replace(attention, rope=None, alibi_slopes=slopes)
    activation = config.activation("activation", "gelu")
    ffn = Mlp(config.opt_size("ffn_hidden_size", 4 * width), activation, gated=False, bias=bias)
    norm = layer_norm(config, "layer_norm_epsilon")
    parallel = config.opt("parallel_attn", bool, True)
    norms_before = config.opt_size("num_ln_in_parallel_attn", 2 if grouped else 1)
    if (grouped and not parallel) or norms_before > (2 if grouped else 1):
        raise config.error("num_ln_in_parallel_attn", f"is {norms_before}, parallel_attn {parallel}: not supported")
    norms = Norms(before_mixer=norm, before_ffn=norm if norms_before == 2 or not parallel else None)
    layer = Layer((attention,), ffn, norms, parallel=parallel)
    return decoder(config, [layer] * config.size("num_hidden_layers"), norm, tied=True)


def _falcon_kv_heads(config: HfConfig, grouped: bool) -> int:
    config.alias("num_kv_heads", "n_head_kv")
    heads = config.size("num_attention_heads")
    kv_heads = config.opt_size("num_kv_heads", heads)
    if config.opt("multi_query", bool, True) and not grouped:
        return 1
    if heads % kv_heads:
        raise config.error("num_kv_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    return kv_heads


_FALCON_SOURCE = "[transformer.]h.{l}"
_FALCON_QKV = tuple("layers.{l}.mixers.0." + name for name in "qkv")

FALCON = Family(
    _falcon,
    (
        Rename("[transformer.]word_embeddings.weight", "embed"),
        Rename("lm_head.weight", "head"),
        *linear("[transformer.]ln_f", "final_norm"),
        *linear(f"{_FALCON_SOURCE}.input_layernorm", "layers.{l}.norms.before_mixer"),
        *linear(f"{_FALCON_SOURCE}.post_attention_layernorm", "layers.{l}.norms.before_ffn"),
        *linear(f"{_FALCON_SOURCE}.ln_attn", "layers.{l}.norms.before_mixer"),
        *linear(f"{_FALCON_SOURCE}.ln_mlp", "layers.{l}.norms.before_ffn"),
        *fused_linear(f"{_FALCON_SOURCE}.self_attention.query_key_value", *_FALCON_QKV, interleaved=True),
        *linear(f"{_FALCON_SOURCE}.self_attention.dense", "layers.{l}.mixers.0.o"),
        *linear(f"{_FALCON_SOURCE}.mlp.dense_h_to_4h", "layers.{l}.ffn.up"),
        *linear(f"{_FALCON_SOURCE}.mlp.dense_4h_to_h", "layers.{l}.ffn.down"),
    ),
)


# StarCoder 2.


def _starcoder2(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.expect("norm_type", "layer_norm")
    config.expect("mlp_type", "default")
    config.expect("scale_attn_weights", True)
    config.ignore("activation_function", "layer_norm_epsilon")  # The keys hidden_act and norm_epsilon supersede these.
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    bias = config.opt("use_bias", bool, True)
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, window=config.window(None), qkv_bias=bias, out_bias=bias)
    ffn = plain_mlp(config, "gelu_pytorch_tanh", bias=bias)
    norm = layer_norm(config, "norm_epsilon")
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, norm, tied=True)


STARCODER2 = Family(
    _starcoder2,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *PRE_NORM_RULES,
        *linear("[model.]layers.{l}.mlp.c_fc", "layers.{l}.ffn.up"),
        *linear("[model.]layers.{l}.mlp.c_proj", "layers.{l}.ffn.down"),
    ),
)


# StableLM and Orion.


def _stablelm(config: HfConfig) -> ModelSpec:
    config.alias("layer_norm_eps", "norm_eps")
    config.alias("partial_rotary_factor", "rope_pct")
    config.expect("rotary_scaling_factor", 1.0)
    attention = rotary_attention(config, config.size("hidden_size"), partial=0.25)
    attention = replace(attention, qkv_bias=config.opt("use_qkv_bias", bool, False))
    if config.opt("qk_layernorm", bool, False):
        attention = replace(attention, qk_norm=layer_norm(config, bias=False), qk_norm_over="own_weights")
    norm = layer_norm(config)
    parallel = config.opt("use_parallel_residual", bool, False)
    norms = Norms(before_mixer=norm, before_ffn=None if parallel else norm)
    layer = Layer((attention,), gated_mlp(config), norms, parallel=parallel)
    return decoder(config, [layer] * config.size("num_hidden_layers"), norm)


def _orion(config: HfConfig) -> ModelSpec:
    config.expect("attention_bias", False)
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"))
    norm = layer_norm(config, "rms_norm_eps")
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, norm)


ORION = Family(_orion, LLAMA_RULES)
STABLELM = Family(
    _stablelm,
    (
        *LLAMA_RULES,
        Stack("[model.]layers.{l}.self_attn.q_layernorm.norms.{e}.weight", "layers.{l}.mixers.0.q_norm"),
        Stack("[model.]layers.{l}.self_attn.k_layernorm.norms.{e}.weight", "layers.{l}.mixers.0.k_norm"),
    ),
)


# Persimmon.


def _persimmon(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    norm = layer_norm(config)
    attention = replace(
        rotary_attention(config, config.size("hidden_size"), partial=0.5),
        qk_norm=norm if config.opt("qk_layernorm", bool, True) else None,
        qkv_bias=True,
        out_bias=True,
    )
    return pre_norm_decoder(config, [attention] * layers, [plain_mlp(config, "relu2", bias=True)] * layers, norm)


_PERSIMMON_SOURCE = "[model.]layers.{l}"

PERSIMMON = Family(
    _persimmon,
    (
        *EMBED_RULES,
        *linear("[model.]final_layernorm", "final_norm"),
        *PRE_NORM_RULES,
        *fused_linear(
            f"{_PERSIMMON_SOURCE}.self_attn.query_key_value",
            f"{_TARGET}.q",
            f"{_TARGET}.k",
            f"{_TARGET}.v",
            interleaved=True,
        ),
        *linear(f"{_PERSIMMON_SOURCE}.self_attn.dense", f"{_TARGET}.o"),
        *linear(f"{_PERSIMMON_SOURCE}.self_attn.q_layernorm", f"{_TARGET}.q_norm"),
        *linear(f"{_PERSIMMON_SOURCE}.self_attn.k_layernorm", f"{_TARGET}.k_norm"),
        *linear(f"{_PERSIMMON_SOURCE}.mlp.dense_h_to_4h", "layers.{l}.ffn.up"),
        *linear(f"{_PERSIMMON_SOURCE}.mlp.dense_4h_to_h", "layers.{l}.ffn.down"),
    ),
)


# Nemotron, Jais 2 and Arcee.


def _nemotron(config: HfConfig) -> ModelSpec:
    config.alias("partial_rotary_factor", "rope_percent")
    norm = replace(layer_norm(config, "norm_eps"), unit_offset=True)
    return _nemotron_model(config, norm, bias=False, partial=0.5)


def _jais2(config: HfConfig) -> ModelSpec:
    return _nemotron_model(config, layer_norm(config), bias=True, partial=1.0)


def _arcee(config: HfConfig) -> ModelSpec:
    return _nemotron_model(config, rms_norm(config, 1e-5), bias=False, partial=1.0)


def _nemotron_model(config: HfConfig, norm: Norm, *, bias: bool, partial: float) -> ModelSpec:
    """`bias`, `partial`: the family's defaults."""
    layers = config.size("num_hidden_layers")
    attention_bias = config.opt("attention_bias", bool, bias)
    attention = rotary_attention(config, config.size("hidden_size"), partial=partial)
    attention = replace(attention, qkv_bias=attention_bias, out_bias=attention_bias)
    ffn = plain_mlp(config, "relu2", bias=config.opt("mlp_bias", bool, bias))
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, norm)


NEMOTRON = Family(_nemotron, LLAMA_RULES)
JAIS2 = Family(_jais2, LLAMA_RULES)
ARCEE = Family(_arcee, LLAMA_RULES)


# Cohere.


def _cohere(config: HfConfig) -> ModelSpec:
    attention = _cohere_attention(config, theta=500_000.0)
    if config.opt("use_qk_norm", bool, False):
        attention = replace(attention, qk_norm=layer_norm(config, bias=False), qk_norm_over="own_weights")
    return _cohere_model(config, [attention] * config.size("num_hidden_layers"))


def _cohere2(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    for key, supported in (
        ("position_embedding_type", "rope_gptj"),
        ("order_of_interleaved_layers", "local_attn_first"),
        ("rotary_pct", 1.0),
        ("use_embedding_sharing", True),
        ("use_gated_activation", True),
        ("use_parallel_block", True),
    ):
        config.expect(key, supported)
    config.ignore("use_parallel_embedding")
    attention = _cohere_attention(config, theta=10_000.0)
    full = replace(attention, rope=None)
    windowed = replace(attention, window=config.window(4096))
    config.alias("sliding_window_pattern", "_sliding_window_pattern", "layer_switch")
    every = config.opt_size("sliding_window_pattern", 4)
    pattern = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    return _cohere_model(config, [windowed if kind == "sliding_attention" else full for kind in kinds])


def _cohere_attention(config: HfConfig, *, theta: float) -> Attention:
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"), theta=theta, interleaved=True)
    return replace(attention, qkv_bias=bias, out_bias=bias)


def _cohere_model(config: HfConfig, mixers: Iterable[Attention]) -> ModelSpec:
    norm = layer_norm(config, bias=False)
    ffn = gated_mlp(config)
    layers = (Layer((mixer,), ffn, Norms(before_mixer=norm), parallel=True) for mixer in mixers)
    spec = decoder(config, layers, norm, tied=True)
    return replace(
        spec,
        logit_scale=config.opt("logit_scale", float, 0.0625),
        # Command R also states the shorter length of its training; RoPE is unscaled, so that it is no limit.
        max_positions=config.opt_size("model_max_length", spec.max_positions),
    )


COHERE = Family(_cohere, (*LLAMA_RULES, *QK_NORM_RULES))
COHERE2 = Family(_cohere2, LLAMA_RULES)
