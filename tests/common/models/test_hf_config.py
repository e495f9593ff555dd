"""The strict reader: every key must be read, expected or known to be harmless."""

from __future__ import annotations

import pytest

from pagoda.common.errors import ModelError
from pagoda.common.models.hf_config import HfConfig, head_dim, kv_heads


def reader(**values: object) -> HfConfig:
    return HfConfig({"model_type": "pebble", **values})


def test_need_takes_an_alias_and_names_what_is_missing():
    assert reader(b=3).need("a", int, "b") == 3
    with pytest.raises(ModelError, match=r"a is missing \(model type 'pebble'\)"):
        reader(a=None).need("a", int, "b")


def test_null_is_absent_for_opt_and_none_for_nullable():
    config = reader(a=None)
    assert config.opt("a", int, 5) == 5
    assert config.nullable("a", int, 5) is None
    assert config.nullable("b", int, 5) == 5


def test_integers_pass_for_floats_but_not_booleans_or_text():
    assert reader(a=2).need("a", float) == 2.0
    for bad in (True, "2", 2.5):
        with pytest.raises(ModelError, match="not of type int"):
            reader(a=bad).need("a", int)
    with pytest.raises(ModelError, match="not a finite number"):
        reader(a=float("nan")).need("a", float)


@pytest.mark.parametrize("bad", [0, -4])
def test_sizes_are_positive(bad: int):
    with pytest.raises(ModelError, match=f"a is {bad}; it must be at least 1"):
        reader(a=bad).size("a")


def test_expect_refuses_other_values():
    config = reader(a="x")
    config.expect("a", "x", "y")
    config.expect("absent", 1)
    with pytest.raises(ModelError, match="a is 'x'; only 'z' is supported"):
        config.expect("a", "z")


def test_finish_names_unread_keys_and_the_model_type():
    config = reader(hidden_size=4, swirl=1, quantization_config={}, twist=None)
    config.need("hidden_size", int)
    with pytest.raises(ModelError, match=r"quantization_config, swirl unknown keys .* \(model type 'pebble'\)"):
        config.finish()


def test_harmless_keys_pass():
    reader(
        torch_dtype="bfloat16",
        transformers_version="5.0.0",
        eos_token_id=[1, 2],
        attention_dropout=0.1,
        use_cache=True,
        initializer_range=0.02,
        output_hidden_states=False,
        _name_or_path="here",
        is_decoder=False,
    ).finish()


def test_unsupported_switches_are_refused():
    with pytest.raises(ModelError, match="is_encoder_decoder is True"):
        reader(is_encoder_decoder=True).finish()


def test_head_arithmetic():
    assert head_dim(reader(), 64, 4) == 16
    assert head_dim(reader(head_dim=24), 64, 4) == 24
    with pytest.raises(ModelError, match="5 does not divide hidden_size 64"):
        head_dim(reader(), 64, 5)
    with pytest.raises(ModelError, match="3 does not divide num_attention_heads 4"):
        kv_heads(reader(num_key_value_heads=3), 4)


def test_layer_types_are_checked():
    config = reader(layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(ModelError, match="chunked_attention"):
        config.layer_types(2, [])
    with pytest.raises(ModelError, match="1 entries for 2 layers"):
        reader(layer_types=["full_attention"]).layer_types(2, [])


def test_unknown_activation_lists_the_known():
    with pytest.raises(ModelError, match=r"'snake'; supported: gelu"):
        reader(hidden_act="snake").activation("hidden_act", "silu")
