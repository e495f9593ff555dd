"""Which formats a model writes its tool calls and its reasoning in, found from its chat template.

A template shows the model its earlier answers as the model writes them. So a short conversation with a call and with
reasoning is rendered, and the format whose parser reads the call back, and leaves the least text over, is the model's.
Templates that show no earlier calls name the call's delimiters in the instructions that they add for tools.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.errors import RequestError
from pagoda.common.text.chat_template import variables_of
from pagoda.server.parsers.parser import (
    Arguments,
    Brackets,
    Content,
    Event,
    ReasoningFormat,
    Tool,
    ToolCall,
    ToolFormat,
)
from pagoda.server.parsers.reasoning.formats import TaggedFormat
from pagoda.server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format

Render = Callable[..., str]
"""Renders messages: `render(messages, tools=..., add_generation_prompt=...)`. Raises RequestError."""

QUESTION: Final = "Which weather has the first city?"
_DAYS: Final = 73915
_RESULT: Final = "sunny-result"
_THOUGHT: Final = "thought-about-weather"
_ANSWER: Final = "answer-about-weather"
TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather_now",
        "description": "Return the weather.",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "description": "days from today"}},
            "required": ["days"],
        },
    },
}
_TOOL: Final = Tool(TOOL["function"]["name"], TOOL["function"]["parameters"])
_ARGUMENTS: Final[Mapping[str, Any]] = {"days": _DAYS}  # a number, since some templates write texts without quotes
_CALL: Final[Mapping[str, Any]] = {
    "id": "call12345",  # nine letters and digits, which Mistral's templates require
    "type": "function",
    "function": {"name": TOOL["function"]["name"], "arguments": _ARGUMENTS},
}


@dataclass(frozen=True, slots=True)
class Probe:
    """Renderings of one template; empty where it refuses the messages."""

    source: str  # the template
    plain: str  # a question, with the opening of the answer
    with_tools: str  # the same with tools
    shows_tools: bool  # whether tools change the rendering; if it fails, whether the template reads them
    with_call: str  # question, call and result
    with_reasoning: str  # question, and an answer with reasoning

    @classmethod
    def of(cls, source: str, render: Render) -> Probe:
        """Render the conversations with one template."""
        question = {"role": "user", "content": QUESTION}
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        result = {
            **{"role": "tool", "content": _RESULT},
            **{"tool_call_id": _CALL["id"], "name": _CALL["function"]["name"]},
        }
        keys = ("reasoning", "reasoning_content", "thinking")
        answer = {"role": "assistant", "content": _ANSWER, **dict.fromkeys(keys, _THOUGHT)}
        without_tools, with_tools = _with_tools(render, question)
        return cls(
            source=source,
            plain=_rendered(render, [question], None, opens=True),
            with_tools=with_tools,
            shows_tools=with_tools != without_tools if with_tools else "tools" in variables_of(source),
            with_call=_rendered(render, [question, call, result], [TOOL], opens=False),
            with_reasoning=_rendered(render, [question, answer], None, opens=False),
        )

    @property
    def has_switch(self) -> bool:
        """Whether the template reads a variable that turns reasoning on and off."""
        return not variables_of(self.source).isdisjoint(_SWITCHES)

    @property
    def calls(self) -> tuple[str, ...]:
        """What the model wrote for the call: with the markup around its turn, without the opening, and without both."""
        shown = self.with_call.rpartition(QUESTION)[2].partition(_RESULT)[0]
        opening = os.path.commonprefix([shown, self.with_tools.rpartition(QUESTION)[2]])
        opening = opening[: max(opening.rfind(end) for end in _MARKUP_ENDS) + 1]
        inner = shown.removeprefix(opening)
        end = self.with_reasoning.rpartition(_ANSWER)[2].strip()
        return shown, inner, inner.partition(end)[0] if end else inner


def _rendered(render: Render, messages: Sequence[Mapping[str, Any]], tools: Any, *, opens: bool) -> str:
    try:
        return render(messages, tools=tools, add_generation_prompt=opens)
    except RequestError:
        return ""


def _with_tools(render: Render, question: Mapping[str, Any]) -> tuple[str, str]:
    """Return a question without and with tools; after a system message if the template shows no tools else."""
    system = {"role": "system", "content": "Call functions where they help."}
    shown = ("", "")
    for messages in ([question], [system, question]):
        without = _rendered(render, messages, None, opens=True)
        shown = (without, _rendered(render, messages, [TOOL], opens=True) or without)
        if shown[0] != shown[1]:
            break
    return shown


_MARKUP_ENDS: Final = ">]\n"
"""Characters that end the opening of a turn. What the opening of a new turn and a turn with a call have in common can
end inside the markup that follows it."""


# Tool calls.


def tools_of(probe: Probe, preferred: str = "") -> str:
    """Return the name of the format of a template's tool calls; "" if there is none.

    `preferred`: the format of the architecture, which decides between formats that read the call alike.
    """
    if not probe.shows_tools:
        return ""
    read = {}
    for names, format in _distinct(TOOL_FORMATS, tool_format):
        left = [count for text in probe.calls if (count := _left_over(format, text)) is not None]
        if left:
            read[names] = (min(left), max(map(_rank, names)))
    if any(preferred in names for names in read):
        return preferred
    if read:
        least = min(read.values())
        return next(names[0] for names, left in read.items() if left == least)
    return preferred or _named(probe)


def _named(probe: Probe) -> str:
    """Return the first format whose beginning of a call stands in the template; "" if there is none."""
    for names, format in _distinct(TOOL_FORMATS, tool_format):
        if _is_named(format, probe.source) and not any(map(_rank, names)):
            return names[0]
    return ""


_GENERAL: Final = ("mimo", "llama3_json", "pythonic", "llama4_pythonic", "xlam", "granite", "phi4_mini_json")
"""Formats that read calls of others, too: they are chosen if no other reads the call as well, the first of them."""


def _rank(name: str) -> int:
    return _GENERAL.index(name) + 1 if name in _GENERAL else 0


def _is_named(format: ToolFormat, source: str) -> bool:
    """Return whether a template has the text that begins a call of this format."""
    tags = getattr(format, "tags", None)
    begins = [tag.begin for tag in tags] if tags else []
    if isinstance(format, Brackets):
        begins += [bracket.begin for bracket in format.brackets([_TOOL])]
    return any(begin.strip() in source for begin in begins if begin.strip())


def _left_over(format: ToolFormat, text: str) -> int | None:
    """Return how many characters of a rendered call the format leaves as content; None if it does not read the call."""
    parser = format.parser([_TOOL])
    events = [*parser.feed(text), *parser.finish()]
    return sum(len("".join(e.text.split())) for e in events if isinstance(e, Content)) if _is_the_call(events) else None


def _is_the_call(events: Iterable[Event]) -> bool:
    """Return whether the events have the probe's call and no other."""
    events = list(events)
    calls = [event for event in events if isinstance(event, ToolCall)]
    text = "".join(event.text for event in events if isinstance(event, Arguments))
    if [call.name for call in calls] != [TOOL["function"]["name"]]:
        return False
    try:
        arguments = json.loads(text)
    except ValueError:
        return False
    return isinstance(arguments, dict) and {key: str(value) for key, value in arguments.items()} == {"days": str(_DAYS)}


