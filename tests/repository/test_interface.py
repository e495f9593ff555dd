"""vLLM's interface, row by row: each flag, variable and command is here once, with a status that holds.

A row that is implemented needs a test that sees its effect and says so with a mark (`setting`, `variable`, `command`);
the marks are read from the test files, so that this test runs alone.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import interface
import pytest
from support.suite.marks import marks
from support.suite.rows import each_row

import pagoda
from pagoda.common.config.commands import COMMAND_SETTINGS
from pagoda.common.config.env import VARIABLES, EnvVar
from pagoda.common.config.settings import ENGINE_SETTINGS, Setting
from pagoda.common.config.without_setting import FLAGS_WITHOUT_SETTING
from pagoda.common.errors import ConfigError
from pagoda.server.cli.main import MODULES, main
from pagoda.server.settings.flags import resolve_settings

ROOT = Path(__file__).resolve().parents[2]

FLAGS = interface.rows("flags")
COMMANDS = dict(interface.commands())
SETTINGS = [setting for known in interface.groups().values() for setting in known.values()]
VARIABLE_BY_NAME: dict[str, EnvVar] = {name: row for row in VARIABLES for name in (row.name, *row.aliases)}

OF_THE_PARSER = {"help", "config", "explain_config"}
"""Flags of the command line itself."""

WORDS = {"bool": [], "int": ["1"], "float": ["0.5"], "human_int": ["2k"], "json": ['{"a": 1}']}
"""What may follow a flag of a type."""

REMEDY = re.compile(
    r"(?:^|[;,] )(?:or )?(?:--|plot|replay|use|drop|set|give|name|put|leave|install|start|run|serve|read|scrape|merge|"
    r"download|parse|raise|lower|say|call|send|convert|list|pass|unset|write|make|choose|mount)|does it: "
)

LEAST_WITHOUT_REFUSAL = 150


def settings_of_row(row: dict[str, str]) -> list[Setting]:
    """The flag's row in each of its commands."""
    name = row["flag"][2:].replace("-", "_")
    return [COMMAND_SETTINGS[command][name] for command in row["commands"].split(",")]


def words_of(row: dict[str, str]) -> list[str]:
    if row["type"] == "enum" and row["choices"]:
        return [row["choices"].split(",")[0]]
    return WORDS.get(row["type"].removeprefix("list[").removesuffix("]"), ["1"])


def spellings(row: dict[str, str]) -> list[str]:
    return [row["flag"], *filter(None, row["aliases"].split(","))]


def flag_rows() -> list[Any]:
    rows = [row for row in FLAGS if row["flag"] not in interface.PARSER_ARGUMENTS]
    return [pytest.param(row, id=row["flag"]) for row in rows]


# --- each has its row ---


def test_nothing_was_left_out_of_the_lists() -> None:
    counts = {name: len(interface.rows(name)) for name in ("flags", "env", "commands", "metrics")}
    assert counts == {"flags": 252, "env": 100, "commands": 18, "metrics": 35}


@each_row("row", flag_rows)
def test_a_flag_has_a_row_in_each_of_its_commands(row: dict[str, str]) -> None:
    assert len({setting.option.status for setting in settings_of_row(row)}) == 1


def test_commands_take_the_flags_of_their_table_and_no_others() -> None:
    for name, parser in interface.parsers().items():
        taken = {action.dest for action in parser._actions if action.option_strings}
        assert taken - OF_THE_PARSER == set(COMMAND_SETTINGS.get(name, ())), name


@each_row("row", flag_rows)
def test_every_spelling_of_a_flag_is_taken(row: dict[str, str]) -> None:
    for command in row["commands"].split(","):
        for spelling in spellings(row):
            words = [] if spelling.startswith("--no-") else words_of(row)
            said = vars(interface.parsers()[command].parse_args([spelling, *words]))
            assert row["flag"][2:].replace("-", "_") in said, f"{command} {spelling}"


@each_row("row", [pytest.param(row, id=row["flag"]) for row in FLAGS if row["choices"]])
def test_every_choice_is_known(row: dict[str, str]) -> None:
    if row["flag"] in interface.PARSER_ARGUMENTS:
        return
    for setting in settings_of_row(row):
        for choice in row["choices"].split(","):
            if choice in setting.option.refused_values:
                with pytest.raises(ConfigError, match=f"^{row['flag']}: '{choice}' is not supported: ") as error:
                    setting.convert_text(choice)
                assert REMEDY.search(setting.option.refused_values[choice]), error.value
            elif setting.option.status == "refused":
                refusal(setting, setting.convert_text(choice))
            else:
                setting.note(setting.convert_text(choice))


