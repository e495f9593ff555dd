"""A reasoning and a tool format of the same family in sequence, for several splits."""

from __future__ import annotations

import pytest
from support.suite.rows import each_row

from pagoda.server.parsers.output_parser import OutputParser
from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, Tool, ToolCall, merge_events
from pagoda.server.parsers.registry import reasoning_format, tool_format

CALL = (ToolCall(0, "now", "id"), Arguments(0, "{}"))
JSON = '{"name": "now", "arguments": {}}'
HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
START = "<|start|>assistant"
EXAMPLES = [
    ("deepseek_r1", "hermes", "", f"Hm.</think>\n\n<tool_call>{JSON}</tool_call>"),
    ("ernie45", "ernie45", "<think>", f"Hm.\n</think>\n\n<tool_call>\n{JSON}\n</tool_call>\n"),
    ("glm45", "glm45", "", "<think>Hm.</think>\n<tool_call>now\n</tool_call>"),
    (
        "granite",
        "granite",
        "",
        f"Here is my thought process: Hm. Here is my response: <|tool_call|>[{JSON}]",
    ),
    (
        "hunyuan_a13b",
        "hunyuan_a13b",
        "",
        f"<think>\nHm.\n</think>\n<answer>\n<tool_calls>[{JSON}]</tool_calls>\n</answer>",
    ),
    (
        "minimax_m2",
        "minimax_m2",
        "<think>",
        'Hm.</think>\n<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    ("mistral", "mistral", "", "[THINK]Hm.[/THINK][TOOL_CALLS]now[ARGS]{}"),
    ("olmo3", "olmo3", "", "<think>Hm.</think><function_calls>now()</function_calls>"),
    ("openai_gptoss", "openai", START, f"{HARMONY}<|channel|>commentary to=functions.now json<|message|>{{}}<|call|>"),
    ("openai_gptoss", "openai", START, f"{HARMONY} to=functions.now<|channel|>commentary<|message|>{{}}"),
    ("openai_gptoss", "openai", START, f"{HARMONY}<|channel|>analysis to=functions.now<|message|>{{}}<|call|>"),
    ("qwen3", "hermes", "", f"<think>\nHm.\n</think>\n\n<tool_call>\n{JSON}\n</tool_call>"),
    (
        "seed_oss",
        "seed_oss",
        "",
        "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    ),
]

XML = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
K2 = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
UNENDED = [
    (
        "deepseek_v3",
        "deepseek_v31",
        "<think>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    ),
    ("deepseek_v4", "deepseek_v4", "<think>", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'),
    ("ernie45", "ernie45", "", f"<tool_call>\n{JSON}\n</tool_call>"),
    ("gemma4", "gemma4", "<|channel>thought", "<|tool_call>call:now{}<tool_call|>"),
    ("glm45", "glm45", "<think>", "<tool_call>now\n</tool_call>"),
    ("granite", "granite", "<think>", f"<|tool_call|>[{JSON}]"),
    ("granite_thinking_parser", "qwen3_xml", "<think>", XML),
    ("cohere_command3", "cohere_command3", "<|START_THINKING|>", f"<|START_ACTION|>[{JSON}]<|END_ACTION|>"),
    (
        "kimi_k2",
        "kimi_k2",
        "<think>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}",
    ),
    (
        "minimax_m2",
        "minimax_m2",
        "<think>",
        '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    ("mistral", "mistral", "[THINK]", "[TOOL_CALLS]now[ARGS]{}"),
    ("qwen3", "hermes", "<think>", f"<tool_call>{JSON}</tool_call>"),
    ("qwen3", "qwen3_coder", "<think>", XML),
    ("seed_oss", "seed_oss", "<seed:think>", XML.replace("tool_call>", "seed:tool_call>")),
    ("step3p5", "qwen3_coder", "", XML),
]
"""Calls of models that do not close their reasoning first."""


def read(reasoning: str, tools: str, prompt: str, text: str, step: int) -> list[Event]:
    stages = (reasoning_format(reasoning).parser(prompt), tool_format(tools).parser([Tool("now")]))
    parser = OutputParser(stages, new_id=lambda: "id")
    events = [event for at in range(0, len(text), step) for event in parser.feed(text[at : at + step])]
    return merge_events([*events, *parser.finish()])


@each_row("step", [1, 2, 3, 7, 1000])
@each_row(("reasoning", "tools", "prompt", "text"), EXAMPLES)
def test_thinking_and_a_call(reasoning: str, tools: str, prompt: str, text: str, step: int) -> None:
    reasoning_event, *rest = read(reasoning, tools, prompt, text, step)
    assert isinstance(reasoning_event, Reasoning)
    assert reasoning_event.text.strip() == "Hm."
    assert tuple(rest) == CALL


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_content_before_and_after_a_call(step: int) -> None:
    text = (
        f"{HARMONY}<|channel|>commentary<|message|>Wait.<|end|>{START}<|channel|>commentary to=functions.now"
        f"<|message|>{{}}<|call|>{START}<|channel|>final<|message|>1 < 2<|return|>"
    )
    events = read("openai_gptoss", "openai", START, text, step)
    assert events == [Reasoning("Hm."), Content("Wait."), *CALL, Content("1 < 2")]


@each_row("step", [1, 5, 1000])
@each_row(("reasoning", "tools", "prompt", "call"), UNENDED)
def test_a_call_ends_the_thinking(reasoning: str, tools: str, prompt: str, call: str, step: int) -> None:
    reasoning_event, call_event, *rest = read(reasoning, tools, prompt, f"Hm: <b>\n{call}", step)
    assert reasoning_event == Reasoning("Hm: <b>")
    assert isinstance(call_event, ToolCall)
    assert call_event.name == "now"
    assert rest == [Arguments(0, "{}")]


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_two_content_messages_are_two_lines(step: int) -> None:
    text = f"{HARMONY}<|channel|>commentary<|message|>Wait.<|end|>{START}<|channel|>final<|message|>5<|return|>"
    assert read("openai_gptoss", "openai", START, text, step) == [Reasoning("Hm."), Content("Wait.\n5")]
