"""Formats found from 83 published chat templates, against those that the models' serving recipes name.

tests/data/chat_templates/index.tsv: the template's file, architecture, expected formats, and where it was published.
"""

import csv
from functools import cache, partial
from pathlib import Path

import pytest
from support.suite.rows import each_row

from pagoda.common.errors import RequestError
from pagoda.common.models import registry
from pagoda.common.models.family import AnswerFormat
from pagoda.common.text.chat_template import render
from pagoda.server.parsers.detection import Probe, reasoning_of, tools_of
from pagoda.server.parsers.parser import Event, ReasoningFormat, Tool, ToolFormat, merge_events
from pagoda.server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format

FOLDER = Path(__file__).parents[2] / "data" / "chat_templates"

ARGUMENT = "73915"
"""The argument of the call that the probe has templates show."""

UNKNOWN = "-"
"""The recipe names no format."""

ALSO_READS = {"vllm_xlam_llama.jinja": "llama3_json", "vllm_xlam_qwen.jinja": "llama3_json"}
"""Templates that show a call as a bare list, which tells nothing of its format: what is chosen reads it, too."""


def rows() -> list[dict[str, str]]:
    with (FOLDER / "index.tsv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@cache
def probe(file: str) -> Probe:
    source = (FOLDER / file).read_text(encoding="utf-8")
    return Probe.of(source, partial(render, source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}))


def hints(architecture: str) -> AnswerFormat:
    known = registry.is_supported(architecture) and architecture in registry.ARCHITECTURES
    return registry.family(architecture).answers if known else AnswerFormat()


def test_the_templates_are_published_ones() -> None:
    assert len(rows()) >= 60
    assert {path.name for path in FOLDER.iterdir()} == {"index.tsv", *(row["file"] for row in rows())}
    for row in rows():
        assert row["licence"] in {"MIT", "Apache-2.0"}
        assert len(row["commit"]) == 40


@each_row("row", rows, ids=lambda row: row["file"])
def test_the_tool_format_is_that_of_the_recipe(row: dict[str, str]) -> None:
    file = row["file"]
    found = tools_of(probe(file), hints(row["architecture"]).tools)
    expected = ALSO_READS.get(file, row["tools"])
    if expected == UNKNOWN:
        assert not found or calls(tool_format(found), file)
    elif expected:
        assert found in TOOL_FORMATS
        assert tool_format(found) is tool_format(expected)
    else:
        assert not found


@each_row("row", lambda: [row for row in rows() if row["tools"] not in ("", UNKNOWN)], ids=lambda row: row["file"])
def test_a_call_is_shown_and_parsed_back(row: dict[str, str]) -> None:
    found = probe(row["file"])
    assert found.shows_tools
    if ARGUMENT in found.with_call and row["file"] != "vllm_phi4_mini.jinja":  # which writes Python's dictionaries
        assert calls(tool_format(row["tools"]), row["file"])


@each_row("row", rows, ids=lambda row: row["file"])
def test_the_reasoning_format_reads_as_that_of_the_recipe(row: dict[str, str]) -> None:
    found = reasoning_of(probe(row["file"]), hints(row["architecture"]).reasoning)
    assert bool(found) == bool(row["reasoning"])
    if found:
        assert found in REASONING_FORMATS
        assert reads(reasoning_format(found), row["file"]) == reads(reasoning_format(row["reasoning"]), row["file"])


@each_row("row", rows, ids=lambda row: row["file"])
def test_contents_are_shown_as_text(row: dict[str, str]) -> None:
    found = probe(row["file"])
    for shown in (found.plain, found.with_tools, found.with_call, found.with_reasoning):
        assert "'text'" not in shown
        assert '"text"' not in shown


def calls(format: ToolFormat, file: str) -> bool:
    """Whether a format reads the call that a template shows."""
    tool = Tool("weather_now", {"type": "object", "properties": {"days": {"type": "integer"}}})
    for text in probe(file).calls:
        parser = format.parser([tool])
        events = [*parser.feed(text), *parser.finish()]
        if any(getattr(event, "name", "") == "weather_now" for event in events):
            return True
    return False


def reads(format: ReasoningFormat, file: str) -> list[Event]:
    """What a format makes of an answer with reasoning."""
    prompt = probe(file).plain
    opening = "" if prompt.rstrip().endswith(format.starts) else format.starts[0]
    parser = format.parser(prompt)
    return merge_events([*parser.feed(f"{opening}a thought{format.ends[0]}the answer"), *parser.finish()])


def test_a_template_that_shows_no_tools_has_no_format() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    found = Probe.of(source, partial(render, source))
    assert not found.shows_tools
    assert tools_of(found, "hermes") == ""


def test_a_template_that_cannot_be_probed_shows_tools_if_it_reads_them() -> None:
    def refuse(*_: object, **__: object) -> str:
        raise RequestError("messages", "a variable is missing")

    found = Probe.of("{{ needed.x.y }}{{ tools }}", refuse)
    assert found.shows_tools
    assert tools_of(found, "hermes") == "hermes"


def test_a_template_that_refuses_everything_has_no_format() -> None:
    def refuse(*_: object, **__: object) -> str:
        raise RequestError("messages", "refused")

    found = Probe.of("</think>", refuse)
    assert tools_of(found) == ""
    assert reasoning_of(found) == ""


@pytest.mark.parametrize(
    ("shown", "format"),
    [
        ('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "hermes"),
        ('[TOOL_CALLS][{"name": "%s", "arguments": %s}]', "mistral"),
        ('{"name": "%s", "parameters": %s}', "llama3_json"),
        ("plain text about %s and %s", ""),
    ],
)
def test_the_format_is_the_one_that_reads_the_call(shown: str, format: str) -> None:
    before, between, after = shown.split("%s")
    source = (
        "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        f"{before}{{{{ c.function.name }}}}{between}{{{{ c.function.arguments | tojson }}}}{after}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert tools_of(Probe.of(source, partial(render, source))) == format
