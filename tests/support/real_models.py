"""Facts of released models, written down by hand: the keys of config.json, the published size, bytes of KV per token.

`parameters` is the published count: exact where the hub's index of tensors states it, else that of the model's card,
without layers that only propose drafts. `kv_bytes` is computed by hand, in bfloat16, over all layers: layers x KV heads
x head dim x K and V x 2 bytes; for latent attention layers x (latent + rotary channels, + those of an indexer's key) x
2 bytes. Recurrent layers keep nothing per token, and windows count like the others.

Source of the keys: MEMORY (written from knowledge of the file), DEFAULTS (defaults of the configuration class in
transformers 5, which are the released model's), or the page that was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from support.hub_configs import GENERATORS

MEMORY: Final = "memory"
DEFAULTS: Final = "transformers 5"
TRANSFORMERS: Final = "transformers 5, its configuration class and model code; github.com/vllm-project/vllm"
LING: Final = "github.com/inclusionAI/Ling-V2, models/configuration_bailing_moe_v2.py"


@dataclass(frozen=True)
class Real:
    """One released model."""

    config: dict[str, Any]
    parameters: float
    kv_bytes: int
    source: str = MEMORY


def _of(name: str, layers: int, **changes: Any) -> dict[str, Any]:
    """The keys of a published file with the whole number of layers, and what differs in this model's file."""
    own = GENERATORS[name]
    key = next(key for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if key in own)
    return {**own, key: layers, **changes}


