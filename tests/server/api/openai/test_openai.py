"""The official client over a real socket: whole and streamed, synchronous and asynchronous."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

USER = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(enable_prompt_tokens_details=True, enable_request_id_headers=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def slow() -> Iterator[LiveServer]:
    with live_server("fake:slow") as server:
        yield server


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_whole_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=USER, max_tokens=5)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", ";<=>?")
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (18, 5, 23)


@pytest.mark.field("ChatCompletionRequest.stream|stream_options|messages", "StreamOptions.include_usage")
def test_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=USER, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ";<=>?"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.field("CompletionRequest.stream_options", "StreamOptions.continuous_usage_stats")
def test_continuous_usage(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    stream = client.completions.create(model="fake", prompt="a", max_tokens=4, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 4


@pytest.mark.field("CompletionRequest.stream")
@each_row("extra", [{}, {"stop": ["CD"]}, {"n": 3}, {"logprobs": 2}, {"echo": True, "logprobs": 1}])
def test_streamed_completion_equals_whole(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    whole = client.completions.create(model="fake", prompt=["@", "PQ"], max_tokens=8, seed=1, **extra)
    text = dict.fromkeys(range(2 * extra.get("n", 1)), "")
    logprobs: dict[int, list[Any]] = {index: [] for index in text}
    offsets: dict[int, list[int]] = {index: [] for index in text}
    ends: dict[int, Any] = {}
    for chunk in client.completions.create(
        model="fake", prompt=["@", "PQ"], max_tokens=8, seed=1, stream=True, **extra
    ):
        for choice in chunk.choices:
            text[choice.index] += choice.text
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.token_logprobs or []
                offsets[choice.index] += choice.logprobs.text_offset or []
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    assert {choice.index: choice.text for choice in whole.choices} == text
    assert {choice.index: choice.finish_reason for choice in whole.choices} == ends
    for choice in whole.choices:
        assert (choice.logprobs.token_logprobs if choice.logprobs else []) == logprobs[choice.index]
        assert (choice.logprobs.text_offset if choice.logprobs else []) == offsets[choice.index]


def test_stop_string(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="a", max_tokens=20, stop=["ef"])
    assert answer.choices[0].text == "bcd"
    assert answer.choices[0].finish_reason == "stop"
    kept = client.completions.create(
        model="fake", prompt="a", max_tokens=20, stop="ef", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "bcdef"
    assert kept.choices[0].model_dump()["stop_reason"] == "ef"


def test_eos_ends(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="x", max_tokens=20)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("yz", "stop")


@pytest.mark.field("CompletionRequest.echo")
def test_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=2, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "abcde"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c", "d", "e"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0, -3.0, -4.0]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]


def test_echo_shows_special_tokens_of_a_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=[97, 256, 98], max_tokens=1, echo=True, logprobs=0)
    (choice,) = answer.choices
    assert choice.text == "a<eos>bc"
    assert [choice.text[offset:][:1] for offset in choice.logprobs.text_offset] == ["a", "<", "b", "c"]


def test_tokens_of_one_character_join_to_it(client: openai.OpenAI) -> None:
    text = "é 界 🙂 x"
    for stream in (False, True):
        asked = client.completions.create(
            model="fake", prompt=text, max_tokens=1, echo=True, logprobs=1, **({"stream": True} if stream else {})
        )
        choices = [choice for chunk in asked for choice in chunk.choices] if stream else asked.choices
        parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
        tokens, offsets = (
            [each for part in parts for each in getattr(part, name)] for name in ("tokens", "text_offset")
        )
        assert "".join(tokens) == text + "y"
        assert tokens[:7] == ["", "é", " ", "", "", "界", " "]
        assert offsets == [0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 4, 5, 6, 7]
        assert all((text + "y")[offset:].startswith(token) for token, offset in zip(tokens, offsets))


def test_tokens_of_a_prompt_that_ends_inside_a_character_join_to_the_text(client: openai.OpenAI) -> None:
    ids = list("a🙂".encode()[:-1])
    choice = client.completions.create(model="fake", prompt=ids, max_tokens=1, echo=True, logprobs=0).choices[0]
    assert choice.text.startswith("a\ufffd")
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text


def test_echo_with_max_tokens_0(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=[97, 98], max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["a", "b"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


@pytest.mark.field("CompletionRequest.prompt")
@each_row("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_prompt_forms(client: openai.OpenAI, prompt: Any) -> None:
    assert client.completions.create(model="fake", prompt=prompt, max_tokens=2).choices[0].text == "cd"


def test_many_prompts_and_choices_are_numbered(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "k"], max_tokens=2, n=2, temperature=1.0)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "bc"), (1, "bc"), (2, "lm"), (3, "lm")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 8)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=USER, max_tokens=2, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == [";", "<"]
    assert content[0].bytes == [ord(";")]
    assert [top.token for top in content[0].top_logprobs] == [";", "<"]
    none = client.chat.completions.create(model="fake", messages=USER, max_tokens=2, logprobs=True)
    assert none.choices[0].logprobs is not None
    assert none.choices[0].logprobs.content is not None
    assert none.choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.field("CompletionRequest.return_tokens_as_token_ids|return_token_ids")
def test_tokens_as_ids_and_token_ids(client: openai.OpenAI) -> None:
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    answer = client.completions.create(model="fake", prompt="a", max_tokens=2, logprobs=0, extra_body=body)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["token_id:98", "token_id:99"]
    shown = answer.choices[0].model_dump()
    assert (shown["prompt_token_ids"], shown["token_ids"]) == ([97], [98, 99])


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=1, extra_body={"prompt_logprobs": 0})
    positions = answer.choices[0].model_dump()["prompt_logprobs"]
    assert positions[0] is None
    assert positions[1] == {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = "0123456789abcdef"
    for _ in range(2):
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 12


@pytest.mark.field("ChatCompletionRequest.continue_final_message|add_generation_prompt|echo")
def test_continue_and_echo_of_a_message(client: openai.OpenAI) -> None:
    messages: Any = [*USER, {"role": "assistant", "content": "abc"}]
    body = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    answer = client.chat.completions.create(model="fake", messages=messages, max_tokens=3, extra_body=body)
    assert answer.choices[0].message.content == "abcdef"


@pytest.mark.field("CompletionRequest.request_id")
def test_request_id_is_returned(client: openai.OpenAI) -> None:
    answer = client.completions.with_raw_response.create(
        model="fake", prompt="a", max_tokens=1, extra_body={"request_id": "mine"}
    )
    assert answer.headers["x-request-id"] == "cmpl-mine"
    assert answer.parse().id == "cmpl-mine"
    again = client.completions.with_raw_response.create(
        model="fake", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "h"}
    )
    assert again.headers["x-request-id"] == "h"
    assert again.parse().id == "cmpl-h"


@pytest.mark.field("CompletionRequest.model")
def test_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="a")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "a" * 100}])
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")
    assert "64" in str(long.value)


async def test_asynchronous_streams_interleave(slow: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:

        async def one(prompt: str) -> tuple[str, int]:
            stream = await client.completions.create(model="fake", prompt=prompt, max_tokens=8, stream=True)
            chunks = [chunk.choices[0].text async for chunk in stream]
            return "".join(chunks), len(chunks)

        answers = await asyncio.gather(*(one("a" * length) for length in range(1, 6)))
    expected = ["".join(chr(97 + (length + i) % 20) for i in range(8)) for length in range(1, 6)]
    assert [text for text, _ in answers] == expected
    assert all(count > 1 for _, count in answers)
