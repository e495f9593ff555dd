"""Round trips through every tool format, streaming of long strings, linear time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows import each_row
from support.tool_writers import ANY, WRITERS

from pagoda.server.parsers.parser import Arguments, Content, Event, ToolCall
from pagoda.server.parsers.registry import TOOL_FORMATS, tool_format

FORMATS = sorted(TOOL_FORMATS)
BUFFERED = 64
"""Maximum number of buffered characters inside a string."""

text = st.text("ab \n\t\"'\\{}[]<>&:,=()|\x00é🗼", max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=4
)
VALUES = {
    "s": text,
    "i": st.integers(),
    "n": st.floats(allow_nan=False, allow_infinity=False),
    "b": st.booleans(),
    "a": st.lists(values, max_size=3),
    "o": st.dictionaries(text, values, max_size=3),
}
calls = st.lists(st.tuples(st.just(ANY.name), st.fixed_dictionaries({}, optional=VALUES)), min_size=1, max_size=3)


def read(form: str, text: str, step: int) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return content and calls."""
    parser = tool_format(form).parser([ANY])
    events: list[Event] = [e for at in range(0, len(text), step) for e in parser.feed(text[at : at + step])]
    events += parser.finish()
    names = [event.name for event in events if isinstance(event, ToolCall)]
    texts = [""] * len(names)
    for event in events:
        if isinstance(event, Arguments):
            texts[event.index] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    return content, [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def test_every_format_has_a_writer() -> None:
    assert set(WRITERS) == set(TOOL_FORMATS)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORMATS), calls, st.integers(1, 9))
def test_round_trip(form: str, made: list[tuple[str, dict[str, Any]]], step: int) -> None:
    assert read(form, WRITERS[form](made), step) == ("", made)


@each_row("form", FORMATS)
def test_long_strings_are_streamed(form: str) -> None:
    long = 'he said "\\hm" <b> 🗼\n' * 50
    text = WRITERS[form]([(ANY.name, {"s": long})])
    start = text.index("he said")
    parser = tool_format(form).parser([ANY])
    parser.feed(text[:start])
    fed, emitted = 0, ""
    for at in range(start, start + len(long), 3):
        emitted += "".join(event.text for event in parser.feed(text[at : at + 3]) if isinstance(event, Arguments))
        fed += 3
        assert len(emitted) + BUFFERED >= fed


@each_row("form", FORMATS)
def test_truncated_closing_markup_is_not_content(form: str) -> None:
    text = WRITERS[form]([(ANY.name, {"s": "last"})])
    for at in range(text.index("last"), len(text) + 1):
        parser = tool_format(form).parser([ANY])
        events = [*parser.feed(text[:at]), *parser.finish()]
        assert not [event for event in events if isinstance(event, Content)], text[:at]


def count_calls(act: Callable[[], object]) -> int:
    """Count function calls."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


@each_row("form", FORMATS)
def test_time_is_linear_in_the_text(form: str) -> None:
    def written(size: int) -> str:
        text = "x <" * size + "\n"
        made = [(ANY.name, {"s": "x < '\"{[" * size, "a": [{"k": [1, 'v"']}] * size})] * 2
        return text + WRITERS[form](made) if form not in ("pythonic", "xlam") else WRITERS[form](made) + text

    short, long = written(20), written(40)
    assert count_calls(lambda: read(form, long, 5)) < 2.3 * count_calls(lambda: read(form, short, 5))


@each_row("form", ["hermes", "pythonic", "qwen3_coder", "gemma4"])
def test_large_answers(form: str) -> None:
    made = [(ANY.name, {"s": "ab \n'\"<" * 27_000, "a": [[1, {"k": "v"}]] * 500})]
    text = WRITERS[form](made)
    assert len(text) > 180_000
    assert read(form, text, 40) == ("", made)
