"""The loop of an agent with no flag for tools: a tool is shown to the model, called, answered, and its result read.

The model plays written answers (see fake_engine.Script): it calls the tool only if its prompt holds the tool's
name, description and parameter as the published chat template writes them, and answers only if it holds the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.engines.fake_engine import LOST, Script, Turn
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
DEFINITION = (
    '{"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": '
)
RESULT = "sunny, 21 degrees"
ANSWER = "It is sunny in Paris."
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A published template, and what it writes."""

    template: str
    definition: str  # of the tool in the prompt
    openings: tuple[str, ...]  # of an answer
    call: str  # as the model writes it
    result: str  # in the prompt


FORMATS = (
    Format(
        template="Qwen-Qwen3-0.6B.jinja",
        definition=f"<tools>\n{DEFINITION}",
        openings=("<|im_start|>assistant\n",),
        call='<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        result=f"<|im_start|>user\n<tool_response>\n{RESULT}\n</tool_response><|im_end|>",
    ),
    Format(
        template="Qwen3-Coder.jinja",
        definition="<function>\n<name>weather</name>\n<description>The weather of a city.</description>\n<parameters>\n"
        "<parameter>\n<name>city</name>\n<type>string</type>",
        openings=("<|im_start|>assistant\n",),
        call="<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        result=f"<tool_response>\n{RESULT}\n</tool_response>\n",
    ),
    Format(
        template="vllm_llama3.1_json.jinja",
        definition='"name": "weather",\n        "description": "The weather of a city.",\n        "parameters": {',
        openings=("<|start_header_id|>assistant<|end_header_id|>\n\n",),
        call='{"name": "weather", "parameters": {"city": "Paris"}}',
        result=f'<|start_header_id|>ipython<|end_header_id|>\n\n{{"output": "{RESULT}"}}<|eot_id|>',
    ),
    Format(
        template="mistralai-Mistral-Nemo-Instruct-2407.jinja",
        definition=f"[AVAILABLE_TOOLS][{DEFINITION}",
        openings=("[/INST]", "[/TOOL_RESULTS]"),
        call='[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]',
        result=f'[TOOL_RESULTS]{{"content": {RESULT}, ',
    ),
    Format(
        template="moonshotai-Kimi-K2.jinja",
        definition=f"<|im_system|>tool_declare<|im_middle|>[{DEFINITION}",
        openings=("<|im_assistant|>assistant<|im_middle|>",),
        call="<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        result=f"{RESULT}<|im_end|>",
    ),
    Format(
        template="GLM-4.6.jinja",
        definition=f"<tools>\n{DEFINITION}",
        openings=("<|assistant|>",),
        call="\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        result=f"<|observation|>\n<tool_response>\n{RESULT}\n</tool_response>",
    ),
    Format(
        template="ByteDance-Seed-OSS.jinja",
        definition='def weather(city: str):\n    """\n    The weather of a city.\n',
        openings=("<seed:bos>assistant\n",),
        call="<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        result=f"<seed:bos>tool\n{RESULT}<seed:eos>",
    ),
    Format(
        template="google-gemma-4-31B-it.jinja",
        definition='<|tool>declaration:weather{description:<|"|>The weather of a city.<|"|>,parameters:{',
        openings=("<|turn>model\n<|channel>thought\n<channel|>", "<tool_response|>"),
        call='<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
        result=f'<|tool_response>response:weather{{value:<|"|>{RESULT}<|"|>}}<tool_response|>',
    ),
)
QWEN = FORMATS[0]


@contextmanager
def serving(format: Format, folder: Path) -> Iterator[LiveServer]:
    """A server of a model that writes one format, without a flag for tools."""
    turns = [
        Turn([format.definition], format.call),
        Turn([format.definition, format.call.strip()[:20], format.result], ANSWER),
    ]
    model = Script(list(format.openings), turns).write(folder / "script.json")
    with live_server(model, chat_template=str(TEMPLATES / format.template)) as server:
        yield server


@each_row("format", FORMATS, ids=lambda format: format.template)
def test_a_conversation_in_the_format_of_the_template(format: Format, tmp_path: Path) -> None:
    reordered = dict(reversed(WEATHER.items()))  # which every API brings into the usual order
    body: dict[str, Any] = {"messages": [QUESTION], "tools": [{"type": "function", "function": reordered}]}
    with serving(format, tmp_path) as server:
        status, first = server.post("/v1/chat/completions", body)
        assert status == 200, first
        (choice,) = first["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Paris"})
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
        messages = [QUESTION, choice["message"], result]
        status, second = server.post("/v1/chat/completions", {**body, "messages": messages})
        assert status == 200, second
        assert second["choices"][0]["message"]["content"].strip() == ANSWER
        status, without = server.post("/v1/chat/completions", {"messages": [QUESTION]})
        assert without["choices"][0]["message"]["content"].strip() == LOST


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(QWEN, tmp_path_factory.mktemp("agent")) as server:
        yield server


def test_a_conversation_by_responses(qwen: LiveServer) -> None:
    body = {"model": "fake", "tools": [{"type": "function", **WEATHER}]}
    status, first = qwen.post("/v1/responses", {**body, "input": QUESTION["content"]})
    assert status == 200, first
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    status, second = qwen.post("/v1/responses", {**body, "input": [QUESTION, call, result]})
    assert status == 200, second
    (message,) = second["output"]
    assert message["content"][0]["text"] == ANSWER


def test_a_conversation_by_messages(qwen: LiveServer) -> None:
    tool = {"name": "weather", "description": WEATHER["description"], "input_schema": SCHEMA}
    body = {"model": "fake", "max_tokens": 200, "tools": [tool]}
    status, first = qwen.post("/v1/messages", {**body, "messages": [QUESTION]})
    assert status == 200, first
    (call,) = [block for block in first["content"] if block["type"] == "tool_use"]
    assert (call["name"], call["input"], first["stop_reason"]) == ("weather", {"city": "Paris"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT}
    messages = [QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    status, second = qwen.post("/v1/messages", {**body, "messages": messages})
    assert status == 200, second
    assert [block["text"] for block in second["content"]] == [ANSWER]
