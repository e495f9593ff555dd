"""RoPE frequencies of every scaling against transformers, and both config spellings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.suite.rows import each_row
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagoda.common.errors import ModelError
from pagoda.common.models.hf_config import HfConfig, context_length, rope, rope_per_layer_type
from pagoda.common.models.rope import LinearScaling, Rope, YarnScaling, cos_sin, inverse_frequencies

HEAD_DIM = 16
POSITIONS = 128

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-all-set": {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + 2.0 * i for i in range(8)],
        "original_max_position_embeddings": 64,
    },
}


def config(**extra: Any) -> dict[str, Any]:
    return {"max_position_embeddings": POSITIONS, "rope_theta": 5000.0, **extra}


def transformers_frequencies(scaling: dict[str, Any], length: int) -> tuple[np.ndarray, float]:
    theirs = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        rope_parameters={**scaling, "rope_theta": 5000.0},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu", seq_len=length)
    return frequencies.numpy(), factor


@each_row("length", [32, 64, 65, 128, 500])
@each_row("name", SCALINGS)
def test_scaling_is_transformers(name: str, length: int):
    scaling = SCALINGS[name]
    expected, factor = transformers_frequencies(scaling, length)
    ours, attention = inverse_frequencies(rope(HfConfig(config(rope_scaling=scaling)), HEAD_DIM), length)
    np.testing.assert_allclose(ours, expected, rtol=2e-6)
    assert attention == pytest.approx(factor)


def test_plain_rope_turns_one_radian_per_token_first():
    frequencies, factor = inverse_frequencies(Rope(10_000.0, 8), 100)
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001])
    assert factor == 1.0


def test_cos_sin_carry_the_attention_factor():
    cos, sin = cos_sin(Rope(1e4, 8, YarnScaling(4.0, 64, attention_factor=1.5)), 64, np.arange(5))
    assert cos.shape == sin.shape == (5, 4)
    np.testing.assert_allclose(cos**2 + sin**2, 1.5**2)


@each_row("name", SCALINGS)
def test_old_and_new_spelling_agree(name: str):
    old = dict(SCALINGS[name])
    old["type"] = old.pop("rope_type")
    new = {**SCALINGS[name], "rope_theta": 5000.0}
    assert rope(HfConfig(config(rope_scaling=old)), HEAD_DIM) == rope(
        HfConfig({"max_position_embeddings": POSITIONS, "rope_parameters": new}), HEAD_DIM
    )


def test_partial_rotary_beside_or_inside_the_parameters():
    beside = rope(HfConfig(config(partial_rotary_factor=0.5)), HEAD_DIM)
    inside = rope(HfConfig(config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})), HEAD_DIM)
    assert beside.dim == inside.dim == HEAD_DIM // 2


def test_an_odd_number_of_rotary_channels_is_rounded_up_to_pairs():
    """As in transformers, whose cos and sin have two entries for each frequency: of 7 channels, with exponents / 7."""
    parsed = rope(HfConfig(config(partial_rotary_factor=0.45)), HEAD_DIM)
    assert parsed.dim == 8
    frequencies, _ = inverse_frequencies(parsed, POSITIONS)
    np.testing.assert_allclose(frequencies, 5000.0 ** -(np.arange(0, 7, 2) / 7), rtol=1e-12)


def test_longrope_outside_original_length_counts():
    scaling = {key: value for key, value in SCALINGS["longrope"].items() if not key.startswith("original")}
    parsed = rope(HfConfig(config(rope_scaling=scaling, original_max_position_embeddings=32)), HEAD_DIM)
    assert parsed.scaling is not None
    assert parsed.scaling.original == 32  # type: ignore[union-attr]


def test_per_layer_type_in_both_spellings():
    old = config(rope_local_base_freq=100.0, rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = {
        "max_position_embeddings": POSITIONS,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }
    expected = {
        "full_attention": Rope(5000.0, HEAD_DIM, LinearScaling(8.0)),
        "sliding_attention": Rope(100.0, HEAD_DIM),
    }
    for values in (old, new):
        assert rope_per_layer_type(HfConfig(values), HEAD_DIM, full=1e6, sliding=1e4) == expected


@each_row(
    ("scaling", "tokens"),
    [
        (None, POSITIONS),
        (SCALINGS["llama3"], POSITIONS),
        (SCALINGS["longrope"], POSITIONS),
        (SCALINGS["linear"], 4 * POSITIONS),
        (SCALINGS["dynamic"], 3 * POSITIONS),
        (SCALINGS["yarn"], 256),
    ],
)
def test_context_length(scaling: dict[str, Any] | None, tokens: int):
    reader = HfConfig(config(rope_scaling=scaling))
    assert context_length(reader, rope(reader, HEAD_DIM)) == tokens


@each_row(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "'spiral'; supported: default, linear"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 2.0, "wobble": 3}, "wobble unknown key"),
        ({"rope_type": "linear", "factor": "two"}, "factor is 'two', not of type float"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8},
            "short_factor has 1 entries for 8",
        ),
        ({**SCALINGS["linear"], "partial_rotary_factor": 0.45}, "scales the rotation of 7 channels; only of an even"),
        ({"rope_type": "default", "partial_rotary_factor": 1.1}, "theta 5000.0 on 17 of 16 channels is not a rotation"),
        ({"partial_rotary_factor": 2.0}, "32 of 16 channels|on 32 of 16"),
    ],
)
def test_bad_scaling_is_named(scaling: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        rope(HfConfig(config(rope_scaling=scaling)), HEAD_DIM)
