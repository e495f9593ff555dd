"""Decoders with layer norms, ungated or parallel blocks, learned positions or ALiBi: configs and tensor layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.decoder_keys import ATTENTION_BIAS, BIASES, LAYER, LAYER_NORM, RMS, DecoderKeys, windows
from pagoda.common.weights.gguf.layouts import (
    ATTENTION,
    FUSED_QKV,
    GATED,
    PLAIN,
    PRE_NORMS,
    QK_NORM,
    ROOT,
    TRANSFORMER,
    UNGATED,
    Array,
    RowChange,
    TensorLayout,
    unchanged,
)
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
        "new_decoder_architecture": True,  # of which the older one is a special case
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

# Tensors.


def _swapped(array: Array, config: Mapping[str, Any]) -> Array:
    return array.T if array.ndim == 2 else array


_transposed: Final = RowChange(_swapped, unchanged)


def _grouped(heads_key: str, groups_key: str) -> RowChange:
    """Reorder q, k and v of all heads [(N+2K)*H, ...] so that each KV head follows its query heads."""

    def change(array: Array, config: Mapping[str, Any]) -> Array:
        heads = config[heads_key]
        groups = config[groups_key]
        rows = array.reshape(heads + 2 * groups, -1, *array.shape[1:])
        queries = rows[:heads].reshape(groups, heads // groups, *rows.shape[1:])
        keys, values = (part[:, None] for part in np.split(rows[heads:], 2))
        return np.concatenate([queries, keys, values], axis=1).reshape(array.shape)

    return RowChange(change)


_GPT2_ROOT: Final = {**TRANSFORMER, "position_embd": "transformer.wpe"}
_GPT2_BLOCK: Final = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BLOOM_ROOT: Final = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_BLOOM_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}

LAYOUTS: Final[Mapping[str, TensorLayout]] = {
    "phi2": TensorLayout(
        {**ROOT, "output_norm": "model.final_layernorm"},
        {
            **ATTENTION,
            "attn_output": "self_attn.dense",
            "attn_norm": "input_layernorm",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        split=FUSED_QKV,
    ),
    "nemotron": TensorLayout(ROOT, UNGATED, norm_plus_one=True),
    "jais2": TensorLayout(ROOT, UNGATED),
    "starcoder2": TensorLayout(ROOT, {**ATTENTION, **PRE_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "stablelm": TensorLayout(
        ROOT,
        {
            **PLAIN,
            "attn_q_norm": "self_attn.q_layernorm.norms.{e}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{e}",
        },
    ),
    "command-r": TensorLayout(ROOT, {**ATTENTION, **GATED, **QK_NORM, "attn_norm": "input_layernorm"}),
    "cohere2": TensorLayout(ROOT, {**ATTENTION, **GATED, "attn_norm": "input_layernorm"}),
    "gptneox": TensorLayout(
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        {**_BLOOM_BLOCK, "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        prefix="gpt_neox.layers",
        changes={"attn_qkv": _grouped("num_attention_heads", "num_attention_heads")},
    ),
    "gpt2": TensorLayout(
        _GPT2_ROOT,
        _GPT2_BLOCK,
        prefix="transformer.h",
        changes=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), _transposed),
    ),
    "starcoder": TensorLayout(_GPT2_ROOT, _GPT2_BLOCK, prefix="transformer.h"),
    "bloom": TensorLayout(
        _BLOOM_ROOT, _BLOOM_BLOCK, prefix="transformer.h", changes={"attn_qkv": _grouped("n_head", "n_head")}
    ),
    "falcon": TensorLayout(
        _BLOOM_ROOT,
        _BLOOM_BLOCK,
        prefix="transformer.h",
        changes={"attn_qkv": _grouped("num_attention_heads", "num_kv_heads")},
        variant=("blk.0.attn_norm_2.weight", {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}),
    ),
    "mpt": TensorLayout(
        {**TRANSFORMER, "output_norm": "transformer.norm_f"},
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        prefix="transformer.blocks",
    ),
    "orion": TensorLayout(ROOT, PLAIN),
}
