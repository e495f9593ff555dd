"""Mixtures of experts: specs of published configs, their parameter counts, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints.real_models import REAL
from support.servers.hub_configs import GENERATORS, SAVED
from support.suite.rows import each_row

from pagoda.common.errors import ModelError
from pagoda.common.models.family import Stack
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.rope import Rope, YarnScaling
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ClampedGlu, ExpertGroups, Mlp, ModelSpec, Moe, Router, SparseMixer
from pagoda.common.weights.quantization.on_the_fly import is_matrix
from pagoda.common.weights.rules import apply_rules, sources

EXPERT = Mlp(1408, "silu", gated=True)

ALTERNATING = ["sliding_attention", "full_attention"]
COUNTS = {
    "DeepSeek-V2-Lite": ({"num_hidden_layers": 27}, 15.7e9),
    "DeepSeek-V2": ({"num_hidden_layers": 60}, 236e9),
    "DeepSeek-V3": ({"num_hidden_layers": 61}, 671e9),
    "Kimi-K2-Instruct": ({"num_hidden_layers": 61}, 1.026e12),
    "Qwen1.5-MoE-A2.7B": ({"num_hidden_layers": 24}, 14.3e9),
    "GLM-4.5-Air": ({"num_hidden_layers": 46}, 107e9),
    "GLM-4.5": ({"num_hidden_layers": 92}, 353e9),
    "GLM-4.7-Flash": ({"num_hidden_layers": 47}, 29.9e9),
    "dots.llm1.inst": ({"num_hidden_layers": 62}, 142e9),
    "OLMoE-1B-7B-0924": ({"num_hidden_layers": 16}, 6.92e9),
    "MiniMax-M2": ({"num_hidden_layers": 62, "attn_type_list": [1] * 62}, 229e9),
    "ERNIE-4.5-21B-A3B-PT": ({"num_hidden_layers": 28}, 21.8e9),
    "Phi-3.5-MoE-instruct": ({"num_hidden_layers": 32}, 41.9e9),
    "granite-3.0-1b-a400m-instruct": ({"num_hidden_layers": 24}, 1.33e9),
    "dbrx-instruct": ({"n_layers": 40}, 131.6e9),
    "gpt-oss-20b": ({"num_hidden_layers": 24, "layer_types": ALTERNATING * 12}, 20.91e9),
    "gpt-oss-120b": ({"num_hidden_layers": 36, "layer_types": ALTERNATING * 18}, 116.83e9),
}
"""Published numbers of parameters, without layers that only propose drafts."""


def spec(name: str, **changes: Any) -> ModelSpec:
    return spec_from_config({**SAVED, **GENERATORS[name], **changes})[0]


def moe(name: str, **changes: Any) -> Moe:
    last = spec(name, **changes).layers[-1].ffn
    assert isinstance(last, Moe)
    return last


@each_row("name", COUNTS)
def test_published_parameter_counts(name: str) -> None:
    changes, count = COUNTS[name]
    assert sum(param.size for param in params(spec(name, **changes)).values()) == pytest.approx(count, rel=0.01)


def test_gpt_oss_as_published() -> None:
    layers = spec("gpt-oss-20b").layers
    assert moe("gpt-oss-20b").router == Router(4, True, bias=True)
    expert = Mlp(2880, "silu", gated=True, bias=True, clamped=ClampedGlu(7.0, 1.702))
    assert moe("gpt-oss-20b") == Moe(32, expert, Router(4, True, bias=True))
    mixers = [layer.attention for layer in layers]
    assert [mixer.window for mixer in mixers] == [128, None] * 2
    assert all(mixer.sinks and mixer.qkv_bias and mixer.out_bias for mixer in mixers)
    scaling = YarnScaling(32.0, 4096, 32.0, 1.0, 0.1 * log(32) + 1, truncate=False)
    assert mixers[0].rope == Rope(150_000.0, 64, scaling)


def test_routers_of_published_configs() -> None:
    groups = ExpertGroups(8, 4, "best_two")
    assert moe("DeepSeek-V3").router == Router(8, True, "sigmoid", correction=True, groups=groups, scale=2.5)
    assert moe("DeepSeek-V2").router == Router(6, False, groups=ExpertGroups(8, 3, "best"), scale=16.0)
    assert moe("DeepSeek-V2-Lite").router == Router(6, False)
    assert moe("Kimi-K2-Instruct").router == Router(8, True, "sigmoid", correction=True, scale=2.827)
    assert moe("MiniMax-M2").router == Router(8, True, "sigmoid", correction=True)
    assert moe("ERNIE-4.5-21B-A3B-PT").router == Router(6, True, correction=True)
    assert moe("dbrx-instruct").router == Router(4, True)
    assert moe("Phi-3.5-MoE-instruct").router == SparseMixer(2, 0.01)


def test_shared_experts_of_published_configs() -> None:
    assert moe("DeepSeek-V2-Lite").shared == replace(EXPERT, width=2816)
    gated = moe("Qwen1.5-MoE-A2.7B")
    assert (gated.shared, gated.shared_gate) == (replace(EXPERT, width=5632), True)
    assert moe("GLM-4.5-Air", n_shared_experts=0).shared is None
    assert not moe("GLM-4.5-Air").shared_gate


def test_dense_layers_of_published_configs() -> None:
    assert [type(layer.ffn) for layer in spec("DeepSeek-V3", num_hidden_layers=5).layers] == [Mlp] * 3 + [Moe] * 2
    ernie = spec("ERNIE-4.5-21B-A3B-PT", num_hidden_layers=5, moe_layer_end_index=3)
    assert [type(layer.ffn) for layer in ernie.layers] == [Mlp, Moe, Moe, Moe, Mlp]
    hunyuan = {**REAL["Hy3-preview"].config, "num_hidden_layers": 2, "mlp_layer_types": ["dense"] * 2}
    assert [type(layer.ffn) for layer in spec_from_config(hunyuan)[0].layers] == [Mlp] * 2


@each_row(
    ("name", "changes", "words"),
    [
        ("DeepSeek-V3", {"n_group": 7}, "4 of 7 groups cannot be formed of 256 experts"),
        ("DeepSeek-V3", {"topk_group": 9}, "9 of 8 groups cannot be formed"),
        ("DeepSeek-V3", {"n_group": 256}, "4 of 256 groups cannot be formed of 256 experts"),
        ("DeepSeek-V3", {"num_experts_per_tok": 129}, "a token cannot choose 129 of 128 experts"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' or 'noaux_tc'"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1"),
        ("DeepSeek-V3", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types has 3 entries for 4 layers"),
        ("DeepSeek-V3", {"mlp_layer_types": ["thick"] * 4}, "mlp_layer_types has 'thick'; supported: dense, sparse"),
        ("DeepSeek-V2", {"norm_topk_prob": True}, "norm_topk_prob is True; only False"),
        ("OLMoE-1B-7B-0924", {"num_experts_per_tok": 65}, "a token cannot choose 65 of 64 experts"),
        ("OLMoE-1B-7B-0924", {"clip_qkv": 8.0}, "clip_qkv is 8.0; only None is supported"),
        ("MiniMax-M2", {"use_routing_bias": False}, "use_routing_bias is False; only True"),
        ("MiniMax-M2", {"attn_type_list": [0, 1]}, r"attn_type_list is \[0, 1\]"),
        ("MiniMax-M2", {"shared_intermediate_size": 64}, "shared_intermediate_size is 64; only 0"),
        ("MiniMax-M3", {"index_local_blocks": 17}, "index_local_blocks is 17; only up to index_topk_blocks 16"),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_use_aux_free": False}, "moe_use_aux_free is False; only True"),
        ("Phi-3.5-MoE-instruct", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3; only 2"),
        ("dbrx-instruct", {"attn_config": {"kv_n_heads": 7}}, "kv_n_heads 7 does not divide n_heads 48"),
        ("dbrx-instruct", {"ffn_config": {"moe_top_k": 9}}, "a token cannot choose 9 of 4 experts"),
        ("dbrx-instruct", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize_expert_weights is 2.0"),
        ("dbrx-instruct", {"ffn_config": {"swirl": 1}}, "swirl unknown key that could change the result"),
    ],
)
def test_configs_that_are_refused(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec(name, **changes)


def test_different_scales_of_long_and_short_contexts_are_refused() -> None:
    scaling = {**GENERATORS["Phi-3.5-MoE-instruct"]["rope_scaling"], "short_mscale": 1.5}
    with pytest.raises(ModelError, match=r"short_mscale is 1\.5; only 1\.243163121016122 is supported"):
        spec("Phi-3.5-MoE-instruct", rope_scaling=scaling)


@pytest.mark.parametrize(("name", "number"), [("DeepSeek-V3", 61), ("GLM-4.5-Air", 46), ("GLM-4.5", 92)])
def test_layers_that_only_propose_drafts_are_dropped(name: str, number: int) -> None:
    _, family = spec_from_config({**SAVED, **GENERATORS[name]})
    stream = [(f"model.layers.{number}.{part}.weight", np.zeros((2, 2))) for part in ("eh_proj", "mlp.gate", "enorm")]
    assert list(apply_rules(family.rules, {}, stream, family.ignored)) == []


def test_every_family_reads_its_experts_one_by_one() -> None:
    """As `pagoda convert --quantization` writes them, whichever way the model's own checkpoints have them."""
    lines = (Path(__file__).parents[2] / "data" / "parity" / "cases.jsonl").read_text().splitlines()
    configs = (json.loads(line)["config"] for line in lines if "expert" in line)
    by_architecture = {config["architectures"][0]: config for config in configs}
    lacking = set()
    for architecture, config in by_architecture.items():
        spec, family = spec_from_config(config)
        stacks = {name: param for name, param in params(spec).items() if len(param.shape) > 2 and is_matrix(param)}
        for name, read in sources(family.rules, stacks).items():
            if not any(isinstance(rule, Stack) for rule, _ in read):
                lacking.add((architecture, name))
    assert not lacking
    assert len(by_architecture) > 30
