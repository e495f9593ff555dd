"""From engine tokens to chat responses: streamed equals whole for any parsers, stop strings and truncation.

Detokenizer, parsers and ChatCompletionBuilder are real; the engine's outputs are scripted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from support.checkpoints.byte_text import EOS, byte_tokenizer
from support.servers.chat_messages import message as empty_message
from support.suite.rows import each_row

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.server.api.chat_prompt import ChatPrompt
from pagoda.server.api.openai.chat import ChatCompletionBuilder, ChatCompletionRequest
from pagoda.server.http.body import parse
from pagoda.server.http.response import event
from pagoda.server.outputs import RequestOutput
from pagoda.server.parsers.output_parser import OutputParser
from pagoda.server.parsers.parser import DelimiterSet, Tool
from pagoda.server.parsers.registry import reasoning_format, tool_format
from pagoda.server.processing.inputs import PreparedRequest, Prompt
from pagoda.server.processing.output_processor import OutputProcessor

TEXT = byte_tokenizer()
TOOLS = [Tool("weather"), Tool("clock")]
SPECIAL = DelimiterSet(["<eos>", "<|im_end|>"])

CALLS = {
    "hermes": (
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "n": [1, "}"]}}\n</tool_call>'
        '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    ),
    "openai": (
        "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Zürich"}'
    ),
    "": "Größe: 5 <b> → ✓<|im_end|> <tool",
}
THOUGHTS = {
    "qwen3": "<think>\nÜber 9.11 < 9.8 …\n</think>\n\n",
    "granite": "Here is my thought process: Über <b>. Here is my response: ",
    "openai_gptoss": "<|channel|>analysis<|message|>Über <b>.<|end|>",
    "": "",
}


def outputs_of(tokens: list[int], cuts: list[int], kind: RequestOutputKind, stop: list[str]) -> Iterator[RequestOutput]:
    """Return the output processor's outputs for tokens that arrive in steps."""
    params = SamplingParams(output_kind=kind, stop=stop, skip_special_tokens=False, max_tokens=len(tokens))
    child = EngineRequest(request_id="r", prompt_token_ids=[1], rules=SamplingRules(), max_tokens=len(tokens))
    processor = OutputProcessor(TEXT)
    processor.add(PreparedRequest("r", Prompt("p", [1]), params, [child], 0.0, 0.0))
    for start, end in zip([0, *cuts], [*cuts, len(tokens)]):
        done = end == len(tokens)
        reason: Any = None if not done else "stop" if tokens[-1] == EOS else "length"
        step = EngineOutput(request_id="r", new_token_ids=tokens[start:end], finish_reason=reason, num_cached_tokens=0)
        ready, _ = processor.process([step])
        yield from ready


def answer_of(reader: Any, **fields: Any) -> ChatCompletionBuilder:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    request = parse(ChatCompletionRequest, json.dumps(body).encode())
    prompt = ChatPrompt("p", [1], params=SamplingParams(), reader=reader, last_message=request.messages[-1])
    return ChatCompletionBuilder(request, "id", "m", ServerConfig(), TEXT, [prompt])


def whole(reader: Any, tokens: list[int], stop: list[str], **fields: Any) -> dict[str, Any]:
    answer = answer_of(reader, **fields)
    for output in outputs_of(tokens, [], RequestOutputKind.FINAL_ONLY, stop):
        answer.add(0, output)
    (choice,) = answer.whole()["choices"]
    return {key: choice[key] for key in ("message", "finish_reason", "stop_reason")}