def refusal(setting: Setting, value: Any) -> None:
    """The value is accepted, or refused under the flag's name."""
    try:
        setting.note(value)
    except ConfigError as error:
        assert error.setting == setting.flag  # noqa: PT017


@pytest.mark.setting("model_tag", "-v")
def test_what_the_parser_itself_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(interface.PARSER_ARGUMENTS) - {row["flag"] for row in FLAGS} == {"--explain-config"}
    args = interface.parsers()["serve"].parse_args(["org/name"])
    assert resolve_settings(args, COMMAND_SETTINGS["serve"]).values["model"] == "org/name"
    assert main(["-v"]) == 0
    assert capsys.readouterr().out == f"{pagoda.__version__}\n"
    for row in FLAGS:
        if row["flag"] == "--help":
            for command in set(row["commands"].split(",")) - {"pagoda"}:
                with pytest.raises(SystemExit) as ended:
                    interface.parsers()[command].parse_args(["--help"])
                assert ended.value.code == 0
                assert "usage:" in capsys.readouterr().out


@each_row("name", [row["name"] for row in interface.rows("env")])
def test_a_variable_has_one_row(name: str) -> None:
    assert sum(name in (row.name, *row.aliases) for row in VARIABLES) == 1


@each_row("name", [row["command"] for row in interface.rows("commands")])
def test_a_command_has_a_row(name: str) -> None:
    assert name in interface.command_statuses()


def test_no_two_rows_bear_one_name() -> None:
    names = Counter(name for row in VARIABLES for name in (row.name, *row.aliases))
    assert [name for name, count in names.items() if count > 1] == []
    for command, known in COMMAND_SETTINGS.items():
        flags = Counter(flag for setting in known.values() for flag in setting.flags)
        assert [flag for flag, count in flags.items() if count > 1] == [], command


# --- each says what becomes of it ---


def rows_with_status() -> Iterator[tuple[str, str, str]]:
    """Name, status and why of every row there is, ours included."""
    for setting in SETTINGS:
        yield setting.flag, setting.option.status, setting.option.reason
    for variable in VARIABLES:
        yield variable.name, variable.status, variable.reason
    for name, command in [*COMMANDS.items(), *MODULES.items()]:
        if command.commands is None:
            yield name, command.status, command.refused


def test_a_status_that_is_not_implemented_has_a_reason() -> None:
    assert [name for name, status, why in rows_with_status() if status != "implemented" and len(why) < 10] == []
    assert [name for name, status, why in rows_with_status() if status == "implemented" and why] == []


def test_a_refusal_says_what_to_do_instead() -> None:
    assert [
        f"{name}: {why}" for name, status, why in rows_with_status() if status == "refused" and not REMEDY.search(why)
    ] == []


def test_an_alias_has_the_status_of_what_it_stands_for() -> None:
    """By what it maps to: a setting without effect gives its aliases none either."""
    checked = set()
    for setting in ENGINE_SETTINGS.values():
        option = setting.option
        if option.maps_to is None or option.status == "no effect":
            continue
        choices = [each for each in setting.choices or () if each not in ("auto", "default")]
        sample = choices[0] if choices else True if setting.is_switch else {} if setting.is_json else (1,)
        targets = option.maps_to(sample)
        checked.add(setting.name)
        assert any(ENGINE_SETTINGS[name].option.status == "implemented" for name in targets), setting.flag
    assert len(checked) > 10
    without_effect = ("num_redundant_experts", "eplb_window_size", "eplb_step_interval", "eplb_log_balancedness")
    assert {ENGINE_SETTINGS[name].option.status for name in without_effect} == {"no effect"}
    assert ENGINE_SETTINGS["disable_mm_preprocessor_cache"].option.status == "no effect"


ABSENT: Mapping[str, str] = {
    "expert parallelism": "enable_expert_parallel",
    "context parallelism": "decode_context_parallel_size",
    "dual batch overlap": "enable_dbo",
    "text only": "mm_processor_cache_gb",
    "text-only": "mm_processor_cache_gb",
    "prompt adapters are not": "enable_prompt_adapter",
    "worker classes are not": "worker_cls",
    "worker extensions are not": "worker_extension_cls",
    "biases of LoRA adapters are not": "enable_lora_bias",
    "prefill/decode disaggregation": "kv_transfer_config",
    "KV cache offloading": "kv_offloading_size",
    "IO processor plugins": "io_processor_plugin",
    "sharded by --tensor-parallel-size only": "pipeline_parallel_size",
}
"""Words of a reason that name the absence of a feature -> the setting that would have it."""


