"""Events to blocks: start, deltas, stop, independent of how the text was split."""

from hypothesis import given
from hypothesis import strategies as st
from support.scripted import scripts

from pagoda.server.parsers.parser import (
    Arguments,
    BlockBuilder,
    BlockDelta,
    BlockStart,
    BlockStop,
    Content,
    Event,
    Reasoning,
    ToolCall,
)


def blocks_of(events: list[Event]) -> list[tuple[str, str]]:
    """Return (kind, text) of each block; fail unless each has a start, deltas and a stop in order."""
    builder = BlockBuilder()
    blocks: list[tuple[str, str]] = []
    current, text = None, ""
    for event in [*builder.feed(events), *builder.finish()]:
        match event:
            case BlockStart(block):
                assert current is None
                current, text = block, ""
            case BlockDelta(block, piece):
                assert block is current
                assert piece
                text += piece
            case BlockStop(block):
                assert block is current
                assert block.text == text
                blocks.append((block.kind, text))
                current = None
    assert current is None
    return blocks


@given(scripts())
def test_blocks_contain_all_text(events: list[Event]) -> None:
    blocks = blocks_of(events)
    for kind, make in (("text", Content), ("reasoning", Reasoning)):
        expected = "".join(event.text for event in events if isinstance(event, make))
        assert "".join("".join(text for each, text in blocks if each == kind).split()) == "".join(expected.split())
    calls = [event for event in events if isinstance(event, ToolCall)]
    assert len([kind for kind, _ in blocks if kind == "call"]) == len(calls)
    assert blocks


@given(scripts(), st.data())
def test_blocks_are_independent_of_splits(events: list[Event], data: st.DataObject) -> None:
    pieces: list[Event] = []
    for event in events:
        if isinstance(event, Content | Reasoning) and event.text:
            cut = data.draw(st.integers(0, len(event.text)))
            pieces += [type(event)(event.text[:cut]), type(event)(event.text[cut:])]
        else:
            pieces.append(event)
    assert blocks_of(pieces) == blocks_of(events)


def test_white_space_between_reasoning_and_calls_is_dropped() -> None:
    events = [Reasoning("\n"), Reasoning("so"), Content("\n\n"), ToolCall(0, "f"), Arguments(0, "{}"), Content("\n")]
    assert blocks_of(events) == [("reasoning", "\nso"), ("call", "{}")]


def test_leading_white_space_is_kept() -> None:
    assert blocks_of([Reasoning("a"), Content("\n"), Content(" b")]) == [("reasoning", "a"), ("text", "\n b")]


def test_an_empty_output_is_an_empty_text_block() -> None:
    assert blocks_of([]) == blocks_of([Reasoning(" ")]) == [("text", "")]
    assert blocks_of([Content(" ")]) == [("text", " ")]
