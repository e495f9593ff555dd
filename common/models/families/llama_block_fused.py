"""Decoders of Llama's kind whose checkpoints fuse q, k and v, or gate and up, into one matrix.

The families, in the order of this file:

- `BaiChuanForCausalLM`, `BaichuanForCausalLM`, `QWenLMHeadModel`: Baichuan 1 and 2, Qwen 1: Llama's block with q-k-v
  fused; Baichuan 13B has ALiBi, Baichuan 2 a normalised head.
- `InternLM2ForCausalLM`, `InternLM2ForRewardModel`: InternLM 2 and 2.5: Llama's block, q-k-v fused by KV head.
- `TeleChat2ForCausalLM`, `TeleChatForCausalLM`: TeleChat 2: Llama's block with biases on the projections out, k and v
  fused by KV head.
- `ChatGLMForConditionalGeneration`, `ChatGLMModel`, `Glm4ForCausalLM`, `GlmForCausalLM`: ChatGLM 2 and 3, GLM-4 of 2024
  (Glm) and 2025 (Glm4, four norms): interleaved RoPE on half of each head.
- `Phi3ForCausalLM`, `PhiForCausalLM`: Phi-1, 1.5 and 2: mixer and ffn in parallel. Phi-3, 3.5 and 4 (dense): fused
  weights, LongRoPE, partial RoPE.
"""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models import hf_config
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    AnswerFormat,
    Family,
    Normalise,
    PoolUse,
    Rename,
    Rule,
    Split,
    decoder,
    fused_linear,
    gated_mlp,
    grouped_attention,
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
from pagoda.common.models.spec import Classifier, Layer, Mlp, ModelSpec, Norms, Pooler

# Baichuan and Qwen 1.


def _baichuan_7b(config: HfConfig) -> ModelSpec:
    return _baichuan_model(config, _baichuan_rotary(config))


def _baichuan(config: HfConfig) -> ModelSpec:
    if config.size("hidden_size") == 4096:  # This is Baichuan2-7B, whose file differs from 13B's in no other way.
        return _baichuan_7b(config)
    config.alias("max_position_embeddings", "model_max_length")
    attention = grouped_attention(config, config.size("hidden_size"), None)
    return _baichuan_model(config, replace(attention, alibi_slopes=alibi_slopes(attention.heads)))


def _baichuan_rotary(config: HfConfig) -> Attention:
    width = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    return grouped_attention(config, width, hf_config.rope(config, hf_config.head_dim(config, width, heads)))


def _baichuan_model(config: HfConfig, attention: Attention) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-6))


def _baichuan_head(config: HfConfig) -> tuple[Rule, ...]:
    """Return the rule of the second version's head: its file has the weight of a loss over z."""
    second = "z_loss_weight" in config
    config.ignore("z_loss_weight")
    return (Normalise("lm_head.weight", "head", axis=1),) if second else ()


