"""Published config.json files of multimodal models: the text model that is loaded of each."""

from __future__ import annotations

from typing import Any

import pytest
from support.checkpoints.real_models import FOUND, REAL
from support.suite.rows import each_row

from pagoda.common.errors import ModelError
from pagoda.common.models.mixers import Attention, LatentAttention
from pagoda.common.models.registry import ARCHITECTURES, overridden, spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.towers import TEXT_TOWERS, TEXT_TYPES, TextTower, TextType, text_model, with_text_keys

LLAMA = {
    "_name_or_path": "lmsys/vicuna-7b-v1.5",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "vocab_size": 32064,
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
    "llava-1.5-7b-hf": {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": 32000,
        "model_type": "llava",
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "text_config": LLAMA,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.36.0.dev0",
        "vision_config": {"model_type": "clip_vision_model"},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    },
    "Mistral-Small-3.1-24B-Instruct-2503": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "use_cache": True,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"model_type": "pixtral"},
        "vision_feature_layer": -1,
    },
    "Qwen2.5-VL-7B-Instruct": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_token_id": 151654,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.41.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vision_config": {"depth": 32, "hidden_size": 1280},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 152064,
    },
    "Qwen3-VL-30B-A3B-Instruct": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl_moe",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "decoder_sparse_step": 1,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 6144,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "use_cache": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 151656,
        "vision_config": {"depth": 27},
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    },
    "Kimi-VL-A3B-Instruct": {
        "architectures": ["KimiVLForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_vl.KimiVLConfig"},
        "vision_config": {"model_type": "moonvit"},
        "text_config": {
            "vocab_size": 163840,
            "max_position_embeddings": 131072,
            "hidden_size": 2048,
            "intermediate_size": 11264,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "ep_size": 1,
            "routed_scaling_factor": 2.446,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "topk_method": "noaux_tc",
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 6,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "aux_loss_alpha": 0.001,
            "seq_aux": True,
            "num_key_value_heads": 16,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-05,
            "pretraining_tp": 1,
            "use_cache": True,
            "rope_theta": 800000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 163584,
            "pad_token_id": 163839,
            "eos_token_id": 163585,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
        },
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.3",
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 163840,
    },
    "Llama-4-Scout-17B-16E-Instruct": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "model_type": "llama4",
        "text_config": {
            "_attn_implementation_autoset": True,
            "attention_bias": False,
            "attention_chunk_size": 8192,
            "attention_dropout": 0.0,
            "bos_token_id": 200000,
            "eos_token_id": [200001, 200007, 200008],
            "for_llm_compressor": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 10485760,
            "model_type": "llama4_text",
            "no_rope_layers": [],
            "num_attention_heads": 40,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "output_router_logits": False,
            "pad_token_id": 200018,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_qk_norm": True,
            "vocab_size": 202048,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0.dev0",
        "vision_config": {"model_type": "llama4_vision_model"},
    },
    "InternVL3-1B": {
        "architectures": ["InternVLChatModel"],
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 448,
        "hidden_size": 896,
        "llm_config": {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 21,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151674,
        },
        "max_dynamic_patch": 12,
        "model_type": "internvl_chat",
        "select_layer": -1,
        "template": "internvl2_5",
        "tie_word_embeddings": False,
        "transformers_version": None,
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "vision_config": {"architectures": ["InternVisionModel"]},
    },
}
PARAMETERS = {
    "gemma-3-4b-it": 3.88e9,
    "llava-1.5-7b-hf": 6.74e9,
    "Mistral-Small-3.1-24B-Instruct-2503": 23.57e9,
    "Qwen2.5-VL-7B-Instruct": 7.62e9,
    "Qwen3-VL-30B-A3B-Instruct": 30.53e9,
    "Kimi-VL-A3B-Instruct": 15.96e9,
    "Llama-4-Scout-17B-16E-Instruct": 107.77e9,
    "InternVL3-1B": 0.63e9,
}
"""Of the text models that these are made of: Gemma 3 4b's, Vicuna 7b, Mistral Small 3, Qwen2.5 7B, Qwen3 30B-A3B,
Moonlight 16B-A3B, and Qwen2.5 0.5B with a head of its own."""


