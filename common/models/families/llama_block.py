"""Dense decoders of RMSNorm, RoPE and gated MLPs, as Llama has them.

The families, in the order of this file:

- `AquilaForCausalLM`, `Fairseq2LlamaForCausalLM`, `GritLM`, `LLaMAForCausalLM`, `LlamaForCausalLM`,
  `Ministral3ForCausalLM`, `MistralForCausalLM`, `TeleChat3ForCausalLM`, `XverseForCausalLM`: Llama 1 to 3 and models
  with its block: as fairseq2 writes it, SmolLM2, Mistral (windows), Ministral 3.
- `CwmForCausalLM`, `Ernie4_5ForCausalLM`, `Ernie4_5_ForCausalLM`, `HeliumForCausalLM`, `IQuestCoderForCausalLM`,
  `InternLM3ForCausalLM`, `InternLMForCausalLM`, `PanguEmbeddedForCausalLM`, `SeedOssForCausalLM`: Seed-OSS, InternLM 1
  and 3, IQuestCoder, Ernie 4.5, Helium, CWM, Pangu Embedded: Llama's block with other details.
- `BitNetForCausalLM`: BitNet b1.58: Llama's block with squared ReLU, and norms before the projections out of attention
  and MLP.
- `SmolLM3ForCausalLM`: SmolLM3: Llama's block; every fourth layer has no RoPE.
- `SolarForCausalLM`: Solar Pro: Llama's block; some layers read a blend with what came before an earlier one.
- `Step1ForCausalLM`: Step 1 (Step-Audio's language models): Llama's block with ALiBi by the root of the distance.
- `MiniCPMForCausalLM`, `TeleFLMForCausalLM`: MiniCPM and TeleFLM: Llama's block with factors on embedding, updates and
  logits.
- `GraniteForCausalLM`, `HyperCLOVAXForCausalLM`: Granite and HyperCLOVA X (dense): Llama's block with multipliers of
  embedding, scores, updates and logits.
- `HunYuanDenseV1ForCausalLM`: Hunyuan (dense): Llama's block with a norm of q and k after RoPE.
- `DeciLMForCausalLM`: DeciLM and Nemotron-NAS (Llama-Nemotron Super and Ultra): Llama's block, pruned and sized layer
  by layer.
- `ApertusForCausalLM`: Apertus: Llama's block with norms of q and k, and an ungated MLP with xIELU.
- `Olmo2ForCausalLM`, `Olmo3ForCausalLM`, `OlmoForCausalLM`: OLMo 1: LayerNorm without weights, q, k, v clamped. OLMo 2,
  3: norms after mixer and ffn, qk norm over all heads.
- `Exaone4ForCausalLM`, `ExaoneForCausalLM`: EXAONE 3: Llama's block. EXAONE 4: norms after mixer and ffn, qk norm;
  beside layers with windows, no RoPE.
- `MuseGlimmerForCausalLM`: Muse Glimmer: a normed embedding, four norms, norms of q and k without weights, an output
  gate; RoPE in layers with windows alone.
- `Plamo3ForCausalLM`: PLaMo 3: four norms whose weights are stored without their offsets, norms on q and k, windows in
  most layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from pagoda.common.models import hf_config
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    FOUR_NORM_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    AnswerFormat,
    Family,
    Rename,
    Shift,
    decoder,
    fused_linear,
    gated_mlp,
    grouped_attention,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention, QueryGrowth
from pagoda.common.models.mixers.attention import alibi_slopes
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Blend, Embedding, Layer, Mlp, ModelSpec, Norms, Xielu

# Llama and Mistral.


def llama(config: HfConfig, *, tied: bool = False) -> ModelSpec:
    """Return Llama's spec. `tied`: the family's default."""
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    attention = replace(rotary_attention(config, config.size("hidden_size")), qkv_bias=bias, out_bias=bias)
    ffn = gated_mlp(config, bias=config.opt("mlp_bias", bool, False))
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, rms_norm(config, 1e-6), tied=tied)


def _mistral(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, window=config.window(4096))
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-6))


def _fairseq2(config: HfConfig) -> ModelSpec:
    """The same with RoPE on interleaved channels."""
    spec = llama(config)
    attention = spec.layers[0].attention
    assert attention.rope is not None
    layer = replace(spec.layers[0], mixers=(replace(attention, rope=replace(attention.rope, interleaved=True)),))
    return replace(spec, layers=(layer,) * len(spec.layers))


def _ministral3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    head_dim = hf_config.head_dim(config, width, config.size("num_attention_heads"))
    rope = hf_config.rope(config, head_dim, read_elsewhere=(_GROWTH, "max_position_embeddings"))
    attention = replace(grouped_attention(config, width, rope), window=config.window(None))
    section = hf_config.rope_section(config)
    if section is not None and (rate := section.opt(_GROWTH, float, 0.0)):
        growth = QueryGrowth(rate, section.size("original_max_position_embeddings"))
        attention = replace(attention, query_growth=growth)
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-5))


_GROWTH: Final = "llama_4_scaling_beta"
"""Key of `rope_parameters`: the rate at which queries grow with their position."""

LLAMA_RULES = (*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES, *PRE_NORM_RULES)

_LLAMA_LAYER = "decoder.layers.{l}"
_FAIRSEQ2_RULES = (
    Rename("decoder_frontend.embed.weight", "embed"),
    Rename("final_proj.weight", "head"),
    Rename("decoder.layer_norm.weight", "final_norm"),
    Rename(f"{_LLAMA_LAYER}.self_attn_layer_norm.weight", "layers.{l}.norms.before_mixer"),
    Rename(f"{_LLAMA_LAYER}.ffn_layer_norm.weight", "layers.{l}.norms.before_ffn"),
    *(
        rule
        for part in "qkv"
        for rule in linear(f"{_LLAMA_LAYER}.self_attn.{part}_proj", f"layers.{{l}}.mixers.0.{part}")
    ),
    *linear(f"{_LLAMA_LAYER}.self_attn.output_proj", "layers.{l}.mixers.0.o"),
    *linear(f"{_LLAMA_LAYER}.ffn.gate_proj", "layers.{l}.ffn.gate"),
    *linear(f"{_LLAMA_LAYER}.ffn.inner_proj", "layers.{l}.ffn.up"),
    *linear(f"{_LLAMA_LAYER}.ffn.output_proj", "layers.{l}.ffn.down"),
)

FAIRSEQ2 = Family(_fairseq2, _FAIRSEQ2_RULES, ignored=("final_proj.weight",))
LLAMA = Family(llama, LLAMA_RULES)
MINISTRAL3 = Family(_ministral3, LLAMA_RULES)
MISTRAL = Family(_mistral, LLAMA_RULES)


# Llama's block with other details.


def _llama_like(
    config: HfConfig, *, qkv_bias: bool, out_bias: bool, mlp_bias: bool, tied: bool = False, **rope: Any
) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"), **rope)
    attention = replace(attention, qkv_bias=qkv_bias, out_bias=out_bias)
    ffn = gated_mlp(config, bias=mlp_bias)
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, rms_norm(config, 1e-6), tied=tied)


def _seed_oss(config: HfConfig) -> ModelSpec:
    config.default("head_dim", 128)
    return _llama_like(
        config,
        qkv_bias=config.opt("attention_bias", bool, True),
        out_bias=config.opt("attention_out_bias", bool, False),
        mlp_bias=config.opt("mlp_bias", bool, False),
    )


def _internlm3(config: HfConfig) -> ModelSpec:
    config.alias("qkv_bias", "attention_bias")
    config.alias("bias", "mlp_bias")
    config.default("rms_norm_eps", 1e-5)
    bias = config.opt("bias", bool, False)
    return _llama_like(config, qkv_bias=config.opt("qkv_bias", bool, False), out_bias=bias, mlp_bias=bias)


def _iquestcoder(config: HfConfig) -> ModelSpec:
    config.expect("clip_qkv", None)
    config.expect("use_sliding_window", False)
    config.ignore("sliding_window", "max_window_layers")
    config.default("rms_norm_eps", 1e-5)
    bias = config.opt("attention_bias", bool, False)
    return _llama_like(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.opt("mlp_bias", bool, False))


def ernie_keys(config: HfConfig) -> None:
    """Check the keys of Ernie 4.5's own code: positions are whole and of one axis, norms are RMSNorm."""
    config.expect("compression_ratio", 1.0)
    config.expect("use_rmsnorm", True)
    config.expect("rope_3d", False)
    # The first means nothing without rope_3d, the second nothing without biases.
    config.ignore("freq_allocation", "weight_share_add_bias")


