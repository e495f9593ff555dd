"""Released models are accepted, with the published number of parameters and bytes of KV per token."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import pytest
from support.checkpoints.real_models import FOUND, OTHERS, REAL, Real
from support.servers.hub_configs import GENERATORS, SAVED
from support.suite.rows import each_row

from pagoda.common.errors import ModelError
from pagoda.common.models.drafters import FeatureDrafter
from pagoda.common.models.families.drafters import mtp_drafter
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Moe


@each_row("name", REAL)
def test_size_and_bytes_per_token(name: str) -> None:
    check(REAL[name], {**SAVED, **REAL[name].config})


def check(real: Real, config: dict[str, Any]) -> None:
    """Compare what a config.json gives with the published facts."""
    spec, _ = spec_from_config(config)
    if real.parameters is not None:
        assert sum(param.size for param in params(spec).values()) == pytest.approx(real.parameters, rel=0.01)
    per_token = sum(cache.block_elements(1) for cache in spec.caches if not isinstance(cache, StateCache))
    assert 2 * per_token == real.kv_bytes
    assert 4 * sum(cache.elements for cache in spec.caches if isinstance(cache, StateCache)) == real.state_bytes


@each_row("name", FOUND)
def test_files_as_they_are_on_the_hub(name: str) -> None:
    """Whole files, with every key that their writers put there."""
    check(FOUND[name], FOUND[name].config)


@each_row("name", OTHERS)
def test_files_of_other_origin(name: str) -> None:
    check(OTHERS[name], OTHERS[name].config)


def test_eighty_files_of_other_origin_have_a_published_size() -> None:
    """The rest are what transformers' classes have as defaults."""
    sized = [real.origin for real in OTHERS.values() if real.parameters is not None]
    assert len([origin for origin in sized if not origin.startswith("transformers ")]) >= 80
    assert not any("aiconfigurator" in origin for origin in sized)


def test_seventy_seven_files_of_eighty_six_are_accepted() -> None:
    """The others wait for DeepSeek-V4 (6), Kimi K3, and Step 3.7 in a flat form (2)."""
    assert len(FOUND) >= 77


def test_sixty_models_are_written_down() -> None:
    assert len(REAL) >= 60


def test_indexers_of_glm_are_stated_in_three_ways() -> None:
    config = REAL["GLM-5.2"].config
    expected = spec_from_config(config)[0]
    assert [mixer.shares_selection for mixer in expected.mixers[:8]] == [False] * 3 + [True] * 3 + [False, True]
    letters = "".join("S" if kind == "shared" else "F" for kind in config["indexer_types"])
    for stated in ({"index_topk_pattern": letters}, {}):  # A period and where it begins are in the file, too.
        rest = {key: value for key, value in config.items() if key != "indexer_types"}
        assert spec_from_config({**rest, **stated})[0] == expected


def test_the_drafting_layer_of_glm_has_an_indexer_of_its_own() -> None:
    """Its last layer shares a selection."""
    config = REAL["GLM-5.2"].config
    target, family = spec_from_config(config)
    drafter = mtp_drafter(config, ["model.layers.78.eh_proj.weight"], target, family).drafter
    assert isinstance(drafter, FeatureDrafter)
    assert [mixer.shares_selection for mixer in drafter.model.mixers] == [False]
    assert len(drafter.caches) == 2


def test_kept_inputs_of_drafts_take_little_beside_states() -> None:
    """Four drafts of a sequence of Qwen3-Next, in bytes; a state for each would take 316 million."""
    spec, _ = spec_from_config({**SAVED, **REAL["Qwen3-Next-80B-A3B-Instruct"].config})
    states = [cache for cache in spec.caches if isinstance(cache, StateCache)]
    assert 4 * 4 * sum(cache.inputs for cache in states) == 4_755_456
    assert 4 * 4 * sum(cache.elements for cache in states) == 316_145_664


