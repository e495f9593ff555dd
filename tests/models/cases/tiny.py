"""Small random models of every family, built and saved by transformers: shared by the parity tests.

Every parameter is random, norms and biases included: at their initial ones and zeros they would hide mistakes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from models.cases import assembled, renames
from safetensors.torch import load_file, save_file
from torch import nn

VOCAB = 97
WINDOW = 7
TOKENS = 40
"""Length of the test sequence: longer than the windows, and than the trained context of the scaled rotaries."""


@dataclass(frozen=True)
class Tiny:
    """One case. `extra`: config values beyond `SMALL`.

    `oracle`: the transformers class with the same maths, for architectures that transformers does not have; then
    `written` are the keys of config.json that differ (None: dropped) and `rename` changes the names of its tensors.
    `assemble` exchanges parts of the oracle before it gets its weights. `names_only`: the maths are those of another
    case, so only the reference backend runs it. `embedding_scale` multiplies the embedding, which may be the head, too.
    """

    name: str
    architecture: str
    extra: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] | None = None
    attention: str = "eager"
    oracle: str = ""
    written: dict[str, Any] = field(default_factory=dict)
    rename: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    assemble: Callable[[transformers.PreTrainedModel], None] | None = None
    names_only: bool = False
    embedding_scale: float = 1.0

    def _settings(self) -> dict[str, Any]:
        """What the configuration class is called with: it writes into nested settings."""
        return deepcopy({**(SMALL if self.base is None else self.base), **self.extra})

    def build(self) -> transformers.PreTrainedModel:
        """The model, in float32."""
        model_class = getattr(transformers, self.oracle or self.architecture)
        config = model_class.config_class(**self._settings())
        config._attn_implementation = self.attention
        torch.manual_seed(hash_of(self.name))
        model = model_class(config)
        if self.assemble is not None:
            self.assemble(model)
        randomise(model.float().eval())
        model.get_input_embeddings().weight.data.mul_(self.embedding_scale)
        return model

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        kind = getattr(transformers, self.oracle or self.architecture).config_class
        config = kind(**self._settings())
        content = json.loads(config.to_json_string()) | self.written | {"architectures": [self.architecture]}
        return {key: value for key, value in content.items() if value is not None}

    def save(self, folder: Path) -> transformers.PreTrainedModel:
        """Write config.json and model.safetensors; the model that was written."""
        model = self.build()
        self._save_oracle(model, folder)
        if self.oracle:
            self._rewrite(folder)
        return model

    def oracle_tensors(self, folder: Path) -> dict[str, torch.Tensor]:
        """Write config.json of the transformers class; the tensors as that class names them."""
        model = self.build()
        self._save_oracle(model, folder)
        computed, tensors = computed_buffers(model), load_file(folder / "model.safetensors")
        return {name: tensor for name, tensor in tensors.items() if name not in computed}

    def _save_oracle(self, model: transformers.PreTrainedModel, folder: Path) -> None:
        """Write the model as transformers does; of a model with exchanged parts, the names are those of its code."""
        model.save_pretrained(folder)
        if self.assemble is not None:
            tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            if model.config.tie_word_embeddings:
                tensors.pop("lm_head.weight", None)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def config_of(self, folder: Path) -> dict[str, Any]:
        """The content of config.json, from what the transformers class wrote."""
        config = json.loads((folder / "config.json").read_text())
        if not self.oracle:
            return dict(config)
        config |= {**self.written, "architectures": [self.architecture]}
        return {key: value for key, value in config.items() if value is not None}

    def _rewrite(self, folder: Path) -> None:
        """Change config.json and the names of the tensors to those of the architecture."""
        (folder / "config.json").write_text(json.dumps(self.config_of(folder)))
        if self.rename is not None:
            tensors = self.rename(load_file(folder / "model.safetensors"))
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


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
SMALL_DBRX: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}

SMALL_MHA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

SMALL_MPT: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}

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
LONGCAT: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "moe_topk": 3},
    **{"ffn_hidden_size": 48, "expert_ffn_hidden_size": 20, "n_routed_experts": 6, "zero_expert_num": 2},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "head_dim": 8},
    **{"v_head_dim": 10, "max_position_embeddings": 64, "routed_scaling_factor": 6.0},
}
ROUTED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
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

DENSE_NEXT = {key: value for key, value in NEXT.items() if "expert" not in key and not key.startswith("moe")}

SMALL_MAMBA2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
}
SMALL_MAMBA: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
KIMI_LINEAR: dict[str, Any] = {
    **LATENT,
    "num_hidden_layers": 3,
    "q_lora_rank": None,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "topk_group": 2,
}
for key in ("first_k_dense_replace", "n_routed_experts"):
    del KIMI_LINEAR[key]
MINIMAX: dict[str, Any] = {
    "num_hidden_layers": 3,
    "block_size": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 6,
    "rms_norm_eps": 1e-2,
    **{f"{part}_alpha_factor": 3.5 for part in ("full_attn", "linear_attn", "mlp")},
    **{f"{part}_beta_factor": 1.2 for part in ("full_attn", "linear_attn", "mlp")},
}
NEMOTRON_H: dict[str, Any] = {
    "head_dim": 8,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
MAMBA_LAYERS: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 16}
ZAMBA2: dict[str, Any] = {
    **{"num_hidden_layers": 3, "layers_block_type": ["hybrid", "hybrid", "hybrid"]},
    **{"num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 12, "chunk_size": 16},
    **{"num_mem_blocks": 2, "adapter_rank": 5, "use_shared_attention_adapter": True, "use_mem_rope": True},
}
FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 48,
    "lm_head_multiplier": 0.6,
    "embedding_multiplier": 2.5,
    "mlp_multipliers": [0.7, 1.4],
    "key_multiplier": 0.6,
    "attention_out_multiplier": 1.3,
    "attention_in_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 1.2, 0.7, 0.8],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.75,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "original_max_position_embeddings": 32}

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
MULTIPLIED: dict[str, Any] = {"embedding_multiplier": 3.0, "attention_multiplier": 8**-0.5}

GROWING = {
    **{"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 4.0, "llama_4_scaling_beta": 0.3},
}

SMALL_LLAMA4: dict[str, Any] = {
    **{key: value for key, value in SMALL.items() if key != "pad_token_id"},
    **{"head_dim": 8, "intermediate_size_mlp": 40, "num_hidden_layers": 4, "num_local_experts": 4},
    **{"interleave_moe_layer_step": 2, "attention_chunk_size": 9, "floor_scale": 8, "attn_scale": 0.4},
}

PER_LAYER: dict[str, Any] = {
    **SMALL,
    **{"num_hidden_layers": 6, "head_dim": 8, "sliding_window": WINDOW, "num_kv_shared_layers": 2},
    **{"layer_types": ["sliding_attention", "full_attention"] * 3},
    **{"vocab_size_per_layer_input": VOCAB - 7, "hidden_size_per_layer_input": 12, "pad_token_id": 0},
}

LFM3: dict[str, Any] = {
    **{"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3, "head_dim": 8},
    **{"sliding_window": WINDOW, "pad_token_id": 0},
}
LFM3_VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "patch_size": 4},
}
MUSE: dict[str, Any] = {"num_hidden_layers": 5, "head_dim": 8, "sliding_window": WINDOW}
MUSE_VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16},
}
MUSE_PROJECTOR = {"out_hidden_size": 64, "projector_hidden_size": 16}

LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 9.0]}


def llama(name: str, **extra: Any) -> Tiny:
    """A Llama with other rotary positions."""
    return Tiny(f"llama-{name}", "LlamaForCausalLM", extra)


GPT_OSS = Tiny(
    "gpt-oss",
    "GptOssForCausalLM",
    {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.9,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e3,
            "factor": 4.0,
            "beta_fast": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
)

TINY = (
    llama("gqa"),
    llama("biased", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=12),
    llama("linear", rope_parameters={"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}),
    llama(
        "dynamic",
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
    Tiny("deepseek32-experts", "DeepseekV32ForCausalLM", ROUTED, SPARSE_LATENT),
    Tiny(
        "deepseek32-yarn",
        "DeepseekV32ForCausalLM",
        {"rope_parameters": YARN_LATENT, "attention_bias": True, "index_head_dim": 8},
        SPARSE_LATENT,
    ),
    Tiny("deepseek3-halves", "DeepseekV3ForCausalLM", {"rope_interleave": False, "attention_bias": True}, LATENT),
    Tiny("deepseek2-experts", "DeepseekV2ForCausalLM", ROUTED, LATENT),
    Tiny(
        "deepseek2-grouped-experts",
        "DeepseekV2ForCausalLM",
        {**ROUTED, "topk_method": "group_limited_greedy", "mlp_bias": True},
        LATENT,
    ),
    Tiny("deepseek3-experts", "DeepseekV3ForCausalLM", ROUTED, LATENT),
    Tiny("deepseek3-one-group", "DeepseekV3ForCausalLM", {**ROUTED, "n_group": 1, "topk_group": 1}, LATENT),
    Tiny("glm4-moe", "Glm4MoeForCausalLM", {**ROUTED, "attention_bias": True, "head_dim": 16}),
    Tiny("glm4-moe-norms", "Glm4MoeForCausalLM", {**ROUTED, "use_qk_norm": True, "norm_topk_prob": False}),
    Tiny(
        "solar-open",
        "SolarOpenForCausalLM",
        {**ROUTED, "first_k_dense_replace": 0, "attention_bias": True, "head_dim": 16},
    ),
    Tiny("bitnet", "BitNetForCausalLM"),
    Tiny("bitnet-biased", "BitNetForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    Tiny("dots1", "Dots1ForCausalLM", {**ROUTED, "sliding_window": WINDOW, "max_window_layers": 2}),
    Tiny("dots1-biased", "Dots1ForCausalLM", {**ROUTED, "attention_bias": True, "norm_topk_prob": True}),
    Tiny(
        "qwen2-moe",
        "Qwen2MoeForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [2],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 3,
        },
    ),
    Tiny("olmoe", "OlmoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 3}),
    Tiny(
        "olmoe-biased",
        "OlmoeForCausalLM",
        {"num_experts": 4, "norm_topk_prob": True, "attention_bias": True} | {"num_experts_per_tok": 2},
    ),
    Tiny("flex-olmo", "FlexOlmoForCausalLM", {"num_experts": 6, "num_experts_per_tok": 3}),
    Tiny(
        "glm4-moe-lite",
        "Glm4MoeLiteForCausalLM",
        {
            **{key: value for key, value in ROUTED.items() if key != "first_k_dense_replace"},
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
        LATENT,
    ),
    Tiny("longcat-flash", "LongcatFlashForCausalLM", {}, LONGCAT),
    Tiny("longcat-flash-biased", "LongcatFlashForCausalLM", {"attention_bias": True, "zero_expert_num": 5}, LONGCAT),
    Tiny(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8},
    ),
    Tiny(
        "ernie-moe",
        "Ernie4_5_MoeForCausalLM",
        {"num_hidden_layers": 3, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 20},
    ),
    Tiny(
        "ernie-moe-biased",
        "Ernie4_5_MoeForCausalLM",
        {
            "num_hidden_layers": 4,
            "use_bias": True,
            "moe_num_experts": 8,
            "moe_num_shared_experts": 1,
            "moe_k": 2,
            "moe_intermediate_size": 20,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    Tiny("phimoe", "PhimoeForCausalLM", {"num_local_experts": 6, "router_jitter_noise": 0.3}),
    Tiny(
        "phimoe-biased",
        "PhimoeForCausalLM",
        {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "sliding_window": WINDOW},
    ),
    Tiny(
        "granite-moe",
        "GraniteMoeForCausalLM",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
    ),
    Tiny(
        "dbrx",
        "DbrxForCausalLM",
        {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 1e3},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 3},
        },
        SMALL_DBRX,
    ),
    Tiny(
        "dbrx-plain-weights",
        "DbrxForCausalLM",
        {
            "attn_config": {"rope_theta": 1e4, "clip_qkv": 100.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_top_k": 2, "moe_normalize_expert_weights": None},
        },
        SMALL_DBRX,
    ),
    GPT_OSS,
    Tiny("granite-moe-shared", "GraniteMoeSharedForCausalLM", {"num_local_experts": 4, "shared_intermediate_size": 20}),
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
    Tiny("qwen3.5", "Qwen3_5ForCausalLM", base=DENSE_NEXT),
    Tiny("qwen3.5-moe", "Qwen3_5MoeForCausalLM", base=NEXT),
    Tiny("mamba2", "Mamba2ForCausalLM", base=SMALL_MAMBA2),
    Tiny(
        "mamba2-biased",
        "Mamba2ForCausalLM",
        {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "time_step_limit": (0.3, 0.8)},
        SMALL_MAMBA2,
    ),
    Tiny("nemotron-h", "NemotronHForCausalLM", NEMOTRON_H),
    Tiny("nemotron-h-latent", "NemotronHForCausalLM", {**NEMOTRON_H, "moe_latent_size": 12}),
    Tiny(
        "nemotron-h-dense",
        "NemotronHForCausalLM",
        {
            **NEMOTRON_H,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    Tiny(
        "granite-hybrid",
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA_LAYERS,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 6,
            "shared_intermediate_size": 20,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
    ),
    Tiny(
        "granite-hybrid-dense",
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA_LAYERS,
            "layer_types": ["full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 20,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
        },
    ),
    Tiny("bamba", "BambaForCausalLM", {**MAMBA_LAYERS, "attn_layer_indices": [1], "num_hidden_layers": 3}),
    Tiny("zamba2", "Zamba2ForCausalLM", ZAMBA2, embedding_scale=0.05),
    Tiny(
        "zamba2-one-block",
        "Zamba2ForCausalLM",
        {
            **ZAMBA2,
            **{"num_mem_blocks": 1, "use_shared_attention_adapter": False, "use_mem_rope": False, "mamba_ngroups": 1},
            **{"add_bias_linear": True, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
        },
        names_only=True,
        embedding_scale=0.05,
    ),
    Tiny("falcon-h1", "FalconH1ForCausalLM", {**MAMBA_LAYERS, **FALCON_H1}),
    Tiny(
        "falcon-h1-normed",
        "FalconH1ForCausalLM",
        {
            **MAMBA_LAYERS,
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mlp_bias": True,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
        },
    ),
    Tiny("mamba", "MambaForCausalLM", base=SMALL_MAMBA),
    Tiny(
        "mamba-biased", "MambaForCausalLM", {"use_bias": True, "use_conv_bias": False, "time_step_rank": 5}, SMALL_MAMBA
    ),
    Tiny("falcon-mamba", "FalconMambaForCausalLM", {"tie_word_embeddings": False}, SMALL_MAMBA),
    Tiny(
        "jamba",
        "JambaForCausalLM",
        {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 6, "mamba_d_state": 8},
    ),
    Tiny(
        "lfm2",
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_multiple_of": 16},
    ),
    Tiny(
        "lfm2-biased",
        "Lfm2ForCausalLM",
        {"full_attn_idxs": [0], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    Tiny(
        "lfm2-moe",
        "Lfm2MoeForCausalLM",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
        },
    ),
    Tiny("lfm3", "Lfm3ForCausalLM", LFM3),
    Tiny("lfm3-plain", "Lfm3ForCausalLM", {**LFM3, "use_sandwich_norm": False, "use_attention_gate": False}),
    Tiny("minimax", "MiniMaxForCausalLM", MINIMAX),
    Tiny("kimi-linear", "KimiLinearForCausalLM", base=KIMI_LINEAR),
    Tiny(
        "olmo-hybrid",
        "OlmoHybridForCausalLM",
        {
            "num_hidden_layers": 3,
            "linear_key_head_dim": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
        },
        oracle="OlmoHybridForCausalLM",
        rename=renames.olmo_hybrid,
    ),
    Tiny("smollm3", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "num_hidden_layers": 4}),
    Tiny(
        "smollm3-window",
        "SmolLM3ForCausalLM",
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    Tiny("olmo", "OlmoForCausalLM", {"clip_qkv": 0.8}),
    Tiny("olmo-biased", "OlmoForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    Tiny("olmo3", "Olmo3ForCausalLM", {"sliding_window": WINDOW, "num_hidden_layers": 5, "rope_scaling": YARN}),
    Tiny(
        "granite",
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    Tiny(
        "granite-biased", "GraniteForCausalLM", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3}
    ),
    Tiny(
        "granite-swa",
        "GraniteSWAForCausalLM",
        {
            **{"num_hidden_layers": 3, "sliding_window": WINDOW, "layer_rope_theta": [0, 1e3, 1e4]},
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
        },
    ),
    Tiny(
        "granite-moe-swa",
        "GraniteMoeSWAForCausalLM",
        {
            **{"num_hidden_layers": 2, "sliding_window": WINDOW, "attention_multiplier": 0.2},
            **{"num_local_experts": 4, "shared_intermediate_size": 20},
        },
    ),
    Tiny(
        "hyperclovax",
        "HyperCLOVAXForCausalLM",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    ),
    Tiny("hyperclovax-pre-norm", "HyperCLOVAXForCausalLM", {"use_post_norm": False, "attention_bias": True}),
    Tiny("seed-oss", "SeedOssForCausalLM", {"head_dim": 12}),
    Tiny("seed-oss-biased", "SeedOssForCausalLM", {"attention_out_bias": True, "mlp_bias": True, "head_dim": 8}),
    Tiny(
        "internlm3",
        "InternLM3ForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
        oracle="LlamaForCausalLM",
        written={"model_type": "internlm3", "qkv_bias": True, "bias": True, "attention_bias": None, "mlp_bias": None},
    ),
    Tiny("iquestcoder", "IQuestCoderForCausalLM", {"head_dim": 12}, oracle="LlamaForCausalLM"),
    Tiny("ernie", "Ernie4_5ForCausalLM", {"head_dim": 12}),
    Tiny("ernie-biased", "Ernie4_5ForCausalLM", {"head_dim": 8, "use_bias": True, "tie_word_embeddings": False}),
    Tiny("helium", "HeliumForCausalLM", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    Tiny(
        "fairseq2",
        "Fairseq2LlamaForCausalLM",
        {"head_dim": 8},
        oracle="HeliumForCausalLM",
        rename=renames.fairseq2,
        names_only=True,
    ),
    Tiny("cwm", "CwmForCausalLM", {"head_dim": 8, "sliding_window": WINDOW, "num_hidden_layers": 5}),
    Tiny("exaone4", "Exaone4ForCausalLM", {"sliding_window": WINDOW, "num_hidden_layers": 5}),
    Tiny(
        "exaone4-full",
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    ),
    Tiny("starcoder2", "Starcoder2ForCausalLM", {"sliding_window": WINDOW}),
    Tiny("starcoder2-unbiased", "Starcoder2ForCausalLM", {"use_bias": False, "tie_word_embeddings": False}),
    Tiny("stablelm", "StableLmForCausalLM"),
    Tiny(
        "stablelm-parallel",
        "StableLmForCausalLM",
        {"use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    ),
    Tiny("glm", "GlmForCausalLM", {"head_dim": 12}),
    Tiny("glm4", "Glm4ForCausalLM", {"head_dim": 8, "attention_bias": False, "partial_rotary_factor": 1.0}),
    Tiny(
        "muse-glimmer",
        "MuseGlimmerForCausalLM",
        base={"text_config": {**SMALL, **MUSE}, "vision_config": MUSE_VISION, **MUSE_PROJECTOR},
        oracle="MuseGlimmerForConditionalGeneration",
        written={
            **{"text_config": None, "vision_config": None, "model_type": "muse_glimmer_text"},
            **{"out_hidden_size": None, "projector_hidden_size": None, "projector_hidden_act": None},
            **{"image_token_id": None, "video_token_id": None, **SMALL, **MUSE},
        },
        rename=renames.text_alone,
    ),
    Tiny("nemotron", "NemotronForCausalLM", {"head_dim": 12}),
    Tiny("nemotron-biased", "NemotronForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    Tiny("jais2", "Jais2ForCausalLM"),
    Tiny("arcee", "ArceeForCausalLM", {"rope_parameters": {**YARN, "rope_theta": 1e3}}),
    Tiny("arcee-biased", "ArceeForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    Tiny("phi", "PhiForCausalLM"),
    Tiny("cohere", "CohereForCausalLM", {"logit_scale": 0.5}),
    Tiny(
        "cohere-biased", "CohereForCausalLM", {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 2.0}
    ),
    Tiny("cohere2", "Cohere2ForCausalLM", {"logit_scale": 0.5, "sliding_window": WINDOW, "num_hidden_layers": 5}),
    Tiny("gpt-neox", "GPTNeoXForCausalLM", {"intermediate_size": 48}, SMALL_MHA),
    Tiny(
        "gpt-neox-sequential",
        "GPTNeoXForCausalLM",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "tie_word_embeddings": True},
        {**SMALL_MHA, "intermediate_size": 48},
    ),
    Tiny("gptj", "GPTJForCausalLM", {"rotary_dim": 6}, base=SMALL_GPT2),
    Tiny("falcon-multi-query", "FalconForCausalLM", base=SMALL_MHA),
    Tiny("falcon-grouped", "FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}, SMALL_MHA),
    Tiny(
        "falcon-grouped-one-norm",
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
        SMALL_MHA,
    ),
    Tiny("falcon-sequential", "FalconForCausalLM", {"multi_query": False, "parallel_attn": False}, SMALL_MHA),
    Tiny("gemma", "GemmaForCausalLM", {"head_dim": 12}),
    Tiny("vaultgemma", "VaultGemmaForCausalLM", {"head_dim": 12, "sliding_window": WINDOW, "num_hidden_layers": 3}),
    Tiny("gpt-bigcode", "GPTBigCodeForCausalLM", base=SMALL_GPT2),
    Tiny("gpt-bigcode-many-heads", "GPTBigCodeForCausalLM", {"multi_query": False}, SMALL_GPT2),
    Tiny(
        "internlm2",
        "InternLM2ForCausalLM",
        oracle="LlamaForCausalLM",
        written={"bias": False, "attention_bias": None, "mlp_bias": None},
        rename=renames.internlm2,
    ),
    Tiny(
        "internlm2-biased",
        "InternLM2ForCausalLM",
        {"attention_bias": True, "tie_word_embeddings": True},
        oracle="LlamaForCausalLM",
        written={"bias": True, "attention_bias": None, "mlp_bias": None},
        rename=renames.internlm2,
    ),
    Tiny(
        "exaone",
        "ExaoneForCausalLM",
        {"rms_norm_eps": 1e-3},
        oracle="LlamaForCausalLM",
        written={
            **{"num_layers": 2, "num_hidden_layers": None, "layer_norm_epsilon": 1e-3, "rms_norm_eps": None},
            **{"activation_function": "silu", "hidden_act": None},
        },
        rename=renames.exaone,
    ),
    Tiny(
        "orion",
        "OrionForCausalLM",
        {"partial_rotary_factor": 1.0},
        oracle="StableLmForCausalLM",
        written={
            **{"rms_norm_eps": 1e-5, "layer_norm_eps": None, "qk_layernorm": None, "use_qkv_bias": None},
            "use_parallel_residual": None,
        },
    ),
    Tiny(
        "minicpm",
        "MiniCPMForCausalLM",
        {**MULTIPLIED, "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 32 / 8},
        oracle="GraniteForCausalLM",
        written={"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 8, **dict.fromkeys(MULTIPLIERS)},
    ),
    Tiny(
        "teleflm",
        "TeleFLMForCausalLM",
        {**MULTIPLIED, "logits_scaling": 2.0},
        oracle="GraniteForCausalLM",
        written={
            **{"use_mup": True, "input_mult": 3.0, "output_mult": 0.25, "mup_scale_factor": 0.5},
            **dict.fromkeys(MULTIPLIERS),
        },
    ),
    Tiny(
        "chatglm",
        "ChatGLMModel",
        {"head_dim": 8, "rope_parameters": {"rope_theta": 5e4, "partial_rotary_factor": 0.5}},
        oracle="GlmForCausalLM",
        written={
            **{"num_layers": 2, "padded_vocab_size": VOCAB, "ffn_hidden_size": 48, "seq_length": 64, "rope_ratio": 5},
            **{"kv_channels": 8, "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True},
            **{"original_rope": True, "layernorm_epsilon": 1.5625e-07, "rmsnorm": True, "post_layer_norm": True},
            **dict.fromkeys(("num_hidden_layers", "intermediate_size", "rope_parameters", "head_dim", "hidden_act")),
            **dict.fromkeys(("max_position_embeddings", "num_key_value_heads", "rms_norm_eps", "attention_bias")),
        },
        rename=renames.chatglm,
    ),
    Tiny(
        "pangu-embedded",
        "PanguEmbeddedForCausalLM",
        {"attention_bias": True},
        oracle="LlamaForCausalLM",
        written={"bias": True, "attention_bias": None},
    ),
    Tiny(
        "mimo",
        "MiMoForCausalLM",
        oracle="Qwen2ForCausalLM",
        written={"num_nextn_predict_layers": 1, "attention_bias": True},
        rename=renames.mimo,
    ),
    Tiny("phi-qk-norm", "PhiForCausalLM", {"qk_layernorm": True, "partial_rotary_factor": 0.25}),
    Tiny("cohere-qk-norm", "CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 1.0}),
    Tiny("stablelm-qk-norm", "StableLmForCausalLM", {"qk_layernorm": True}),
    Tiny("persimmon", "PersimmonForCausalLM", {"intermediate_size": 48}, SMALL_MHA),
    Tiny("persimmon-plain", "PersimmonForCausalLM", {"intermediate_size": 48, "qk_layernorm": False}, SMALL_MHA),
    Tiny(
        "hunyuan",
        "HunYuanDenseV1ForCausalLM",
        {"head_dim": 12, "rope_parameters": {"rope_type": "dynamic", "alpha": 9.0, "factor": 1.0, "rope_theta": 1e3}},
    ),
    Tiny("hunyuan-biased", "HunYuanDenseV1ForCausalLM", {"head_dim": 8, "attention_bias": True}),
    Tiny("bloom", "BloomForCausalLM", base={"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    Tiny("bloom-6-heads", "BloomForCausalLM", base={"vocab_size": VOCAB, "hidden_size": 36, "n_layer": 2, "n_head": 6}),
    Tiny("mpt", "MptForCausalLM", base=SMALL_MPT),
    Tiny("mpt-clipped", "MptForCausalLM", {"attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.5}}, SMALL_MPT),
    Tiny(
        "falcon-alibi",
        "FalconForCausalLM",
        {"alibi": True, "multi_query": False, "bias": True},
        SMALL_MHA,
        attention="sdpa",  # the eager one of transformers adds ALiBi twice
    ),
    Tiny("apertus", "ApertusForCausalLM"),
    Tiny(
        "gemma4",
        "Gemma4ForCausalLM",
        {
            **{"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"use_double_wide_mlp": True, "final_logit_softcapping": 5.0, "vocab_size_per_layer_input": VOCAB},
        },
        PER_LAYER,
    ),
    Tiny(
        "gemma4-experts",
        "Gemma4ForCausalLM",
        {
            **{"global_head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20},
        },
        PER_LAYER,
    ),
    Tiny(
        "gemma3n",
        "Gemma3nForCausalLM",
        {"laurel_rank": 4, "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.0, 0.0], "altup_active_idx": 1},
        PER_LAYER,
    ),
    Tiny("ministral3", "Ministral3ForCausalLM", {"head_dim": 8, "rope_parameters": GROWING}),
    Tiny("llama4", "Llama4ForCausalLM", {"no_rope_layers": [1, 0, 1, 1]}, SMALL_LLAMA4),
    Tiny(
        "llama4-short",
        "Llama4ForCausalLM",
        {"attention_chunk_size": 64, "floor_scale": 64, "interleave_moe_layer_step": 1},
        SMALL_LLAMA4,
    ),
    Tiny(
        "llama4-yarn",
        "Llama4ForCausalLM",
        {"no_rope_layers": [1, 0, 1, 1], "rope_parameters": {**YARN, "rope_theta": 1e3, "attention_factor": 1.7}},
        SMALL_LLAMA4,
    ),
    Tiny("apertus-biased", "ApertusForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    Tiny(
        "hunyuan-moe",
        "HunYuanMoEV1ForCausalLM",
        {"head_dim": 8, "num_experts": 6, "moe_topk": [2, 3], "attention_bias": True},
    ),
    Tiny(
        "afmoe",
        "AfmoeForCausalLM",
        {
            **{"num_hidden_layers": 4, "num_dense_layers": 2, "head_dim": 8, "sliding_window": WINDOW},
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "route_scale": 1.7},
            **{"mup_enabled": True, "global_attn_every_n_layers": 2},
        },
    ),
    Tiny(
        "exaone-moe",
        "ExaoneMoeForCausalLM",
        {
            **{"num_hidden_layers": 5, "sliding_window": WINDOW, "num_experts": 8, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 20, "num_shared_experts": 2, "n_group": 2, "topk_group": 1},
        },
    ),
    Tiny(
        "hy3",
        "HYV3ForCausalLM",
        {
            **{"num_hidden_layers": 3, "head_dim": 12, "num_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 20, "num_shared_experts": 2},
        },
    ),
    Tiny(
        "mellum",
        "MellumForCausalLM",
        {
            **{"num_hidden_layers": 3, "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 20, "sliding_window": WINDOW, "mlp_layer_types": ["dense", "sparse", "sparse"]},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 1e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    Tiny(
        "cohere2-moe",
        "Cohere2MoeForCausalLM",
        {
            **{"num_hidden_layers": 4, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 40},
            **{"head_dim": 8, "logit_scale": 0.5, "sliding_window": WINDOW, "sliding_window_pattern": 2},
            **{"num_experts": 6, "expert_selection_fn": "sigmoid", "num_shared_experts": 1},
            "shared_expert_combination_strategy": "sum",
        },
    ),
    Tiny(
        "cohere2-moe-softmax",
        "Cohere2MoeForCausalLM",
        {"head_dim": 8, "logit_scale": 0.5, "rms_norm_eps": 1e-5, "num_shared_experts": 2},
    ),
    Tiny(
        "axk1",
        "AXK1ForCausalLM",
        {key: value for key, value in ROUTED.items() if key != "first_k_dense_replace"},
        {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
    ),
    Tiny(
        "glm5",
        "GlmMoeDsaForCausalLM",
        {**ROUTED, "n_group": 1, "topk_group": 1},
        SPARSE_LATENT,
    ),
    Tiny(
        "glm5-shared",
        "GlmMoeDsaForCausalLM",
        {
            **{**ROUTED, "n_group": 1, "topk_group": 1, "num_hidden_layers": 4},
            "indexer_types": ["full", "shared", "full", "shared"],
        },
        SPARSE_LATENT,
    ),
    Tiny(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        {"scale_emb": 3.0, "dim_model_base": 8},
        {key: value for key, value in LATENT.items() if key not in ("first_k_dense_replace", "n_routed_experts")},
    ),
    Tiny(
        "deepseek1",
        "DeepseekForCausalLM",
        {"num_hidden_layers": 3},
        oracle="LlamaForCausalLM",
        written={key: value for key, value in ROUTED.items() if "group" not in key and key != "routed_scaling_factor"},
        assemble=assembled.deepseek_experts,
        rename=renames.single_experts,
    ),
    Tiny(
        "bailing",
        "BailingMoeForCausalLM",
        {"num_hidden_layers": 3, "head_dim": 12},
        oracle="LlamaForCausalLM",
        written={
            **{"num_experts": 12, "num_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
            **{"first_k_dense_replace": 1, "norm_topk_prob": False, "norm_head": True, "use_sliding_window": False},
        },
        assemble=assembled.deepseek_experts_and_unit_head,
        rename=renames.bailing,
    ),
    Tiny(
        "bailing-v2",
        "BailingMoeV2ForCausalLM",
        {**ROUTED, "use_qk_norm": True, "head_dim": 16, "rope_parameters": {"partial_rotary_factor": 0.5}},
        oracle="Glm4MoeForCausalLM",
        written={
            **{"num_experts": 12, "num_shared_experts": 2, "score_function": "sigmoid", "n_routed_experts": None},
            **{"n_shared_experts": None, "moe_router_enable_expert_bias": True, "num_local_experts": None},
        },
        rename=renames.bailing_v2,
        names_only=True,
    ),
    Tiny(
        "sarvam-mla",
        "SarvamMLAForCausalLM",
        {**ROUTED, "q_lora_rank": None},
        {**LATENT},
        oracle="DeepseekV3ForCausalLM",
        written={
            **{"num_experts": 12, "num_shared_experts": 2, "score_function": "sigmoid", "n_routed_experts": None},
            **{"n_shared_experts": None, "moe_router_enable_expert_bias": True},
        },
        names_only=True,
    ),
    Tiny(
        "pangu-ultra",
        "PanguUltraMoEForCausalLM",
        {**ROUTED, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6},
        LATENT,
        oracle="DeepseekV3ForCausalLM",
        written={
            **{"num_routed_experts": 12, "num_shared_experts": 2, "num_dense_layers": 1, "sandwich_norm": True},
            **{"attention_q_lora_dim": 24, "attention_kv_lora_dim": 16, "attention_qk_dim": 12},
            **{"attention_qk_rope_dim": 8, "attention_v_dim": 10, "router_enable_expert_bias": True},
            **dict.fromkeys(("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "q_lora_rank")),
            **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
        },
        assemble=assembled.sandwich,
        rename=renames.pangu_ultra,
    ),
    Tiny(
        "telechat2",
        "TeleChat2ForCausalLM",
        {"rms_norm_eps": 1e-3},
        oracle="LlamaForCausalLM",
        written={
            **{"n_layer": 2, "n_head": 4, "ffn_hidden_size": 48, "layer_norm_epsilon": 1e-3, "training_seqlen": 64},
            **{"base_seqlen": 64, "logn": True, "embed_layernorm": False, "hidden_dropout": 0.0},
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps")),
            **dict.fromkeys(("max_position_embeddings",)),
        },
        assemble=assembled.biased_outputs,
        rename=renames.telechat2,
    ),
    Tiny(
        "baichuan-7b",
        "BaiChuanForCausalLM",
        {"num_key_value_heads": 4},
        oracle="LlamaForCausalLM",
        rename=renames.baichuan,
        names_only=True,
    ),
    Tiny(
        "baichuan2-13b",
        "BaichuanForCausalLM",
        {"num_key_value_heads": 4},
        oracle="LlamaForCausalLM",
        written={"z_loss_weight": 0, "model_max_length": 64, "max_position_embeddings": None, "rope_parameters": None},
        assemble=assembled.alibi,
        rename=renames.baichuan2,
    ),
    Tiny(
        "qwen1",
        "QWenLMHeadModel",
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 1e3}},
        oracle="Qwen2ForCausalLM",
        written={
            **{"layer_norm_epsilon": 1e-3, "rotary_emb_base": 1000, "kv_channels": 8, "intermediate_size": 96},
            **{"seq_length": 64, "max_position_embeddings": 8192, "no_bias": True, "use_dynamic_ntk": True},
            **{"rms_norm_eps": None, "rope_parameters": None, "layer_types": None, "use_logn_attn": True},
            **{"max_window_layers": None, "use_sliding_window": None, "sliding_window": None},
        },
        rename=renames.qwen1,
        names_only=True,
    ),
    Tiny(
        "plamo3",
        "Plamo3ForCausalLM",
        {
            **{"num_hidden_layers": 3, "head_dim": 12, "use_sliding_window": True, "sliding_window": WINDOW},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        oracle="Qwen3ForCausalLM",
        written={
            **{"sliding_window": None, "window_size": WINDOW, "sliding_window_pattern": 2, "layer_types": None},
            **{"rope_parameters": None, "rope_theta": 1e4, "rope_local_theta": 1e4, "max_window_layers": None},
            "use_sliding_window": None,
        },
        assemble=assembled.sandwich,
        rename=renames.plamo3,
    ),
    Tiny(
        "solar",
        "SolarForCausalLM",
        {"num_hidden_layers": 4},
        oracle="LlamaForCausalLM",
        written={
            **{"bskcn_1": [0], "bskcn_2": [1], "bskcn_3": [2], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8]},
            "sliding_window": 2047,
        },
        assemble=assembled.blended,
    ),
    Tiny(
        "nemotron-nas",
        "DeciLMForCausalLM",
        {"num_hidden_layers": 6},
        oracle="LlamaForCausalLM",
        written={
            **{"intermediate_size": None, "num_key_value_heads": None},
            "block_configs": [
                {"attention": attention, "ffn": ffn}
                for attention, ffn in (
                    ({"n_heads_in_group": 2}, {"intermediate_size": 48}),
                    ({"no_op": True}, {"intermediate_size": 48}),
                    ({"n_heads_in_group": 2, "no_op": False}, {"no_op": True}),
                    ({"no_op": True}, {"no_op": True}),
                    ({"n_heads_in_group": 4, "replace_with_linear": False}, {"ffn_mult": 6.0}),
                    ({"n_heads_in_group": 2}, {"intermediate_size": 48}),
                )
            ],
        },
        assemble=assembled.pruned,
    ),
    Tiny(
        "step1",
        "Step1ForCausalLM",
        oracle="LlamaForCausalLM",
        written={
            **{"num_attention_groups": 2, "max_seq_len": 64, "num_key_value_heads": None},
            **{"max_position_embeddings": None, "rope_parameters": None},
        },
        assemble=assembled.root_alibi,
    ),
    Tiny(
        "arctic",
        "ArcticForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
        oracle="MixtralForCausalLM",
        written={"moe_layer_frequency": 2, "use_residual": True, "parallel_attn_mlp_res": True},
        assemble=assembled.arctic,
        rename=renames.arctic,
    ),
    Tiny(
        "mistral4",
        "Mistral4ForCausalLM",
        {
            **{key: value for key, value in ROUTED.items() if key != "routed_scaling_factor"},
            "rope_parameters": {**GROWING, "max_position_embeddings": 64},
        },
        LATENT,
    ),
    Tiny(
        "mimo-v2",
        "MiMoV2FlashForCausalLM",
        {
            **{"num_hidden_layers": 3, "head_dim": 12, "v_head_dim": 8, "sliding_window": WINDOW},
            **{"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "attention_bias": True},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "num_key_value_heads": 1},
        },
        oracle="MiMoV2FlashForCausalLM",
        written={
            **{"sliding_window": WINDOW - 1, "sliding_window_size": WINDOW - 1, "swa_num_key_value_heads": 2},
            **{"hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "layer_types": None},
            **{"rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334, "rope_parameters": None},
            **{"mlp_layer_types": None, "layernorm_epsilon": 1e-5, "rms_norm_eps": None},
        },
    ),
    Tiny(
        "step3p5",
        "Step3p5ForCausalLM",
        oracle="LlamaForCausalLM",
        written={
            **{"num_hidden_layers": 3, "num_attention_groups": 2, "num_key_value_heads": None, "head_dim": 8},
            **{"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]},
            **{"attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6}},
            **{"sliding_window": WINDOW, "moe_layers_enum": "1,2", "moe_num_experts": 6, "moe_top_k": 2},
            **{"moe_intermediate_size": 20, "share_expert_dim": 24, "moe_router_scaling_factor": 1.7},
            **{"swiglu_limits": [0.0, 0.0, 0.5, 0.0], "swiglu_limits_shared": [0.3, 0.0, 0.4, 0.0]},
            **{"rope_theta": [1e4, 1e3, 1e4, 1e3], "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0]},
            **{"rope_scaling": assembled.LLAMA3, "yarn_only_types": ["full_attention"], "rope_parameters": None},
            **{"rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1},
        },
        assemble=assembled.step3p5,
        rename=renames.step3p5,
    ),
    Tiny(
        "rnj1",
        "Rnj1ForCausalLM",
        {"num_hidden_layers": 3, "head_dim": 12, "sliding_window": 8, "sliding_window_pattern": 3},
        oracle="Gemma3ForCausalLM",
        written={"layer_types": ["chunked_attention", "chunked_attention", "full_attention"]},
        assemble=assembled.chunked,
    ),
    Tiny(
        "ling3",
        "BailingMoeV3ForCausalLM",
        {
            **{"num_hidden_layers": 4, "layer_group_size": 2, "first_k_dense_replace": 1, "short_conv_kernel_size": 3},
            **{"head_dim": 8, "num_local_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
            **{"n_group": 4, "topk_group": 2, "rope_theta": 1e3},
        },
        {key: value for key, value in LATENT.items() if key not in ("q_lora_rank", "n_routed_experts")},
        oracle="BailingHybridForCausalLM",
        written={
            **{"num_experts": 12, "num_local_experts": None, "no_kda_lora": True, "score_function": "sigmoid"},
            **{"gated_attention_proj_granularity_type": "head_wise", "head_dim": 8, "qk_head_dim": 20},
            **dict.fromkeys(("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "mlp_layer_types")),
        },
    ),
    Tiny(
        "ling2.5",
        "BailingMoeV2_5ForCausalLM",
        {**ROUTED, "num_hidden_layers": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
        {**LATENT},
        oracle="DeepseekV3ForCausalLM",
        written={
            **{"num_experts": 12, "num_shared_experts": 2, "score_function": "sigmoid", "n_routed_experts": None},
            **{"n_shared_experts": None, "moe_router_enable_expert_bias": True, "use_qk_norm": True, "head_dim": 8},
            **{"layer_group_size": 2, "group_norm_size": 2, "num_key_value_heads": 2, "qk_head_dim": None},
            **{"rope_parameters": None, "rope_theta": 1e3, "partial_rotary_factor": 0.5, "use_bias": False},
        },
        assemble=assembled.lightning_attention,
        rename=renames.bailing_linear,
    ),
    Tiny(
        "minimax-m3",
        "MiniMaxM3SparseForCausalLM",
        {
            **{"num_hidden_layers": 3, "head_dim": 16, "rotary_dim": 8, "dense_intermediate_size": 40},
            **{"shared_intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 0.8},
            **{"index_n_heads": 2, "index_head_dim": 12, "index_block_size": 4, "index_topk_blocks": 3},
            **{"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "index_local_blocks": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
        },
        oracle="MiniMaxM3VLForCausalLM",
        written={
            **{"layer_types": None, "mlp_layer_types": None, "moe_layer_freq": [0, 1, 1], "hidden_act": "swigluoai"},
            **dict.fromkeys(("index_n_heads", "index_head_dim", "index_block_size")),
            **{"index_topk_blocks": None, "index_local_blocks": None},
            "sparse_attention_config": {
                **{"use_sparse_attention": True, "sparse_num_index_heads": 2, "sparse_index_dim": 12},
                **{"sparse_block_size": 4, "sparse_topk_blocks": 3, "sparse_local_block": 2},
                **{"sparse_attention_freq": [0, 1, 1], "sparse_disable_index_value": [0, 1, 1]},
            },
        },
        rename=renames.minimax_m3,
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
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(std=0.2)
        if name.endswith("layer_scalar"):
            buffer.normal_(1.0, 0.2)


def computed_buffers(model: nn.Module) -> set[str]:
    """Return the names of buffers that follow from the configuration, such as rotary frequencies."""
    learned = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    return {name for name, _ in model.named_buffers() if not name.endswith(learned)}


def tokens(count: int = TOKENS, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


Logits = Callable[[list[int]], torch.Tensor]


@torch.inference_mode()
def logits(model: transformers.PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits, float32 [T, V]."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]