def _ernie(config: HfConfig) -> ModelSpec:
    ernie_keys(config)
    config.default("rms_norm_eps", 1e-5)
    bias = config.opt("use_bias", bool, False)
    return _llama_like(
        config, qkv_bias=bias, out_bias=bias, mlp_bias=bias, tied=True, theta=500_000.0, interleaved=True
    )


def _helium(config: HfConfig) -> ModelSpec:
    config.default("rms_norm_eps", 1e-8)
    return _llama_like(
        config,
        qkv_bias=config.opt("attention_bias", bool, False),
        out_bias=False,
        mlp_bias=config.opt("mlp_bias", bool, False),
        theta=100_000.0,
        interleaved=True,
    )


def _cwm(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.default("rms_norm_eps", 1e-5)
    spec = _llama_like(
        config, qkv_bias=False, out_bias=False, mlp_bias=config.opt("mlp_bias", bool, False), theta=1_000_000.0
    )
    windowed = replace(spec.layers[0].attention, window=config.window(8192))
    pattern = ["sliding_attention" if layer % 4 else "full_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    stack = (
        replace(layer, mixers=(windowed,)) if kind == "sliding_attention" else layer
        for layer, kind in zip(spec.layers, kinds)
    )
    return replace(spec, layers=tuple(stack))


def _pangu(config: HfConfig) -> ModelSpec:
    bias = config.opt("bias", bool, True)
    return _llama_like(config, qkv_bias=bias, out_bias=bias, mlp_bias=False)


PANGU = Family(_pangu, LLAMA_RULES)
SEED_OSS = Family(_seed_oss, LLAMA_RULES)
INTERNLM3 = Family(_internlm3, LLAMA_RULES)
IQUESTCODER = Family(_iquestcoder, LLAMA_RULES)
ERNIE = Family(_ernie, LLAMA_RULES)
HELIUM = Family(_helium, LLAMA_RULES)
CWM = Family(_cwm, LLAMA_RULES)


# BitNet b1.58.


def _bitnet(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-5)
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"), theta=500_000.0)
    attention = replace(attention, out_norm=norm, qkv_bias=bias, out_bias=bias)
    activation = config.activation("hidden_act", "relu2")
    ffn = Mlp(config.size("intermediate_size"), activation, gated=True, inner_norm=norm)
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, norm)


