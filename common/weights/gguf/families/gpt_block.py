"""Decoders with layer norms, ungated or parallel blocks, learned positions or ALiBi: their configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.decoder_keys import ATTENTION_BIAS, BIASES, LAYER, LAYER_NORM, RMS, DecoderKeys, windows
from pagoda.common.weights.gguf.metadata import Config, Metadata, has_tensor, rope, rows


def _gpt2(metadata: Metadata) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **_gpt2_keys(metadata),
        "activation_function": "gelu_new",
    }


def _starcoder(metadata: Metadata) -> Config:
    heads = metadata.need("attention.head_count", int)
    shared = metadata.opt("attention.head_count_kv", int, heads) == 1
    return {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        **_gpt2_keys(metadata),
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": shared,
    }


def _gpt2_keys(metadata: Metadata) -> Config:
    return {
        "n_embd": metadata.need("embedding_length", int),
        "n_layer": metadata.need("block_count", int),
        "n_head": metadata.need("attention.head_count", int),
        "n_inner": metadata.need("feed_forward_length", int),
        "n_positions": metadata.need("context_length", int),
        "layer_norm_epsilon": metadata.need(LAYER, float),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not has_tensor(metadata, "output.weight"),
    }


def _bloom(metadata: Metadata) -> Config:
    width = _wide_ffn(metadata)
    metadata.ignore("attention.head_count_kv")
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": width,
        "n_layer": metadata.need("block_count", int),
        "n_head": metadata.need("attention.head_count", int),
        "seq_length": metadata.need("context_length", int),
        "layer_norm_epsilon": metadata.need(LAYER, float),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not has_tensor(metadata, "output.weight"),
    }


def _mpt(metadata: Metadata) -> Config:
    width = _wide_ffn(metadata)
    alibi = metadata.opt("attention.max_alibi_bias", float, 0.0)
    if not alibi:
        raise ModelError(f"{metadata.file.path}: MPT without ALiBi is not supported")
    heads = metadata.need("attention.head_count", int)
    if metadata.opt("attention.head_count_kv", int, heads) != heads:
        raise ModelError(f"{metadata.file.path}: MPT with fewer KV heads is not supported")
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "d_model": width,
        "n_layers": metadata.need("block_count", int),
        "n_heads": heads,
        "max_seq_len": metadata.need("context_length", int),
        "layer_norm_epsilon": metadata.need(LAYER, float),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not has_tensor(metadata, "output.weight"),
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": alibi,
            "clip_qkv": metadata.opt("attention.clamp_kqv", float, 0.0) or None,
        },
    }


def _wide_ffn(metadata: Metadata) -> int:
    """Return the width of a model whose ffn is four times as wide."""
    width = metadata.need("embedding_length", int)
    if metadata.need("feed_forward_length", int) != 4 * width:
        raise ModelError(f"{metadata.file.path}: metadata feed_forward_length other than 4 widths is not supported")
    return width


def _falcon(metadata: Metadata) -> Config:
    width = _wide_ffn(metadata)
    heads = metadata.need("attention.head_count", int)
    two_norms = has_tensor(metadata, "blk.0.attn_norm_2.weight")
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "hidden_size": width,
        "num_hidden_layers": metadata.need("block_count", int),
        "num_attention_heads": heads,
        "num_kv_heads": metadata.opt("attention.head_count_kv", int, heads),
        "layer_norm_epsilon": metadata.need(LAYER, float),
        "max_position_embeddings": metadata.need("context_length", int),
        "new_decoder_architecture": True,  # The older architecture is a special case of it.
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "bias": has_tensor(metadata, "blk.0.attn_qkv.bias"),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not has_tensor(metadata, "output.weight"),
        **rope(metadata, width // heads),
    }


CONFIGS: Final[Mapping[str, Callable[[Metadata], Config]]] = {
    "phi2": DecoderKeys("PhiForCausalLM", "phi", LAYER_NORM, fixed={"hidden_act": "gelu_new"}, partial=True),
    "nemotron": DecoderKeys(
        "NemotronForCausalLM",
        "nemotron",
        ("norm_eps", LAYER),
        fixed={"hidden_act": "relu2"},
        present=BIASES,
        ignored=(RMS,),
        partial=True,
    ),
    "jais2": DecoderKeys("Jais2ForCausalLM", "jais2", LAYER_NORM, fixed={"hidden_act": "relu2"}, present=BIASES),
    "starcoder2": DecoderKeys(
        "Starcoder2ForCausalLM",
        "starcoder2",
        ("norm_epsilon", LAYER),
        fixed={"hidden_act": "gelu_pytorch_tanh"},
        present={"use_bias": "blk.0.attn_q.bias"},
    ),
    "stablelm": DecoderKeys(
        "StableLmForCausalLM",
        "stablelm",
        LAYER_NORM,
        present={"use_qkv_bias": "blk.0.attn_q.bias", "qk_layernorm": "blk.0.attn_q_norm.weight"},
        ignored=("use_parallel_residual",),
        partial=True,
        more=lambda metadata, _: {"use_parallel_residual": not has_tensor(metadata, "blk.0.ffn_norm.weight")},
    ),
    "orion": DecoderKeys("OrionForCausalLM", "orion", ("rms_norm_eps", LAYER), ignored=(RMS,)),
    "command-r": DecoderKeys(
        "CohereForCausalLM",
        "cohere",
        LAYER_NORM,
        values={"logit_scale": ("logit_scale", float, None)},
        present={**ATTENTION_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "cohere2": DecoderKeys(
        "Cohere2ForCausalLM",
        "cohere2",
        LAYER_NORM,
        values={"logit_scale": ("logit_scale", float, None)},
        more=lambda metadata, config: windows(metadata, config, 4),
    ),
    "gptneox": DecoderKeys(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        LAYER_NORM,
        fixed={"hidden_act": "gelu"},
        values={"use_parallel_residual": ("use_parallel_residual", bool, True)},
        present={"attention_bias": "blk.0.attn_qkv.bias"},
        absent=("num_key_value_heads",),
        partial=True,
    ),
    "gpt2": _gpt2,
    "starcoder": _starcoder,
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon": _falcon,
}