def _qwen1(config: HfConfig) -> ModelSpec:
    for key, supported in (("no_bias", True), ("rotary_pct", 1.0), ("scale_attn_weights", True)):
        config.expect(key, supported)
    # Beyond the trained context, which is not served, and the dtypes and kernels of the model's own code.
    config.ignore("use_dynamic_ntk", "use_logn_attn", "max_position_embeddings", "bf16", "fp16", "fp32", "onnx_safe")
    config.ignore("softmax_in_fp32", "use_cache_kernel", "use_cache_quantization", "tokenizer_type")
    config.alias("rms_norm_eps", "layer_norm_epsilon")
    config.alias("rope_theta", "rotary_emb_base")
    config.alias("head_dim", "kv_channels")
    config.set("max_position_embeddings", config.size("seq_length"))
    config.set("intermediate_size", config.size("intermediate_size") // 2)  # The file counts gate and up together.
    return _baichuan_model(config, replace(_baichuan_rotary(config), qkv_bias=True))


_BAICHUAN_QKV = tuple("layers.{l}.mixers.0." + part for part in "qkv")
_BAICHUAN_ATTENTION = "[model.]layers.{l}.self_attn"
_BAICHUAN_RULES = (
    *(EMBED_RULES + MLP_RULES + PRE_NORM_RULES),
    *fused_linear(f"{_BAICHUAN_ATTENTION}.W_pack", *_BAICHUAN_QKV),
    *linear(f"{_BAICHUAN_ATTENTION}.o_proj", "layers.{l}.mixers.0.o"),
)
_BAICHUAN_BLOCK = "[transformer.]h.{l}"

BAICHUAN_7B = Family(_baichuan_7b, _BAICHUAN_RULES, config_rules=_baichuan_head)
BAICHUAN = Family(_baichuan, _BAICHUAN_RULES, config_rules=_baichuan_head)
QWEN1 = Family(
    _qwen1,
    (
        Rename("[transformer.]wte.weight", "embed"),
        Rename("[transformer.]ln_f.weight", "final_norm"),
        Rename("lm_head.weight", "head"),
        Rename(f"{_BAICHUAN_BLOCK}.ln_1.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_BAICHUAN_BLOCK}.ln_2.weight", "layers.{l}.norms.before_ffn"),
        *fused_linear(f"{_BAICHUAN_BLOCK}.attn.c_attn", *_BAICHUAN_QKV),
        Rename(f"{_BAICHUAN_BLOCK}.attn.c_proj.weight", "layers.{l}.mixers.0.o"),
        Rename(f"{_BAICHUAN_BLOCK}.mlp.w2.weight", "layers.{l}.ffn.gate"),
        Rename(f"{_BAICHUAN_BLOCK}.mlp.w1.weight", "layers.{l}.ffn.up"),
        Rename(f"{_BAICHUAN_BLOCK}.mlp.c_proj.weight", "layers.{l}.ffn.down"),
    ),
    ignored=("*.rotary_emb.inv_freq", "*.masked_bias", "*.attn.bias", "lm_head.weight"),
)


# InternLM 2.


def _internlm2(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("bias", bool, True)
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, qkv_bias=bias, out_bias=bias)
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-6))


_INTERNLM2_SOURCE = "[model.]layers.{l}"
_INTERNLM2_QKV = tuple("layers.{l}.mixers.0." + name for name in "qkv")

INTERNLM2 = Family(
    _internlm2,
    (
        Rename("[model.]tok_embeddings.weight", "embed"),
        Rename("output.weight", "head"),
        Rename("[model.]norm.weight", "final_norm"),
        Rename(f"{_INTERNLM2_SOURCE}.attention_norm.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_INTERNLM2_SOURCE}.ffn_norm.weight", "layers.{l}.norms.before_ffn"),
        *fused_linear(f"{_INTERNLM2_SOURCE}.attention.wqkv", *_INTERNLM2_QKV, interleaved=True),
        *linear(f"{_INTERNLM2_SOURCE}.attention.wo", "layers.{l}.mixers.0.o"),
        Rename(f"{_INTERNLM2_SOURCE}.feed_forward.w1.weight", "layers.{l}.ffn.gate"),
        Rename(f"{_INTERNLM2_SOURCE}.feed_forward.w3.weight", "layers.{l}.ffn.up"),
        Rename(f"{_INTERNLM2_SOURCE}.feed_forward.w2.weight", "layers.{l}.ffn.down"),
    ),
    ignored=("*.rotary_emb.inv_freq", "output.weight"),
    heads=("score.*", "v_head.*", "output.*"),
)


def _internlm2_reward(config: HfConfig, use: PoolUse) -> Pooler:
    """Return the pooler of a reward model, which rates every token."""
    return Pooler("all", classifier=Classifier(1, bias=False))


INTERNLM2_REWARD = replace(INTERNLM2, pooler=_internlm2_reward, pooler_rules=linear("v_head", "pooler.classifier"))


# TeleChat 2.


def _telechat2(config: HfConfig) -> ModelSpec:
    for key, *names in (
        ("hidden_size", "n_embed"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
        ("intermediate_size", "ffn_hidden_size"),
        ("rms_norm_eps", "layer_norm_epsilon"),
        ("max_position_embeddings", "training_seqlen", "seq_length"),
    ):
        config.alias(key, *names)
    # With another length the base of RoPE would differ.
    config.expect("base_seqlen", config.size("max_position_embeddings"))
    config.expect("apply_residual_connection_post_layernorm", False)
    config.expect("embed_layernorm", False)
    # The key logn concerns lengths beyond the trained context, which are not served.
    config.ignore("logn", "hidden_dropout")
    layers = config.size("num_hidden_layers")
    attention = replace(rotary_attention(config, config.size("hidden_size")), out_bias=True)
    ffn = replace(gated_mlp(config), down_bias=True)
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, rms_norm(config, 1e-5))