BITNET = Family(
    _bitnet,
    (
        *LLAMA_RULES,
        Rename("[model.]layers.{l}.self_attn.attn_sub_norm.weight", "layers.{l}.mixers.0.out_norm"),
        Rename("[model.]layers.{l}.mlp.ffn_sub_norm.weight", "layers.{l}.ffn.inner_norm"),
    ),
)


# SmolLM3.


def _smollm3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    every = config.opt_size("no_rope_layer_interval", 4)
    with_rope = config.opt("no_rope_layers", list, [int((layer + 1) % every != 0) for layer in range(layers)])
    if len(with_rope) != layers:
        raise config.error("no_rope_layers", f"has {len(with_rope)} entries for {layers} layers")
    window = config.window(None) if config.opt("use_sliding_window", bool, False) else None
    config.ignore("sliding_window", "max_window_layers")
    pattern = ["full_attention" if rope or window is None else "sliding_attention" for rope in with_rope]
    kinds = config.layer_types(layers, pattern)
    attention = rotary_attention(config, config.size("hidden_size"), theta=2_000_000.0)
    attention = replace(attention, qkv_bias=bias, out_bias=bias)
    mixers = [
        replace(
            attention,
            rope=attention.rope if rope else None,
            window=window if kind == "sliding_attention" else None,
        )
        for rope, kind in zip(with_rope, kinds)
    ]
    ffn = gated_mlp(config, bias=config.opt("mlp_bias", bool, False))
    return pre_norm_decoder(config, mixers, [ffn] * layers, rms_norm(config, 1e-6), tied=True)


SMOLLM3 = Family(_smollm3, LLAMA_RULES)


# Solar Pro.


