"""Precedence: flags, file, environment, defaults; deprecated flags; reading configuration files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.suite.rows import each_row

from pagoda.common.config.settings import (
    ENGINE_SETTINGS,
    SERVER_SETTINGS,
    Sourced,
    from_environment,
    from_file,
    from_keywords,
    merge_layers,
)
from pagoda.common.errors import ConfigError

ALL = ENGINE_SETTINGS | SERVER_SETTINGS


def layer_of(source: str = "flag", **values: Any) -> dict[str, Sourced]:
    return {name: Sourced(ALL[name].convert(value), source) for name, value in values.items()}


def yaml(tmp_path: Path, text: str) -> dict[str, Sourced]:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return from_file(str(path), ALL)


def values(layer: dict[str, Sourced]) -> dict[str, Any]:
    return {name: sourced.value for name, sourced in layer.items()}


# --- layers ---


@each_row("upper", [0, 1, 2])
@each_row("lower", [1, 2, 3])
def test_the_layer_with_precedence_wins(upper: int, lower: int) -> None:
    if upper >= lower:
        return
    layers: list[dict[str, Sourced]] = [{}, {}, {}]
    layers[upper] = layer_of(f"layer {upper}", max_num_seqs=5)
    if lower < 3:
        layers[lower] = layer_of(f"layer {lower}", max_num_seqs=9)
    resolved_settings = merge_layers(ALL, *layers)
    assert resolved_settings.values["max_num_seqs"] == 5
    assert resolved_settings.sources == {"max_num_seqs": f"layer {upper}"}


def test_unset_settings_have_their_default() -> None:
    resolved_settings = merge_layers(ALL, {}, {}, {})
    assert resolved_settings.values == {name: setting.default for name, setting in ALL.items()}
    assert (resolved_settings.sources, resolved_settings.notes) == ({}, ())


def test_an_explicit_none_overrides_lower_layers() -> None:
    flag = {"max_num_seqs": Sourced(None, "flag")}
    assert merge_layers(ALL, flag, layer_of("file", max_num_seqs=9)).values["max_num_seqs"] is None


def test_json_is_merged_key_by_key() -> None:
    resolved_settings = merge_layers(
        ALL,
        layer_of("flag", hf_overrides={"a": {"x": 1}, "b": 1}),
        layer_of("file", hf_overrides={"a": {"x": 2, "y": 2}, "b": {"z": 2}}),
        layer_of("environment", hf_overrides={"a": {"y": 3, "w": 3}, "c": 3}),
    )
    assert resolved_settings.values["hf_overrides"] == {"a": {"x": 1, "y": 2, "w": 3}, "b": 1, "c": 3}
    assert resolved_settings.sources["hf_overrides"] == "flag, file, environment"


# --- old names ---


def test_a_deprecated_flag_has_the_precedence_of_its_layer() -> None:
    stronger = merge_layers(
        ALL, layer_of("flag", rope_theta=5.0), layer_of("file", hf_overrides={"rope_theta": 7.0, "x": 1})
    )
    assert stronger.values["hf_overrides"] == {"rope_theta": 5.0, "x": 1}
    weaker = merge_layers(ALL, layer_of("flag", hf_overrides={"rope_theta": 7.0}), layer_of("file", rope_theta=5.0))
    assert weaker.values["hf_overrides"] == {"rope_theta": 7.0}
    switch = merge_layers(
        ALL, layer_of("flag", disable_log_requests=True), layer_of("environment", enable_log_requests=True)
    )
    assert switch.values["enable_log_requests"] is False


def test_two_deprecated_flags_merge_into_one_setting() -> None:
    resolved_settings = merge_layers(ALL, layer_of(rope_theta=5.0, rope_scaling={"factor": 2.0}, hf_overrides={"x": 1}))
    assert resolved_settings.values["hf_overrides"] == {"x": 1, "rope_theta": 5.0, "rope_scaling": {"factor": 2.0}}


@each_row(
    "values",
    [
        {"rope_theta": 5.0, "hf_overrides": {"rope_theta": 7.0}},
        {"device": "cpu", "backend": "jax_tpu"},
        {"disable_log_requests": True, "enable_log_requests": True},
        {"rope_scaling": {"factor": 2.0}, "hf_overrides": {"rope_scaling": {"factor": 4.0}}},
        {"tokens_only": True, "skip_tokenizer_init": False},
    ],
)
def test_a_deprecated_flag_that_contradicts_the_new_one_is_refused(values: dict[str, Any]) -> None:
    old = next(iter(values))
    with pytest.raises(ConfigError, match=f"--{old.replace('_', '-')}: contradicts --.*; drop --"):
        merge_layers(ALL, layer_of(**values))


def test_a_deprecated_flag_may_agree_with_the_new_one() -> None:
    resolved_settings = merge_layers(ALL, layer_of(device="cpu", backend="reference"))
    assert resolved_settings.values["backend"] == "reference"


def test_a_deprecated_flag_at_its_default_changes_nothing() -> None:
    layer = {"task": Sourced(None, "flag"), "rope_scaling": Sourced({}, "flag")}
    resolved_settings = merge_layers(ALL, layer)
    assert resolved_settings.values["runner"] == "auto"
    assert resolved_settings.values["hf_overrides"] == {}
    assert len(resolved_settings.notes) == 2


def test_a_refusal_names_the_deprecated_flag_that_was_given() -> None:
    runner = ALL["runner"]
    refused = replace(runner, option=replace(runner.option, status="refused", reason="there is none; drop it"))
    with pytest.raises(ConfigError, match=r"^--task: sets --runner: 'pooling' is not supported: "):
        merge_layers(ALL | {"runner": refused}, layer_of(task="embed"))


# --- what the user hears ---


@each_row(
    ("values", "starts"),
    [
        ({"swap_space": 1}, ["--swap-space has no effect: "]),
        ({"rope_theta": 5.0}, ["--rope-theta is deprecated; use --hf-overrides.rope_theta"]),
        ({"cuda_graph_sizes": [8]}, ["--cuda-graph-sizes is deprecated; use --cudagraph-capture-sizes"]),
        ({"cuda_graph_sizes": [8], "swap_space": 1}, ["--cuda-graph-sizes is deprecated", "--swap-space"]),
        ({"num_scheduler_steps": 8}, ["--num-scheduler-steps has no effect: "]),
        ({"swap_space": 4.0, "max_num_seqs": 3}, []),
        ({"attention_backend": "auto"}, []),
    ],
)
def test_one_note_per_flag(values: dict[str, Any], starts: list[str]) -> None:
    notes = merge_layers(ALL, layer_of(**values)).notes
    assert len(notes) == len(starts)
    assert all(note.startswith(start) for note, start in zip(notes, starts))
    assert all("\n" not in note for note in notes)


# --- keywords and variables ---


def test_keywords_of_none_are_ignored() -> None:
    assert from_keywords(ALL, {"max_num_seqs": None, "seed": 3}) == layer_of("keyword", seed=3)


def test_variables() -> None:
    environ = {
        "PAGODA_MAX_NUM_SEQS": "7",
        "PAGODA_SERVED_MODEL_NAME": "a b",
        "PAGODA_HF_OVERRIDES": '{"a": 1}',
        "PAGODA_ENFORCE_EAGER": "true",
        "PAGODA_TOKENIZER": "",
        "VLLM_API_KEY": "secret",
    }
    layer_of_environment = from_environment([ALL], environ)
    assert values(layer_of_environment) == {
        "max_num_seqs": 7,
        "served_model_name": ("a", "b"),
        "hf_overrides": {"a": 1},
        "enforce_eager": True,
        "api_key": ("secret",),
    }
    assert layer_of_environment["max_num_seqs"].source == "environment PAGODA_MAX_NUM_SEQS"
    assert layer_of_environment["api_key"].source == "environment VLLM_API_KEY"


def test_variables_of_settings_outside_the_table_are_ignored() -> None:
    assert from_environment([ENGINE_SETTINGS], {"PAGODA_PORT": "x", "VLLM_API_KEY": "k"}) == {}


def test_an_invalid_variable_error_names_it() -> None:
    with pytest.raises(ConfigError, match=r"^PAGODA_PORT: --port: 'x' is not an integer"):
        from_environment([ALL], {"PAGODA_PORT": "x"})


def test_a_kubernetes_service_variable_is_no_setting() -> None:
    assert from_environment([ALL], {"PAGODA_PORT": "tcp://10.0.0.1:80"}) == {}


# --- files ---


@each_row(
    ("text", "meant"),
    [
        ("", {}),
        ("# nothing\n", {}),
        ("{}", {}),
        ("max-num-seqs: 7", {"max_num_seqs": 7}),
        ("max_num_seqs: 7", {"max_num_seqs": 7}),
        ("--max-num-seqs: 7", None),
        ("max-model-len: 4k", {"max_model_len": 4000}),
        ("max-model-len: auto", {"max_model_len": None}),
        ("max-num-seqs: null", {}),
        ("model: m\nseed: 3", {"model": "m", "seed": 3}),
        ("model_tag: m", {"model": "m"}),
        ("enforce-eager: true", {"enforce_eager": True}),
        ("enforce-eager: off", {"enforce_eager": False}),
        ("no-async-scheduling: true", {"async_scheduling": False}),
        ("swap-space: 2", {"swap_space": 2.0}),
        ("served-model-name: a", {"served_model_name": ("a",)}),
        ("served-model-name: [a, b]", {"served_model_name": ("a", "b")}),
        ("served-model-name:\n- a\n- b\n", {"served_model_name": ("a", "b")}),
        ("cudagraph-capture-sizes: [1, 2]", {"cudagraph_capture_sizes": (1, 2)}),
        ("cudagraph-capture-sizes: ['1', '2']", {"cudagraph_capture_sizes": (1, 2)}),
        ("allowed-origins: [a, b]", {"allowed_origins": ("a", "b")}),
        ("hf-overrides:\n  a: {b: 1}\n  c: [x]", {"hf_overrides": {"a": {"b": 1}, "c": ["x"]}}),
        ("hf-overrides: '{\"a\": 1}'", {"hf_overrides": {"a": 1}}),
        ("hf-overrides.a.b: 1\nhf-overrides.c: x", {"hf_overrides": {"a": {"b": 1}, "c": "x"}}),
        ("port: 8001", {"port": 8001}),
        ("port: '8001'", {"port": 8001}),
    ],
)
def test_files(text: str, meant: dict[str, Any] | None, tmp_path: Path) -> None:
    if meant is None:
        with pytest.raises(ConfigError, match="unknown key"):
            yaml(tmp_path, text)
    else:
        assert values(yaml(tmp_path, text)) == meant


@each_row(
    ("text", "message"),
    [
        ("max-num-seq: 7", "unknown key max-num-seq; did you mean max-num-seqs?"),
        ("no-max-num-seqs: true", "unknown key no-max-num-seqs; did you mean max-num-seqs?"),
        ("zzz: 1", "unknown key zzz"),
        ("1: 2", "unknown key 1"),
        ("- a\n- b", "must be a mapping, such as `max-model-len: 4096`, not a list"),
        ("just words", "must be a mapping, such as `max-model-len: 4096`, not a str"),
        ("a: [", "invalid YAML: "),
        ("a: b: c", "invalid YAML: "),
        ("a: !!python/object:os.system x", "invalid YAML: "),
        ("seed: 1\nseed: 2", "duplicate key seed"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "duplicate key max-num-seqs"),
        ("seed.x: 1", "seed.x: --seed is an integer and has no keys"),
        ("revision: 1.10", "--revision: 1.1 is not a string; put it in quotes"),
        ("revision: 2024-01-01", "--revision: 2024-01-01 is not a string; put it in quotes"),
        ("served-model-name: [a, 1.10]", "is not a list of strings; put it in quotes"),
        ("max-num-seqs: many", "--max-num-seqs: 'many' is not an integer"),
        ("max-num-seqs: [1]", "--max-num-seqs: [1] is not an integer"),
        ("max-model-len: 1.5K", "did you mean 1.5k?"),
        ("enforce-eager: perhaps", "--enforce-eager: 'perhaps' is not true or false"),
        ("hf-overrides: [1]", "--hf-overrides: [1] is not a JSON object"),
        ("hf-overrides: &a {x: *a}", "--hf-overrides: "),
        ("dtype: float23", "did you mean float32?"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        yaml(tmp_path, text)
    assert caught.value.setting == "--config"
    assert message in str(caught.value)
    assert str(tmp_path / "c.yaml") in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: .*nowhere\.yaml: No such file"):
        from_file(str(tmp_path / "nowhere.yaml"), ALL)
    with pytest.raises(ConfigError, match=r"--config: .*Is a directory"):
        from_file(str(tmp_path), ALL)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"--config: .*b\.yaml: "):
        from_file(str(tmp_path / "b.yaml"), ALL)
    (tmp_path / "zero.yaml").write_bytes(b"a: \x00")
    with pytest.raises(ConfigError, match=r"--config: .*zero\.yaml: invalid YAML"):
        from_file(str(tmp_path / "zero.yaml"), ALL)
