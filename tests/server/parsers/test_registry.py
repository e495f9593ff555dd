"""Formats by name: built in, from a plugin file or module, and from entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from support.servers.live_server import live_server
from support.suite.rows import each_row

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError
from pagoda.server.parsers.parser import Content, Parser, ToolCall
from pagoda.server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, check_formats, reasoning_format, tool_format
from pagoda.server.settings import plugins
from pagoda.server.settings.flags import EngineArgs

SHOUTING = """
from pagoda.server.parsers.parser import Reasoning, ToolCall


class Shouted:
    def feed(self, text):
        return [ToolCall(0, text)] if text.isupper() else []

    def finish(self):
        return []


class Thinking:
    def feed(self, text):
        return [Reasoning(text)]

    def finish(self):
        return []


class Shouting:
    starts = ends = ("!",)

    def thinks(self, prompt):
        return False

    def parser(self, prompt_or_tools):
        return Thinking() if isinstance(prompt_or_tools, str) else Shouted()


TOOL_FORMATS = {"shouting": Shouting(), "hermes": Shouting()}
REASONING_FORMATS = {"shouting": Shouting()}
"""

VLLM_0_32 = """
apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 dots ernie45
functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hf hunyuan_a13b hy_v3 hy_v4 inkling
internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5
minimax_m2 minimax_m3 mistral muse_glimmer olmo3 openai phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder
qwen3_json qwen3_xml seed_oss step3 step3p5 xlam
"""
"""Tool parsers registered by vLLM 0.32."""


class Installed:
    def parser(self, tools: object) -> Parser:
        raise NotImplementedError


INSTALLED = Installed()


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "shout-ing.py"
    path.write_text(SHOUTING)
    return str(path)


def test_every_name_resolves() -> None:
    for name in TOOL_FORMATS:
        assert tool_format(name).parser([]).finish() == []
    for name in REASONING_FORMATS:
        assert isinstance(reasoning_format(name).ends, tuple)


def test_unknown_names_list_the_known_ones(plugin: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--tool-call-parser: unknown format 'herms'; use one of .*xlam; the closest is hermes"
    ):
        tool_format("herms")
    with pytest.raises(ConfigError, match=r"--reasoning-parser: unknown format 'r1'.*qwen3, seed_oss, shouting"):
        reasoning_format("r1", plugin)


def test_names_of_vllm_are_known_or_refused_with_the_closest() -> None:
    for name in VLLM_0_32.split():
        if name not in TOOL_FORMATS:
            with pytest.raises(ConfigError, match=r"unknown format .*(; the closest is \w+|hermes)"):
                tool_format(name)
    assert set(VLLM_0_32.split()) - set(TOOL_FORMATS) == {"hf", "hy_v4", "inkling", "k2_horizon", "muse_glimmer"}
    with pytest.raises(ConfigError, match="the closest is hy_v3"):
        tool_format("hy_v4")


def test_a_plugin_adds_and_overrides_names(plugin: str) -> None:
    assert tool_format("shouting", plugin).parser([]).feed("RUN") == [ToolCall(0, "RUN")]
    assert tool_format("hermes", plugin).parser([]).feed("RUN") == [ToolCall(0, "RUN")]
    assert tool_format("hermes").parser([]).feed("RUN") == [Content("RUN")]
    assert tool_format("xlam", plugin) is tool_format("xlam")
    assert reasoning_format("shouting", plugin).ends == ("!",)
    with pytest.raises(ConfigError):
        tool_format("shouting")


def test_a_plugin_may_be_a_module(plugin: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "shouting_module.py").write_text(SHOUTING)
    monkeypatch.syspath_prepend(tmp_path)
    assert tool_format("shouting", "shouting_module").parser([]).feed("RUN") == [ToolCall(0, "RUN")]


@each_row(
    ("text", "line"),
    [
        ("import no_such_module", "cannot be imported: ModuleNotFoundError"),
        ("TOOL_FORMATS = 5", "defines no dictionary TOOL_FORMATS"),
        ("", "defines no dictionary TOOL_FORMATS"),
        ("TOOL_FORMATS = {'mine': print}", "format 'mine' has no parser"),
        (None, "cannot be imported: FileNotFoundError"),
    ],
)
def test_a_broken_plugin_is_one_line(tmp_path: Path, text: str | None, line: str) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"^--tool-parser-plugin: .*{line}"):
        tool_format("mine", str(path))


def test_entry_points_are_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("installed", f"{__name__}:INSTALLED", "pagoda.tool_parsers")])
    monkeypatch.setattr(plugins, "entry_points", lambda group: points.select(group=group))
    assert tool_format("installed") is INSTALLED
    with pytest.raises(ConfigError, match="hy_v3, installed, internlm"):
        tool_format("other")
    with pytest.raises(ConfigError):
        reasoning_format("installed")


@pytest.mark.setting("--tool-parser-plugin", "--reasoning-parser-plugin")
def test_a_server_uses_plugin_formats(plugin: str) -> None:
    body = {"messages": [{"role": "user", "content": "[[RUN]]"}], "max_tokens": 9}
    calls = {"enable_auto_tool_choice": True, "tool_call_parser": "shouting", "tool_parser_plugin": plugin}
    with live_server("fake:say", **calls) as server:
        tool = {"type": "function", "function": {"name": "RUN"}}
        _, answer = server.post("/v1/chat/completions", body | {"tools": [tool]})
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] in ("R", "RUN")
    with live_server("fake:say", engine={"reasoning_parser": "shouting", "reasoning_parser_plugin": plugin}) as server:
        _, answer = server.post("/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["reasoning"] == "RUN"


def test_formats_are_checked_before_startup(plugin: str) -> None:
    engine = EngineArgs("fake", reasoning_parser="shouting", reasoning_parser_plugin=plugin).create_engine_config()
    server = ServerConfig(tool_call_parser="shouting", tool_parser_plugin=plugin)
    check_formats(engine, server)
    with pytest.raises(ConfigError, match="--tool-call-parser: unknown format 'shouting'"):
        check_formats(engine, ServerConfig(tool_call_parser="shouting"))
    with pytest.raises(ConfigError, match="--reasoning-parser: unknown format 'x'"):
        check_formats(EngineArgs("fake", reasoning_parser="x").create_engine_config(), server)
    with pytest.raises(ConfigError, match="--tool-parser-plugin: needs --tool-call-parser"):
        ServerConfig(tool_parser_plugin=plugin)
    with pytest.raises(ConfigError, match="--reasoning-parser-plugin: needs --reasoning-parser"):
        EngineArgs("fake", reasoning_parser_plugin=plugin).create_engine_config()