def _solar(config: HfConfig) -> ModelSpec:
    config.default("rms_norm_eps", 1e-5)
    # The window is that of the training; the model's code does not apply it.
    config.expect("sliding_window", None, 2047)
    spec = llama(config)
    shares = config.opt("bskcn_tv", list, [0.9, 0.8])  # The two shares apply in training and after it.
    if len(shares) != 2 or not all(type(share) in (int, float) for share in shares):
        raise config.error("bskcn_tv", f"is {shares}; it must be two numbers")
    blends: dict[int, Blend] = {}
    for begin, end in (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")):
        begins = config.opt(begin, list, [])
        ends = config.opt(end, list, [])
        for layer in ends:
            earlier = [first for first in begins if first < layer]
            if not earlier or layer in blends or layer in begins:
                raise config.error(end, f"is {ends}; each must follow one of {begin}, {begins}, and come once")
            blends[layer] = Blend(max(earlier), float(shares[1]))
    layers = (replace(layer, blend=blends.get(index)) for index, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


SOLAR = replace(LLAMA, build=_solar)


# Step 1.


def _step1(config: HfConfig) -> ModelSpec:
    config.alias("num_key_value_heads", "num_attention_groups")
    config.alias("max_position_embeddings", "max_seq_len")
    config.default("num_key_value_heads", 1)
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    attention = grouped_attention(config, config.size("hidden_size"), None)
    attention = replace(attention, qkv_bias=bias, out_bias=bias, alibi_root=True)
    attention = replace(attention, alibi_slopes=alibi_slopes(attention.heads))
    ffn = gated_mlp(config, bias=config.opt("mlp_bias", bool, False))
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, rms_norm(config, 1e-5))


STEP1 = replace(LLAMA, build=_step1)


# MiniCPM and TeleFLM.


def _minicpm(config: HfConfig) -> ModelSpec:
    config.expect("num_experts", 0)
    config.expect("sparse_config", None)
    return scaled(config, llama(config, tied=True), embedding=1.0, depth=1.0, base=1)


def scaled(config: HfConfig, spec: ModelSpec, *, embedding: float, depth: float, base: int) -> ModelSpec:
    """Return the spec with factors on embedding, updates and logits. `embedding`, `depth`, `base`: the defaults."""
    config.ignore("mup_denominator")  # Only training reads this key.
    scale = config.opt("scale_depth", float, depth) / len(spec.layers) ** 0.5
    return replace(
        spec,
        layers=tuple(replace(layer, residual_scale=scale) for layer in spec.layers),
        embedding=Embedding(scale=config.opt("scale_emb", float, embedding)),
        logit_scale=config.opt_size("dim_model_base", base) / spec.width,
    )


def _teleflm(config: HfConfig) -> ModelSpec:
    spec = llama(config, tied=False)
    embedding = config.opt("input_mult", float, 1.0)
    output = config.opt("output_mult", float, 1.0)
    output /= config.opt("mup_scale_factor", float, 1.0)
    if not config.opt("use_mup", bool, False):
        return spec
    return replace(spec, embedding=Embedding(scale=embedding), logit_scale=output)


MINICPM = Family(_minicpm, LLAMA_RULES)
TELEFLM = Family(_teleflm, LLAMA_RULES)


# Granite and HyperCLOVA X.


def _granite(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-6)
    spec = _granite_model(config, Norms(before_mixer=norm, before_ffn=norm), norm, score_scale=1.0)
    return replace(spec, logit_scale=1 / config.opt("logits_scaling", float, 1.0))


def _hyperclovax(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-6)
    after = norm if config.opt("use_post_norm", bool, True) else None
    spec = _granite_model(config, Norms(norm, after, norm, after), norm, score_scale=None)
    return replace(spec, logit_scale=config.opt("logits_scaling", float, 1.0))


def _granite_model(config: HfConfig, norms: Norms, final_norm: Norm, *, score_scale: float | None) -> ModelSpec:
    """`score_scale`: the family's default factor on q.k; None: 1 / sqrt(head dim)."""
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"))
    scale = config.opt("attention_multiplier", float, attention.scale if score_scale is None else score_scale)
    layer = Layer(
        (replace(attention, scale=scale, qkv_bias=bias, out_bias=bias),),
        gated_mlp(config, bias=config.opt("mlp_bias", bool, False)),
        norms,
        residual_scale=config.opt("residual_multiplier", float, 1.0),
    )
    spec = decoder(config, [layer] * config.size("num_hidden_layers"), final_norm)
    return replace(spec, embedding=Embedding(scale=config.opt("embedding_multiplier", float, 1.0)))


POST_NORM_RULES = (
    Rename("[model.]layers.{l}.post_norm1.weight", "layers.{l}.norms.after_mixer"),
    Rename("[model.]layers.{l}.post_norm2.weight", "layers.{l}.norms.after_ffn"),
)

GRANITE = Family(_granite, LLAMA_RULES, answers=AnswerFormat(tools="granite"))
HYPERCLOVAX = Family(_hyperclovax, (*LLAMA_RULES, *POST_NORM_RULES))


# Hunyuan.

HUNYUAN_UNUSED = (
    *("cla_share_factor", "class_num", "dense_list", "pool_type", "num_media_embeds", "org_vocab_size"),
    *("im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "pad_id", "text_end_id", "text_start_id"),
)


def _hunyuan(config: HfConfig) -> ModelSpec:
    config.expect("num_experts", 1)
    config.ignore(*HUNYUAN_UNUSED)
    layers = config.size("num_hidden_layers")
    attention = hunyuan_attention(config)
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-5))