def spec(name: str, changes: dict[str, Any] | None = None) -> ModelSpec:
    return spec_from_config(overridden(MULTIMODAL[name], changes or {}))[0]


@each_row("name", MULTIMODAL)
def test_published_configs(name: str) -> None:
    count = sum(param.size for param in params(spec(name)).values())
    assert count == pytest.approx(PARAMETERS[name], rel=0.01)


def test_keys_that_files_leave_out_have_the_defaults_of_their_type() -> None:
    (mixer, *_) = spec("gemma-3-4b-it").mixers
    assert isinstance(mixer, Attention)
    assert (mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.window) == (8, 4, 256, 1024)
    assert spec("gemma-3-4b-it").max_positions == 131_072
    (mixer, *_) = spec("llava-1.5-7b-hf").mixers
    assert isinstance(mixer, Attention)
    assert (mixer.heads, mixer.kv_heads) == (32, 32)


def test_layers_of_llama_4() -> None:
    mixers = [layer.attention for layer in spec("Llama-4-Scout-17B-16E-Instruct").layers[:4]]
    assert [(mixer.chunk, mixer.rope is None, mixer.query_growth is None) for mixer in mixers] == [
        (8192, False, True),
        (8192, False, True),
        (8192, False, True),
        (None, True, False),
    ]
    assert [mixer.qk_norm is None for mixer in mixers] == [False, False, False, True]


def test_multimodal_positions_of_text_are_plain_ones() -> None:
    assert {rope.scaling for rope in spec("Qwen2.5-VL-7B-Instruct").ropes} == {None}
    assert isinstance(spec("Kimi-VL-A3B-Instruct").mixers[0], LatentAttention)


@each_row(
    ("version", "top", "section", "tied"),
    [
        ("4.57.0", False, True, True),  # transformers 4 reads the section
        ("4.57.0", False, None, False),
        ("4.57.0", None, True, True),
        ("5.23.0", False, True, False),  # transformers 5 the top
        ("5.23.0", True, False, True),
        ("5.23.0", None, True, True),
    ],
)
def test_which_key_ties_the_head(version: str, top: bool | None, section: bool | None, tied: bool) -> None:
    stated = {"transformers_version": version, "tie_word_embeddings": top}
    changes = {**stated, "text_config": {"tie_word_embeddings": section}}
    assert spec("Qwen3-VL-30B-A3B-Instruct", changes).tied is tied


def test_what_the_section_states_of_the_whole_checkpoint() -> None:
    config = MULTIMODAL["Qwen3-VL-30B-A3B-Instruct"]
    fp8 = overridden(config, {"text_config": {"quantization_config": {"quant_method": "fp8"}}})
    keys = with_text_keys(fp8)
    assert (keys["dtype"], keys["eos_token_id"]) == ("bfloat16", 151645)
    assert keys["quantization_config"] == {"quant_method": "fp8"}
    assert spec_from_config(fp8)[0] == spec("Qwen3-VL-30B-A3B-Instruct")
    assert with_text_keys(LLAMA) == LLAMA
    assert with_text_keys(MULTIMODAL["gemma-3-4b-it"])["eos_token_id"] == [1, 106]


def test_both_names_of_a_section() -> None:
    """NVIDIA's files say `llm_config`, transformers' `text_config`; remedies name the one that the file has."""
    section = REAL["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"].config
    for name in ("NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3"):
        for key in ("llm_config", "text_config"):
            config = {"architectures": [name], key: section}
            assert spec_from_config(config)[0] == spec_from_config(section)[0]
            with pytest.raises(ModelError, match=rf"""'\{{"{key}": \{{"swirl": null"""):
                spec_from_config({**config, key: {**section, "swirl": 1}})


