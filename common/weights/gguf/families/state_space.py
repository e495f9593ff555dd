"""Decoders with state-space (Mamba) layers: their configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.decoder_keys import (
    BIASES,
    EXPERTS,
    KV_HEADS,
    LAYER,
    MULTIPLIERS,
    RMS,
    ROUTED,
    DecoderKeys,
    any_layer,
    sigmoid_experts,
)
from pagoda.common.weights.gguf.metadata import Config, Metadata, has_tensor, rows


def _state_space(metadata: Metadata, architecture: str, model_type: str) -> Config:
    """Keys of models of Mamba layers alone, whose files state an arbitrary context."""
    metadata.ignore("feed_forward_length", "attention.head_count", "context_length")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": metadata.need("embedding_length", int),
        "num_hidden_layers": metadata.need("block_count", int),
        "layer_norm_epsilon": metadata.need(RMS, float),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not has_tensor(metadata, "output.weight"),
        "conv_kernel": metadata.need("ssm.conv_kernel", int),
        "state_size": metadata.need("ssm.state_size", int),
        "use_bias": has_tensor(metadata, "blk.0.ssm_in.bias"),
        "use_conv_bias": has_tensor(metadata, "blk.0.ssm_conv1d.bias"),
    }


def _mamba(metadata: Metadata) -> Config:
    normed = metadata.opt("ssm.dt_b_c_rms", bool, False)
    if normed:
        config = _state_space(metadata, "FalconMambaForCausalLM", "falcon_mamba")
    else:
        config = _state_space(metadata, "MambaForCausalLM", "mamba")
    return {
        **config,
        "intermediate_size": metadata.need("ssm.inner_size", int),
        "time_step_rank": metadata.need("ssm.time_step_rank", int),
    }


def _mamba2(metadata: Metadata) -> Config:
    heads = metadata.need("ssm.time_step_rank", int)
    inner = metadata.need("ssm.inner_size", int)
    config = _state_space(metadata, "Mamba2ForCausalLM", "mamba2")
    return {
        **config,
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner // config["hidden_size"],
        "n_groups": metadata.need("ssm.group_count", int),
    }


def _mamba_layers(metadata: Metadata, config: Config) -> Config:
    """Keys of Mamba-2 mixers in a hybrid model."""
    heads = metadata.need("ssm.time_step_rank", int)
    inner = metadata.need("ssm.inner_size", int)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // config["hidden_size"],
        "mamba_n_groups": metadata.need("ssm.group_count", int),
        "mamba_d_state": metadata.need("ssm.state_size", int),
        "mamba_d_conv": metadata.need("ssm.conv_kernel", int),
        "mamba_proj_bias": any_layer(metadata, config, "ssm_in.bias"),
        "mamba_conv_bias": any_layer(metadata, config, "ssm_conv1d.bias"),
    }


def _falcon_h1(metadata: Metadata, config: Config) -> Config:
    """Files have no multipliers: the weights are multiplied by them."""
    layers = _mamba_layers(metadata, config)
    return {
        **layers,
        "mamba_d_ssm": layers["mamba_n_heads"] * layers["mamba_d_head"],
        "projectors_bias": layers["mamba_proj_bias"],
        "mamba_rms_norm": has_tensor(metadata, "blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _granite_hybrid(metadata: Metadata, config: Config) -> Config:
    attends = metadata.layers_with(KV_HEADS, config["num_hidden_layers"])
    experts = metadata.opt("expert_count", int, 0)
    shared = metadata.opt("expert_shared_feed_forward_length", int, 0)
    return {
        **_mamba_layers(metadata, config),
        "layer_types": ["attention" if layer else "mamba" for layer in attends],
        "position_embedding_type": "rope" if metadata.opt("rope.scaling.finetuned", bool, False) else "nope",
        "attention_multiplier": metadata.opt("attention.scale", float, 0.0) or config["head_dim"] ** -0.5,
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.opt("expert_used_count", int, 0),
        "shared_intermediate_size": shared or config["intermediate_size"],
        "attention_bias": any_layer(metadata, config, "attn_q.bias"),
    }


def _jamba(metadata: Metadata, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    attends = metadata.layers_with(KV_HEADS, layers)
    mixes = [has_tensor(metadata, f"blk.{layer}.ffn_gate_inp.weight") for layer in range(layers)]
    return {
        **_every(metadata, "attn_layer", attends),
        **(_every(metadata, "expert_layer", mixes) if any(mixes) else {"num_experts": 1}),
        "mamba_d_state": metadata.need("ssm.state_size", int),
        "mamba_d_conv": metadata.need("ssm.conv_kernel", int),
        "mamba_dt_rank": metadata.need("ssm.time_step_rank", int),
        "mamba_expand": metadata.need("ssm.inner_size", int) // config["hidden_size"],
        "mamba_proj_bias": any_layer(metadata, config, "ssm_in.bias"),
        "mamba_conv_bias": any_layer(metadata, config, "ssm_conv1d.bias"),
    }


def _every(metadata: Metadata, kind: str, layers: list[bool]) -> Config:
    """Return the offset and the period of a kind of layer. Raises ModelError if they are irregular."""
    numbers = [number for number, present in enumerate(layers) if present]
    period = numbers[1] - numbers[0] if len(numbers) > 1 else len(layers)
    if not numbers or [number % period == numbers[0] % period for number in range(len(layers))] != layers:
        raise ModelError(f"{metadata.file.path}: layers {numbers} as {kind} are not evenly spaced")
    return {f"{kind}_offset": numbers[0], f"{kind}_period": period}


def _nemotron_h(metadata: Metadata) -> Config:
    layers = metadata.need("block_count", int)
    mapped = metadata.of_some_layers()
    layers -= metadata.opt("nextn_predict_layers", int, 0)
    attends = metadata.layers_with(KV_HEADS, layers)
    feeds = metadata.layers_with("feed_forward_length", layers)
    mixes = [has_tensor(metadata, f"blk.{layer}.ffn_gate_inp.weight") for layer in range(layers)]
    kinds = [
        "attention" if attention else "moe" if moe else "mlp" if feed else "mamba"
        for attention, feed, moe in zip(attends, feeds, mixes)
    ]
    heads = metadata.need("ssm.time_step_rank", int)
    inner = metadata.need("ssm.inner_size", int)
    metadata.ignore(LAYER, "attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned")
    config: Config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": metadata.need("embedding_length", int),
        "num_hidden_layers": layers,
        "layers_block_type": kinds,
        "intermediate_size": mapped.need("feed_forward_length", int) or None,
        "num_attention_heads": mapped.need("attention.head_count", int),
        "num_key_value_heads": mapped.need(KV_HEADS, int),
        "head_dim": metadata.need("attention.key_length", int),
        "layer_norm_epsilon": metadata.need(RMS, float),
        "max_position_embeddings": metadata.need("context_length", int),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not has_tensor(metadata, "output.weight"),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": metadata.need("ssm.group_count", int),
        "ssm_state_size": metadata.need("ssm.state_size", int),
        "conv_kernel": metadata.need("ssm.conv_kernel", int),
        "use_bias": any(has_tensor(metadata, f"blk.{layer}.ssm_in.bias") for layer in range(layers)),
        "use_conv_bias": any(has_tensor(metadata, f"blk.{layer}.ssm_conv1d.bias") for layer in range(layers)),
        "mlp_bias": any(has_tensor(metadata, f"blk.{layer}.ffn_up.bias") for layer in range(layers)),
    }
    if "moe" not in kinds:
        metadata.ignore("expert_gating_func", *(name for name, _, _ in ROUTED.values()))
        return config
    sigmoid_experts(metadata, config)
    for key, (name, kind, default) in ROUTED.items():
        config[key] = metadata.need(name, kind) if default is None else metadata.opt(name, kind, default)
    del config["first_k_dense_replace"]
    config["moe_shared_expert_intermediate_size"] = metadata.need("expert_shared_feed_forward_length", int)
    return config


CONFIGS: Final[Mapping[str, Callable[[Metadata], Config]]] = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": DecoderKeys(
        "JambaForCausalLM", "jamba", values=EXPERTS, absent=("rope_theta",), some_layers=True, more=_jamba
    ),
    "falcon-h1": DecoderKeys("FalconH1ForCausalLM", "falcon_h1", present=BIASES, more=_falcon_h1),
    "granitehybrid": DecoderKeys(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", values=MULTIPLIERS, some_layers=True, more=_granite_hybrid
    ),
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
}