def hunyuan_attention(config: HfConfig) -> Attention:
    """Return the attention of every layer; without layers that read another's K and V."""
    for key, supported in (
        ("add_classification_head", False),
        ("norm_type", "rms"),
        ("use_cla", False),
        ("use_qk_norm", True),
        ("use_rotary_pos_emb", True),
    ):
        config.expect(key, supported)
    config.alias("head_dim", "attention_head_dim")
    bias = config.opt("attention_bias", bool, False)
    return replace(
        rotary_attention(config, config.size("hidden_size")),
        qk_norm=rms_norm(config, 1e-5),
        qk_norm_after_rope=True,
        qkv_bias=bias,
        out_bias=bias,
    )


HUNYUAN_RULES = (
    *LLAMA_RULES,
    Rename("[model.]layers.{l}.self_attn.query_layernorm.weight", "layers.{l}.mixers.0.q_norm"),
    Rename("[model.]layers.{l}.self_attn.key_layernorm.weight", "layers.{l}.mixers.0.k_norm"),
)

HUNYUAN = Family(_hunyuan, HUNYUAN_RULES)


# DeciLM and Nemotron-NAS.


def _nemotron_nas(config: HfConfig) -> ModelSpec:
    config.expect("architecture", "transformer")
    count = config.size("num_hidden_layers")
    heads = config.size("num_attention_heads")
    if "block_configs" not in config:  # DeciLM-7B has no `block_configs`.
        kv_heads = config.per_layer("num_key_value_heads_per_layer", count, heads)
        spec = llama(config)
        layers = [_nas_resized(config, layer, kv, heads) for layer, kv in zip(spec.layers, kv_heads)]
        return replace(spec, layers=tuple(layers))
    blocks = config.need("block_configs", list)
    if len(blocks) != count or not all(isinstance(block, dict) for block in blocks):
        raise config.error("block_configs", f"has {len(blocks)} entries, not an object for each of {count} layers")
    config.default("intermediate_size", 1)  # Each block states its own size.
    spec = llama(config)
    layers = [
        _nas_block(HfConfig(block, label="block_configs"), layer, heads, spec.width)
        for layer, block in zip(spec.layers, blocks)
    ]
    return replace(spec, layers=tuple(layers))


def _nas_resized(config: HfConfig, layer: Layer, kv_heads: int, heads: int) -> Layer:
    """Return the layer with this number of KV heads."""
    if kv_heads < 1 or heads % kv_heads:
        raise config.error("num_key_value_heads_per_layer", f"has {kv_heads}, which does not divide {heads} heads")
    return replace(layer, mixers=(replace(layer.attention, kv_heads=kv_heads),))


def _nas_block(block: HfConfig, layer: Layer, heads: int, width: int) -> Layer:
    """Return the layer with the mixer and the ffn that its block states, each possibly none."""
    block.expect("parallel_blocks", None)
    attention = block.section("attention")
    ffn = block.section("ffn")
    if attention is None or ffn is None:
        raise block.error("attention" if attention is None else "ffn", "is missing")
    mixer = _nas_attention(attention, layer.attention, heads)
    mlp = _nas_mlp(ffn, layer.feed_forward, width)
    block.finish()
    norms = layer.norms
    norms = replace(
        norms, before_mixer=norms.before_mixer if mixer else None, before_ffn=norms.before_ffn if mlp else None
    )
    return replace(layer, mixers=(mixer,) if mixer else (), ffn=mlp, norms=norms)


