"""Every value that vLLM documents for a flag or variable: effective, without effect and said so, or refused.

The rows are those of tests/data/interface; `default` and `choices` are their values there.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from typing import Any

import interface
import pytest
from support.suite.rows import each_row

from pagoda.common.config import backend_support, env
from pagoda.common.config.commands import COMMAND_SETTINGS
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.settings import ENGINE_GROUPS, ENGINE_SETTINGS, Setting, build, from_environment
from pagoda.common.errors import ConfigError
from pagoda.server.cli.serving import serve
from pagoda.server.settings.flags import EngineArgs, resolve_settings
from pagoda.server.settings.resolve import check_machine

REMEDY = re.compile(
    r"(?:^|[;,:] )(?:or )?(?:--|use|drop|set|add|give|name|put|leave|install|pip install|start|run|serve|read|scrape|"
    r"merge|raise|lower|choose|did you mean|unset|plot|send|download)|needs|is not one of|cannot be imported"
)
"""What an error says besides the reason."""

SAMPLES: Mapping[str, list[str]] = {
    "int": ["1", "7"],
    "float": ["0.5"],
    "human_int": ["2k", "1"],
    "json": ['{"a": 1}', "{}"],
}
"""Values of a flag by its type, besides those that the documentation names."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a command line."""

    refusal: str = ""
    notes: tuple[str, ...] = ()
    values: Mapping[str, Any] | None = None
    engine: EngineConfig | None = None


def outcome(command: str, *words: str) -> Outcome:
    """Run the command's checks that need no model. Any error but a refusal is raised."""
    settings = COMMAND_SETTINGS[command]
    model = ["--model", "m"] if "model" in settings else []
    if command == "run-batch":
        model += ["--input-file", "in", "--output-file", "out"]
    backend = ["--backend", "reference"] if "backend" in settings and "--backend" not in words else []
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            args = interface.parsers()[command].parse_args([*model, *backend, *words])
        resolved = resolve_settings(args, settings)
        for config in {setting.config for setting in settings.values()} - {*ENGINE_GROUPS.values()}:
            build(config, {name: value for name, value in resolved.values.items() if settings[name].config is config})
        if not backend and "--backend" not in words:
            return Outcome(notes=resolved.notes, values=resolved.values)
        engine = EngineArgs.from_resolved(resolved).create_engine_config()
        chosen, _ = check_machine(engine)
        if command == "serve":
            serve.configurations(args)
    except ConfigError as error:
        return Outcome(refusal=str(error))
    except SystemExit:
        return Outcome(refusal=printed.getvalue())
    notes = (*resolved.notes, *backend_support.notes(engine, chosen))
    return Outcome(notes=notes, values=resolved.values, engine=engine)


@cache
def usual(command: str) -> Outcome:
    """What becomes of the command without flags."""
    return outcome(command)


def words_of(row: dict[str, str]) -> Iterator[list[str]]:
    """Yield the flag with each of its values."""
    flag = row["flag"]
    if row["type"] == "bool":
        yield [flag]
        yield ["--no-" + flag[2:]]
        return
    kind = row["type"].removeprefix("list[").removesuffix("]")
    known = [*filter(None, (*row["choices"].split(","), *row["default"].split("|")))]
    for value in dict.fromkeys(known or SAMPLES.get(kind, ["1"])):
        yield [flag, value]


def cases() -> Iterator[Any]:
    for row in interface.rows("flags"):
        if row["flag"] not in interface.PARSER_ARGUMENTS:
            command = row["commands"].split(",")[0]
            for words in words_of(row):
                yield pytest.param(command, words, id=f"{command}: {' '.join(words)}"[:90])


