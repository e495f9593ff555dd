"""Writers of tool calls in every format, the inverse of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from pagoda.server.parsers.parser import Tool

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