def _nas_attention(section: HfConfig, attention: Attention, heads: int) -> Attention | None:
    for key in (
        "replace_with_linear",
        "sparsify",
        "window_length",
        "num_sink_tokens",
        "use_prefill_window_in_sink_attention",
    ):
        section.expect(key, False)
    section.expect("unshifted_sink", False)
    per_group = section.opt("n_heads_in_group", int, 0)
    none = section.opt("no_op", bool, False)
    section.finish()
    if none:
        return None
    if per_group < 1 or heads % per_group:
        raise section.error("n_heads_in_group", f"is {per_group}, which does not divide {heads} heads")
    return replace(attention, kv_heads=heads // per_group)


def _nas_mlp(section: HfConfig, mlp: object, width: int) -> Mlp | None:
    assert isinstance(mlp, Mlp), "Llama's"
    for key in ("replace_with_linear", "sparsify"):
        section.expect(key, False)
    multiple = section.opt("ffn_mult", float, 0.0)
    none = section.opt("no_op", bool, False)
    channels = section.opt("intermediate_size", int, 0) or -(-int(2 * multiple * width / 3) // 256) * 256
    activation = section.activation("hidden_act", mlp.activation)
    section.finish()
    return None if none else replace(mlp, width=channels, activation=activation)


NEMOTRON_NAS = replace(LLAMA, build=_nemotron_nas)


# Apertus.


def _apertus(config: HfConfig) -> ModelSpec:
    config.expect("hidden_act", "xielu")
    config.expect("qk_norm", True)
    config.expect("post_norm", False)
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-5)
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"), theta=12_000_000.0)
    attention = replace(attention, qk_norm=norm, qkv_bias=bias, out_bias=bias)
    ffn = Mlp(config.size("intermediate_size"), "silu", gated=False, learned=Xielu())
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, norm)


_APERTUS_LAYER = "[model.]layers.{l}"

APERTUS = Family(
    _apertus,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *QK_NORM_RULES,
        *MLP_RULES,
        Rename(f"{_APERTUS_LAYER}.attention_layernorm.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_APERTUS_LAYER}.feedforward_layernorm.weight", "layers.{l}.norms.before_ffn"),
        Rename(f"{_APERTUS_LAYER}.mlp.act_fn.alpha_p", "layers.{l}.ffn.curvature_p"),
        Rename(f"{_APERTUS_LAYER}.mlp.act_fn.alpha_n", "layers.{l}.ffn.curvature_n"),
    ),
    ignored=("*.mlp.act_fn.beta", "*.mlp.act_fn.eps", "*.rotary_emb.inv_freq", "lm_head.weight"),
)


# OLMo.


def _olmo2(config: HfConfig) -> ModelSpec:
    attention = rotary_attention(config, config.size("hidden_size"))
    return _olmo_model(config, [attention] * config.size("num_hidden_layers"))


