"""The stages of OutputParser: reasoning, tool calls, content without special tokens; for every split."""

import itertools
from collections.abc import Callable

from support.kernels.splits import read_all_splits
from support.suite.rows import each_row

from pagoda.server.api.chat_prompt import PlainReader
from pagoda.server.parsers.output_parser import MAX_CHUNK_CHARS, OutputParser
from pagoda.server.parsers.parser import Arguments, Content, DelimiterSet, Event, Parser, Reasoning, Tool, ToolCall
from pagoda.server.parsers.reasoning.formats import PlainParser
from pagoda.server.parsers.registry import reasoning_format
from pagoda.server.parsers.tool.forced import Named, Required

SPECIAL = DelimiterSet(["<eos>", "<|im_end|>"])
TOOLS = [Tool("f"), Tool("g")]


def parser_maker(*stages: Callable[[], Parser], **options: object) -> Callable[[], OutputParser]:
    def make() -> OutputParser:
        numbers = itertools.count()
        return OutputParser(
            [stage() for stage in stages],
            **{"new_id": lambda: f"id{next(numbers)}", **options},  # type: ignore[arg-type]
        )

    return make


def thinking() -> Parser:
    return reasoning_format("qwen3").parser("")


def required() -> Parser:
    return Required().parser(TOOLS)


def named() -> Parser:
    return Named("f").parser(TOOLS[:1])


def test_without_stages_text_is_content() -> None:
    assert read_all_splits(OutputParser, "a <eos> b") == [Content("a <eos> b")]
    assert OutputParser().reasoning_tokens is None


def test_a_long_output_is_fed_in_chunks() -> None:
    class Longest(PlainParser):
        seen = 0

        def feed(self, text: str) -> list[Event]:
            Longest.seen = max(Longest.seen, len(text))
            return super().feed(text)

    parser = OutputParser((Longest(),))
    text = "".join(str(event.text) for event in parser.feed("größer " * MAX_CHUNK_CHARS) if isinstance(event, Content))
    assert text == "größer " * MAX_CHUNK_CHARS
    assert Longest.seen == MAX_CHUNK_CHARS


def test_thinking_then_calls() -> None:
    calls = '[{"name": "f", "parameters": {"é": 1}}, {"name": "g", "parameters": {}}]'
    text = f"<think>\nwhich? <eos>\n</think>\n\n{calls}<eos>"
    events: list[Event] = [
        Reasoning("which?"),
        ToolCall(0, "f", "id0"),
        Arguments(0, '{"é": 1}'),
        ToolCall(1, "g", "id1"),
        Arguments(1, "{}"),
    ]
    make = parser_maker(thinking, required, hidden=SPECIAL)
    events_without_space = read_all_splits(make, text)
    assert [Reasoning(e.text.rstrip()) if isinstance(e, Reasoning) else e for e in events_without_space] == events
    one = read_all_splits(parser_maker(thinking, required, hidden=SPECIAL, parallel_calls=False), text)
    assert one[1:] == events[1:3]


def test_a_named_call() -> None:
    text = '<think>hm</think>{"city": "Zürich"}'
    assert read_all_splits(parser_maker(thinking, named), text) == [
        Reasoning("hm"),
        ToolCall(0, "f", "id0"),
        Arguments(0, '{"city": "Zürich"}'),
    ]


def test_special_tokens_are_stripped_only_if_hidden() -> None:
    text = "<think>a<|im_end|>b</think>c<eos>d<|im_"
    assert read_all_splits(parser_maker(thinking, hidden=SPECIAL), text) == [Reasoning("ab"), Content("cd<|im_")]
    assert read_all_splits(parser_maker(thinking), text) == [Reasoning("a<|im_end|>b"), Content("c<eos>d<|im_")]


def test_an_incomplete_special_token_is_flushed_before_the_next_kind() -> None:
    text = "<think>a <|im</think>b"
    assert read_all_splits(parser_maker(thinking, hidden=SPECIAL), text) == [Reasoning("a <|im"), Content("b")]


def test_an_incomplete_special_token_is_flushed_before_a_call() -> None:
    class Calls:
        def feed(self, text: str) -> list[Event]:
            return [ToolCall(0, "f", "x") if letter == "!" else Content(letter) for letter in text]

        def finish(self) -> list[Event]:
            return []

    assert read_all_splits(parser_maker(Calls, hidden=SPECIAL), "a <eo!s>") == [
        Content("a <eo"),
        ToolCall(0, "f", "x"),
        Content("s>"),
    ]


@each_row("stages", [(thinking,), (thinking, required), (required,), (thinking, named)])
def test_truncated_outputs(stages: tuple[Callable[[], Parser], ...]) -> None:
    text = '<think>hm é</think>\n[{"name": "f", "parameters": {"a": "ü<eos>"}}]'
    for length in range(len(text)):
        read_all_splits(parser_maker(*stages, hidden=SPECIAL), text[:length])


def test_reasoning_tokens_are_counted() -> None:
    parser = OutputParser([thinking()], count=len)
    for letter in "<think> hmm </think>ok":
        parser.feed(letter)
    parser.finish()
    assert parser.reasoning_tokens == 3


def test_missing_call_ids_are_generated() -> None:
    class Own:
        def feed(self, text: str) -> list[Event]:
            return [ToolCall(0, "f", "mine"), ToolCall(1, "g")]

        def finish(self) -> list[Event]:
            return []

    alone = OutputParser([Own()], parallel_calls=False)
    assert (alone.calls, len(alone.feed("x")), alone.calls) == (0, 1, 1)
    parser = OutputParser([Own()])
    first, second = parser.feed("x")
    assert parser.calls == 2
    assert isinstance(first, ToolCall)
    assert first.id == "mine"
    assert isinstance(second, ToolCall)
    assert second.id is not None
    assert second.id.isalnum()
    assert len(second.id) == 9


def test_what_is_plain() -> None:
    assert PlainReader().is_plain
    assert PlainReader().feed("a <b>", [1]) == OutputParser().feed("a <b>", [1]) == [Content("a <b>")]
    assert PlainReader().feed("") == OutputParser().feed("") == PlainReader().finish() == OutputParser().finish() == []
    assert (PlainReader().calls, PlainReader().reasoning_tokens) == (
        OutputParser().calls,
        OutputParser().reasoning_tokens,
    )
    assert not OutputParser([thinking()]).is_plain
    assert not OutputParser(hidden=SPECIAL).is_plain
