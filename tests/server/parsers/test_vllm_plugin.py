"""Tool and reasoning parser plugins of vLLM's interface, in a live server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.byte_text import byte_tokenizer
from support.servers.live_server import LiveServer, live_server

from pagoda.common.errors import ConfigError
from pagoda.reasoning import ReasoningParserManager
from pagoda.server.parsers.registry import reasoning_format, tool_format
from pagoda.server.vllm.parser_interface import ParserClasses
from pagoda.tool_parsers import ToolParserManager

PLUGIN = '''
"""Calls are written <call>{"name": ..., "arguments": {...}}</call>, reasoning <r>...</r>."""

import json
import re
from collections.abc import Sequence
from uuid import uuid4

from pagoda.entrypoints.chat_utils import make_tool_call_id
from pagoda.entrypoints.openai.engine.protocol import DeltaMessage as SameDelta
from pagoda.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from pagoda.entrypoints.openai.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
from pagoda.logger import init_logger
from pagoda.reasoning import ReasoningParser, ReasoningParserManager
from pagoda.reasoning.abs_reasoning_parsers import ReasoningParserManager as SameManager
from pagoda.tool_parsers.utils import find_common_prefix
from pagoda.transformers_utils.tokenizer import AnyTokenizer

logger = init_logger(__name__)
assert SameDelta is DeltaMessage and SameManager is ReasoningParserManager


@ToolParserManager.register_module(["tagged", "tagged_too"])
class TaggedParser(ToolParser):
    def __init__(self, tokenizer: AnyTokenizer, tools=None):
        super().__init__(tokenizer, tools)
        assert tools is None or [tool.function.name for tool in self.tools] == ["add"]
        self.begin, self.end = "<call>", "</call>"
        self.less_than = self.vocab["<"]

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        request = super().adjust_request(request)
        assert request.tools[0].function.parameters is not None
        if request.tool_choice != "none":
            request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        assert request.stream is False
        texts = re.findall("<call>(.*?)</call>", model_output, re.DOTALL)
        if "burst" in model_output:
            raise OverflowError("no luck")
        if "nonsense" in model_output:
            return 5
        calls = [json.loads(text) for text in texts]
        return ExtractedToolCallInformation(
            tools_called=bool(calls),
            tool_calls=[
                ToolCall(
                    type="function",
                    id="id-" + call["name"],
                    function=FunctionCall(name=call["name"], arguments=json.dumps(call["arguments"])),
                )
                for call in calls
            ],
            content=model_output.partition("<call>")[0] or None,
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatCompletionRequest,
    ) -> DeltaMessage | None:
        assert request.stream and [tool.function.name for tool in request.tools] == ["add"]
        assert previous_text + delta_text == current_text
        assert list(previous_token_ids) + list(delta_token_ids) == list(current_token_ids)
        assert self.model_tokenizer.decode(current_token_ids, skip_special_tokens=True).startswith(current_text)
        if "burst" in current_text:
            raise OverflowError("no luck")
        if self.less_than not in current_token_ids:
            return DeltaMessage(content=delta_text)
        content = delta_text.partition("<")[0] if "<" not in previous_text else ""
        name = re.match(r'{"name": "(\\w+)", "arguments": ', current_text.partition(self.begin)[2])
        if name is None:
            return DeltaMessage(content=content) if content else None
        calls = []
        if self.current_tool_id < 0:
            self.current_tool_id = 0
            function = DeltaFunctionCall(name=name[1]).model_dump(exclude_none=True)
            calls.append(DeltaToolCall(index=0, type="function", id=make_tool_call_id(), function=function))
            self.prev_tool_call_arr = [{"name": name[1]}]
            self.streamed_args_for_tool = [""]
        arguments = current_text.partition(self.begin)[2][name.end() :].partition("<")[0]
        self.prev_tool_call_arr[0]["arguments"] = arguments[:-1]  # without the closing brace of the call
        piece = arguments[len(self.streamed_args_for_tool[0]) : -2]  # the server adds the last character
        self.streamed_args_for_tool[0] += piece
        calls.append(DeltaToolCall(index=0, function=DeltaFunctionCall(arguments=piece)))
        return DeltaMessage(content=content or None, tool_calls=calls)


class OldParser(TaggedParser):
    """As parsers were before they took tools."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)


ToolParserManager.register_module("old", module=OldParser)
ToolParserManager.register_lazy_module("later", "no_such_module", "Parser")