def _olmo3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    theta = config.opt("rope_theta", float, 500_000.0)
    head_dim = hf_config.head_dim(config, width, config.size("num_attention_heads"))
    ropes = hf_config.rope_per_layer_type(config, head_dim, full=theta, sliding=theta)
    window = config.window(4096)
    pattern = ["sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(layers)]
    full = grouped_attention(config, width, ropes["full_attention"])
    windowed = replace(full, rope=ropes["sliding_attention"], window=window)
    kinds = config.layer_types(layers, pattern)
    return _olmo_model(config, [windowed if kind == "sliding_attention" else full for kind in kinds])


def _olmo_model(config: HfConfig, mixers: Iterable[Attention]) -> ModelSpec:
    norm = rms_norm(config, 1e-5)
    bias = config.opt("attention_bias", bool, False)
    ffn = gated_mlp(config)
    layers = (
        Layer(
            (replace(mixer, qk_norm=norm, qk_norm_over="full", qkv_bias=bias, out_bias=bias),),
            ffn,
            Norms(after_mixer=norm, after_ffn=norm),
        )
        for mixer in mixers
    )
    return decoder(config, layers, norm)


def _olmo(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    attention = replace(
        rotary_attention(config, config.size("hidden_size")),
        qkv_bias=bias,
        out_bias=bias,
        qkv_clip=config.nullable("clip_qkv", float),
    )
    norm = Norm(1e-5, kind="layer", scale=False)
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, norm)


OLMO = Family(_olmo, (*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES))
OLMO2 = Family(_olmo2, (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MLP_RULES, *FOUR_NORM_RULES))
OLMO3 = replace(OLMO2, build=_olmo3)


# EXAONE.


def _exaone4(config: HfConfig) -> ModelSpec:
    config.ignore("num_nextn_predict_layers")
    norm = rms_norm(config, 1e-5)
    ffn = gated_mlp(config)
    norms = Norms(after_mixer=norm, after_ffn=norm)
    return decoder(config, (Layer((mixer,), ffn, norms) for mixer in exaone4_attentions(config)), norm)


def exaone4_attentions(config: HfConfig) -> list[Attention]:
    """Return the attention of each layer: with windows in some, then the others have no RoPE."""
    layers = config.size("num_hidden_layers")
    full = replace(rotary_attention(config, config.size("hidden_size")), qk_norm=rms_norm(config, 1e-5))
    windowed = full
    if (window := config.window(4096)) is not None:
        full, windowed = replace(full, rope=None), replace(full, window=window)
    if "layer_types" in config or window is None:
        config.ignore("sliding_window_pattern")
    else:
        config.expect("sliding_window_pattern", 4, "LLLG")
    pattern = ["sliding_attention" if (layer + 1) % 4 and window else "full_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    return [windowed if kind == "sliding_attention" else full for kind in kinds]


def _exaone(config: HfConfig) -> ModelSpec:
    config.alias("num_hidden_layers", "num_layers")
    config.alias("rms_norm_eps", "layer_norm_epsilon")
    config.alias("hidden_act", "activation_function")
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"))
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-5))


_EXAONE_SOURCE = "[transformer.]h.{l}"

EXAONE = Family(
    _exaone,
    (
        Rename("[transformer.]wte.weight", "embed"),
        Rename("lm_head.weight", "head"),
        Rename("[transformer.]ln_f.weight", "final_norm"),
        Rename(f"{_EXAONE_SOURCE}.ln_1.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_EXAONE_SOURCE}.ln_2.weight", "layers.{l}.norms.before_ffn"),
        *(Rename(f"{_EXAONE_SOURCE}.attn.attention.{x}_proj.weight", "layers.{l}.mixers.0." + x) for x in "qkv"),
        Rename(f"{_EXAONE_SOURCE}.attn.attention.out_proj.weight", "layers.{l}.mixers.0.o"),
        Rename(f"{_EXAONE_SOURCE}.mlp.c_fc_0.weight", "layers.{l}.ffn.gate"),
        Rename(f"{_EXAONE_SOURCE}.mlp.c_fc_1.weight", "layers.{l}.ffn.up"),
        Rename(f"{_EXAONE_SOURCE}.mlp.c_proj.weight", "layers.{l}.ffn.down"),
    ),
    ignored=("*.rotary.inv_freq", "*.rotary_emb.inv_freq", "lm_head.weight"),
)
EXAONE4 = Family(
    _exaone4,
    (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MLP_RULES, *FOUR_NORM_RULES),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "mtp.*"),  # The module `mtp` only proposes drafts.
)


# PLaMo 3.


def _plamo3(config: HfConfig) -> ModelSpec:
    config.expect("linear_type", "normal")
    config.alias("sliding_window", "window_size")
    config.alias("rope_local_base_freq", "rope_local_theta")
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    norm = rms_norm(config, 1e-6)
    ropes = hf_config.rope_per_layer_type(config, config.size("head_dim"), full=1_000_000.0, sliding=10_000.0)
    full = replace(grouped_attention(config, width, ropes["full_attention"]), qk_norm=norm)
    windowed = replace(full, rope=ropes["sliding_attention"], window=config.window(2048))
    every = config.opt_size("sliding_window_pattern", 8)
    kinds = config.layer_types(
        layers, ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(layers)]
    )
    norms = Norms(norm, norm, norm, norm)
    ffn = gated_mlp(config)
    stack = (Layer((windowed if kind == "sliding_attention" else full,), ffn, norms) for kind in kinds)
    return decoder(config, stack, norm)


_PLAMO3_LAYER = "model.layers.layers.{l}"
_PLAMO3_MIXER = "layers.{l}.mixers.0"
_PLAMO3_NORMS = "layers.{l}.norms"

