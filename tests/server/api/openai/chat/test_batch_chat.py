"""Several conversations in one request: numbered choices, and the settings of single requests."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.chat_messages import message as empty_message
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.server.api.openai.chat import BatchChatCompletionRequest, ChatCompletionRequest, ChatFields
from pagoda.server.http.body import parse

BATCH = "/v1/chat/completions/batch"
WEATHER = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with live_server("fake:say", engine={"reasoning_parser": "qwen3"}, **tools) as server:
        yield server


def batch(*texts: str, **more: Any) -> dict[str, Any]:
    """A request whose conversations are answered with the texts."""
    messages = [[{"role": "user", "content": f"[[{text}]]"}] for text in texts]
    return {"messages": messages, "max_tokens": 400, **more}


def answer_of(server: LiveServer, body: dict[str, Any]) -> Any:
    status, answer = server.post(BATCH, body)
    assert status == 200, answer
    return answer


@pytest.mark.field("BatchChatCompletionRequest.messages|n|max_tokens|include_reasoning|model|request_id|user")
def test_choices_are_numbered_across_conversations(server: LiveServer) -> None:
    answer = answer_of(server, batch(THOUGHT + "one", "two", n=2, request_id="mine", user="me"))
    assert (answer["object"], answer["id"]) == ("chat.completion", "chatcmpl-mine")
    replies = [(choice["index"], choice["message"]["content"]) for choice in answer["choices"]]
    assert replies == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
    assert answer["choices"][0]["message"]["reasoning"] == "Hm."
    assert answer["usage"]["completion_tokens"] == 2 * (len(THOUGHT + "one") + 1 + len("two") + 1)
    hidden = answer_of(server, batch(THOUGHT + "one", include_reasoning=False, max_tokens=23))["choices"]
    assert (hidden[0]["message"], hidden[0]["finish_reason"]) == (
        empty_message("o"),
        "length",
    )
    assert server.post(BATCH, batch("one", model="gpt-9"))[0] == 404


@pytest.mark.field(
    "BatchChatCompletionRequest.tools|tool_choice|parallel_tool_calls|echo|add_generation_prompt|continue_final_message"
)
def test_tool_calls_and_continued_messages(server: LiveServer) -> None:
    calls = answer_of(server, batch(CALL, "no", tools=[WEATHER]))["choices"]
    assert [choice["finish_reason"] for choice in calls] == ["tool_calls", "stop"]
    one = answer_of(server, batch(CALL + CALL, tools=[WEATHER], parallel_tool_calls=False))["choices"]
    assert len(one[0]["message"]["tool_calls"]) == 1
    none = answer_of(server, batch(CALL, tools=[WEATHER], tool_choice="none"))["choices"]
    assert none[0]["message"]["content"] == CALL
    begun = ("assistant:", "x assistant:")
    messages = [[{"role": "user", "content": "[[mo]]"}, {"role": "assistant", "content": text}] for text in begun]
    going_on = {"echo": True, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 9}
    replies = answer_of(server, {"messages": messages, **going_on})["choices"]
    assert [choice["message"]["content"] for choice in replies] == ["assistant:mo", "x assistant:mo"]


@pytest.mark.field(
    "BatchChatCompletionRequest.return_token_ids|return_tokens_as_token_ids|return_prompt_text|prompt_logprobs|logprobs"
)
def test_token_ids_and_the_first_prompt(server: LiveServer) -> None:
    shown = {"return_token_ids": True, "return_tokens_as_token_ids": True, "return_prompt_text": True, "logprobs": True}
    answer = answer_of(server, batch("one", "two", prompt_logprobs=0, **shown))
    assert answer["prompt_text"] == "user: [[one]];assistant:"
    assert answer["prompt_token_ids"] == list(answer["prompt_text"].encode())
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert [choice["token_ids"][:3] for choice in answer["choices"]] == [list(b"one"), list(b"two")]
    assert answer["choices"][1]["logprobs"]["content"][0]["token"] == "token_id:116"


SAMPLING: dict[str, Any] = {
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "best_of": 3,
    "frequency_penalty": 0.5,
    "guided_choice": ["x"],
    "guided_grammar": 'start: "x"',
    "guided_json": {"type": "string"},
    "guided_regex": "x",
    "guided_whitespace_pattern": " ",
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "logit_bias": {"1": 1.0},
    "logprob_token_ids": [1],
    "max_completion_tokens": 7,
    "min_p": 0.1,
    "min_tokens": 1,
    "presence_penalty": 0.5,
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    "repetition_penalty": 1.5,
    "response_format": {"type": "json_object"},
    "seed": 7,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["x"],
    "stop_token_ids": [1],
    "structured_outputs": {"regex": "x"},
    "temperature": 0.3,
    "thinking_token_budget": 3,
    "top_k": 3,
    "top_p": 0.3,
    "truncate_prompt_tokens": 5,
    "truncation_side": "right",
    "vllm_xargs": {"a": 1},
}
TEMPLATE: dict[str, Any] = {
    "add_special_tokens": True,
    "chat_template": "x",
    "chat_template_kwargs": {"a": 1},
    "documents": [{"a": 1}],
    "reasoning_effort": "low",
}


NEEDED: dict[str, dict[str, Any]] = {
    "guided_whitespace_pattern": {"guided_json": {}},
    "logprob_token_ids": {"logprobs": True},
}
"""What a setting goes with."""


@pytest.mark.field(
    "BatchChatCompletionRequest.best_of|guided_choice|guided_grammar|guided_json|guided_regex|guided_whitespace_pattern",
    "BatchChatCompletionRequest.logprob_token_ids|repetition_detection|response_format|structured_outputs",
    "BatchChatCompletionRequest.thinking_token_budget|truncation_side",
    "BatchChatCompletionRequest.allowed_token_ids|bad_words|frequency_penalty|ignore_eos|include_stop_str_in_output",
    "BatchChatCompletionRequest.logit_bias|max_completion_tokens|min_p|min_tokens|presence_penalty|repetition_penalty",
    "BatchChatCompletionRequest.seed|skip_special_tokens|spaces_between_special_tokens|stop|stop_token_ids|temperature",
    "BatchChatCompletionRequest.top_k|top_p|truncate_prompt_tokens|vllm_xargs",
    "BatchChatCompletionRequest.add_special_tokens|chat_template|chat_template_kwargs|documents|reasoning_effort",
)
@each_row("name", [*SAMPLING, *TEMPLATE])
def test_settings_match_single_requests(name: str) -> None:
    messages = [{"role": "user", "content": "a"}]

    def read(body: type[ChatFields], messages: Any, **fields: Any) -> Any:
        return parse(body, json.dumps({"messages": messages} | fields).encode())

    needed = NEEDED.get(name, {})
    setting = needed | {name: (SAMPLING | TEMPLATE)[name]}
    single = read(ChatCompletionRequest, messages, **setting)
    both = read(BatchChatCompletionRequest, [messages, messages], **setting)
    plain = read(BatchChatCompletionRequest, [messages], **needed)
    assert list(both.conversations()) == [single.conversation()] * 2
    assert both.params({}) == single.params({})
    assert (both.params({}), next(both.conversations())) != (plain.params({}), next(plain.conversations()))


@pytest.mark.field("BatchChatCompletionRequest.use_beam_search|length_penalty|early_stopping")
def test_beam_search() -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "n": 2, "length_penalty": 0.5, "early_stopping": True}
    body = parse(BatchChatCompletionRequest, json.dumps(batch("x", **fields)).encode())
    search = body.beam_search_params(body.params({}), 9)
    assert (search.beam_width, search.length_penalty, search.early_stopping) == (2, 0.5, True)
    with live_server("fake") as server:
        messages = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
        answer = answer_of(server, {"messages": messages, "max_tokens": 2, **fields})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


@pytest.mark.field("BatchChatCompletionRequest.cache_salt|priority|top_logprobs")
def test_cache_salt_priority_and_logprobs(server: LiveServer) -> None:
    with live_server("fake:say", enable_prompt_tokens_details=True) as counting:

        def cached(salt: str) -> int:
            usage = answer_of(counting, batch("one", cache_salt=salt))["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [cached("a"), cached("b")] == [0, 0]
        assert cached("a") > 0
    status, answer = server.post(BATCH, batch("x", priority=1))
    assert (status, answer["error"]["param"]) == (400, "priority")
    (choice,) = answer_of(server, batch("x", logprobs=True, top_logprobs=2))["choices"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2


@each_row(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": [[{"role": "user", "content": "a"}], [{"content": "a"}]]}, "messages[1][0].role"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages[0]"),
        ({"messages": [[{"role": "user", "content": "a"}]] * 1025}, "messages"),
        (batch("x", stream=True), "stream"),
        (batch("x", typical_p=0.5), "typical_p"),
        (batch("x", temperature=-1.0), "temperature"),
    ],
)
def test_errors_name_the_conversation(server: LiveServer, body: dict[str, Any], field: str) -> None:
    status, answer = server.post(BATCH, body)
    assert (status, answer["error"]["param"]) == (400, field)


def test_empty_options_of_a_stream_are_none(server: LiveServer) -> None:
    assert answer_of(server, batch("one", stream=False, stream_options={}))["choices"][0]["message"]["content"] == "one"
    status, answer = server.post(BATCH, batch("one", stream_options={"include_usage": True}))
    assert (status, answer["error"]["param"]) == (400, "stream_options")