_TELECHAT_SOURCE = "[transformer.]h.{l}"
_TELECHAT_MIXER = "layers.{l}.mixers.0"

TELECHAT2 = Family(
    _telechat2,
    (
        Rename("[transformer.]word_embeddings.weight", "embed"),
        Rename("[transformer.]ln_f.weight", "final_norm"),
        Rename("lm_head.weight", "head"),
        Rename(f"{_TELECHAT_SOURCE}.input_layernorm.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_TELECHAT_SOURCE}.post_attention_layernorm.weight", "layers.{l}.norms.before_ffn"),
        Rename(f"{_TELECHAT_SOURCE}.self_attention.query.weight", f"{_TELECHAT_MIXER}.q"),
        Split(
            f"{_TELECHAT_SOURCE}.self_attention.key_value.weight",
            (f"{_TELECHAT_MIXER}.k", f"{_TELECHAT_MIXER}.v"),
            interleaved=True,
        ),
        *linear(f"{_TELECHAT_SOURCE}.self_attention.dense", f"{_TELECHAT_MIXER}.o"),
        *(replace(rule, source=rule.source.replace("[model.]layers.{l}", _TELECHAT_SOURCE)) for rule in MLP_RULES),
    ),
)


# ChatGLM and GLM-4.


def _glm(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1.5625e-07)
    return _glm_model(config, Norms(before_mixer=norm, before_ffn=norm), norm)


def _glm4(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1.5625e-07)
    return _glm_model(config, Norms(norm, norm, norm, norm), norm)


def _glm_model(config: HfConfig, norms: Norms, final_norm: Norm) -> ModelSpec:
    config.default("head_dim", 128)
    attention = rotary_attention(config, config.size("hidden_size"), partial=0.5, interleaved=True)
    attention = replace(attention, qkv_bias=config.opt("attention_bias", bool, True))
    layer = Layer((attention,), gated_mlp(config), norms)
    return decoder(config, [layer] * config.size("num_hidden_layers"), final_norm)


def _chatglm(config: HfConfig) -> ModelSpec:
    config.expect("num_hidden_layers", config.size("num_layers"))
    for key, supported in (
        ("add_bias_linear", False),
        ("apply_residual_connection_post_layernorm", False),
        ("interleaved_qkv", False),
        ("post_layer_norm", True),
        ("pre_seq_len", 0),
        ("prefix_projection", False),
        ("quantization_bit", 0),
        ("rmsnorm", True),
    ):
        config.expect(key, supported)
    config.ignore("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion")
    config.ignore("fp32_residual_connection", "vocab_size")
    heads = config.size("num_attention_heads")
    head_dim = config.size("kv_channels")
    width = config.size("hidden_size")
    grouped = config.opt("multi_query_attention", bool, False)
    groups = config.opt_size("multi_query_group_num", 1)
    interleaved = config.opt("original_rope", bool, True)
    rope = Rope(10_000.0 * config.opt("rope_ratio", float, 1.0), head_dim // 2, interleaved=interleaved)
    norm = Norm(config.opt("layernorm_epsilon", float, 1e-5))
    bias = config.opt("add_qkv_bias", bool, False)
    kv_heads = groups if grouped else heads
    layer = Layer(
        (Attention(heads, kv_heads, head_dim, head_dim**-0.5, rope, qkv_bias=bias),),
        Mlp(config.size("ffn_hidden_size"), "silu", gated=True),
        Norms(before_mixer=norm, before_ffn=norm),
    )
    return ModelSpec(
        vocab=config.size("padded_vocab_size"),
        width=width,
        layers=(layer,) * config.size("num_layers"),
        final_norm=norm,
        tied=config.opt("tie_word_embeddings", bool, False),
        max_positions=config.size("seq_length"),
    )


_GLM_RULES = (
    *EMBED_RULES,
    *ATTENTION_RULES,
    *PRE_NORM_RULES,
    *fused_linear("[model.]layers.{l}.mlp.gate_up_proj", "layers.{l}.ffn.gate", "layers.{l}.ffn.up"),
    *linear("[model.]layers.{l}.mlp.down_proj", "layers.{l}.ffn.down"),
)

GLM = Family(_glm, _GLM_RULES, answers=AnswerFormat(tools="glm45"))
GLM4 = Family(
    _glm4,
    (
        *_GLM_RULES,
        Rename("[model.]layers.{l}.post_self_attn_layernorm.weight", "layers.{l}.norms.after_mixer"),
        Rename("[model.]layers.{l}.post_mlp_layernorm.weight", "layers.{l}.norms.after_ffn"),
    ),
)

_GLM_SOURCE = "[transformer.]encoder.layers.{l}"
_GLM_QKV = tuple("layers.{l}.mixers.0." + name for name in "qkv")

CHATGLM = Family(
    _chatglm,
    (
        Rename("[transformer.]embedding.word_embeddings.weight", "embed"),
        Rename("[transformer.]output_layer.weight", "head"),
        Rename("[transformer.]encoder.final_layernorm.weight", "final_norm"),
        Rename(f"{_GLM_SOURCE}.input_layernorm.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_GLM_SOURCE}.post_attention_layernorm.weight", "layers.{l}.norms.before_ffn"),
        *fused_linear(f"{_GLM_SOURCE}.self_attention.query_key_value", *_GLM_QKV),
        Rename(f"{_GLM_SOURCE}.self_attention.dense.weight", "layers.{l}.mixers.0.o"),
        *fused_linear(f"{_GLM_SOURCE}.mlp.dense_h_to_4h", "layers.{l}.ffn.gate", "layers.{l}.ffn.up"),
        Rename(f"{_GLM_SOURCE}.mlp.dense_4h_to_h.weight", "layers.{l}.ffn.down"),
    ),
    ignored=("*.rotary_pos_emb.inv_freq", "transformer.output_layer.weight"),
    heads=("score.*", "classifier_head.*", "transformer.output_layer.*"),
)


# Phi.


def _phi3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.opt_size("original_max_position_embeddings", 4096)  # The RoPE scaling reads the key again.
    config.expect("full_attn_mod", 1)
    config.expect("interpolate_factor", 1)
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, window=config.window(None))
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-5))