def judge(setting: Setting, words: list[str], result: Outcome, usual: Outcome) -> str:
    """Return what became of the value: refused, no effect, the default, or implemented. Fail for anything else."""
    if result.refusal:
        flags = (words[0], setting.flag, (setting.option.deprecated or words[0]).partition(".")[0])
        assert any(flag in result.refusal for flag in flags), "the message does not name the flag"
        assert REMEDY.search(result.refusal), f"no remedy: {result.refusal}"
        return "refused"
    if any(setting.flag in note or words[0] in note for note in result.notes):
        return "no effect" if not setting.option.deprecated else "deprecated"
    assert result.values is not None
    assert usual.values is not None
    if result.values != usual.values or result.engine != usual.engine:
        return "implemented"
    given = words[-1] if len(words) > 1 else words[0]
    if given in setting.option.same_values:
        assert given in setting.option.help, "an alias that is not documented"
        return "implemented"
    default = setting.shown(setting.default)
    is_default = setting.default is ("--no-" not in words[0]) if setting.is_switch else True
    assert is_default, f"{words} is accepted silently, as {default}"
    return "default"


@each_row(("command", "words"), cases)
def test_every_value_of_a_flag_has_an_outcome(command: str, words: list[str]) -> None:
    name = words[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    setting = COMMAND_SETTINGS[command].get(name)
    if setting is None:  # a switch whose own name begins with no
        setting = COMMAND_SETTINGS[command][words[0][2:].replace("-", "_")]
    judge(setting, words, outcome(command, *words), usual(command))


NAMED = [
    ("--task transcription", "'transcription' is not supported: it needs audio input"),
    ("--task draft", "'draft' is not supported: draft models belong to speculative decoding"),
    ("--task embed", "deprecated"),
    ("--task score", "deprecated"),
    ("--task nonsense", "'nonsense' is not one of auto, generate, embed"),
    ("--device hpu", "'hpu' is not supported: there is no backend for it; use auto, cpu, cuda or tpu"),
    ("--device neuron", "'neuron' is not supported"),
    ("--device xpu", "'xpu' is not supported"),
    ("--kv-cache-dtype fp8_inc", "'fp8_inc' is not supported: it is the 8-bit format of Gaudi"),
    ("--kv-cache-dtype float16", "'float16' is not supported: .*; use auto with --dtype float16"),
    ("--kv-cache-dtype turboquant_k8v4", "'turboquant_k8v4' is not supported"),
    ("--kv-cache-dtype fp88", "'fp88' is not one of .*; did you mean fp8"),
    ("--load-format hf", "implemented"),
    ("--load-format npcache", "implemented"),
    ("--load-format runai_streamer", "implemented"),
    ("--load-format fastsafetensors", "implemented"),
    ("--load-format bitsandbytes", "implemented"),
    ("--load-format tensorizer", "'tensorizer' is not supported: .*; use the safetensors files"),
    ("--load-format runai_streamer_sharded", "'runai_streamer_sharded' is not supported"),
    ("--load-format mistral", "'mistral' is not supported"),
    ("--load-format my_plugin", "'my_plugin' is not one of auto, safetensors"),
    ("--quantization awqq", "'awqq' is not one of .*; did you mean awq"),
    ("-q fp9", "'fp9' is not one of .*; did you mean fp8"),
    ("-q aqlm", "'aqlm' is not supported: its checkpoints are not read"),
    ("--distributed-executor-backend external_launcher", "'external_launcher' is not supported"),
    ("--model-impl terratorch", "'terratorch' is not supported"),
    ("--tokenizer-mode slow", "'slow' is not supported"),
    ("--dtype float64", "'float64' is not one of"),
    ("--preemption-mode swap", "'swap' is not supported"),
    ("--preemption-mode recompute", "no effect"),
    ("--cuda-graph-sizes 512", "deprecated"),
    ("--cuda-graph-sizes 1 2 4", "deprecated"),
]


@each_row(("line", "expected"), NAMED)
def test_named_values(line: str, expected: str) -> None:
    words = line.split()
    name = {"-q": "quantization"}.get(words[0], words[0][2:].replace("-", "_"))
    setting = ENGINE_SETTINGS[name]
    result = outcome("serve", *words)
    if expected in ("implemented", "no effect", "deprecated"):
        assert judge(setting, words, result, usual("serve")) == expected
    else:
        assert re.match(rf"{setting.flag}: {expected}", result.refusal), result.refusal


@pytest.mark.setting("--cuda-graph-sizes")
@pytest.mark.parametrize(
    ("sizes", "listed", "largest"), [(["512"], (), 512), (["1", "8"], (1, 8), None), (["4", "4"], (4, 4), None)]
)
def test_one_graph_size_is_the_largest(sizes: list[str], listed: tuple[int, ...], largest: int | None) -> None:
    engine = outcome("serve", "--cuda-graph-sizes", *sizes).engine
    assert engine is not None
    assert engine.compilation.cudagraph_capture_sizes == listed
    assert engine.compilation.max_capture_size == largest


# --- environment variables ---

VALUES = ("1", "0", "cpu", "/tmp", "2,3", "XFORMERS", "FLASH_ATTN_VLLM_V1", "fork", "nonsense")


@each_row("name", [row["name"] for row in interface.rows("env")])
def test_every_variable_has_an_outcome(name: str) -> None:
    (variable,) = [each for each in env.VARIABLES if name in each.names]
    row = next(row for row in interface.rows("env") if row["name"] == name)
    seen = set()
    for value in dict.fromkeys((*VALUES, *filter(None, (row.get("choices") or "").split(",")))):
        environ = {name: value}
        try:
            notes = env.notes(environ)
            layer = from_environment([COMMAND_SETTINGS["serve"]], environ)
        except ConfigError as error:
            refusal = str(error)
        else:
            refusal = ""
        if refusal:
            assert refusal.startswith(f"{name}: ")
            assert "SECRET" not in name or value not in refusal
            seen.add("refused")
            continue
        if variable.status == "no effect":
            assert not layer
            assert [note for note in notes if name in note and variable.reason in note] or variable.shared
        elif variable.maps_to is not None and not layer:
            assert variable.read(environ) in ("0", *env.OFF, "nonsense"), f"{name}={value} is accepted silently"
        seen.add(variable.status)
    assert seen, name


@pytest.mark.variable("PAGODA_BATCH_INVARIANT")
@pytest.mark.parametrize(("text", "is_on"), [("1", True), ("0", False)])
def test_batch_invariance_by_variable(text: str, is_on: bool) -> None:
    layer = from_environment([ENGINE_SETTINGS], {"VLLM_BATCH_INVARIANT": text})
    assert layer["batch_invariant"].value is is_on


KERNELS = [
    (
        "XFORMERS",
        "VLLM_ATTENTION_BACKEND: --attention-backend: 'XFORMERS': no backend has this kernel; use one of AUTO",
    ),
    ("ROCM_FLASH", "VLLM_ATTENTION_BACKEND: --attention-backend: 'ROCM_FLASH': no backend has this kernel"),
    ("FLASHATTN", "VLLM_ATTENTION_BACKEND: --attention-backend: 'FLASHATTN': unknown; did you mean FLASH_ATTN?"),
]


@pytest.mark.variable("VLLM_ATTENTION_BACKEND")
@pytest.mark.parametrize(("value", "message"), KERNELS)
def test_kernels_that_no_backend_has(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        from_environment([ENGINE_SETTINGS], {"VLLM_ATTENTION_BACKEND": value})


@pytest.mark.parametrize(
    ("value", "name"),
    [("FLASH_ATTN", "FLASH_ATTN"), ("FLASH_ATTN_VLLM_V1", "FLASH_ATTN"), ("TORCH_SDPA_VLLM_V1", "TORCH_SDPA")],
)
def test_old_names_of_kernels(value: str, name: str) -> None:
    layer = from_environment([ENGINE_SETTINGS], {"VLLM_ATTENTION_BACKEND": value})
    assert layer["attention_backend"].value == name


@each_row("name", [variable.name for variable in env.VARIABLES if variable.status != "implemented"])
def test_no_reason_denies_what_exists(name: str) -> None:
    (variable,) = [each for each in env.VARIABLES if each.name == name]
    stale = r"no GPU backend|no NCCL|no Ray|one node|no float8|no CUDA|CPU only|AWQ is not|single GPU"
    assert not re.search(stale, variable.reason, re.IGNORECASE)
