"""What the readers of dense families make of published keys."""

from __future__ import annotations

from typing import Any

import pytest
from support.servers.hub_configs import GENERATORS, SAVED
from support.suite.rows import each_row

from pagoda.common.errors import ModelError
from pagoda.common.models.mixers.attention import alibi_slopes
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Mlp, ModelSpec, Moe


def spec(name: str, **changes: Any) -> ModelSpec:
    return spec_from_config({**SAVED, **GENERATORS[name], **changes})[0]


@pytest.mark.parametrize(
    ("name", "kv_heads", "norms", "parallel"),
    [("falcon-7b", 1, 1, True), ("falcon-40b of 2023", 8, 2, True), ("falcon-11B", 8, 1, True)],
)
def test_generations_of_falcon(name: str, kv_heads: int, norms: int, parallel: bool) -> None:
    layer = spec(name).layers[0]
    assert (layer.attention.kv_heads, layer.parallel) == (kv_heads, parallel)
    assert (layer.norms.before_ffn is not None) == (norms == 2)


@each_row(
    ("name", "dim", "theta"),
    [
        ("pythia-1.4b", 32, 10_000.0),
        ("Minitron-4B-Base", 64, 10_000.0),
        ("stablelm-3b-4e1t of 2023", 32, 10_000.0),
        ("phi-2", 32, 10_000.0),
        ("chatglm3-6b", 64, 10_000.0),
        ("Hunyuan-7B-Instruct", 128, 10_000.0 * 1000.0 ** (128 / 126)),
        ("starcoder2-3b", 128, 999_999.4420358813),
    ],
)
def test_older_names_of_rope_keys(name: str, dim: int, theta: float) -> None:
    (rope,) = spec(name).ropes
    assert (rope.dim, rope.theta) == (dim, theta)


@each_row(
    ("name", "ropes", "windows"),
    [
        ("SmolLM3-3B", [True, False], [None, None]),
        ("c4ai-command-r7b-12-2024", [True, True], [4096, 4096]),
        ("EXAONE-4.0-32B", [True, False], [4096, None]),
        ("Olmo-3-7B-Instruct", [True, True], [4096, None]),
        ("cwm", [True, True], [None, 8192]),
    ],
)
def test_layers_without_rope_and_with_windows(name: str, ropes: list[bool], windows: list[int | None]) -> None:
    mixers = [layer.attention for layer in spec(name).layers]
    assert [mixer.rope is not None for mixer in mixers] == ropes
    assert [mixer.window for mixer in mixers] == windows


def test_fourth_layers_of_command_have_no_rope() -> None:
    mixers = [layer.attention for layer in spec("c4ai-command-r7b-12-2024", num_hidden_layers=8).layers]
    assert [mixer.rope is None for mixer in mixers] == [False, False, False, True] * 2


@each_row(("heads", "last"), [(1, 2**-8), (8, 2**-8), (12, 2**-3.5), (16, 2**-8)])
def test_slopes_of_alibi(heads: int, last: float) -> None:
    """The paper's: 2^(-8 i / n) for n heads, a power of two; others take every second of the next power's."""
    slopes = alibi_slopes(heads)
    assert len(set(slopes)) == heads
    assert slopes[-1] == last
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(12)[:8] == alibi_slopes(8)


def test_slopes_of_falcon_are_scaled_like_its_scores() -> None:
    mixer = spec("falcon-rw-1b").layers[0].attention
    assert mixer.rope is None
    assert mixer.alibi_slopes == tuple(slope * mixer.scale for slope in alibi_slopes(32))


def test_multipliers() -> None:
    granite, minicpm = spec("granite-3.3-8b-instruct"), spec("MiniCPM-2B-sft-bf16")
    assert (granite.embedding.scale, granite.logit_scale, granite.layers[0].residual_scale) == (12, 1 / 16, 0.22)
    assert granite.layers[0].attention.scale == 0.0078125
    assert (minicpm.embedding.scale, minicpm.logit_scale) == (12, 256 / 1024)
    assert minicpm.layers[0].residual_scale == 1.4 / 2**0.5
    assert spec("HyperCLOVAX-SEED-Think-14B").logit_scale == 0.125


def test_the_context_of_command_is_its_model_max_length() -> None:
    """Command R's `max_position_embeddings` is 8192, that of its training."""
    for name in ("c4ai-command-r-v01", "c4ai-command-r7b-12-2024"):
        assert spec(name, max_position_embeddings=8192, model_max_length=131_072).max_positions == 131_072
        assert spec(name, max_position_embeddings=8192, model_max_length=None).max_positions == 8192


def test_keys_that_repeat_what_others_state() -> None:
    assert spec("mpt-7b", logit_scale=1.0) == spec("mpt-7b")
    assert spec("Zamba2-1.2B", head_dim=128) == spec("Zamba2-1.2B")


def test_layers_of_muse_glimmer_that_rotate() -> None:
    """`layer_rope_theta` states RoPE's base in each layer: the only one, or 0. Without it every fourth has none."""
    llama = {**GENERATORS["Llama-2-7b-hf"], "hidden_act": None, "num_hidden_layers": 4}
    config = {**llama, "architectures": ["MuseGlimmerForCausalLM"]}
    for thetas, rotates in (
        (None, [True, True, True, False]),
        ([0, 0, 10_000.0, 10_000.0], [False, False, True, True]),
    ):
        layers = spec_from_config({**SAVED, **config, "layer_rope_theta": thetas})[0].layers
        assert [layer.attention.rope is not None for layer in layers] == rotates
    for thetas in ([0, 0, 500.0, 10_000.0], [0]):
        with pytest.raises(ModelError, match="layer_rope_theta must have 4 entries, each 0 or rope_theta"):
            spec_from_config({**SAVED, **config, "layer_rope_theta": thetas})


