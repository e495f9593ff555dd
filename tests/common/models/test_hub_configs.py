"""Published config.json files load: harmless keys are known, others are checked, the suggested override works."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.checkpoints.real_models import REAL
from support.servers.hub_configs import GENERATORS, LEGACY, POOLERS, SAVED
from support.suite.rows import each_row

from pagoda.common.config.groups.nested.pooler import PoolerConfig
from pagoda.common.errors import ModelError
from pagoda.common.models.registry import overridden, pooling_spec, spec_from_config
from pagoda.common.models.spec import ModelSpec, Moe, Router

ONE_EACH = {str(config["model_type"]): config for config in GENERATORS.values()}


def spec(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config({**SAVED, **config})[0]


@each_row("name", GENERATORS)
def test_published_generators(name: str) -> None:
    assert spec(GENERATORS[name]).vocab == GENERATORS[name]["vocab_size"]


def test_layers_that_a_search_has_sized_one_by_one() -> None:
    assert [layer.attention.kv_heads for layer in spec(GENERATORS["DeciLM-7B"]).layers] == [4, 2]
    first, second = spec(GENERATORS["Llama-3_3-Nemotron-Super-49B-v1"]).layers
    assert (first.attention.kv_heads, second.mixers) == (1, ())
    assert [layer.ffn.width for layer in (first, second)] == [1792, 768]  # 2/3 of the multiple, in steps of 256


@pytest.mark.parametrize(
    ("part", "key", "words"),
    [
        ("attention", {"replace_with_linear": True}, "replace_with_linear is True; only False is supported"),
        ("attention", {"n_heads_in_group": 3}, "n_heads_in_group is 3, which does not divide 8 heads"),
        ("ffn", {"swirl": 1}, "swirl unknown key"),
    ],
)
def test_blocks_that_are_not_computed_are_refused(part: str, key: dict[str, Any], words: str) -> None:
    config = GENERATORS["Llama-3_3-Nemotron-Super-49B-v1"]
    first, second = config["block_configs"]
    with pytest.raises(ModelError, match=words):
        spec({**config, "block_configs": [{**first, part: {**first[part], **key}}, second]})


@each_row("name", POOLERS)
def test_published_poolers(name: str) -> None:
    config = {**SAVED, **POOLERS[name]}
    use = "classify" if "Classification" in config["architectures"][0] else "embed"
    assert pooling_spec(config, use, None, PoolerConfig())[0].pooler is not None  # type: ignore[arg-type]


@each_row("kind", ONE_EACH)
def test_keys_added_by_writers_do_not_change_the_spec(kind: str) -> None:
    """Every PretrainedConfig field of older files, in every generating family."""
    config = ONE_EACH[kind]
    assert spec({**LEGACY, **config}) == spec(config)


@each_row(
    ("name", "key", "value", "words"),
    [
        ("Qwen3-Coder-30B-A3B-Instruct", "use_qk_norm", False, "use_qk_norm is False; only True is supported"),
        ("Qwen3-Coder-30B-A3B-Instruct", "qkv_bias", True, "qkv_bias is True; only False is supported"),
        ("Qwen3-4B", "use_qk_norm", False, "use_qk_norm is False; only True is supported"),
        ("Qwen3-Next-80B-A3B-Instruct", "hidden_act", "gelu", "hidden_act is 'gelu'; only 'silu' is supported"),
        ("Qwen3-Next-80B-A3B-Instruct", "use_sliding_window", True, "is True; only False is supported"),
        ("Qwen3-Next-80B-A3B-Instruct", "linear_num_key_heads", 12, "12 does not divide linear_num_value_heads 32"),
        ("Qwen3-Next-80B-A3B-Instruct", "layer_types", ["full_attention"], "has 1 entries for 2 layers"),
        ("Qwen3-Next-80B-A3B-Instruct", "layer_types", ["sliding_attention"] * 2, "has 'sliding_attention'; supported"),
        ("Qwen2-7B-Instruct", "qkv_bias", False, "qkv_bias is False; only True is supported"),
        ("Qwen2-7B-Instruct", "use_qk_norm", True, "use_qk_norm is True; only False is supported"),
        ("Mistral-7B-v0.1", "attention_bias", True, "attention_bias is True; only False is supported"),
        ("Mistral-7B-v0.1", "mlp_bias", True, "mlp_bias is True; only False is supported"),
        ("Mixtral-8x7B-v0.1", "attention_bias", True, "attention_bias is True; only False is supported"),
        ("Phi-4-mini-instruct", "lm_head_bias", True, "lm_head_bias is True; only False is supported"),
        ("Qwen3-4B", "mlp_bias", True, "mlp_bias is True; only False is supported"),
        ("phi-2", "rotary_dim", 64, "rotary_dim is 64; only 32 is supported"),
        ("gpt2", "attention_bias", False, "attention_bias is False; only True is supported"),
        ("opt-125m", "attention_bias", False, "attention_bias is False; only True is supported"),
        ("gpt2-medium", "n_special", 5, "n_special is 5; only 0 is supported"),
        ("gemma-2-9b", "sliding_window_size", 1024, "sliding_window_size is 1024; only 4096 is supported"),
        ("Llama-2-7b-hf", "quantization_config", {"quant_method": "awq"}, "quantization_config unknown key that"),
    ],
)
def test_keys_that_change_the_computation_are_refused(name: str, key: str, value: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec({**GENERATORS[name], key: value})


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_that_are_read_are_built(key: str) -> None:
    plain, biased = (spec({**GENERATORS["Llama-2-7b-hf"], key: value}) for value in (False, True))
    assert plain == spec(GENERATORS["Llama-2-7b-hf"]) != biased


@each_row(
    "extra",
    [
        {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_type": "llama", "tokenizer_name": "org/model"},
        {"_pre_quantization_dtype": "bfloat16", "use_flash_attention": True, "use_xformers": False},
        {"num_logits_to_keep": 1, "max_seq_length": 4096, "model_name": "m", "pipeline_tag": "text-generation"},
        {"router_z_loss_coef": 0.001, "aux_loss_coeff": 0.1, "neftune_noise_alpha": 5, "custom_pipelines": {}},
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {"layer_types": ["full_attention", "full_attention"]},
        {"num_experts": 0, "n_shared_experts": 0, "num_nextn_predict_layers": 0, "use_mup": False, "alibi": False},
        {"embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1.0, "use_parallel_residual": False},
    ],
)
def test_bookkeeping_keys_and_mechanisms_that_are_off_do_not_change_the_spec(extra: dict[str, Any]) -> None:
    plain = GENERATORS["Llama-2-7b-hf"]
    assert spec({**plain, **extra}) == spec(plain)


@each_row(
    ("extra", "words"),
    [
        ({"use_sliding_window": True}, "use_sliding_window is True; only False .*--hf-overrides"),
        ({"sliding_window": 4096}, "sliding_window unknown key that could change the result .*--hf-overrides"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types unknown key .*--hf-overrides"),
        ({"qk_layernorm": True}, "qk_layernorm is True; only False"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0; only 1.0"),
        ({"alibi": True}, "alibi is True; only False .* not change the result: --hf-overrides '.\"alibi\": null.'"),
    ],
)
def test_mechanisms_that_are_on_are_refused_by_families_without_them(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec({**GENERATORS["Llama-2-7b-hf"], **extra})


@each_row(
    ("name", "extra"),
    [
        ("Qwen1.5-MoE-A2.7B", {"use_sliding_window": False, "sliding_window": 0}),  # As transformers 5 writes it.
        ("phi-2", {"rotary_dim": 32}),  # As early files have it, beside the factor.
    ],
)
def test_keys_that_say_what_others_say_do_not_change_the_spec(name: str, extra: dict[str, Any]) -> None:
    assert spec({**GENERATORS[name], **extra}) == spec(GENERATORS[name])


def test_families_with_the_same_layers_under_other_names() -> None:
    """dots.ocr's text model is a Qwen2; Param 2 and Sarvam 30B are Ling 2's, but for the shared experts' width."""
    qwen = GENERATORS["Qwen2-7B-Instruct"]
    media = {"vision_config": {"hidden_size": 1536}, "image_token_id": 151665, "video_token_id": 151656}
    assert spec({**qwen, **media, "architectures": ["DotsOCRForCausalLM"]}) == spec(qwen)
    ling = {**REAL["Ling-mini-2.0"].config, "num_shared_experts": 2}
    shared = {}
    for name in ("BailingMoeV2", "SarvamMoE", "Param2MoE"):
        last = spec({**ling, "architectures": [f"{name}ForCausalLM"]}).layers[-1].ffn
        assert isinstance(last, Moe)
        assert last.shared is not None
        shared[name] = last.shared.width
    assert shared == {"BailingMoeV2": 1024, "SarvamMoE": 1024, "Param2MoE": 512}