def test_a_longcat_may_do_without_identity_experts_and_factors_on_latents() -> None:
    config = REAL["LongCat-Flash-Chat"].config
    spec, _ = spec_from_config(config)
    factors = {pattern.rpartition(".")[2]: factor for pattern, factor in spec.weight_scales}
    assert factors == {"q_a_norm": 2.0, "kv_a_norm": pytest.approx(12**0.5)}
    off = {"zero_expert_num": None, "mla_scale_q_lora": False, "mla_scale_kv_lora": False}
    without, _ = spec_from_config({**config, **off})
    assert without.weight_scales == ()
    (before, *_), (after, *_) = (list(model.layers[0].ffns.values())[-1:] for model in (spec, without))
    assert (before.choices, after.choices) == (768, 512)


def test_the_drafting_module_of_exaone_is_left_out() -> None:
    config = GENERATORS["EXAONE-4.0-32B"]
    spec, family = spec_from_config({**config, "num_nextn_predict_layers": 1})
    assert spec == spec_from_config(config)[0]
    assert any(fnmatch("mtp.layers.0.mlp.up_proj.weight", pattern) for pattern in family.ignored)


def test_mixtures_of_k_exaone_are_stated_in_three_ways() -> None:
    """Layer by layer as in released files, in transformers' words, or by the number of dense layers."""
    config = OTHERS["K-EXAONE-236B-A23B"].config
    expected = spec_from_config(config)[0]
    rest = {key: value for key, value in config.items() if "moe_layer" not in key and "dense_replace" not in key}
    kinds = ["dense"] + ["sparse"] * 47
    for stated in ({"mlp_layer_types": kinds}, {"first_k_dense_replace": 1}):
        assert spec_from_config({**rest, **stated})[0] == expected
    assert [isinstance(layer.ffn, Moe) for layer in expected.layers] == config["is_moe_layer"]
    dense = spec_from_config({**config, "is_moe_layer": [False, False] + [True] * 46})[0]
    assert [isinstance(layer.ffn, Moe) for layer in dense.layers[:3]] == [False, False, True]
    with pytest.raises(ModelError, match="mlp_layer_types has 2 entries for 48 layers"):
        spec_from_config({**config, "is_moe_layer": [False, True]})


@each_row(
    ("name", "extra", "words"),
    [
        ("Hunyuan-A13B-Instruct", {"moe_topk": [8] * 31}, "moe_topk is .* it must be 32 integers, one per layer"),
        ("Hunyuan-A13B-Instruct", {"use_cla": True}, "use_cla is True; only False is supported"),
        ("GLM-5", {"indexer_types": ["shared", "full"] * 39}, "layer 0 shares the selection .* indexer selects None"),
        ("GLM-5", {"indexer_types": ["full", "half"] * 39}, "indexer_types has 'half'; supported: full, shared"),
        ("GLM-5", {"index_topk_pattern": "FSX"}, "indexer_types has 'X'; supported: full, shared"),
        ("Ling-mini-2.0", {"moe_router_enable_expert_bias": False}, "scoring_func is 'sigmoid'; only 'softmax'"),
        ("Qwen-7B", {"no_bias": False}, "no_bias is False; only True is supported"),
        ("deepseek-moe-16b-base", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; only 'softmax'"),
        ("MiMo-V2-Flash", {"attention_projection_layout": "by_head"}, "is 'by_head'; only .* 'fused_qkv' is supported"),
        ("solar-pro-preview-instruct", {"bskcn_3": [12, 24]}, "bskcn_3 is .* each must follow one of bskcn_1"),
        ("Solar-Open-100B", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1; only 0 is supported"),
        (
            "LongCat-Flash-Chat",
            {"zero_expert_type": "copy"},
            "zero_expert_type is 'copy'; only 'identity'",
        ),
        ("LongCat-Flash-Chat", {"router_bias": True}, "router_bias is True; only False is supported"),
        ("LongCat-Flash-Chat", {"attention_method": "MHA"}, "attention_method is 'MHA'; only 'MLA' is supported"),
        ("LongCat-Flash-Chat", {"num_hidden_layers": 30}, "num_hidden_layers is 30; only 28 or 56 is supported"),
        ("galactica-6.7b", {"scale_embeddings": True}, "scale_embeddings is True; only False is supported"),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_key(name: str, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_from_config({**REAL[name].config, **extra})
