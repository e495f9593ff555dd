"""Round trips through every tool format, streaming of long strings, linear time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.suite.rows import each_row

from pagoda.server.parsers.parser import Arguments, Content, Event, Tool, ToolCall
from pagoda.server.parsers.registry import TOOL_FORMATS, tool_format

# --- writers of tool calls in every format, the inverse of the parsers ---

TYPES = {
    "s": "string",
    "i": "integer",
    "n": "number",
    "b": "boolean",
    "a": "array",
    "o": "object",
}
"""Parameters of ANY and their types."""

ANY = Tool("any", {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}})

Call = tuple[str, dict[str, Any]]
Writer = Callable[[Sequence[Call]], str]


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def raw(value: object) -> str:
    """Return a value without quotes."""
    return value if isinstance(value, str) else dumped(value)


def objects(begin: str, end: str = "", between: str = "", name: str = "name", arguments: str = "arguments") -> Writer:
    """Write each call as JSON between tags."""
    return lambda calls: between.join(
        f"{begin}{dumped({name: call, arguments: values})}{end}" for call, values in calls
    )


def listed(begin: str = "", end: str = "", name: str = "name", arguments: str = "arguments") -> Writer:
    """Write all calls as one JSON list."""
    return lambda calls: f"{begin}{dumped([{name: call, arguments: values} for call, values in calls])}{end}"


def named(section: str, begin: str, middle: str, end: str, section_end: str, between: str = "") -> Writer:
    """Write the name, then the arguments as JSON."""
    return lambda calls: (
        section + between.join(f"{begin}{call}{middle}{dumped(values)}{end}" for call, values in calls) + section_end
        if calls
        else ""
    )


def tagged(
    block: str, call: str, key: str, value_end: str, call_end: str, block_end: str, once: bool = False
) -> Writer:
    """Write each argument between tags; `once`: one block for all calls. {}: name, []: whether the value is text."""

    def one(name: str, values: dict[str, Any]) -> str:
        parts = "".join(
            key.replace("{}", parameter).replace("[]", "true" if isinstance(value, str) else "false")
            + raw(value)
            + value_end
            for parameter, value in values.items()
        )
        return call.replace("{}", name) + parts + call_end

    def write(calls: Sequence[Call]) -> str:
        if once:
            return block + "".join(one(*each) for each in calls) + block_end if calls else ""
        return "".join(block + one(*each) + block_end for each in calls)

    return write


def pythonic(begin: str = "", end: str = "", brackets: tuple[str, str, str] = ("[", ", ", "]")) -> Writer:
    opening, between, closing = brackets

    def one(name: str, values: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"

    return lambda calls: begin + opening + between.join(one(*each) for each in calls) + closing + end if calls else ""


def marked(begin: str, end: str, mark: str) -> Writer:
    def form(value: object, keys: bool = True) -> str:
        match value:
            case str():
                return f"{mark}{value}{mark}"
            case dict():
                shown = (f"{form(key) if keys else key}:{form(each)}" for key, each in value.items())
                return "{" + ",".join(shown) + "}"
            case list():
                return "[" + ",".join(map(form, value)) + "]"
            case _:
                return dumped(value)

    return lambda calls: "".join(f"{begin}call:{name}{form(values, False)}{end}" for name, values in calls)


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(values)}<|call|>"
        for name, values in calls
    )


def kimi(calls: Sequence[Call]) -> str:
    parts = (
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{dumped(values)}<|tool_call_end|>"
        for n, (name, values) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(parts) + "<|tool_calls_section_end|>" if calls else ""


def kimi_k3(calls: Sequence[Call]) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    parts = (
        f'<|open|>call tool="{name}" index="{n}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>{raw(value)}<|close|>argument<|sep|>'
            for key, value in values.items()
        )
        + "<|close|>call<|sep|>"
        for n, (name, values) in enumerate(calls, 1)
    )
    return "<|open|>tools<|sep|>" + "".join(parts) + "<|close|>tools<|sep|>" if calls else ""


def elements(prefix: str) -> Writer:
    """Write each argument as an element; lists and objects as JSON, since their items have no types here."""

    def one(name: str, values: dict[str, Any]) -> str:
        parts = "".join(f"{prefix}<{key}>{raw(value)}{prefix}</{key}>" for key, value in values.items())
        return f'{prefix}<invoke name="{name}">{parts}{prefix}</invoke>\n'

    return lambda calls: (
        f"{prefix}<tool_call>\n{''.join(one(*each) for each in calls)}{prefix}</tool_call>" if calls else ""
    )


HERMES = objects("<tool_call>\n", "\n</tool_call>", "\n")
QWEN = tagged(
    "<tool_call>\n", "<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n", "</tool_call>\n"
)
GLM = "<arg_key>{}</arg_key>\n<arg_value>"
DSML = '<｜DSML｜parameter name="{}" string="[]">'
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

COMMAND = listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters")

WRITERS: dict[str, Writer] = {
    "apertus": lambda calls: f"<|tools_prefix|>{dumped([{name: values} for name, values in calls])}<|tools_suffix|>",
    "cohere_command3": COMMAND,
    "cohere_command4": COMMAND,
    "deepseek_v3": named(
        DEEPSEEK[0], DEEPSEEK[1] + "function<｜tool▁sep｜>", "\n```json\n", "\n```" + DEEPSEEK[2], DEEPSEEK[3], "\n"
    ),
    "deepseek_v31": named(DEEPSEEK[0], DEEPSEEK[1], "<｜tool▁sep｜>", DEEPSEEK[2], DEEPSEEK[3]),
    "deepseek_v32": tagged(
        "<｜DSML｜function_calls>\n",
        '<｜DSML｜invoke name="{}">\n',
        DSML,
        "</｜DSML｜parameter>\n",
        "</｜DSML｜invoke>\n",
        "</｜DSML｜function_calls>",
        once=True,
    ),
    "deepseek_v4": tagged(
        "<｜DSML｜tool_calls>\n",
        '<｜DSML｜invoke name="{}">\n',
        DSML,
        "</｜DSML｜parameter>\n",
        "</｜DSML｜invoke>\n",
        "</｜DSML｜tool_calls>",
        once=True,
    ),
    "deepseek_v41": tagged(
        "<｜DSML｜ calls>\n",
        '<｜DSML｜ invoke name="{}">\n',
        DSML.replace("｜p", "｜ p"),
        "</｜DSML｜ parameter>\n",
        "</｜DSML｜ invoke>\n",
        "</｜DSML｜ calls>",
        once=True,
    ),
    "dots": tagged(
        "<dots_function_call>\n",
        '<invoke name="{}">\n',
        '<parameter name="{}">',
        "</parameter>\n",
        "</invoke>\n",
        "</dots_function_call>",
        once=True,
    ),
    "ernie45": HERMES,
    "functiongemma": marked("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": marked("<|tool_call>", "<tool_call|>", '<|"|>'),
    "gigachat3": objects("<|function_call|>"),
    "glm45": tagged("", "<tool_call>{}\n", GLM, "</arg_value>\n", "</tool_call>\n", ""),
    "glm47": tagged("", "<tool_call>{}", GLM.replace("\n", ""), "</arg_value>", "</tool_call>", ""),
    "granite": listed("<|tool_call|>"),
    "granite-20b-fc": objects("<function_call> ", "\n"),
    "granite4": HERMES,
    "hermes": HERMES,
    "hunyuan_a13b": listed("<tool_calls>", "</tool_calls>"),
    "hy_v3": tagged(
        "<tool_calls>\n", "<tool_call>{}<tool_sep>\n", GLM, "</arg_value>\n", "</tool_call>\n", "</tool_calls>"
    ),
    "internlm": objects("<|action_start|><|plugin|>", "<|action_end|>", arguments="parameters"),
    "jamba": listed("<tool_calls>", "</tool_calls>"),
    "kimi_k2": kimi,
    "kimi_k3": kimi_k3,
    "lfm2": pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
    "ling3": tagged("", "<tool_call>{}\n", GLM, "</arg_value>\n", "</tool_call>\n", ""),
    "llama3_json": objects("", "", "; ", arguments="parameters"),
    "llama4_json": objects("", "", "\n", arguments="parameters"),
    "llama4_pythonic": pythonic("<|python_start|>", "<|python_end|>"),
    "longcat": objects("<longcat_tool_call>", "</longcat_tool_call>"),
    "mimo": tagged("<tool_call>", "<function={}>", "<parameter={}>", "</parameter>", "</function>", "</tool_call>"),
    "minicpm5": tagged("", '<function name="{}">', '<param name="{}"><![CDATA[', "]]></param>", "</function>\n", ""),
    "minimax": lambda calls: f"<tool_calls>\n{objects('', '', chr(10))(calls)}\n</tool_calls>" if calls else "",
    "minimax_m2": tagged(
        "<minimax:tool_call>\n",
        '<invoke name="{}">\n',
        '<parameter name="{}">',
        "</parameter>\n",
        "</invoke>\n",
        "</minimax:tool_call>",
        once=True,
    ),
    "minimax_m3": elements("]<]minimax[>["),
    "mistral": named("", "[TOOL_CALLS]", "[ARGS]", "", ""),
    "olmo3": pythonic("<function_calls>", "</function_calls>", ("", "\n", "")),
    "openai": harmony,
    "phi4_mini_json": listed("functools"),
    "plamo3": named(
        "<|plamo:begin_tool_requests:plamo|>",
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        "<|plamo:end_tool_requests:plamo|>",
    ),
    "poolside_v1": tagged("", "<tool_call>{}\n", GLM, "</arg_value>\n", "</tool_call>\n", ""),
    "pythonic": pythonic(),
    "qwen3_coder": QWEN,
    "qwen3_json": HERMES,
    "qwen3_xml": QWEN,
    "seed_oss": tagged(
        "<seed:tool_call>\n",
        "<function={}>\n",
        "<parameter={}>\n",
        "\n</parameter>\n",
        "</function>\n",
        "</seed:tool_call>\n",
    ),
    "step3": tagged(
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>",
        '<steptml:invoke name="{}">\n',
        '<steptml:parameter name="{}">',
        "</steptml:parameter>\n",
        "</steptml:invoke>",
        "<｜tool_call_end｜>\n<｜tool_calls_end｜>",
    ),
    "step3p5": QWEN,
    "xlam": listed(),
}


# --- tests ---


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