PLAMO3 = Family(
    _plamo3,
    (
        Rename("model.embed_tokens.weight", "embed"),
        Rename("lm_head.weight", "head"),
        Shift("model.norm.weight", "final_norm", 1.0),
        Shift(f"{_PLAMO3_LAYER}.pre_mixer_norm.weight", f"{_PLAMO3_NORMS}.before_mixer", 1.0),
        Shift(f"{_PLAMO3_LAYER}.post_mixer_norm.weight", f"{_PLAMO3_NORMS}.after_mixer", 1 / 5),
        Shift(f"{_PLAMO3_LAYER}.pre_mlp_norm.weight", f"{_PLAMO3_NORMS}.before_ffn", 1.0),
        Shift(f"{_PLAMO3_LAYER}.post_mlp_norm.weight", f"{_PLAMO3_NORMS}.after_ffn", 5**-1.5),
        Shift(f"{_PLAMO3_LAYER}.mixer.q_norm.weight", f"{_PLAMO3_MIXER}.q_norm", 1.0),
        Shift(f"{_PLAMO3_LAYER}.mixer.k_norm.weight", f"{_PLAMO3_MIXER}.k_norm", 1.0),
        *fused_linear(f"{_PLAMO3_LAYER}.mixer.qkv_proj", *(f"{_PLAMO3_MIXER}.{part}" for part in "qkv")),
        Rename(f"{_PLAMO3_LAYER}.mixer.o_proj.weight", f"{_PLAMO3_MIXER}.o"),
        *fused_linear(f"{_PLAMO3_LAYER}.mlp.gate_up_proj", "layers.{l}.ffn.gate", "layers.{l}.ffn.up"),
        Rename(f"{_PLAMO3_LAYER}.mlp.down_proj.weight", "layers.{l}.ffn.down"),
    ),
)


# Muse Glimmer.


def _muse_glimmer(config: HfConfig) -> ModelSpec:
    config.expect("attention_bias", False)
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    plain = rms_norm(config, 1e-5)
    bare = replace(plain, scale=False)
    before = replace(plain, unit_offset=True)
    after = Norm(config.opt("post_norm_eps", float, 1e-8), unit_offset=True)
    fourths = [(layers - 1 - layer) % 4 == 0 for layer in range(layers)]
    kinds = config.layer_types(layers, ["full_attention" if each else "sliding_attention" for each in fourths])
    attention = rotary_attention(config, width)
    attention = replace(
        attention,
        scale=attention.scale * config.opt("qk_scale_factor", float, 3.87),  # It multiplies the normed queries.
        qk_norm=bare,
        output_gate=True,
    )
    rotates = _muse_rotates(config, attention, fourths)
    window = config.window(2048)
    mixers = [
        replace(
            attention, window=window if kind == "sliding_attention" else None, rope=attention.rope if turns else None
        )
        for kind, turns in zip(kinds, rotates)
    ]
    ffn = Mlp(config.size("intermediate_size"), config.activation("hidden_activation", "silu"), gated=True)
    norms = Norms(before_mixer=before, after_mixer=after, before_ffn=before, after_ffn=after)
    return replace(
        decoder(config, (Layer((mixer,), ffn, norms) for mixer in mixers), plain),
        embedding=Embedding(norm=bare),
        logit_scale=config.opt("output_multiplier", float, 0.19611613513818404),
        logit_softcap=config.opt("final_logit_softcapping", float, 20.0),
    )


def _muse_rotates(config: HfConfig, attention: Attention, fourths: list[bool]) -> list[bool]:
    """Return whether each layer has RoPE: `layer_rope_theta` is its base in each layer, or 0."""
    assert attention.rope is not None, "the attention rotates"
    theta = attention.rope.theta
    thetas = config.opt("layer_rope_theta", list, [0 if each else theta for each in fourths])
    if len(thetas) != len(fourths) or any(base not in (0, theta) for base in thetas):
        raise config.error("layer_rope_theta", f"must have {len(fourths)} entries, each 0 or rope_theta {theta}")
    return [bool(base) for base in thetas]


MUSE_GLIMMER = Family(
    _muse_glimmer,
    (
        *(EMBED_RULES + ATTENTION_RULES + MLP_RULES + FOUR_NORM_RULES),
        Rename("[model.]layers.{l}.self_attn.gate_proj.weight", "layers.{l}.mixers.0.gate"),
    ),
)
