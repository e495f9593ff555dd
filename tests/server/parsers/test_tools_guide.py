"""The tool calling guide matches the code."""

from __future__ import annotations

import re
from pathlib import Path

from support.suite.rows import each_row

from pagoda.server.parsers.parser import Arguments, Event, Tool, ToolCall, merge_events
from pagoda.server.parsers.registry import TOOL_FORMATS, tool_format

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "tools.md").read_text()
ROWS = [
    line.strip("|").split(" | ", 1)
    for line in GUIDE.partition("## Formats")[2].splitlines()
    if re.match(r"\| `\w", line)
]
SHOWN = [
    (name, text)
    for names, shown in ROWS
    for name in re.findall(r"`([^`]+)`", names)
    for text in re.findall(r"`([^`]+)`", shown.replace("\\|", "|"))[:1]
]


def read(text: str, name: str, plugin: str = "") -> list[Event]:
    parser = tool_format(name, plugin).parser([Tool("f", {"properties": {"a": {"type": "integer"}}})])
    return merge_events([*parser.feed(text), *parser.finish()])


def test_the_table_lists_the_registry() -> None:
    assert sorted(name for names, _ in ROWS for name in re.findall(r"`([^`]+)`", names)) == sorted(TOOL_FORMATS)


@each_row(("name", "text"), SHOWN, ids=[name for name, _ in SHOWN])
def test_the_examples_in_the_table_parse(name: str, text: str) -> None:
    wraps = {
        "longcat": '<longcat_tool_call>{"name": "f", "arguments": {"a": 1}}</longcat_tool_call>',
        "seed_oss": "<seed:tool_call><function=f><parameter=a>1</parameter></function></seed:tool_call>",
        "deepseek_v41": '<｜DSML｜ invoke name="f"><｜DSML｜ parameter name="a">1</｜DSML｜ parameter>'
        "</｜DSML｜ invoke>",
        "mimo": "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
        "lfm2": f"<|tool_call_start|>{text}<|tool_call_end|>",
        "olmo3": f"<function_calls>{text}</function_calls>",
        "gemma4": "<|tool_call>call:f{a:1}<tool_call|>",
        "deepseek_v3": text.replace("begin｜>f<｜tool▁sep｜>", "begin｜>function<｜tool▁sep｜>f\n```json\n").replace(
            "}<", "}\n```<"
        ),
    }
    call, arguments = read(wraps.get(name, text), name)
    assert isinstance(call, ToolCall)
    assert call.name == "f"
    assert isinstance(arguments, Arguments)
    assert arguments.text.replace(" ", "") == '{"a":1}'


def test_the_example_plugin_works(tmp_path: Path) -> None:
    path = tmp_path / "shout.py"
    path.write_text(GUIDE.partition("```python\n")[2].partition("```")[0])
    text = '<CALL>{"name": "f"}</CALL>'
    assert read(text, "shout", str(path)) == [ToolCall(0, "f"), Arguments(0, "{}")]
