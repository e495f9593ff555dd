"""Deprecated flags set their replacements and log one warning."""

from typing import Any

import pytest
from support.suite.rows import each_row

from pagoda.common.config.commands import COMMAND_SETTINGS
from pagoda.common.config.settings import ResolvedSettings
from pagoda.common.errors import ConfigError
from pagoda.server.cli.main import COMMANDS, parser_of
from pagoda.server.settings.flags import EngineArgs, resolve_settings


def resolved(*flags: str) -> ResolvedSettings:
    parser = parser_of("serve", COMMANDS["serve"])
    return resolve_settings(parser.parse_args(flags), COMMAND_SETTINGS["serve"])


@pytest.mark.setting("--task", "--device", "--rope-scaling", "--rope-theta", "--override-pooler-config")
@pytest.mark.setting("--disable-log-requests", "--guided-decoding-backend", "--guided-decoding-disable-fallback")
@pytest.mark.setting("--guided-decoding-disable-any-whitespace", "--guided-decoding-disable-additional-properties")
@pytest.mark.setting("--num-redundant-experts", "--eplb-window-size", "--eplb-step-interval", "--eplb-log-balancedness")
@pytest.mark.setting("--enable-multimodal-encoder-data-parallel", "--disable-mm-preprocessor-cache")
@pytest.mark.setting("--cuda-graph-sizes", "--tokens-only")
@each_row(
    ("words", "becomes"),
    [
        ("--task generate", {"runner": "generate"}),
        ("--task embed", {"runner": "pooling", "convert": "embed"}),
        ("--task auto", {"runner": "auto", "convert": "auto"}),
        ("--task embedding", {"runner": "pooling", "convert": "embed"}),
        ("--task classify", {"runner": "pooling", "convert": "classify"}),
        ("--task reward", {"runner": "pooling", "convert": "reward"}),
        ("--task score", {"runner": "pooling"}),
        ("--device cpu", {"backend": "reference"}),
        ('--rope-scaling {"factor":2.0}', {"hf_overrides": {"rope_scaling": {"factor": 2.0}}}),
        ("--rope-theta 5e5", {"hf_overrides": {"rope_theta": 500000.0}}),
        ('--override-pooler-config {"a":1}', {"pooler_config": {"a": 1}}),
        ("--no-disable-log-requests", {"enable_log_requests": True}),
        ("--guided-decoding-backend auto", {"structured_outputs_config": {"backend": "auto"}}),
        ("--guided-decoding-disable-fallback", {"structured_outputs_config": {"disable_fallback": True}}),
        ("--guided-decoding-disable-any-whitespace", {"structured_outputs_config": {"disable_any_whitespace": True}}),
        (
            "--guided-decoding-disable-additional-properties",
            {"structured_outputs_config": {"disable_additional_properties": True}},
        ),
        ("--num-redundant-experts 3", {"eplb_config": {"num_redundant_experts": 3}}),
        ("--eplb-window-size 9", {"eplb_config": {"window_size": 9}}),
        ("--eplb-step-interval 8", {"eplb_config": {"step_interval": 8}}),
        ("--eplb-log-balancedness", {"eplb_config": {"log_balancedness": True}}),
        ("--enable-multimodal-encoder-data-parallel", {"mm_encoder_tp_mode": "data"}),
        ("--disable-mm-preprocessor-cache", {"mm_processor_cache_gb": 0.0}),
        ("--cuda-graph-sizes 1 2 4", {"cudagraph_capture_sizes": (1, 2, 4)}),
        ("--CUDA-graph-sizes 8", {"max_cudagraph_capture_size": 8}),
        ("--tokens-only", {"skip_tokenizer_init": True}),
    ],
)
def test_deprecated_flag_sets_its_replacement(words: str, becomes: dict[str, Any]) -> None:
    flag, *value = words.split(" ")
    settings = resolved(flag, *value)
    assert {name: settings.values[name] for name in becomes} == becomes
    name = flag.removeprefix("--no-").removeprefix("--").lower()
    about = [note for note in settings.notes if note.startswith(f"--{name} ")]
    assert len(about) == (name != "tokens-only"), settings.notes
    assert all("is deprecated; use --" in note for note in about)


def test_deprecated_flags_of_one_json_setting_are_merged() -> None:
    settings = resolved("--rope-theta", "5e5", "--hf-overrides.max_position_embeddings", "64")
    assert settings.values["hf_overrides"] == {"rope_theta": 500000.0, "max_position_embeddings": 64}


def test_deprecated_flag_that_contradicts_its_replacement_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rope-theta: contradicts --hf-overrides; drop --rope-theta"):
        resolved("--rope-theta", "5e5", "--hf-overrides.rope_theta", "1e4")


@each_row(
    ("flag", "value", "message"),
    [
        (
            "--task",
            "transcription",
            "'transcription' is not supported: it needs audio input, and this version serves text only",
        ),
        ("--task", "transcribe", "'transcribe' is not one of auto, generate, embed"),
        ("--runner", "transcription", "'transcription' is not one of auto, generate, pooling"),
        ("--convert", "transcription", "'transcription' is not one of auto, none, embed, classify, reward"),
        ("--convert", "score", "'score' is not one of auto, none, embed, classify, reward"),
    ],
)
def test_no_other_task_makes_an_embedder_of_the_model(flag: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: {message}"):
        resolved(flag, value)
    with pytest.raises(ConfigError, match=f"^{flag}: {message}"):
        EngineArgs("m", **{flag.removeprefix("--"): value})


def test_refused_value_of_a_deprecated_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--task: 'draft' is not supported: draft models"):
        EngineArgs("m", task="draft").create_engine_config()


def test_deprecated_keywords_set_their_replacements(caplog: pytest.LogCaptureFixture) -> None:
    assert EngineArgs("m", rope_theta=5e5).create_engine_config().model.hf_overrides == {"rope_theta": 5e5}
    assert [record.getMessage() for record in caplog.records] == [
        "--rope-theta is deprecated; use --hf-overrides.rope_theta"
    ]