def test_gelu_of_gemma_is_the_approximation() -> None:
    ffn = spec("gemma-7b").layers[0].ffn
    assert isinstance(ffn, Mlp)
    assert ffn.activation == "gelu_tanh"


@each_row(
    ("name", "key", "value"),
    [
        ("gpt-j-6b", "rotary_dim", 63),
        ("SmolLM3-3B", "no_rope_layers", [1]),
        ("chatglm3-6b", "rmsnorm", False),
        ("iquestcoder", "clip_qkv", 8.0),
        ("mpt-7b", "logit_scale", 0.5),
        ("Zamba2-1.2B", "head_dim", 64),
        ("starcoder2-3b", "norm_type", "rms"),
        ("MiniCPM-2B-sft-bf16", "num_experts", 8),
        ("EXAONE-4.0-32B", "sliding_window_pattern", "LG"),
        ("c4ai-command-r7b-12-2024", "use_parallel_block", False),
        ("falcon-11B", "parallel_attn", False),
    ],
)
def test_unsupported_values_are_refused(name: str, key: str, value: Any) -> None:
    changes = {key: value, "layer_types": None} if key == "sliding_window_pattern" else {key: value}
    if name == "iquestcoder":
        changes, name = {"architectures": ["IQuestCoderForCausalLM"], key: value}, "Llama-2-7b-hf"
    with pytest.raises(ModelError, match=key if key != "parallel_attn" else "num_ln_in_parallel_attn"):
        spec(name, **changes)


def test_keys_of_qwen_and_its_kin_that_are_absent_have_their_defaults() -> None:
    plain = spec("Llama-2-7b-hf", architectures=["IQuestCoderForCausalLM"]).layers[0].attention
    assert (plain.qkv_bias, plain.out_bias) == (False, False)
    experts = spec("Qwen3.5-35B-A3B, its text", num_experts=None).layers[0].ffn
    assert isinstance(experts, Moe)
    assert experts.experts == 256


def test_rnj1_takes_the_rotary_of_its_configuration() -> None:
    kinds = ["chunked_attention", "full_attention"] * 3
    changes = {"architectures": ["Rnj1ForCausalLM"], "layer_types": kinds, "sliding_window": 512}
    ropes = {"rope_type": "default", "rope_theta": 7_000.0}
    made = spec("gemma-3-1b-it", **changes, rope_theta=None, rope_local_base_freq=None, rope_parameters=ropes)
    assert {rope.theta for rope in made.ropes} == {7_000.0}


@pytest.mark.parametrize("count", [-1, 35])
def test_a_count_of_layers_that_share_a_cache_must_fit(count: int) -> None:
    with pytest.raises(ModelError, match=f"num_kv_shared_layers is {count}, which leaves no layer"):
        spec("gemma-3-1b-it", architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", num_kv_shared_layers=count)


def sizes(layers: int, width: int, heads: int, kv_heads: int | None, inner: int | None, vocab: int) -> dict[str, Any]:
    keys = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "layer_types": None,
        "no_rope_layers": None,
    }
    return {key: value for key, value in keys.items() if value is not None or key in ("layer_types", "no_rope_layers")}


@each_row(
    ("name", "changes", "published"),
    [
        ("SmolLM3-3B", sizes(36, 2048, 16, 4, 11008, 128256), 3_075_098_624),
        ("granite-3.3-8b-instruct", sizes(40, 4096, 32, 8, 12800, 49159), 8_170_848_256),
        ("Seed-OSS-36B-Instruct", sizes(64, 5120, 80, 8, 27648, 155136), 36_151_104_512),
        ("EXAONE-4.0-32B", sizes(64, 5120, 40, 8, 27392, 102400), 32_003_216_384),
        ("internlm2_5-7b-chat", sizes(32, 4096, 32, 8, 14336, 92544), 7_737_708_544),
        ("starcoder2-3b", sizes(30, 3072, 24, 2, 12288, 49152), 3_030_371_328),
        ("stablelm-2-1_6b", sizes(24, 2048, 32, 32, 5632, 100352), 1_644_515_328),
        ("glm-4-9b-chat-hf", sizes(40, 4096, 32, 2, 13696, 151552), 9_399_951_360),
        ("phi-2", sizes(32, 2560, 32, 32, 10240, 51200), 2_779_683_840),
        ("c4ai-command-r-v01", sizes(40, 8192, 64, 64, 22528, 256000), 34_980_831_232),
        ("pythia-1.4b", sizes(24, 2048, 16, None, 8192, 50304), 1_414_647_808),
        ("gpt-j-6b", {"n_layer": 28}, 6_053_381_344),
        ("falcon-7b", {"num_hidden_layers": 32}, 6_921_720_704),
        ("gemma-7b", sizes(28, 3072, 16, 16, 24576, 256000), 8_537_680_896),
        ("Apertus-8B-Instruct-2509", sizes(32, 4096, 32, 8, 21504, 131072), 8_053_338_176),
        ("bloom-7b1", {"n_layer": 30}, 7_069_016_064),
        ("mpt-7b", {"n_layers": 32}, 6_649_286_656),
        ("OLMo-7B-0424-hf", sizes(32, 4096, 32, 32, 11008, 50304), 6_888_095_744),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, changes: dict[str, Any], published: int) -> None:
    count = sum(param.size for param in params(spec(name, **changes)).values())
    assert abs(count / published - 1) < 0.01
