"""One setting: conversion of texts, keywords and variables, errors, and how values are shown."""

import dataclasses
from pathlib import PurePosixPath
from typing import Any

import pytest
from support.suite.rows import each_row

from pagoda.common.config.settings import DOCUMENTED_GROUPS, ENGINE_SETTINGS, SERVER_SETTINGS, settings_of
from pagoda.common.errors import ConfigError

ALL = ENGINE_SETTINGS | SERVER_SETTINGS


@each_row(
    ("name", "text", "value"),
    [
        ("max_num_seqs", "7", 7),
        ("max_num_seqs", "None", None),
        ("max_num_seqs", "", None),
        ("max_model_len", "4k", 4000),
        ("max_model_len", "auto", None),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("enforce_eager", "true", True),
        ("enforce_eager", "Off", False),
        ("enable_prefix_caching", "None", None),
        ("served_model_name", ["a", "b"], ("a", "b")),
        ("served_model_name", "a b", ("a b",)),
        ("cudagraph_capture_sizes", ["1", "2"], (1, 2)),
        ("allowed_origins", ['["a", "b"]'], ("a", "b")),
        ("allowed_origins", ["a", "b"], ("a", "b")),
        ("hf_overrides", '{"a": {"b": 1}}', {"a": {"b": 1}}),
        ("hf_overrides", "None", {}),
        ("tokenizer", "None", None),
        ("model", "None", "None"),
    ],
)
def test_text(name: str, text: Any, value: Any) -> None:
    assert ALL[name].convert_text(text) == value


@each_row(
    ("name", "given", "value"),
    [
        ("max_num_seqs", 7, 7),
        ("max_num_seqs", None, None),
        ("max_model_len", "4k", 4000),
        ("max_model_len", -1, None),
        ("swap_space", 2, 2.0),
        ("tokenizer", PurePosixPath("a/b"), "a/b"),
        ("served_model_name", "a b", ("a b",)),
        ("served_model_name", ["a", "b"], ("a", "b")),
        ("scheduler_cls", PurePosixPath, f"{PurePosixPath.__module__}.PurePosixPath"),
        ("logits_processors", [PurePosixPath, "a.B"], (f"{PurePosixPath.__module__}.PurePosixPath", "a.B")),
        ("seed", None, 0),
    ],
)
def test_keywords(name: str, given: Any, value: Any) -> None:
    assert ALL[name].convert(given) == value


@each_row(
    ("name", "text", "value"),
    [
        ("served_model_name", "a b", ("a", "b")),
        ("served_model_name", '["a b", "c"]', ("a b", "c")),
        ("allowed_origins", '["a", "b"]', ("a", "b")),
        ("cudagraph_capture_sizes", "1 2", (1, 2)),
        ("cudagraph_capture_sizes", "[1, 2]", (1, 2)),
        ("max_num_seqs", "7", 7),
        ("enforce_eager", "1", True),
    ],
)
def test_variables(name: str, text: str, value: Any) -> None:
    assert ALL[name].convert_variable(text) == value


@each_row(
    ("name", "text", "message"),
    [
        ("max_num_seqs", "x", "--max-num-seqs: 'x' is not an integer"),
        ("max_num_seqs", "1.5", "--max-num-seqs: '1.5' is not an integer"),
        ("max_model_len", "1.5K", "--max-model-len: '1.5K': a fraction needs a decimal suffix; did you mean 1.5k?"),
        ("gpu_memory_utilization", "x", "--gpu-memory-utilization: 'x' is not a number"),
        ("gpu_memory_utilization", "nan", "--gpu-memory-utilization: 'nan' is not a number"),
        ("enforce_eager", "maybe", "--enforce-eager: 'maybe' is not true or false"),
        ("cudagraph_capture_sizes", ["1", "x"], "--cudagraph-capture-sizes: '1 x' is not a list of integers"),
        ("hf_overrides", "{", "--hf-overrides: '{': invalid JSON: "),
        ("hf_overrides", "3", "--hf-overrides: '3': must be a JSON object"),
        ("max_num_seqs", str(2**64), "use UTF-8 text and numbers of at most 64 bits"),
        ("hf_overrides", f'{{"x": {2**64}}}', "use UTF-8 text and numbers of at most 64 bits"),
        ("model", "a\udcff", "use UTF-8 text and numbers of at most 64 bits"),
    ],
)
def test_bad_text(name: str, text: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ALL[name].convert_text(text)
    assert message in str(caught.value)
    assert caught.value.setting == ALL[name].flag


def test_an_unknown_choice_error_lists_all_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'float23' is not one of auto, float32, .*; did you mean float32\?"):
        ALL["dtype"].convert_text("float23")
    with pytest.raises(ConfigError, match="'nope' is not one of auto, safetensors"):
        ALL["load_format"].convert("nope")


@each_row(
    ("name", "given"),
    [
        ("max_num_seqs", True),
        ("max_num_seqs", 1.5),
        ("max_num_seqs", 2**64),
        ("enforce_eager", 1),
        ("tokenizer", 3),
        ("served_model_name", [1]),
        ("hf_overrides", [1]),
        ("hf_overrides", {"x": object()}),
    ],
)
def test_bad_keywords(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=ALL[name].flag):
        ALL[name].convert(given)


def test_a_recursive_object_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["x"] = endless
    with pytest.raises(ConfigError, match="--hf-overrides"):
        ALL["hf_overrides"].convert(endless)


def test_a_variable_with_an_invalid_array() -> None:
    with pytest.raises(ConfigError, match="is not a JSON array"):
        ALL["served_model_name"].convert_variable('["a"')


def test_shown_values() -> None:
    shown = {
        "max_num_seqs": (7, "7"),
        "enforce_eager": (False, "false"),
        "served_model_name": (("a", "b"), "a b"),
        "hf_overrides": ({"a": 1}, '{"a": 1}'),
        "tokenizer": (None, "unset"),
        "api_key": (("a",), "***"),
        "hf_token": ("a", "***"),
        "seed": (0, "0"),
    }
    for name, (value, text) in shown.items():
        assert ALL[name].shown(value) == text


@each_row(
    "setting", [each for group in DOCUMENTED_GROUPS for each in settings_of(group)], ids=lambda setting: setting.flag
)
def test_every_setting_is_well_formed(setting: Any) -> None:
    """A default is a valid value without a note, and every setting has a help text."""
    assert setting.default is None or setting.convert(setting.default) == setting.default
    if setting.option.deprecated is None:
        assert setting.note(setting.default) is None
    assert setting.option.help.endswith((".", ")"))
    assert setting.default in (setting.choices or (setting.default,)) or setting.default is None


def test_setting_names_are_unique() -> None:
    names = [each.name for group in DOCUMENTED_GROUPS for each in settings_of(group)]
    assert len(names) == len(set(names))
    flags = [flag for group in DOCUMENTED_GROUPS for each in settings_of(group) for flag in each.flags]
    assert len(flags) == len(set(flags))


def test_every_field_is_a_setting() -> None:
    for group in DOCUMENTED_GROUPS:
        assert [each.field for each in settings_of(group)] == [each.name for each in dataclasses.fields(group)]
