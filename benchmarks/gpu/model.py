"""The model of the GPU figures: the shapes of Llama-3.1-8B, without its weights."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
TINY = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""For trying the benchmarks without a GPU."""


def write(folder: Path, config: dict) -> Path:
    """Write a model folder with only a configuration, for `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def matrix_elements(config: dict) -> int:
    """Return the elements of the matrices that every token is multiplied by, the head included."""
    d, f, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    attention = d * h * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    return config["num_hidden_layers"] * (attention + 3 * d * f) + d * config["vocab_size"]


def kv_bytes(config: dict, item: int = 2) -> int:
    """Return bytes of K and V of one token in all layers."""
    return 2 * item * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


def prefill_flops(config: dict, tokens: int) -> float:
    """Return the FLOP of a prompt: the layers for every token, causal attention, the head for one."""
    head = config["hidden_size"] * config["vocab_size"]
    layers = 2 * tokens * (matrix_elements(config) - head)
    width = config["num_attention_heads"] * config["head_dim"]
    return layers + 2 * head + config["num_hidden_layers"] * 2 * width * tokens * (tokens + 1)