def test_reasons_name_no_feature_that_is_there() -> None:
    statuses = {setting.name: setting.option.status for setting in SETTINGS}
    for words, name in ABSENT.items():
        assert statuses[name] != "implemented", f"{name} is there: reasons that say {words!r} are wrong"
    reasons = [(name, why) for name, _, why in rows_with_status() if why]
    reasons += [(name, why) for name, why in FLAGS_WITHOUT_SETTING.items()]
    absent = re.compile(r"(is|are) not in this version")
    for name, why in reasons:
        assert "one engine drives" not in why, f"{name}: replicas may have engines of their own"
        assert not absent.search(why) or any(words in why for words in (*ABSENT, *NOT_SETTINGS)), f"{name}: {why}"


NOT_SETTINGS = ("this option of LoRA adapters",)
"""Subjects of reasons that no setting has."""


def test_most_flags_are_not_refused() -> None:
    statuses = Counter(interface.flag_statuses().values())
    assert sum(statuses.values()) == 252
    assert statuses["implemented"] + statuses["no effect"] >= LEAST_WITHOUT_REFUSAL


def test_the_readme_counts_what_the_tables_say() -> None:
    text = (ROOT / "README.md").read_text()
    for kind, found in (
        ("flags", interface.flag_statuses()),
        ("environment variables", interface.variable_statuses()),
        ("commands", interface.command_statuses()),
    ):
        counts = Counter(found.values())
        cells = [sum(counts.values()), counts["implemented"], counts["no effect"], counts["refused"]]
        assert f"| {kind} | {' | '.join(map(str, cells))} |" in text


# --- what is implemented is seen by a test ---


def marked(kind: str) -> set[str]:
    """The arguments of every `pytest.mark.KIND(...)` in the test files."""
    return set(map(str, marks()[kind]))


def test_implemented_flags_are_seen_by_a_test() -> None:
    seen = marked("setting")
    assert sorted({s.flag for s in SETTINGS if s.option.status == "implemented"} - seen) == []
    assert sorted(set(interface.PARSER_ARGUMENTS) - seen) == []


def test_implemented_variables_are_seen_by_a_test() -> None:
    seen = marked("variable")
    unseen = [v.name for v in VARIABLES if v.status == "implemented" and not seen & {v.name, *v.aliases}]
    assert unseen == []


def test_implemented_commands_are_run_by_a_test() -> None:
    seen = marked("command")
    assert [
        name for name, row in (COMMANDS | MODULES).items() if row.status == "implemented" and name not in seen
    ] == []


def test_marks_name_what_there_is() -> None:
    assert sorted(marked("setting") - {s.flag for s in SETTINGS} - set(interface.PARSER_ARGUMENTS)) == []
    assert sorted(marked("variable") - set(VARIABLE_BY_NAME) - {s.variable for s in SETTINGS}) == []
    assert sorted(marked("command") - set(COMMANDS) - set(MODULES)) == []


# --- command lines of vLLM's documentation ---


@each_row(
    "line",
    [
        "serve Qwen/Qwen1.5-32B-Chat-AWQ --max-model-len 4096",
        "serve unsloth/Llama-3.2-1B-Instruct",
        "run-batch -i in.jsonl -o out.jsonl --model meta-llama/Meta-Llama-3-8B-Instruct",
        "bench latency --model meta-llama/Llama-3.2-1B-Instruct --input-len 32 --output-len 128 --batch-size 8",
    ],
)
def test_documented_command_lines_are_understood(line: str) -> None:
    assert settled(line) == ()


def test_a_documented_command_line_for_two_devices() -> None:
    line = (
        "serve RedHatAI/Llama-3.2-1B-Instruct-FP8 --tensor-parallel-size 2 --gpu-memory-utilization 0.8 "
        "--max-model-len 16384 --max-num-batched-tokens 2048"
    )
    assert settled(line) == ()
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size: 2 is not supported: .*; use 1"):
        settled(line.replace("tensor", "pipeline"))


def settled(line: str) -> tuple[str, ...]:
    """What the user hears about a command line's engine settings. Raises ConfigError."""
    words = shlex.split(line)
    name = " ".join(words[:2]) if words[0] == "bench" else words[0]
    args = interface.parsers()[name].parse_args(words[len(name.split()) :])
    return resolve_settings(args, COMMAND_SETTINGS[name]).notes