def _llama(layers: int, width: int, heads: int, kv: int, ffn: int, **changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": ffn}
    return _of("Llama-3.1-8B-Instruct", layers, **{**shape, **changes})


def _qwen2(layers: int, width: int, heads: int, kv: int, ffn: int, **changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": ffn}
    return _of("Qwen2.5-7B-Instruct", layers, **{**shape, **changes})


def _qwen3(layers: int, width: int, heads: int, kv: int, ffn: int, **changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": ffn}
    return _of("Qwen3-4B", layers, **{**shape, **changes})


def _mistral(layers: int, width: int, heads: int, ffn: int, **changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": ffn, "sliding_window": None}
    return _of("Mistral-7B-v0.1", layers, **{**shape, **changes})


_MIMO_V2: dict[str, Any] = {
    **{"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "vocab_size": 152576},
    **{"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 64},
    **{"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64},
    **{"swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "swa_rope_theta": 10000.0},
    **{"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.334, "attention_value_scale": 0.707},
    **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "attention_bias": False},
    **{"hybrid_layer_pattern": [0 if n == 0 or n % 6 == 5 else 1 for n in range(48)], "sliding_window": 128},
    **{"moe_layer_freq": [0] + [1] * 47, "moe_intermediate_size": 2048, "n_routed_experts": 256},
    **{"num_experts_per_tok": 8, "n_shared_experts": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": None},
    **{"max_position_embeddings": 262144, "layernorm_epsilon": 1e-5, "attention_chunk_size": 128},
    **{"sliding_window_size": 128, "hidden_act": "silu", "tie_word_embeddings": False},
}
_QWEN3_235B = {
    **{"hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "intermediate_size": 12288},
    **{"moe_intermediate_size": 1536, "max_window_layers": 94},
}
_KIMI = {
    **{"n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "vocab_size": 163840, "rope_theta": 50000.0},
}
_V2 = {
    **{"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "n_group": 8, "topk_group": 3},
    **{"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
}
_V32 = {
    **{"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "max_position_embeddings": 163840},
    **{"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
}

_LLAMA_4: Final[dict[str, Any]] = {
    **{"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120},
    **{"intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40},
    **{"num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072},
    **{"rms_norm_eps": 1e-5, "num_experts_per_tok": 1, "num_local_experts": 16, "interleave_moe_layer_step": 1},
    **{"use_qk_norm": True, "rope_theta": 500000.0, "rope_scaling": None, "no_rope_layers": [], "attn_scale": 0.1},
    **{"attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192, "attention_bias": False},
}
_GEMMA_3N: Final[dict[str, Any]] = {
    **{"architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "vocab_size": 262400},
    **{"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6},
    **{"max_position_embeddings": 32768, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "laurel_rank": 64},
    **{"sliding_window": 512, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7},
    **{"final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256},
    **{"altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_num_inputs": 4},
    **{"num_kv_shared_layers": 15, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25},
}

_IN_TURN: Final = ["sliding_attention", "full_attention"]

REAL: Final[dict[str, Real]] = {
    "Llama-2-7b": Real(_of("Llama-2-7b-hf", 32), 6_738_415_616, 32 * 32 * 128 * 2 * 2),
    "Llama-2-70b": Real(
        _of(
            "Llama-2-7b-hf",
            80,
            hidden_size=8192,
            intermediate_size=28672,
            num_attention_heads=64,
            num_key_value_heads=8,
        ),
        68_976_648_192,
        80 * 8 * 128 * 2 * 2,
    ),
    "Llama-3.1-8B": Real(_llama(32, 4096, 32, 8, 14336), 8_030_261_248, 32 * 8 * 128 * 2 * 2),
    "Llama-3.1-70B": Real(_llama(80, 8192, 64, 8, 28672), 70_553_706_496, 80 * 8 * 128 * 2 * 2),
    "Llama-3.1-405B": Real(_llama(126, 16384, 128, 8, 53248), 405_853_388_800, 126 * 8 * 128 * 2 * 2),
    "Llama-3.2-1B": Real(
        _llama(16, 2048, 32, 8, 8192, head_dim=64, tie_word_embeddings=True), 1_235_814_400, 16 * 8 * 64 * 2 * 2
    ),
    "Llama-3.2-3B": Real(
        _llama(28, 3072, 24, 8, 8192, head_dim=128, tie_word_embeddings=True), 3_212_749_824, 28 * 8 * 128 * 2 * 2
    ),
    "Llama-3.3-70B-Instruct": Real(_llama(80, 8192, 64, 8, 28672), 70_553_706_496, 80 * 8 * 128 * 2 * 2),
    "Yi-34B": Real(
        _of(
            "Yi-6B",
            60,
            hidden_size=7168,
            intermediate_size=20480,
            num_attention_heads=56,
            num_key_value_heads=8,
        ),
        34_388_917_248,
        60 * 8 * 128 * 2 * 2,
    ),
    "Mistral-7B-v0.1": Real(_of("Mistral-7B-v0.1", 32), 7_241_732_096, 32 * 8 * 128 * 2 * 2),
    "Mistral-Nemo-Instruct-2407": Real(
        _mistral(40, 5120, 32, 14336, head_dim=128, vocab_size=131072), 12_247_782_400, 40 * 8 * 128 * 2 * 2
    ),
    "Mistral-Small-24B-Instruct-2501": Real(
        _mistral(40, 5120, 32, 32768, head_dim=128, vocab_size=131072), 23_572_403_200, 40 * 8 * 128 * 2 * 2
    ),
    "Mistral-Large-Instruct-2407": Real(
        _mistral(88, 12288, 96, 28672, vocab_size=32768), 122_610_069_504, 88 * 8 * 128 * 2 * 2
    ),
    "Mixtral-8x7B-v0.1": Real(_of("Mixtral-8x7B-v0.1", 32), 46_702_792_704, 32 * 8 * 128 * 2 * 2),
    "Mixtral-8x22B-v0.1": Real(
        _of(
            "Mixtral-8x7B-v0.1",
            56,
            hidden_size=6144,
            intermediate_size=16384,
            num_attention_heads=48,
            vocab_size=32000,
        ),
        140_620_634_112,
        56 * 8 * 128 * 2 * 2,
    ),
    "Qwen2-7B": Real(_qwen2(28, 3584, 28, 4, 18944, vocab_size=152064), 7_615_616_512, 28 * 4 * 128 * 2 * 2),
    "Qwen2.5-0.5B": Real(
        _qwen2(24, 896, 14, 2, 4864, vocab_size=151936, tie_word_embeddings=True), 494_032_768, 24 * 2 * 64 * 2 * 2
    ),
    "Qwen2.5-14B": Real(_qwen2(48, 5120, 40, 8, 13824, vocab_size=152064), 14_770_033_664, 48 * 8 * 128 * 2 * 2),
    "Qwen2.5-32B": Real(_qwen2(64, 5120, 40, 8, 27648, vocab_size=152064), 32_763_876_352, 64 * 8 * 128 * 2 * 2),
    "Qwen2.5-72B": Real(_qwen2(80, 8192, 64, 8, 29568, vocab_size=152064), 72_706_203_648, 80 * 8 * 128 * 2 * 2),
    "Qwen1.5-MoE-A2.7B": Real(_of("Qwen1.5-MoE-A2.7B", 24), 14_315_784_192, 24 * 16 * 128 * 2 * 2),
    "Qwen-7B": Real(
        {
            **{"architectures": ["QWenLMHeadModel"], "model_type": "qwen", "attn_dropout_prob": 0.0, "bf16": False},
            **{"emb_dropout_prob": 0.0, "fp16": False, "fp32": False, "hidden_size": 4096, "intermediate_size": 22016},
            **{"kv_channels": 128, "layer_norm_epsilon": 1e-6, "max_position_embeddings": 32768, "no_bias": True},
            **{"num_attention_heads": 32, "num_hidden_layers": 32, "onnx_safe": None, "rotary_emb_base": 10000},
            **{"rotary_pct": 1.0, "scale_attn_weights": True, "seq_length": 8192, "softmax_in_fp32": False},
            **{"tie_word_embeddings": False, "tokenizer_class": "QWenTokenizer", "use_cache_kernel": False},
            **{"use_cache_quantization": False, "use_dynamic_ntk": True, "use_flash_attn": "auto"},
            **{"use_logn_attn": True, "vocab_size": 151936},
        },
        7_721_324_544,
        32 * 32 * 128 * 2 * 2,
    ),
    "Qwen3-0.6B": Real(
        _qwen3(28, 1024, 16, 8, 3072, vocab_size=151936, tie_word_embeddings=True, head_dim=128),
        596_049_920,
        28 * 8 * 128 * 2 * 2,
    ),
    "Qwen3-8B": Real(
        _qwen3(36, 4096, 32, 8, 12288, vocab_size=151936, tie_word_embeddings=False, head_dim=128),
        8_190_735_360,
        36 * 8 * 128 * 2 * 2,
    ),
    "Qwen3-32B": Real(
        _qwen3(64, 5120, 64, 8, 25600, vocab_size=151936, tie_word_embeddings=False, head_dim=128),
        32_762_123_264,
        64 * 8 * 128 * 2 * 2,
    ),
    "Qwen3-30B-A3B": Real(_of("Qwen3-30B-A3B", 48), 30_532_122_624, 48 * 4 * 128 * 2 * 2),
    "Qwen3-Coder-30B-A3B-Instruct": Real(_of("Qwen3-Coder-30B-A3B-Instruct", 48), 30_532_122_624, 48 * 4 * 128 * 2 * 2),
    "Qwen3-235B-A22B": Real(_of("Qwen3-30B-A3B", 94, **_QWEN3_235B), 235_093_634_560, 94 * 4 * 128 * 2 * 2),
    "Qwen3-Next-80B-A3B-Instruct": Real(_of("Qwen3-Next-80B-A3B-Instruct", 48), 79_674_391_296, 12 * 2 * 256 * 2 * 2),
    "deepseek-moe-16b-base": Real(
        {
            **{"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "attention_bias": False},
            **{"aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048},
            **{"intermediate_size": 10944, "max_position_embeddings": 4096, "moe_intermediate_size": 1408},
            **{"moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False},
            **{"num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28, "num_key_value_heads": 16},
            **{"pretraining_tp": 1, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000},
            **{"scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False, "vocab_size": 102400},
        },
        16_375_728_128,
        28 * 16 * 128 * 2 * 2,
    ),
    "DeepSeek-V2-Lite": Real(_of("DeepSeek-V2-Lite", 27), 15_706_484_224, 27 * (512 + 64) * 2),
    "DeepSeek-V2": Real(_of("DeepSeek-V2-Lite", 60, **_V2), 235_741_434_880, 60 * (512 + 64) * 2),
    "DeepSeek-V3": Real(_of("DeepSeek-V3", 61), 671_026_419_200, 61 * (512 + 64) * 2),
    "DeepSeek-R1": Real(_of("DeepSeek-V3", 61, max_position_embeddings=163840), 671_026_419_200, 61 * (512 + 64) * 2),
    "DeepSeek-V3.2": Real(_of("DeepSeek-V3", 61, **_V32), 671.9e9, 61 * (512 + 64 + 128) * 2),
    "Kimi-K2-Instruct": Real(_of("DeepSeek-V3", 61, **_KIMI), 1.026e12, 61 * (512 + 64) * 2),
    "GLM-4-9B-0414": Real(
        _of(
            "GLM-4-32B-0414",
            40,
            hidden_size=4096,
            intermediate_size=13696,
            num_attention_heads=32,
            num_key_value_heads=2,
        ),
        9_400_279_040,
        40 * 2 * 128 * 2 * 2,
    ),
    "GLM-4-32B-0414": Real(
        _of("GLM-4-32B-0414", 61, hidden_size=6144, intermediate_size=23040, num_attention_heads=48),
        32_566_081_536,
        61 * 2 * 128 * 2 * 2,
    ),
    "GLM-4.5-Air": Real(_of("GLM-4.5-Air", 46), 106e9, 46 * 8 * 128 * 2 * 2),
    "GLM-4.5": Real(
        _of(
            "GLM-4.5-Air",
            92,
            hidden_size=5120,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            n_routed_experts=160,
            first_k_dense_replace=3,
            routed_scaling_factor=2.5,
            use_qk_norm=True,
        ),
        355e9,
        92 * 8 * 128 * 2 * 2,
    ),
    "gemma-7b": Real(
        _of(
            "gemma-7b",
            28,
            hidden_size=3072,
            intermediate_size=24576,
            num_attention_heads=16,
            num_key_value_heads=16,
            head_dim=256,
            vocab_size=256000,
        ),
        8_537_680_896,
        28 * 16 * 256 * 2 * 2,
    ),
    "gemma-2-2b": Real(
        _of(
            "gemma-2-2b-it",
            26,
            hidden_size=2304,
            intermediate_size=9216,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
        ),
        2_614_341_888,
        26 * 4 * 256 * 2 * 2,
    ),
    "gemma-2-9b": Real(
        _of(
            "gemma-2-9b",
            42,
            hidden_size=3584,
            intermediate_size=14336,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=256,
        ),
        9_241_705_984,
        42 * 8 * 256 * 2 * 2,
    ),
    "gemma-3-1b-it": Real(_of("gemma-3-1b-it", 26), 999_885_952, 26 * 1 * 256 * 2 * 2),
    "Phi-3-mini-4k-instruct": Real(_of("Phi-3-mini-4k-instruct", 32), 3_821_079_552, 32 * 32 * 96 * 2 * 2),
    "phi-2": Real(
        _of(
            "phi-2",
            32,
            hidden_size=2560,
            intermediate_size=10240,
            num_attention_heads=32,
            num_key_value_heads=32,
            vocab_size=51200,
        ),
        2_779_683_840,
        32 * 32 * 80 * 2 * 2,
    ),
    "phi-4": Real(
        _of("phi-4", 40, hidden_size=5120, intermediate_size=17920, num_attention_heads=40, num_key_value_heads=10),
        14_659_507_200,
        40 * 10 * 128 * 2 * 2,
    ),
    "Phi-3.5-MoE-instruct": Real(_of("Phi-3.5-MoE-instruct", 32), 41_873_153_344, 32 * 8 * 128 * 2 * 2),
    "OLMo-2-1124-7B": Real(_of("OLMo-2-1124-7B", 32), 7_298_617_344, 32 * 32 * 128 * 2 * 2),
    "OLMoE-1B-7B-0924": Real(_of("OLMoE-1B-7B-0924", 16), 6_919_161_856, 16 * 16 * 128 * 2 * 2),
    "Minitron-4B-Base": Real(
        _of(
            "Minitron-4B-Base",
            32,
            hidden_size=3072,
            intermediate_size=9216,
            num_attention_heads=24,
            num_key_value_heads=8,
            vocab_size=256000,
        ),
        4.19e9,
        32 * 8 * 128 * 2 * 2,
    ),
    "granite-3.3-8b-instruct": Real(
        _of(
            "granite-3.3-8b-instruct",
            40,
            hidden_size=4096,
            intermediate_size=12800,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=49159,
        ),
        8_170_848_256,
        40 * 8 * 128 * 2 * 2,
    ),
    "granite-3.0-1b-a400m-instruct": Real(_of("granite-3.0-1b-a400m-instruct", 24), 1.334e9, 24 * 8 * 64 * 2 * 2),
    "c4ai-command-r-v01": Real(
        _of(
            "c4ai-command-r-v01",
            40,
            hidden_size=8192,
            intermediate_size=22528,
            num_attention_heads=64,
            num_key_value_heads=64,
            vocab_size=256000,
        ),
        34_980_831_232,
        40 * 64 * 128 * 2 * 2,
    ),
    "c4ai-command-r7b-12-2024": Real(
        _of(
            "c4ai-command-r7b-12-2024",
            32,
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=256000,
        ),
        8.028e9,
        32 * 8 * 128 * 2 * 2,
    ),
    "Olmo-3-7B-Instruct": Real(
        _of(
            "Olmo-3-7B-Instruct",
            32,
            hidden_size=4096,
            intermediate_size=11008,
            num_attention_heads=32,
            num_key_value_heads=32,
            vocab_size=100278,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8,
        ),
        7_298_011_136,
        32 * 32 * 128 * 2 * 2,
    ),
    "galactica-6.7b": Real(
        _of(
            "opt-6.7b",
            32,
            **{"_name_or_path": "galactica-6.7b", "activation_function": "gelu", "attention_dropout": 0.1},
            **{"bos_token_id": 0, "ffn_dim": 16384, "hidden_size": 4096, "num_attention_heads": 32},
            **{"learned_embeddings": True, "scale_embeddings": False, "vocab_size": 50000, "word_embed_proj_dim": 4096},
        ),
        6.66e9,
        32 * 32 * 128 * 2 * 2,
    ),
    "gpt2": Real(_of("gpt2", 12), 124_439_808, 12 * 12 * 64 * 2 * 2),
    "gpt2-medium": Real(_of("gpt2-medium", 24, n_embd=1024, n_head=16), 354_823_168, 24 * 16 * 64 * 2 * 2),
    "distilgpt2": Real(_of("distilgpt2", 6), 81_912_576, 6 * 12 * 64 * 2 * 2),
    "SmolLM3-3B": Real(
        _of(
            "SmolLM3-3B",
            36,
            hidden_size=2048,
            intermediate_size=11008,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=128256,
            no_rope_layers=[1, 1, 1, 0] * 9,
            layer_types=["full_attention"] * 36,
        ),
        3_075_098_624,
        36 * 4 * 128 * 2 * 2,
    ),
    "starcoder2-3b": Real(
        _of(
            "starcoder2-3b",
            30,
            hidden_size=3072,
            intermediate_size=12288,
            num_attention_heads=24,
            num_key_value_heads=2,
            vocab_size=49152,
        ),
        3_030_371_328,
        30 * 2 * 128 * 2 * 2,
    ),
    "dbrx-instruct": Real(_of("dbrx-instruct", 40), 131_596_523_520, 40 * 8 * 128 * 2 * 2),
    "MiniMax-M2": Real(_of("MiniMax-M2", 62, attn_type_list=[1] * 62), 228.7e9, 62 * 8 * 128 * 2 * 2),
    "dots.llm1.inst": Real(_of("dots.llm1.inst", 62), 142.77e9, 62 * 32 * 128 * 2 * 2),
    "ERNIE-4.5-21B-A3B-PT": Real(
        _of("ERNIE-4.5-21B-A3B-PT", 28, moe_capacity=[64, 64, 64]), 21.83e9, 28 * 4 * 128 * 2 * 2
    ),
    "Seed-OSS-36B-Instruct": Real(
        _of(
            "Seed-OSS-36B-Instruct",
            64,
            hidden_size=5120,
            intermediate_size=27648,
            num_attention_heads=80,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=155136,
        ),
        36_151_104_512,
        64 * 8 * 128 * 2 * 2,
    ),
    "EXAONE-4.0-32B": Real(
        _of(
            "EXAONE-4.0-32B",
            64,
            hidden_size=5120,
            intermediate_size=27392,
            num_attention_heads=40,
            num_key_value_heads=8,
            vocab_size=102400,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 16,
        ),
        32.0e9,
        64 * 8 * 128 * 2 * 2,
    ),
    "Apertus-8B-Instruct-2509": Real(
        _of(
            "Apertus-8B-Instruct-2509",
            32,
            hidden_size=4096,
            intermediate_size=21504,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=131072,
        ),
        8_053_338_176,
        32 * 8 * 128 * 2 * 2,
    ),
    "Hunyuan-A13B-Instruct": Real(
        {
            **{
                "architectures": ["HunYuanMoEV1ForCausalLM"],
                "model_type": "hunyuan_v1_moe",
                "add_classification_head": False,
            },
            **{"attention_bias": False, "attention_head_dim": 128, "cla_share_factor": 2, "class_num": 0},
            **{"dense_list": [4096, 0], "eod_token_id": 127967, "group_limited_greedy": False, "hidden_act": "silu"},
            **{"hidden_size": 4096, "intermediate_size": 3072, "kv_lora_rank": None, "max_position_embeddings": 32768},
            **{"mlp_bias": False, "moe_drop_tokens": False, "moe_intermediate_size": [3072] * 32},
            **{"moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": False, "moe_topk": [8] * 32},
            **{"n_group": None, "norm_topk_prob": True, "norm_type": "rms", "num_attention_heads": 32},
            **{"num_experts": 64, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_shared_expert": [1] * 32},
            **{"org_vocab_size": 128167, "pool_type": "last", "q_lora_rank": None, "qk_nope_head_dim": None},
            **{"qk_rope_head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "routed_scaling_factor": False},
            "rope_scaling": {
                **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0},
                **{"mscale_all_dim": 0.0, "type": "dynamic"},
            },
            **{"tie_word_embeddings": True, "topk_group": None, "use_cla": False, "use_mixed_mlp_moe": True},
            **{"use_mla": False, "use_qk_norm": True, "use_rotary_pos_emb": True, "v_head_dim": None},
            "vocab_size": 128167,
        },
        80_393_183_232,
        32 * 8 * 128 * 2 * 2,
    ),
    "Ling-mini-2.0": Real(
        {
            **{"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "embedding_dropout": 0.0},
            **{"first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048},
            **{"intermediate_size": 5120, "max_position_embeddings": 32768, "moe_intermediate_size": 512},
            **{"moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 512, "n_group": 8},
            **{"norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8},
            **{"num_hidden_layers": 20, "num_key_value_heads": 4, "num_shared_experts": 1, "output_dropout": 0.0},
            **{"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 600000},
            **{"routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid", "topk_group": 4},
            **{"tie_word_embeddings": False, "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False},
            **{"use_rmsnorm": True, "num_nextn_predict_layers": 0, "vocab_size": 157184},
        },
        16.26e9,
        20 * 4 * 128 * 2 * 2,
        LING,
    ),
    "MiniCPM3-4B": Real(
        {
            **{"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "attention_bias": False},
            **{"dim_model_base": 256, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 6400},
            **{"kv_lora_rank": 256, "max_position_embeddings": 32768, "num_attention_heads": 40},
            **{"num_hidden_layers": 62, "num_key_value_heads": 40, "q_lora_rank": 768, "qk_nope_head_dim": 64},
            **{"qk_rope_head_dim": 32, "rms_norm_eps": 1e-5, "scale_depth": 1.4, "scale_emb": 12},
            **{"tie_word_embeddings": True, "vocab_size": 73448},
            "rope_scaling": {
                **{"long_factor": [1.0] * 16, "short_factor": [1.0] * 16, "type": "longrope"},
                "original_max_position_embeddings": 32768,
            },
        },
        4.07e9,
        62 * (256 + 32) * 2,
        DEFAULTS,
    ),
    "GLM-5": Real(
        _of(
            "DeepSeek-V3",
            78,
            **{"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 154880},
            **{"hidden_size": 6144, "intermediate_size": 12288, "num_attention_heads": 64, "num_key_value_heads": 64},
            **{"q_lora_rank": 2048, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1},
            **{"max_position_embeddings": 202752, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32},
            **{"rope_scaling": None, "rope_theta": 1000000, "rms_norm_eps": 1e-5, "indexer_rope_interleave": True},
        ),
        744e9,
        78 * (512 + 64 + 128) * 2,
        DEFAULTS,
    ),
    "A.X-K1": Real(
        _of(
            "DeepSeek-V3",
            61,
            **{"architectures": ["AXK1ForCausalLM"], "model_type": "axk1", "vocab_size": 163840},
            **{"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 192},
            **{"first_k_dense_replace": 1, "max_position_embeddings": 131072},
        ),
        519e9,
        61 * (512 + 64) * 2,
        DEFAULTS,
    ),
    "Hy3-preview": Real(
        {
            **{"architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "vocab_size": 120832, "hidden_size": 4096},
            **{"intermediate_size": 13312, "num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128},
            **{"num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072},
            **{"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_experts": 192, "num_experts_per_tok": 8},
            **{"num_shared_experts": 1, "moe_intermediate_size": 1536, "router_scaling_factor": 2.826},
            **{"enable_moe_fp32_combine": True, "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"}},
        },
        295e9,
        80 * 8 * 128 * 2 * 2,
        DEFAULTS,
    ),
    "solar-pro-preview-instruct": Real(
        _of(
            "Llama-2-7b-hf",
            64,
            **{"architectures": ["SolarForCausalLM"], "model_type": "solar", "vocab_size": 32128, "hidden_size": 5120},
            **{"intermediate_size": 17920, "num_attention_heads": 40, "num_key_value_heads": 10, "head_dim": 128},
            **{"bskcn_1": [12, 20, 32, 44], "bskcn_2": [20, 32], "bskcn_3": [16, 24, 36, 48], "bskcn_4": [28, 40]},
            **{"bskcn_tv": [0.9, 0.8], "sliding_window": 2047, "max_position_embeddings": 4096},
        ),
        22.1e9,
        64 * 10 * 128 * 2 * 2,
    ),
    "snowflake-arctic-instruct": Real(
        {
            **{"architectures": ["ArcticForCausalLM"], "model_type": "arctic", "vocab_size": 32000},
            **{"hidden_size": 7168, "intermediate_size": 4864, "num_hidden_layers": 35, "num_attention_heads": 56},
            **{"num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 2, "rope_theta": 10000.0},
            **{"moe_layer_frequency": 1, "use_residual": True, "parallel_attn_mlp_res": True, "hidden_act": "silu"},
            **{"moe_token_dropping": False, "moe_min_capacity": 0, "moe_train_capacity_factor": 1},
            **{"moe_eval_capacity_factor": 1, "enable_expert_tensor_parallelism": False, "rms_norm_eps": 1e-5},
            **{"max_position_embeddings": 4096, "sliding_window": None, "attention_bias": False},
        },
        479e9,
        35 * 8 * 128 * 2 * 2,
    ),
    "Mistral-Large-3-675B-Instruct-2512": Real(
        _of(
            "DeepSeek-V3",
            61,
            **{"architectures": ["MistralLarge3ForCausalLM"], "model_type": "mistral_large3", "vocab_size": 131072},
            **{"hidden_size": 7168, "intermediate_size": 16384, "n_routed_experts": 128, "num_experts_per_tok": 4},
            **{"moe_intermediate_size": 4096, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
            **{
                "scoring_func": "softmax",
                "topk_method": None,
                "num_nextn_predict_layers": 0,
                "max_position_embeddings": 294912,
            },
            **{"rope_scaling": None, "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8192}},
        ),
        672e9,
        61 * (512 + 64) * 2,
    ),
    "MiMo-V2-Flash": Real(_MIMO_V2, 309e9, (9 * 4 + 39 * 8) * (192 + 128) * 2, TRANSFORMERS),
    "MiMo-V2.5-Pro": Real(
        {
            **_MIMO_V2,
            **{"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "hidden_size": 6144},
            **{"num_hidden_layers": 70, "num_attention_heads": 128, "num_key_value_heads": 8},
            **{"swa_num_attention_heads": 128, "n_routed_experts": 384, "max_position_embeddings": 1048576},
            **{"hybrid_layer_pattern": [0, *[1] * 6, *[0, *[1] * 7] * 6, *[0, *[1] * 6] * 2, 0]},
            **{"moe_layer_freq": [0] + [1] * 69, "rope_theta": 10000000, "attention_value_scale": 0.612},
            **{"attention_projection_layout": "fused_qkv", "attention_dropout": 0.0, "initializer_range": 0.02},
        },
        1.02e12,
        70 * 8 * (192 + 128) * 2,
        "its config.json, quoted with the list of its tensors in a public description of the checkpoint",
    ),
    "Step-3.5-Flash": Real(
        {
            **{"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "vocab_size": 128896},
            **{"hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45, "max_seq_len": 262144},
            **{"num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128, "use_qk_norm": False},
            **{"max_position_embeddings": 262144, "moe_layers_enum": ",".join(str(n) for n in range(3, 45))},
            **{"use_moe": True, "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280},
            **{"share_expert_dim": 1280, "moe_layer_offset": 0, "moe_every_n_layer": 1, "norm_expert_weight": True},
            **{"moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "att_impl_type": "GQA"},
            **{"use_moe_router_bias": True, "need_fp32_gate": True, "use_head_wise_attn_gate": True},
            **{"sliding_window": 512, "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12},
            **{"rope_theta": [5e6, 1e4, 1e4, 1e4] * 12, "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12},
            **{"use_rope_layers": [], "num_nextn_predict_layers": 3, "zero_centered": True},
            **{"yarn_only_types": ["full_attention"], "swiglu_limits": [0.0] * 43 + [7.0, 7.0] + [0.0] * 3},
            **{"swiglu_limits_shared": [0.0] * 43 + [16.0, 16.0] + [0.0] * 3, "rms_norm_eps": 1e-5},
            "attention_other_setting": {
                **{"attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 8},
                **{"head_dim": 128, "true_head_dim": 128},
            },
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072},
                **{"low_freq_factor": 1.0, "high_freq_factor": 32.0},
            },
        },
        196e9,
        45 * 8 * 128 * 2 * 2,
        TRANSFORMERS,
    ),
    "gpt-oss-20b": Real(_of("gpt-oss-20b", 24, layer_types=_IN_TURN * 12), 20_914_757_184, 24 * 8 * 64 * 2 * 2),
    "gpt-oss-120b": Real(_of("gpt-oss-120b", 36, layer_types=_IN_TURN * 18), 116_829_156_672, 36 * 8 * 64 * 2 * 2),
    # The hub's counts are those of both with a vision tower of 871,932,416: 108,641,793,536 and 401,583,781,376.
    "Llama-4-Scout-17B-16E, its text": Real(_LLAMA_4, 107_769_861_120, 48 * 8 * 128 * 2 * 2, DEFAULTS),
    "Llama-4-Maverick-17B-128E, its text": Real(
        {**_LLAMA_4, "num_local_experts": 128, "interleave_moe_layer_step": 2, "attention_chunk_size": 8192},
        400_711_848_960,
        48 * 8 * 128 * 2 * 2,
        DEFAULTS,
    ),
    "gemma-3n-E4B, its text": Real(_GEMMA_3N, 6.87e9, 20 * 2 * 256 * 2 * 2, DEFAULTS),
    "mamba-130m-hf": Real(GENERATORS["mamba-130m-hf"], 129_135_360, 0),
    "falcon-mamba-7b": Real(GENERATORS["falcon-mamba-7b"], 7_272_665_088, 0),
    "Mamba-Codestral-7B-v0.1": Real(GENERATORS["Mamba-Codestral-7B-v0.1"], 7_285_403_648, 0),
    "Jamba-v0.1": Real(GENERATORS["Jamba-v0.1"], 51_570_323_328, 4 * 8 * 128 * 2 * 2),
    "Nemotron-H-8B-Base-8K": Real(GENERATORS["Nemotron-H-8B-Base-8K"], 8.1e9, 4 * 8 * 128 * 2 * 2),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Real(
        GENERATORS["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"], 31.6e9, 6 * 2 * 128 * 2 * 2
    ),
    "granite-4.0-h-tiny": Real(GENERATORS["granite-4.0-h-tiny"], 6.94e9, 4 * 4 * 128 * 2 * 2),
    "granite-4.0-h-micro": Real(GENERATORS["granite-4.0-h-micro"], 3_191_396_096, 4 * 8 * 64 * 2 * 2),
    "Bamba-9B-v2": Real(GENERATORS["Bamba-9B-v2"], 9.78e9, 3 * 8 * 128 * 2 * 2),
    "Zamba2-1.2B": Real(GENERATORS["Zamba2-1.2B"], 1_215_064_704, 6 * 2 * 32 * 128 * 2),
    "Zamba2-7B": Real(GENERATORS["Zamba2-7B"], 7_356_749_648, 13 * 2 * 32 * 224 * 2),
    "Falcon-H1-0.5B-Instruct": Real(GENERATORS["Falcon-H1-0.5B-Instruct"], 521_411_104, 36 * 2 * 64 * 2 * 2),
    "LFM2-1.2B": Real(GENERATORS["LFM2-1.2B"], 1_170_340_608, 6 * 8 * 64 * 2 * 2),
    "LFM2-8B-A1B": Real(GENERATORS["LFM2-8B-A1B"], 8.34e9, 6 * 8 * 64 * 2 * 2),
    "Kimi-Linear-48B-A3B-Instruct": Real(
        GENERATORS["Kimi-Linear-48B-A3B-Instruct"], 49_122_681_728, 7 * (512 + 64) * 2
    ),
    "MiniMax-Text-01": Real(GENERATORS["MiniMax-Text-01"], 456.09e9, 10 * 8 * 128 * 2 * 2),
    "Qwen3.5-27B, its text": Real(GENERATORS["Qwen3.5-27B, its text"], 26.9e9, 16 * 4 * 256 * 2 * 2),
    "Qwen3.5-35B-A3B, its text": Real(GENERATORS["Qwen3.5-35B-A3B, its text"], 34.7e9, 10 * 2 * 256 * 2 * 2),
}