@ReasoningParserManager.register_module("aloud")
class AloudParser(ReasoningParser):
    reasoning_end_str = "</r>"

    def __init__(self, tokenizer: AnyTokenizer, *args, **kwargs):
        super().__init__(tokenizer, *args, **kwargs)
        self.sent = 0
        self.loud = (kwargs.get("chat_template_kwargs") or {}).get("loud")

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return "</r>" in self.model_tokenizer.decode(input_ids).rpartition("]]")[2]

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return self.model_tokenizer.encode(self.model_tokenizer.decode(input_ids).partition("</r>")[2])

    def extract_reasoning(self, model_output, request):
        if "explode" in model_output:
            raise OverflowError("no luck")
        reasoning, _, content = model_output.removeprefix("<r>").partition("</r>")
        return reasoning.upper() if self.loud else reasoning, content or None

    def extract_reasoning_streaming(
        self, previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids
    ):
        if "explode" in current_text:
            raise OverflowError("no luck")
        if "<r>".startswith(current_text):
            return None
        reasoning, _, content = current_text.removeprefix("<r>").partition("</r>")
        piece = reasoning.partition("<")[0][self.sent :]
        self.sent += len(piece)
        return DeltaMessage(reasoning=(piece.upper() if self.loud else piece) or None, content=content or None)


@ReasoningParserManager.register_module("former")
class FormerParser(AloudParser):
    """Of the names that the methods had."""

    def extract_reasoning_content(self, model_output, request):
        return AloudParser.extract_reasoning(self, model_output, request)

    def extract_reasoning_content_streaming(self, *args):
        delta = AloudParser.extract_reasoning_streaming(self, *args)
        return delta and DeltaMessage(reasoning_content=delta.reasoning, content=delta.content)

    extract_reasoning = ReasoningParser.extract_reasoning
    extract_reasoning_streaming = ReasoningParser.extract_reasoning_streaming