def test_keys_of_the_drafting_module_of_exaone_45_are_unknown_to_its_class() -> None:
    """Its first files have a type of text that transformers reads as EXAONE 4."""
    config = {**REAL["EXAONE-4.0-32B"].config, "transformers_version": "5.3.0.dev0", "architectures": None}
    plain = spec_from_config({**config, "architectures": ["Exaone4ForCausalLM"]})[0]
    extra = {"_num_mtp_layers": 1, "mtp_loss_scaling_factor": 0.05, "mtp_share_layers": True}
    for kind in ("exaone4", "exaone4_5_text"):
        text = {**config, **extra, "model_type": kind}
        file = {"architectures": ["Exaone4_5_ForConditionalGeneration"], "text_config": text}
        assert spec_from_config({**file, "transformers_version": "5.3.0.dev0"})[0] == plain


@pytest.mark.parametrize("digits", [1, 2])
def test_full_heads_of_gemma_4_that_are_stated_layer_by_layer(digits: int) -> None:
    """transformers 5 writes the layers' numbers with as many digits as the last one has."""
    config = FOUND["google/gemma-4-26B-A4B"].config["text_config"] | {"architectures": ["Gemma4ForCausalLM"]}
    full = [layer for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    section = {"head_dim": config["global_head_dim"], "num_key_value_heads": config["num_global_key_value_heads"]}
    stated = {f"{layer:0{digits}}": section for layer in full}
    rest = {key: value for key, value in config.items() if key not in ("global_head_dim", "num_global_key_value_heads")}
    assert spec_from_config({**rest, "per_layer_config": stated})[0] == spec_from_config(config)[0]
    for changed, words in (
        ({**stated, "99": section}, "per_layer_config has an entry for layer 99 of 30 layers"),
        ({**stated, f"{full[0]:03}": section}, f"{full[0]:03} unknown key"),
        ({**stated, "last": section}, "last unknown key"),
        ({name: stated[name] for name in list(stated)[1:]}, f"for each full layer and no other; see {full[0]}"),
    ):
        with pytest.raises(ModelError, match=words):
            spec_from_config({**rest, "per_layer_config": changed})


def test_heads_of_windowed_layers_that_are_stated_one_by_one() -> None:
    """transformers 5 writes Step 3.7's so."""
    config = REAL["Step-3.5-Flash"].config
    other = config["attention_other_setting"]["num_attention_heads"]
    kinds = config["layer_types"][: config["num_hidden_layers"]]
    windowed = [str(layer) for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    rest = {key: value for key, value in config.items() if key != "attention_other_setting"}
    stated = {layer: {"num_attention_heads": other} for layer in windowed}
    assert spec_from_config({**rest, "per_layer_config": stated})[0] == spec_from_config(config)[0]
    for changed, words in (
        ({**stated, "0": {"num_attention_heads": other}}, "for each windowed layer, no other; see 0"),
        ({**stated, windowed[0]: {"num_attention_heads": 8}}, "differs from windowed layer to windowed layer"),
        ({**stated, windowed[0]: {"num_attention_heads": other, "head_dim": 64}}, "head_dim unknown key"),
    ):
        with pytest.raises(ModelError, match=words):
            spec_from_config({**rest, "per_layer_config": changed})


def test_an_unknown_key_of_the_text_is_refused_with_the_override_that_drops_it() -> None:
    changes = {"text_config": {"swirl": [3]}}
    with pytest.raises(ModelError, match=r"""swirl unknown key .*'\{"text_config": \{"swirl": null\}\}'$"""):
        spec("gemma-3-4b-it", changes)
    assert spec("gemma-3-4b-it", {"swirl": 3}) == spec("gemma-3-4b-it")


@each_row("entry", [*TEXT_TOWERS.values(), *TEXT_TYPES.values()], ids=lambda entry: entry.architecture)
def test_every_text_model_is_supported(entry: TextTower | TextType) -> None:
    if entry.architecture is not None:
        assert entry.architecture in ARCHITECTURES


@each_row(
    ("config", "message"),
    [
        ({"architectures": ["MllamaForConditionalGeneration"]}, "Mllama.* cross-attention layers; serve"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config is missing"),
        ({"architectures": ["LlavaForConditionalGeneration"], "text_config": {}}, "text model of type None"),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "swirl"}},
            "of type 'swirl', which is not supported; supported: .*gemma3_text",
        ),
    ],
)
def test_what_is_not_supported(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        text_model(config)
