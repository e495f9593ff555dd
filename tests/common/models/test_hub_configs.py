"""Published config.json files load: harmless keys are known, others are checked, the suggested override works."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.hub_configs import GENERATORS, LEGACY, POOLERS, SAVED

from pagoda.common.config.groups.pooler import PoolerConfig
from pagoda.common.errors import ModelError
from pagoda.common.models.registry import overridden, pooling_spec, spec_from_config
from pagoda.common.models.spec import ModelSpec

ONE_EACH = {str(config["model_type"]): config for config in GENERATORS.values()}


def spec(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config({**SAVED, **config})[0]


@pytest.mark.parametrize("name", GENERATORS)
def test_published_generators(name: str) -> None:
    assert spec(GENERATORS[name]).vocab == GENERATORS[name]["vocab_size"]


@pytest.mark.parametrize("name", POOLERS)
def test_published_poolers(name: str) -> None:
    config = {**SAVED, **POOLERS[name]}
    use = "classify" if "Classification" in config["architectures"][0] else "embed"
    assert pooling_spec(config, use, None, PoolerConfig())[0].pooler is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ONE_EACH)
def test_keys_added_by_writers_do_not_change_the_spec(kind: str) -> None:
    """Every PretrainedConfig field of older files, in every generating family."""
    config = ONE_EACH[kind]
    assert spec({**LEGACY, **config}) == spec(config)


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("Qwen3-Coder-30B-A3B-Instruct", "use_qk_norm", False, "use_qk_norm is False; only True is supported"),
        ("Qwen3-Coder-30B-A3B-Instruct", "qkv_bias", True, "qkv_bias is True; only False is supported"),
        ("Qwen3-Coder-30B-A3B-Instruct", "shared_expert_intermediate_size", 5632, "is 5632; only 0 is supported"),
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


NESTED = "gemma-3 of transformers 5"


@pytest.mark.parametrize(
    ("name", "extra", "message", "override"),
    [
        ("Llama-2-7b-hf", {"swirl": 3}, "swirl unknown key that could", {"swirl": None}),
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
