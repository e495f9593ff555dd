"""Small random models of every family, built and saved by transformers: shared by the parity tests.

Every parameter is random, norms and biases included: at their initial ones and zeros they would hide mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 97
WINDOW = 7
TOKENS = 40
"""Length of the test sequence: longer than the windows, and than the trained context of the scaled rotaries."""


@dataclass(frozen=True)
class Tiny:
    """One case. `extra`: config values beyond `SMALL`. `grows`: frequencies depend on the sequence length."""

    name: str
    architecture: str
    extra: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] | None = None
    grows: bool = False

    def build(self) -> transformers.PreTrainedModel:
        """The model, in float32 with eager attention."""
        model_class = getattr(transformers, self.architecture)
        config = model_class.config_class(**{**(SMALL if self.base is None else self.base), **self.extra})
        config._attn_implementation = "eager"
        torch.manual_seed(hash_of(self.name))
        model = model_class(config).float().eval()
        randomise(model)
        return model

    def save(self, folder: Path) -> transformers.PreTrainedModel:
        """Write config.json and model.safetensors; the model that was written."""
        model = self.build()
        model.save_pretrained(folder)
        return model


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

SMALL_OPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

SMALL_GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

LATENT: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
}
YARN_LATENT = {
    "rope_type": "yarn",
    "rope_theta": 1e3,
    "factor": 4.0,
    "beta_fast": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}

SPARSE_LATENT: dict[str, Any] = {**LATENT, "index_n_heads": 16, "index_head_dim": 12, "index_topk": 9}
"""16 heads, so that no score is exactly 0: the order of equal scores is undefined in torch."""

NEXT: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}

LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 9.0]}


def llama(name: str, *, grows: bool = False, **extra: Any) -> Tiny:
    """A Llama with other rotary positions."""
    return Tiny(f"llama-{name}", "LlamaForCausalLM", extra, grows=grows)


TINY = (
    llama("gqa"),
    llama("biased", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=12),
    llama("linear", rope_parameters={"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}),
    llama(
        "dynamic",
        grows=True,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    ),
    llama(
        "llama3",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e3,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    llama(
        "yarn",
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e3,
            "factor": 4.0,
            "beta_fast": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    Tiny("mistral-window", "MistralForCausalLM", {"sliding_window": WINDOW, "head_dim": 16}),
    Tiny("mistral-full", "MistralForCausalLM", {"sliding_window": None}),
    Tiny("qwen2-tied", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    Tiny(
        "qwen2-window",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    Tiny("qwen3", "Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    Tiny("qwen3-tied", "Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    Tiny(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
        },
    ),
    Tiny(
        "qwen3-moe-plain-weights",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
        },
    ),
    Tiny(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    Tiny(
        "gemma3",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    Tiny("phi3", "Phi3ForCausalLM", {"sliding_window": WINDOW}),
    Tiny(
        "phi3-long",
        "Phi3ForCausalLM",
        {"original_max_position_embeddings": 16, "rope_parameters": {**LONG, "rope_theta": 1e4}},
    ),
    Tiny(
        "phi3-short-partial",
        "Phi3ForCausalLM",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 60,
            "rope_parameters": {**LONG, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    Tiny("opt", "OPTForCausalLM", base=SMALL_OPT),
    Tiny(
        "opt-norm-after-narrow",
        "OPTForCausalLM",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
        base=SMALL_OPT,
    ),
    Tiny("opt-unbiased", "OPTForCausalLM", {"enable_bias": False, "tie_word_embeddings": False}, base=SMALL_OPT),
    Tiny("gpt2", "GPT2LMHeadModel", base=SMALL_GPT2),
    Tiny("gpt2-untied", "GPT2LMHeadModel", {"n_inner": 40, "tie_word_embeddings": False}, base=SMALL_GPT2),
    Tiny("olmo2", "Olmo2ForCausalLM"),
    Tiny(
        "mixtral",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    Tiny("mixtral-full", "MixtralForCausalLM", {"num_local_experts": 4, "head_dim": 12, "tie_word_embeddings": True}),
    Tiny("deepseek2-lite", "DeepseekV2ForCausalLM", {"q_lora_rank": None}, LATENT),
    Tiny("deepseek2-biased", "DeepseekV2ForCausalLM", {"attention_bias": True, "mlp_bias": True}, LATENT),
    Tiny(
        "deepseek2-yarn",
        "DeepseekV2ForCausalLM",
        {"rope_parameters": {**YARN_LATENT, "mscale": 0.707, "mscale_all_dim": 0.5}},
        LATENT,
    ),
    Tiny("deepseek3-yarn", "DeepseekV3ForCausalLM", {"rope_parameters": YARN_LATENT}, LATENT),
    Tiny("deepseek32", "DeepseekV32ForCausalLM", {}, SPARSE_LATENT),
    Tiny(
        "deepseek32-yarn",
        "DeepseekV32ForCausalLM",
        {"rope_parameters": YARN_LATENT, "attention_bias": True, "index_head_dim": 8},
        SPARSE_LATENT,
    ),
    Tiny("deepseek3-halves", "DeepseekV3ForCausalLM", {"rope_interleave": False, "attention_bias": True}, LATENT),
    Tiny("qwen3-next", "Qwen3NextForCausalLM", base=NEXT),
    Tiny(
        "qwen3-next-dense-layers",
        "Qwen3NextForCausalLM",
        {
            "mlp_only_layers": [0, 3],
            "attention_bias": True,
            "linear_conv_kernel_dim": 3,
            "norm_topk_prob": False,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
        NEXT,
    ),
)


def hash_of(name: str) -> int:
    """A seed that is the same in every process."""
    return int.from_bytes(name.encode(), "big") % 2**31


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Random matrices that preserve the scale of their input; norms near one, biases near zero; states that last."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if "embed" not in name else 0.5)
        elif name.endswith("A_log"):
            parameter.normal_(-2.0)  # a state that holds the last token alone is ill-conditioned, for it is normalised
        elif name.endswith("bias"):
            parameter.normal_(std=0.2)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.3)


def tokens(count: int = TOKENS, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


Logits = Callable[[list[int]], torch.Tensor]


@torch.inference_mode()
def logits(model: transformers.PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits, float32 [T, V]."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]