def _distinct(table: Mapping[str, tuple[str, str]], load: Callable[[str], Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Return the built-in formats, each with all of its names."""
    names: dict[int, list[str]] = {}
    formats: dict[int, Any] = {}
    for name in table:
        format = load(name)
        known = names.setdefault(id(format), [])
        known.insert(0 if table[name][1].lower() == name else len(known), name)
        formats[id(format)] = format
    return [(tuple(names[key]), formats[key]) for key in names]


# Reasoning.


_BY_FLAG: Final = frozenset({"minimax_m2_append_think", "identity"})
"""Ways to leave reasoning in the content, which only the user can choose."""


def reasoning_of(probe: Probe, preferred: str = "") -> str:
    """Return the name of the format of a template's reasoning; "" if the template knows none.

    A format's closing tag must stand in the template and the opening of its turn in the rendering. `preferred`: the
    format of the architecture, which decides between formats alike.
    """
    fitting = {}
    for names, format in _distinct(REASONING_FORMATS, reasoning_format):
        fit = None if _BY_FLAG.intersection(names) else _fit(format, probe)
        if fit is not None:
            fitting[names] = fit
    if any(preferred in names for names in fitting):
        return preferred
    best = min(fitting.values(), default=None)
    return next((names[0] for names, fit in fitting.items() if fit == best), "")


def _fit(format: ReasoningFormat, probe: Probe) -> tuple[int, ...] | None:
    """Return how well a reasoning format fits a template, less is better; None if it does not."""
    if not any(end in probe.source for end in format.ends):
        return None
    if not isinstance(format, TaggedFormat):
        return (0, 0, 0)
    opened = [number for number, turn in enumerate(format.turn_starts) if turn in probe.plain]
    if not opened:
        return None
    tagged = format.content_tags is not None and format.content_tags[0] in probe.source
    if format.content_tags is not None and not tagged:
        return None
    opens = any(start in probe.source for start in format.starts)
    always = not probe.has_switch and format.turn_starts[:1] != _COMMON_TURN
    return (not tagged, opened[0], format.starts_thinking != always, not opens)


_COMMON_TURN: Final = ("<|im_start|>assistant",)
"""The opening of ChatML, which tells nothing about the model."""

_SWITCHES: Final = ("thinking", "enable_thinking", "think")
"""Variables of templates that turn reasoning on and off. A model whose template has none always reasons."""
