"""EngineArgs: keywords, flags, a file and the environment give the same configuration and the same errors."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.suite.rows import each_row

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.settings import ENGINE_SETTINGS, Setting
from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import AsyncEngineArgs, EngineArgs, FlagParser


def parse(*flags: str) -> EngineConfig:
    parser = EngineArgs.add_cli_args(FlagParser())
    return EngineArgs.from_cli_args(parser.parse_args(list(flags))).create_engine_config()


def test_defaults_are_those_of_the_configuration() -> None:
    assert EngineArgs().create_engine_config() == EngineConfig()
    assert parse() == EngineConfig()


def test_keywords_reach_the_configuration() -> None:
    args = EngineArgs("some/model", dtype="float32", max_model_len=99, scheduling_policy="priority", block_size=8)
    config = args.create_engine_config()
    assert (config.model.model, config.model.dtype, config.model.max_model_len) == ("some/model", "float32", 99)
    assert (config.scheduler.policy, config.cache.block_size) == ("priority", 8)


def test_flags_reach_the_configuration() -> None:
    config = parse(
        *("--model", "m", "--max-model-len", "4k", "--served-model-name", "a", "b", "--no-enable-prefix-caching"),
        *("--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "1G", "--no-async-scheduling", "--seed", "7"),
    )
    assert config.model == ModelConfig(model="m", max_model_len=4000, served_model_name=("a", "b"), seed=7)
    assert config.cache.enable_prefix_caching is False
    assert config.cache.kv_cache_memory_bytes == 2**30
    assert config.cache.gpu_memory_utilization == 0.5
    assert config.scheduler.async_scheduling is False


@pytest.mark.parametrize("value", [-1, "auto", None])
def test_max_model_len_auto_is_unset(value: object) -> None:
    assert EngineArgs(max_model_len=value).create_engine_config().model.max_model_len is None


def test_python_conveniences() -> None:
    args = EngineArgs(Path("a/b"), served_model_name="x", seed=None, max_num_batched_tokens="2k")
    assert (args.model, args.served_model_name, args.seed, args.max_num_batched_tokens) == ("a/b", ("x",), 0, 2000)


@each_row(
    ("settings", "flag"),
    [
        ({"dtype": "float63"}, "--dtype"),
        ({"max_num_seqs": "many"}, "--max-num-seqs"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"block_size": 12}, "--block-size"),
        ({"enable_prefix_caching": 3}, "--enable-prefix-caching"),
        ({"max_model_len": "1.5K"}, "--max-model-len"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"tensor_parallel_size": True}, "--tensor-parallel-size"),
        ({"speculative_config": {"method": "ngram"}}, "--speculative-config"),
    ],
)
def test_bad_values_name_the_flag(settings: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs(**settings).create_engine_config()
    assert caught.value.setting == flag


def test_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'max_modellen'; did you mean max_model_len\?"):
        AsyncEngineArgs(max_modellen=3)


def test_settings_without_effect_are_accepted() -> None:
    args = EngineArgs(tensor_parallel_size=1, quantization=None, trust_remote_code=False)
    assert args.create_engine_config() == EngineConfig()
    assert parse("-tp", "1", "--enforce-eager").compilation.enforce_eager
    with pytest.raises(ConfigError, match="--pipeline-parallel-size: 2 is not supported"):
        parse("--pipeline-parallel-size", "2")


def test_bad_flag_text_is_explained() -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        parse("--max-model-len", "1.5K")
    with pytest.raises(ConfigError, match="--dtype"):
        parse("--dtype", "float63")


def test_config_survives_msgpack() -> None:
    config = EngineArgs("m", served_model_name=["a", "b"], max_num_seqs=3).create_engine_config()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_repr_shows_what_changed_and_hides_the_token() -> None:
    shown = repr(EngineArgs("m", hf_token="secret", max_num_seqs=3))
    assert shown == "EngineArgs(model='m', hf_token='***', max_num_seqs=3)"


# --- the sources of a setting ---

EXAMPLES: dict[str, Any] = {
    "attention_backend": "TRITON_ATTN",
    "attention_config": {"backend": "TRITON_ATTN"},
    "block_size": 32,
    "compilation_config": {"pass_config": {"b": [1, "x"]}, "level": 3},
    "cpu_omp_threads_bind": "0-1",
    "gpu_memory_utilization": 0.5,
    "log_level": "DEBUG",
    "lora_modules_to_save": ("lm_head", "embed_tokens"),
    "max_lora_rank": 32,
    "optimization_level": 2,
    "profiler_config": {"profiler": "torch", "torch_profiler_dir": "traces", "max_iterations": 3},
    "quantization": "fp8",
    "reasoning_config": {"reasoning_end_str": "x"},
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    "structured_outputs_config": {"disable_any_whitespace": True},
}
"""Valid values of settings that do not accept every value of their type."""


def example(setting: Setting) -> Any:
    """Return a value other than the default."""
    if setting.name in EXAMPLES:
        return EXAMPLES[setting.name]
    if setting.is_switch:
        return not setting.default
    if setting.choices:
        return next(choice for choice in setting.choices if choice != setting.default)
    if setting.is_json:
        return {"a": {"b": [1, "x"]}, "c": True}
    if setting.is_list:
        return {"a list of integers": (3, 5), "a list of numbers": (1.5, 2.0)}.get(setting.kind, ("a", "b.c"))
    if setting.kind == "an integer":
        return (setting.default or 0) + 7
    return (setting.default or 0.0) + 0.25 if setting.kind == "a number" else "a.b"


def words(value: Any) -> list[str]:
    if isinstance(value, tuple):
        return [str(each) for each in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def by_keyword(setting: Setting, value: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    return EngineArgs(**{setting.name: value}).create_engine_config()


def by_attribute(setting: Setting, value: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    args = EngineArgs()
    setattr(args, setting.name, value)
    return args.create_engine_config()


def by_flag(setting: Setting, value: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    if setting.is_switch:
        return parse(setting.flag if value else f"--no-{setting.key}")
    return parse(setting.flag, *words(value))


def by_file(setting: Setting, value: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    path.write_text(f"{setting.key}: {json.dumps(value)}")
    return parse("--config", str(path))


def by_variable(setting: Setting, value: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv(setting.variable, " ".join(words(value)))
    return EngineArgs().create_engine_config()


Way = Callable[[Setting, Any, Path, pytest.MonkeyPatch], EngineConfig]
WAYS: tuple[Way, ...] = (by_keyword, by_attribute, by_flag, by_file, by_variable)
NOT_ALONE = {"reasoning_parser_plugin", "collect_detailed_traces"}
"""Settings that are refused unless another is set."""
NAMED = [
    pytest.param(each, id=each.name)
    for each in ENGINE_SETTINGS.values()
    if each.option.maps_to is None and each.name not in NOT_ALONE
]


@each_row("setting", NAMED)
def test_every_source_of_a_setting_gives_the_same_value(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = example(setting)
    assert value != setting.default
    for way in WAYS:
        with monkeypatch.context() as patch:
            if setting.option.status == "refused" and value not in setting.option.accepts:
                with pytest.raises(ConfigError, match=f"{setting.flag}: .* is not supported: "):
                    way(setting, value, tmp_path / "c.yaml", patch)
                continue
            config = way(setting, value, tmp_path / "c.yaml", patch)
        if setting.option.deprecated is None and setting.group != "DeprecatedConfig":
            assert value_in(config, setting) == value, way.__name__
            assert config != EngineConfig()


def value_in(config: EngineConfig, setting: Setting) -> Any:
    group = next(
        each
        for each in (getattr(config, name) for name in EngineConfig.__dataclass_fields__)
        if type(each) is setting.config
    )
    return getattr(group, setting.field)


# --- warnings of settings without effect ---


def test_each_flag_without_effect_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    parse("--swap-space", "1", "--rope-theta", "5", "--cuda-graph-sizes", "8", "--max-num-seqs", "3")
    warned = [record.getMessage().split(" ")[0] for record in caplog.records]
    assert sorted(warned) == ["--cuda-graph-sizes", "--rope-theta", "--swap-space"]
    caplog.clear()
    args = EngineArgs(swap_space=1, max_num_seqs=3)
    args.seed = 5
    assert args.create_engine_config().model.seed == 5
    assert [record.getMessage().split(" ")[0] for record in caplog.records] == ["--swap-space"]


# --- spellings of flags ---


@each_row(
    "said",
    [
        ["--hf-overrides", '{"a": {"b": 1}, "c": ["x", "y", 2]}'],
        ['--hf-overrides={"a": {"b": 1}, "c": ["x", "y", 2]}'],
        ["--hf_overrides.a.b", "1", "--hf-overrides.c+", "x,y", "--hf-overrides.c+=2"],
        ["--hf-overrides.a.b=1", '--hf-overrides.c+=["x","y",2]'],
        ["--hf-overrides.a.b=1", '--hf-overrides.c=["x","y",2]'],
        ["--hf-overrides.a.b=1", "--hf-overrides", '{"a": {"b": 7}, "c": ["x", "y", 2]}'],
        ["--hf-overrides", '{"a": {"b": 1}}', "--hf-overrides", '{"c": ["x", "y", 2]}'],
    ],
)
def test_every_spelling_of_a_json_flag(said: list[str]) -> None:
    assert parse(*said).model.hf_overrides == {"a": {"b": 1}, "c": ["x", "y", 2]}


@each_row(
    ("text", "value"),
    [
        ("1", 1),
        ("1.5", 1.5),
        ("true", True),
        ("null", None),
        ("auto", "auto"),
        ("True", "True"),
        ("a=b", "a=b"),
        ("", ""),
        ("-1", -1),
        ('"1"', "1"),
        ("NaN", "NaN"),
        ("[1]", [1]),
    ],
)
@each_row("joined", [True, False])
def test_dotted_values_are_json_or_text(text: str, value: object, joined: bool) -> None:
    said = [f"--hf-overrides.x_y={text}"] if joined else ["--hf-overrides.x_y", text]
    assert parse(*said).model.hf_overrides == {"x_y": value}


@each_row(
    "said", [["-O3"], ["-O", "3"], ["-O=3"], ["--optimization-level", "3"], ["-cc", "3"], ["--compilation-config", "3"]]
)
def test_optimization_levels(said: list[str]) -> None:
    assert parse(*said).compilation.optimization_level == 3


@each_row(
    "said",
    [
        ["-O.level=3"],
        ["-O", '{"level": 3}'],
        ['-O={"level": 3}'],
        ["-cc.level", "3"],
        ["--compilation-config.level", "3"],
        ["--compilation_config.level=3"],
    ],
)
def test_compilation_settings(said: list[str]) -> None:
    assert parse(*said).compilation.compilation_config == {"level": 3}


@pytest.mark.parametrize("said", ["", "None"])
def test_flags_set_to_none_override_the_file(said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max-num-seqs: 7\nhf-overrides: {a: 1}")
    assert parse("--config", str(path)).scheduler.max_num_seqs == 7
    assert parse("--config", str(path), f"--max-num-seqs={said}").scheduler.max_num_seqs is None


def test_switches_and_underscores() -> None:
    assert parse("--no-async-scheduling").scheduler.async_scheduling is False
    assert parse("--no_async_scheduling", "--async_scheduling").scheduler.async_scheduling is True
    assert parse("--max_num_seqs=5").scheduler.max_num_seqs == 5
    assert parse("--scheduling_policy", "priority").scheduler.policy == "priority"


def test_repeated_lists_grow_and_repeated_numbers_are_the_last() -> None:
    assert parse("--served-model-name", "a", "b", "--served-model-name", "c").model.names == ("a", "b", "c")
    assert parse("--max-num-seqs", "1", "--max-num-seqs", "2").scheduler.max_num_seqs == 2


def test_assigned_attributes_are_checked() -> None:
    args = EngineArgs("m", max_num_seqs=5, rope_theta=7.0)
    args.max_model_len = "2k"
    config = args.create_engine_config()
    assert (config.model.max_model_len, config.scheduler.max_num_seqs) == (2000, 5)
    assert config.model.hf_overrides == {"rope_theta": 7.0}
    assert args.sources["max_model_len"] == "keyword"
    args.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="--pipeline-parallel-size: 2 is not supported"):
        args.create_engine_config()


def test_engine_args_work_with_dataclasses(caplog: pytest.LogCaptureFixture) -> None:
    args = AsyncEngineArgs("m", max_num_seqs=3, served_model_name=["a", "b"], hf_overrides={"x": 1})
    parts = dataclasses.asdict(args)
    assert parts["max_num_seqs"] == 3
    with caplog.at_level("WARNING"):
        assert EngineArgs(**(parts | {"seed": 5})) == EngineArgs(
            "m", max_num_seqs=3, served_model_name=["a", "b"], hf_overrides={"x": 1}, seed=5
        )
    assert not caplog.records
    assert [field.name for field in dataclasses.fields(EngineArgs)] == list(ENGINE_SETTINGS)


def test_options_of_scripts_keep_their_spelling() -> None:
    parser = EngineArgs.add_cli_args(FlagParser())
    parser.add_argument("--num_rounds", type=int, default=1)
    parser.add_argument("--seed-file")
    for words in (["--num_rounds", "4"], ["--num-rounds=4"]):
        args = parser.parse_args([*words, "--seed_file", "x", "--max_model_len", "64"])
        assert vars(args) == {"num_rounds": 4, "seed_file": "x", "max_model_len": "64"}


def test_parsed_arguments_are_keywords() -> None:
    args = EngineArgs.add_cli_args(FlagParser()).parse_args(["--model", "fake", "--max-model-len", "64"])
    assert EngineArgs(**vars(args)) == EngineArgs.from_cli_args(args)
