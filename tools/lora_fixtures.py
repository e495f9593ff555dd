"""Write the LoRA adapters of the tests, and the logits that the library peft computes with them.

    python tools/lora_fixtures.py          needs torch, transformers and peft; writes tests/data/lora/

Each case is a small random model, whose weights a seed gives (nothing of it is stored), an adapter as peft saves it,
and peft's float32 logits of one prompt. The adapter's matrices are random, B too, which peft begins with zeros; DoRA's
magnitudes are some way from the lengths of the base model's rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

FOLDER: Final = Path(__file__).parents[1] / "tests" / "data" / "lora"
PROMPT: Final = (5, 17, 3, 42, 8, 30, 11, 2, 61, 7)
SMALL: Final = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ALL: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Case:
    """A model's configuration and an adapter's."""

    model_type: str
    lora: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)


EXPERTS: Final = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MIXTURE: Final = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "norm_topk_prob": True,
}

CASES: Final = {
    "all_linear": Case("llama", {"r": 4, "lora_alpha": 8, "target_modules": ALL}),
    "attention": Case("llama", {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]}),
    "rank_stabilised": Case("llama", {"r": 4, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True}),
    "patterns": Case(
        "llama",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 8},
            "alpha_pattern": {"o_proj": 2, "layers.0.self_attn.v_proj": 5},
        },
    ),
    "embeddings": Case("llama", {"r": 4, "lora_alpha": 8, "target_modules": [*ALL, "embed_tokens", "lm_head"]}),
    "tied": Case(
        "llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "embed_tokens"]}, {"tie_word_embeddings": True}
    ),
    "fused": Case("phi3", {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj"]}),
    "one_layer": Case("llama", {"r": 4, "lora_alpha": 8, "target_modules": ALL, "layers_to_transform": [1]}),
    "gpt2": Case(
        "gpt2",
        {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48},
    ),
    "dora": Case(
        "llama",
        {"r": 4, "lora_alpha": 8, "target_modules": [*ALL, "embed_tokens", "lm_head"], "use_dora": True},
        {"attention_bias": True, "mlp_bias": True},
    ),
    "dora_fused": Case(
        "gpt2",
        {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True},
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48},
    ),
    "saved": Case(
        "llama",
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "saved_tied": Case(
        "llama",
        {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
        {"tie_word_embeddings": True},
    ),
    "experts": Case(
        "qwen3_moe",
        {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS},
        MIXTURE,
    ),
    "square_experts": Case(
        "qwen3_moe",
        {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": [],
            "target_parameters": EXPERTS,
            "alpha_pattern": {"down_proj": 5},
        },
        {**MIXTURE, "moe_intermediate_size": 16},
    ),
    "experts_by_inputs": Case(
        "gpt_oss",
        {"r": 2, "lora_alpha": 3, "target_modules": ["v_proj"], "target_parameters": EXPERTS},
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8, "rope_parameters": None},
    ),
}


def base_model(case: Case) -> Any:
    """Return the random model of a case, the same on every machine."""
    from transformers import AutoConfig, AutoModelForCausalLM

    gpt2 = case.model_type == "gpt2"
    shape = {key: value for key, value in SMALL.items() if not gpt2 or "token" in key or key == "vocab_size"}
    config = AutoConfig.for_model(case.model_type, **{**shape, **case.config})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    numbers = np.random.default_rng(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = numbers.standard_normal(tuple(parameter.shape), np.float32) * np.float32(0.1)
            parameter.copy_(torch.from_numpy(values + np.float32("norm" in name or "ln_" in name)))
    return model


def write(name: str, case: Case) -> None:
    """Write one case's adapter and logits."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base_model(case), LoraConfig(task_type="CAUSAL_LM", **case.lora)).eval()
    numbers = np.random.default_rng(sum(map(ord, name)))
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            if "lora_" in key or "modules_to_save" in key:
                values = numbers.standard_normal(tuple(parameter.shape), np.float32) * np.float32(0.2)
                drawn = torch.from_numpy(values)
                parameter.copy_(parameter * (1 + drawn) if "magnitude" in key else drawn)
        logits = model(torch.tensor([PROMPT])).logits[0]
    folder = FOLDER / name
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / file).write_bytes((Path(scratch) / file).read_bytes())
    rows = [[round(float(value), 6) for value in row] for row in logits]
    (folder / "logits.json").write_text(json.dumps({"prompt": PROMPT, "logits": rows}) + "\n")


def main() -> int:
    """Write all cases, or those that are named."""
    for name in sys.argv[1:] or CASES:
        write(name, CASES[name])
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
