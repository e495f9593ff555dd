"""MessagesBuilder: event order and content for scripted outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st
from support.engines.scripted import outputs, pieces, script, scripts
from support.servers.message_grammar import check_grammar, plain

from pagoda.server.api.anthropic.messages import UNSIGNED, MessagesBuilder
from pagoda.server.http.errors import UnavailableError
from pagoda.server.outputs import RequestOutput
from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall


def builder_of(events: Sequence[Event], keep: int = 0, thinking: Any = "full") -> MessagesBuilder:
    return MessagesBuilder("msg_1", "m", script(events, keep), thinking)


def streamed(builder: MessagesBuilder, results: list[RequestOutput]) -> list[Any]:
    return [event for output in results for event in builder.chunks(0, output)] + [builder.usage_chunk()]


@given(
    scripts(),
    st.integers(0, 4),
    st.lists(st.integers(0, 99), max_size=5),
    st.sampled_from(["stop", "length"]),
    st.sampled_from(["full", "omitted", "none"]),
)
def test_streamed_and_whole_messages_agree(
    events: list[Event], keep: int, cuts: list[int], finish_reason: str, thinking: str
) -> None:
    message = check_grammar(
        streamed(builder_of(events, keep, thinking), outputs(pieces(len(events), cuts), finish_reason))
    )
    Message.model_validate(message)
    whole = builder_of(events, keep, thinking)
    for output in outputs([len(events)], finish_reason):
        whole.add(0, output)
    assert plain(whole.whole()) == plain(message)


LONG = [
    Reasoning("so"),
    Content("\n"),
    Content("hi"),
    ToolCall(0, "f", "c0"),
    Arguments(0, '{"a": [1, "x'),
    Arguments(0, '"]}'),
]


def test_blocks() -> None:
    message = check_grammar(streamed(builder_of(LONG), outputs([1, 3, 2])))
    assert message["content"] == [
        {"type": "thinking", "thinking": "so", "signature": UNSIGNED},
        {"type": "text", "text": "\nhi"},
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": [1, "x"]}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 6,
        "service_tier": "standard",
    }


@pytest.mark.parametrize(
    ("finish_reason", "stop", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_stop_reasons(finish_reason: str, stop: str | None, expected: tuple[str, str | None]) -> None:
    message = check_grammar(streamed(builder_of([Content("a")]), outputs([1], finish_reason, stop)))
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_a_truncated_call() -> None:
    message = check_grammar(streamed(builder_of(LONG[:-1]), outputs([5], "length")))
    assert message["content"][-1]["input"] == {"a": [1, "x"]}
    assert message["stop_reason"] == "max_tokens"


def test_an_aborted_message_is_an_error() -> None:
    with pytest.raises(UnavailableError, match="before it was complete"):
        streamed(builder_of(LONG), outputs([6], "abort"))


@pytest.mark.field("AnthropicMessagesRequest.thinking")
def test_thinking_can_be_omitted_or_hidden() -> None:
    omitted = check_grammar(streamed(builder_of(LONG, thinking="omitted"), outputs([6])))
    assert omitted["content"][0] == {"type": "thinking", "thinking": "", "signature": UNSIGNED}
    hidden = check_grammar(streamed(builder_of(LONG, thinking="none"), outputs([6])))
    assert [block["type"] for block in hidden["content"]] == ["text", "tool_use"]