def test_a_softmax_router_has_no_correction() -> None:
    first = {"architectures": ["BailingMoeForCausalLM"], "score_function": None, "moe_router_enable_expert_bias": None}
    off = {"n_group": None, "topk_group": None, "routed_scaling_factor": None}
    moe = spec({**REAL["Ling-mini-2.0"].config, **first, **off}).layers[-1].ffn
    assert isinstance(moe, Moe)
    assert moe.router == Router(8, renormalise=True)


NESTED = "gemma-3 of transformers 5"


@each_row(
    ("name", "extra", "message", "override"),
    [
        ("Llama-2-7b-hf", {"swirl": [3]}, "swirl unknown key that could", {"swirl": None}),
        ("gpt2", {"b": [1], "a": {"c": 2}}, "a, b unknown keys that could", {"a": None, "b": None}),
        (
            "Llama-3.1-8B-Instruct",
            {"rope_scaling": {"wobble": 2}},
            r"wobble unknown key .* \(rope_scaling, model type 'llama'\)",
            {"rope_scaling": {"wobble": None}},
        ),
        (
            NESTED,
            {"rope_parameters": {"sliding_attention": {"wobble": 2}}},
            r"wobble unknown key .* \(sliding_attention, rope_parameters, model type 'gemma3_text'\)",
            {"rope_parameters": {"sliding_attention": {"wobble": None}}},
        ),
        (
            NESTED,
            {"rope_parameters": {"slanted_attention": {"rope_theta": 2}}},
            r"slanted_attention unknown key .* \(rope_parameters,",
            {"rope_parameters": {"slanted_attention": None}},
        ),
    ],
)
def test_the_error_names_a_remedy_that_works(
    name: str, extra: dict[str, Any], message: str, override: dict[str, Any]
) -> None:
    broken = overridden(GENERATORS[name], extra)
    with pytest.raises(ModelError, match=message) as caught:
        spec(broken)
    stated = re.search(r"--hf-overrides '(.*)'$", str(caught.value))
    assert stated is not None
    assert json.loads(stated[1]) == override
    assert spec(overridden(broken, override)) == spec(GENERATORS[name])
