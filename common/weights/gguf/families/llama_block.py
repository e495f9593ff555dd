"""Configs of Llama and decoders of its kind.

InternLM2, EXAONE 3 and Xverse are read as Llama, MiniCPM as Granite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.decoder_keys import (
    ATTENTION_BIAS,
    BIASES,
    LAYER,
    MULTIPLIERS,
    OF_IMAGES,
    RMS,
    DecoderKeys,
    as_float32,
    decoder,
    windows,
)
from pagoda.common.weights.gguf.metadata import Config, Metadata, has_tensor, rope


def _llama(metadata: Metadata) -> Config:
    experts = metadata.opt("expert_count", int, 0)
    window = metadata.opt("attention.sliding_window", int, 0)
    epsilon = ("rms_norm_eps", RMS)
    if experts:
        config = decoder(metadata, "MixtralForCausalLM", "mixtral", epsilon)
        if not has_tensor(metadata, "blk.0.ffn_gate_exps.weight"):
            raise ModelError(f"{metadata.file.path}: keeps its experts in separate tensors; convert it again")
        config |= {"num_local_experts": experts, "num_experts_per_tok": metadata.need("expert_used_count", int)}
    elif window:
        config = decoder(metadata, "MistralForCausalLM", "mistral", epsilon)
    else:
        config = decoder(metadata, "LlamaForCausalLM", "llama", epsilon)
        config |= {key: has_tensor(metadata, tensor) for key, tensor in BIASES.items()}
    if window:
        config["sliding_window"] = window
    if metadata.has("rope.dimension_count") and not metadata.has("attention.key_length"):
        config["head_dim"] = metadata.need("rope.dimension_count", int)
    return config | rope(metadata, config["head_dim"])


def _olmo(metadata: Metadata, config: Config) -> Config:
    if config.pop("epsilon") != as_float32(1e-5):
        raise ModelError(f"{metadata.file.path}: metadata {LAYER} other than 1e-5 is not supported")
    return {"clip_qkv": metadata.opt("attention.clamp_kqv", float, 0.0) or None}


def _olmo2(metadata: Metadata, config: Config) -> Config:
    if not metadata.has("attention.sliding_window"):
        return {}
    theta = metadata.opt("rope.freq_base", float, 500_000.0)
    if metadata.opt("rope.freq_base_swa", float, theta) != theta:
        raise ModelError(
            f"{metadata.file.path}: metadata rope.freq_base_swa other than rope.freq_base is not supported"
        )
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **windows(metadata, config, 4)}


def _exaone4(metadata: Metadata, config: Config) -> Config:
    if not metadata.opt("attention.sliding_window", int, 0):
        return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return windows(metadata, config, 4)


def _baichuan(metadata: Metadata, config: Config) -> Config:
    if config["num_hidden_layers"] == 40:
        raise ModelError(f"{metadata.file.path}: Baichuan 13B, which has ALiBi, is not supported")
    return {}


def _apertus(metadata: Metadata, config: Config) -> Config:
    for key, value in (("xielu.beta", 0.5), ("xielu.eps", -1e-6)):
        if any(abs(number - value) > 1e-8 for number in metadata.floats(key, config["num_hidden_layers"])):
            raise ModelError(f"{metadata.file.path}: metadata {key} other than {value} is not supported")
    return {}


def _glm(metadata: Metadata, config: Config) -> Config:
    return {"attention_bias": any(has_tensor(metadata, f"blk.0.{stem}.bias") for stem in ("attn_q", "attn_qkv"))}


def _smollm3(metadata: Metadata, config: Config) -> Config:
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]}


def granite(metadata: Metadata, config: Config) -> Config:
    return {"attention_multiplier": metadata.opt("attention.scale", float, 0.0) or config["head_dim"] ** -0.5}


def _minicpm(metadata: Metadata, config: Config) -> Config:
    if has_tensor(metadata, "rope_factors_long.weight"):
        raise ModelError(f"{metadata.file.path}: rope_factors_long.weight is not supported in a minicpm model")
    return granite(metadata, config)


def phi3(metadata: Metadata, config: Config) -> Config:
    """Window and LongRoPE of Phi-3 and Phi-3.5-MoE."""
    head_dim = config["head_dim"]
    original = config["max_position_embeddings"]
    dim = metadata.opt("rope.dimension_count", int, head_dim)
    more: Config = {
        "partial_rotary_factor": dim / head_dim,
        "original_max_position_embeddings": metadata.opt("rope.scaling.original_context_length", int, original),
        "sliding_window": metadata.opt("attention.sliding_window", int, 0) or None,
    }
    attention = metadata.opt("rope.scaling.attn_factor", float, 1.0)
    kind = "longrope" if has_tensor(metadata, "rope_factors_long.weight") else "none"
    if kind == "longrope":
        more["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": metadata.file.tensor("rope_factors_short.weight").tolist(),
            "long_factor": metadata.file.tensor("rope_factors_long.weight").tolist(),
            "attention_factor": attention,
        }
    if metadata.opt("rope.scaling.type", str, kind) != kind or (kind == "none" and attention != 1.0):
        raise ModelError(f"{metadata.file.path}: rope scaling without rope_factors_long.weight is not supported here")
    return {**more, "rope_theta": metadata.opt("rope.freq_base", float, 10000.0)}


def _dense_phi3(metadata: Metadata) -> Config:
    config = decoder(metadata, "Phi3ForCausalLM", "phi3", ("rms_norm_eps", RMS))
    return config | phi3(metadata, config)


_LLAMA: Final = DecoderKeys("LlamaForCausalLM", "llama", present=BIASES)


def _qwen1(metadata: Metadata) -> Config:
    config = decoder(metadata, "QWenLMHeadModel", "qwen", ("layer_norm_epsilon", RMS))
    metadata.ignore(LAYER)
    for key in ("rms_norm_eps", "hidden_act", "num_key_value_heads", "tie_word_embeddings"):
        config.pop(key, None)
    theta = rope(metadata, config["head_dim"])["rope_theta"]
    return {**config, "rotary_emb_base": theta, "seq_length": config["max_position_embeddings"]}


def _plamo3(metadata: Metadata, config: Config) -> Config:
    return {
        "window_size": metadata.need("attention.sliding_window", int),
        "sliding_window_pattern": metadata.opt("attention.sliding_window_pattern", int, 8),
        "rope_local_theta": metadata.opt("rope.freq_base_swa", float, 10_000.0),
    }


CONFIGS: Final[Mapping[str, Callable[[Metadata], Config]]] = {
    "qwen": _qwen1,
    "plamo3": DecoderKeys("Plamo3ForCausalLM", "plamo3", theta=1_000_000.0, more=_plamo3),
    "llama": _llama,
    "mistral3": _llama,
    "xverse": _LLAMA,
    "internlm2": _LLAMA,
    "baichuan": DecoderKeys("LlamaForCausalLM", "llama", present=BIASES, more=_baichuan),
    "exaone": DecoderKeys("LlamaForCausalLM", "llama", present=BIASES, ignored=(LAYER,)),
    "pangu-embedded": DecoderKeys("PanguEmbeddedForCausalLM", "PanguEmbedded", present={"bias": "blk.0.attn_q.bias"}),
    "arcee": DecoderKeys("ArceeForCausalLM", "arcee", fixed={"hidden_act": "relu2"}, present=BIASES),
    "smollm3": DecoderKeys("SmolLM3ForCausalLM", "smollm3", present=BIASES, more=_smollm3),
    "seed_oss": DecoderKeys(
        "SeedOssForCausalLM", "seed_oss", present={**BIASES, "attention_out_bias": "blk.0.attn_output.bias"}
    ),
    "ernie4_5": DecoderKeys("Ernie4_5ForCausalLM", "ernie4_5", present={"use_bias": "blk.0.attn_q.bias"}),
    "hunyuan-dense": DecoderKeys("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", present=ATTENTION_BIAS),
    "granite": DecoderKeys("GraniteForCausalLM", "granite", values=MULTIPLIERS, present=BIASES, more=granite),
    "minicpm": DecoderKeys(
        "GraniteForCausalLM",
        "granite",
        values={key: (name, kind, None) for key, (name, kind, _) in MULTIPLIERS.items()},
        present=BIASES,
        more=_minicpm,
    ),
    "exaone4": DecoderKeys("Exaone4ForCausalLM", "exaone4", more=_exaone4),
    "glm4": DecoderKeys("Glm4ForCausalLM", "glm4", partial=True, more=_glm),
    "chatglm": DecoderKeys("GlmForCausalLM", "glm", partial=True, more=_glm),
    "apertus": DecoderKeys(
        "ApertusForCausalLM", "apertus", fixed={"hidden_act": "xielu"}, present=ATTENTION_BIAS, more=_apertus
    ),
    "qwen2": DecoderKeys("Qwen2ForCausalLM", "qwen2"),
    "qwen3": DecoderKeys("Qwen3ForCausalLM", "qwen3", present=ATTENTION_BIAS),
    "qwen2vl": DecoderKeys("Qwen2ForCausalLM", "qwen2", ignored=OF_IMAGES),
    "qwen3vl": DecoderKeys("Qwen3ForCausalLM", "qwen3", present=ATTENTION_BIAS, ignored=OF_IMAGES),
    "olmo": DecoderKeys("OlmoForCausalLM", "olmo", ("epsilon", LAYER), present=ATTENTION_BIAS, more=_olmo),
    "olmo2": DecoderKeys("Olmo2ForCausalLM", "olmo2", fixed={"attention_bias": False}, more=_olmo2),
    "phi3": _dense_phi3,
}