def _phi(config: HfConfig) -> ModelSpec:
    attention = rotary_attention(config, config.size("hidden_size"), partial=0.5)
    attention = replace(attention, qkv_bias=True, out_bias=True)
    if attention.rope is not None:
        config.expect("rotary_dim", attention.rope.dim)  # Early files state it beside the factor.
    norm = layer_norm(config)
    if config.opt("qk_layernorm", bool, False):
        attention = replace(attention, qk_norm=norm)
    layer = Layer((attention,), plain_mlp(config, "gelu_new", bias=True), Norms(before_mixer=norm), parallel=True)
    return replace(decoder(config, [layer] * config.size("num_hidden_layers"), norm), head_bias=True)


PHI = Family(
    _phi,
    (
        *EMBED_RULES,
        Rename("lm_head.bias", "head_bias"),
        *linear("[model.]final_layernorm", "final_norm"),
        *ATTENTION_RULES,
        *linear("[model.]layers.{l}.self_attn.dense", "layers.{l}.mixers.0.o"),
        *linear("[model.]layers.{l}.self_attn.q_layernorm", "layers.{l}.mixers.0.q_norm"),
        *linear("[model.]layers.{l}.self_attn.k_layernorm", "layers.{l}.mixers.0.k_norm"),
        *PRE_NORM_RULES,
        *linear("[model.]layers.{l}.mlp.fc1", "layers.{l}.ffn.up"),
        *linear("[model.]layers.{l}.mlp.fc2", "layers.{l}.ffn.down"),
    ),
)

PHI3 = Family(
    _phi3,
    (
        *EMBED_RULES,
        *PRE_NORM_RULES,
        *fused_linear(
            "model.layers.{l}.self_attn.qkv_proj",
            "layers.{l}.mixers.0.q",
            "layers.{l}.mixers.0.k",
            "layers.{l}.mixers.0.v",
        ),
        *linear("model.layers.{l}.self_attn.o_proj", "layers.{l}.mixers.0.o"),
        *fused_linear("model.layers.{l}.mlp.gate_up_proj", "layers.{l}.ffn.gate", "layers.{l}.ffn.up"),
        *linear("model.layers.{l}.mlp.down_proj", "layers.{l}.ffn.down"),
    ),
    answers=AnswerFormat(tools="phi4_mini_json"),
)