def streamed(reader: Any, tokens: list[int], cuts: list[int], stop: list[str]) -> dict[str, Any]:
    """Return the response merged from a stream's chunks, as clients do."""
    answer = answer_of(reader)
    message = empty_message("")
    last: dict[str, Any] = {}
    for output in outputs_of(tokens, cuts, RequestOutputKind.DELTA, stop):
        for chunk in map(event, answer.chunks(0, output)):
            assert last.get("finish_reason") is None
            (last,) = json.loads(chunk.removeprefix(b"data: "))["choices"]
            for key, value in last["delta"].items():
                if key == "tool_calls":
                    (piece,) = value
                    if "id" in piece:
                        call = {"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])}
                        message.setdefault("tool_calls", []).append(call)
                    else:
                        function = message["tool_calls"][piece["index"]]["function"]
                        function["arguments"] += piece["function"]["arguments"]
                elif key != "role":
                    message[key] = (message.get(key) or "") + value
    if not message["content"] and (message["reasoning"] or "tool_calls" in message):
        message["content"] = None
    return {"message": message, "finish_reason": last["finish_reason"], "stop_reason": last["stop_reason"]}


def reader_of(thinks: str, calls: str) -> OutputParser:
    stages = []
    if thinks:
        stages.append(reasoning_format(thinks).parser("x"))
    if calls:
        stages.append(tool_format(calls).parser(TOOLS))
    ids = iter("abc")
    return OutputParser(stages, hidden=SPECIAL, new_id=lambda: next(ids))


COMBINED = [
    *[(thinks, calls) for thinks in ("qwen3", "granite", "") for calls in ("hermes", "")],
    ("openai_gptoss", "openai"),
    ("openai_gptoss", ""),
    ("", "openai"),
]


@each_row(("thinks", "calls"), COMBINED)
def test_streamed_equals_whole_at_any_max_tokens(thinks: str, calls: str) -> None:
    tokens = [*(THOUGHTS[thinks] + CALLS[calls]).encode(), EOS]
    reader = partial(reader_of, thinks, calls)
    for end in range(1, len(tokens) + 1):
        cut = tokens[:end]
        assert streamed(reader, cut, list(range(1, end)), []) == whole(reader, cut, []), bytes(cut[:-1])


@each_row("stop", [[], ["Zür", "✓"], ["</think>"], ["\n<tool_call>"]])
@each_row(("thinks", "calls"), COMBINED)
def test_streamed_equals_whole_for_any_grouping_of_tokens(thinks: str, calls: str, stop: list[str]) -> None:
    tokens = [*(THOUGHTS[thinks] + CALLS[calls]).encode(), EOS]
    reader = partial(reader_of, thinks, calls)
    expected = whole(reader, tokens, stop)
    every = range(1, len(tokens))
    chance = random.Random(1)
    at_random = [sorted(chance.sample(every, len(every) // 3)) for _ in range(10)]
    for cuts in ([], *([at] for at in every), *at_random):
        assert streamed(reader, tokens, cuts, stop) == expected, cuts


def test_compared_messages_are_not_empty() -> None:
    tokens = [*(THOUGHTS["qwen3"] + CALLS["hermes"]).encode(), EOS]
    response = whole(partial(reader_of, "qwen3", "hermes"), tokens, [])
    assert response["finish_reason"] == "tool_calls"
    assert response["message"]["reasoning"] == "Über 9.11 < 9.8 …"
    assert [call["function"]["name"] for call in response["message"]["tool_calls"]] == ["weather", "clock"]
    stopped = whole(partial(reader_of, "qwen3", "hermes"), tokens, ["Zür"])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("tool_calls", "Zür")


@each_row("text", ["<thi", "<think", " <tool_c", "<eo", "\n"])
def test_held_back_text_is_flushed_at_the_end(text: str) -> None:
    reader = partial(reader_of, "qwen3", "hermes")
    response = whole(reader, [*text.encode(), EOS], [])
    assert response["message"]["content"] == text


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), ("auto", "tool_calls"), ("named", "stop")])
def test_finish_reason_of_calls(choice: str, reason: str) -> None:
    """ "stop" for a named tool, as at OpenAI; "length" for any truncated output."""
    tool_choice = {"type": "function", "function": {"name": "clock"}} if choice == "named" else choice
    text = CALLS["hermes"].encode()
    respond = partial(whole, partial(reader_of, "", "hermes"), stop=[], tool_choice=tool_choice, tools=[])
    assert respond([*text, EOS])["finish_reason"] == reason
    assert respond([*text])["finish_reason"] == "length"