'''

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<call>{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}</call>'
ARGUMENTS = {"a": 1, "b": [2, 3]}


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for manager in (ToolParserManager, ReasoningParserManager):
        monkeypatch.setattr(manager, "parsers", ParserClasses(manager.parsers._base))


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.fixture
def server(plugin: str) -> Iterator[LiveServer]:
    with _served(plugin) as live:
        yield live


def _served(plugin: str, tools: str = "tagged", reasoning: str = "aloud") -> Any:
    calls = {"enable_auto_tool_choice": True, "tool_call_parser": tools, "tool_parser_plugin": plugin}
    return live_server("fake:say", engine={"reasoning_parser": reasoning, "reasoning_parser_plugin": plugin}, **calls)


def _body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"[[{text}]]"}], "max_tokens": 200, "tools": [ADD], **fields}


def _events(server: LiveServer, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
    status, raw = server.post(path, body | {"stream": True})
    assert status == 200, raw
    lines = [line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _streamed(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    """The message that a stream's deltas add up to."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    for event in _events(server, body):
        delta = event["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            name, arguments = message["calls"].get(call["index"], ("", ""))
            function = call["function"]
            message["calls"][call["index"]] = (function.get("name", name), arguments + function["arguments"])
        message["finish_reason"] = event["choices"][0]["finish_reason"]
    return message


@pytest.mark.setting("--tool-parser-plugin", "--reasoning-parser-plugin")
def test_a_whole_answer(server: LiveServer) -> None:
    _, answer = server.post("/v1/chat/completions", _body(f"<r>hm</r>Look: {CALL}"))
    choice = answer["choices"][0]
    message = choice["message"]
    assert message["reasoning"] == "hm"
    assert message["content"] == "Look: "
    assert [(call["id"], call["function"]["name"]) for call in message["tool_calls"]] == [("id-add", "add")]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    assert choice["finish_reason"] == "tool_calls"


def test_a_streamed_answer(server: LiveServer) -> None:
    message = _streamed(server, _body(f"<r>hm, hm</r>Look: {CALL}"))
    assert message["reasoning"] == "hm, hm"
    assert message["content"] == "Look: "
    name, arguments = message["calls"][0]
    assert name == "add"
    assert json.loads(arguments) == ARGUMENTS
    assert message["finish_reason"] == "tool_calls"


FAILURES = {
    "explode": "reasoning parser 'aloud' failed: OverflowError: no luck",
    "<r>hm</r>Now burst": "tool parser 'tagged' failed: OverflowError: no luck",
    "<r>hm</r>nonsense": "tool parser 'tagged' failed: extract_tool_calls returned int instead of "
    "ExtractedToolCallInformation",
}


@pytest.mark.parametrize("text", FAILURES)
def test_a_plugin_that_raises_fails_its_request_alone(server: LiveServer, text: str) -> None:
    status, answer = server.post("/v1/chat/completions", _body(text))
    assert status == 500
    assert answer["error"]["message"] == FAILURES[text]
    assert _streamed(server, _body("<r>a</r>b"))["content"] == "b"


@pytest.mark.parametrize("text", ["explode", "<r>hm</r>Now burst"])
def test_a_stream_whose_plugin_raises_ends_with_an_error(server: LiveServer, text: str) -> None:
    status, raw = server.post("/v1/chat/completions", _body(text, stream=True))
    if status == 200:
        assert raw.endswith(b"data: [DONE]\n\n")
        raw = json.loads(raw.decode().split("data: ")[-2])
    assert raw["error"]["message"] == FAILURES[text]
    assert (raw["error"]["type"], raw["error"]["code"]) == ("server_error", None)
    assert _streamed(server, _body("<r>a</r>b"))["content"] == "b"


def test_other_apis(server: LiveServer) -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    body = {"input": f"[[<r>hm</r>Look: {CALL}]]", "tools": [tool], "max_output_tokens": 200}
    _, answer = server.post("/v1/responses", body)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    assert json.loads(answer["output"][2]["arguments"]) == ARGUMENTS
    tool = {"name": "add", "input_schema": {"type": "object"}}
    events = _events(server, _body(f"<r>hm</r>Look: {CALL}", model="fake") | {"tools": [tool]}, "/v1/messages")
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == ARGUMENTS


def test_parsers_read_the_request(server: LiveServer) -> None:
    body = _body("<r>hm</r>ok", chat_template_kwargs={"loud": True}, tool_choice="none")
    _, answer = server.post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["reasoning"] == "HM"
    assert _streamed(server, body)["reasoning"] == "HM"


def test_reasoning_precedes_the_grammar(server: LiveServer) -> None:
    body = _body("<r>hm</r>yes", tool_choice="none", structured_outputs={"choice": ["yes", "no"]})
    _, answer = server.post("/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "yes")


def test_names_and_constructors_of_older_plugins(plugin: str) -> None:
    with _served(plugin, "old", "former") as server:
        for message in (
            server.post("/v1/chat/completions", _body(f"<r>hm</r>Look: {CALL}"))[1]["choices"][0]["message"],
            _streamed(server, _body(f"<r>hm</r>Look: {CALL}")),
        ):
            assert message["reasoning"] == "hm"
            assert message["content"] == "Look: "
            assert message.get("tool_calls") or message["calls"]


def test_registered_names(plugin: str) -> None:
    assert tool_format("tagged_too", plugin).make is tool_format("tagged", plugin).make  # type: ignore[attr-defined]
    assert tool_format("hermes", plugin) is tool_format("hermes")
    with pytest.raises(ConfigError, match=r"--tool-call-parser: .*'later' cannot be imported: No module named"):
        tool_format("later", plugin)
    with pytest.raises(ConfigError, match="nor registers a parser 'other'"):
        tool_format("other", plugin)
    with pytest.raises(ConfigError, match="nor registers a parser 'tagged'"):
        reasoning_format("tagged", plugin)
    with pytest.raises(KeyError, match="registered already"):
        ToolParserManager.register_module("tagged", force=False)(ToolParserManager.get_tool_parser("old"))
    with pytest.raises(TypeError, match="not a subclass of ReasoningParser"):
        ReasoningParserManager.register_module("x", module=ToolParserManager.get_tool_parser("old"))
    assert ToolParserManager.list_registered() == ["later", "old", "tagged", "tagged_too"]


def test_a_parser_without_its_tokens_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "tokens.py"
    path.write_text(
        "from pagoda.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser as Base\n"
        "from pagoda.reasoning import ReasoningParserManager\n"
        "ReasoningParserManager.register_module('mine', module=Base)\n"
    )
    with pytest.raises(ConfigError, match=r"--reasoning-parser: .*the tokenizer has no tokens '<think>'"):
        reasoning_format("mine", str(path), byte_tokenizer())
