"""A small model on disk, as the hub would give it: config.json, random safetensors, a byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file
from support.checkpoints.byte_text import byte_tokenizer

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 256,
}


def write_model(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write it; the folder. `config`: changes to CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {**CONFIG, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(tensors(whole, seed), folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of a Llama-like model, float32, large enough that attention matters to the answer."""
    noise = np.random.default_rng(seed)
    width, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (kv, width) for part in "kv"}
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (width, width) for part in "qo"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (ffn, width) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (width, ffn)
        if config["model_type"] == "qwen2":
            shapes |= {f"{name}.self_attn.{part}_proj.bias": (size,) for part, size in zip("qkv", (width, kv, kv))}
    found = {
        name: noise.normal(scale=2 * shape[-1] ** -0.5, size=shape).astype(np.float32) for name, shape in shapes.items()
    }
    if config.get("tie_word_embeddings"):
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    norms = ["model.norm"]
    for layer in range(config["num_hidden_layers"]):
        norms += [f"model.layers.{layer}.{part}_layernorm" for part in ("input", "post_attention")]
    return found | {f"{name}.weight": np.ones(width, np.float32) for name in norms}
