"""Events to blocks: start, deltas, stop, independent of how the text was split."""

from hypothesis import given
from hypothesis import strategies as st
from support.engines.scripted import scripts

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


def test_events_come_with_their_text() -> None:
    builder = BlockBuilder()
    seen: list[list[str]] = []
    for event in (
        *(Content(" "), Content("a"), Content(""), Content(" "), Content("b"), Reasoning("\n")),
        *(Reasoning("c"), ToolCall(0, "f", "id"), Arguments(0, "{"), Arguments(0, ""), Arguments(0, "}"), Content(" ")),
    ):
        shown = []
        for each in builder.feed([event]):
            shown.append(f"{type(each).__name__.removeprefix('Block')} {getattr(each, 'text', each.block.kind)!r}")
        seen.append(shown)
    assert seen == [
        [],
        ["Start 'text'", "Delta ' a'"],
        [],
        ["Delta ' '"],
        ["Delta 'b'"],
        [],
        ["Stop 'text'", "Start 'reasoning'", "Delta '\\nc'"],
        ["Stop 'reasoning'", "Start 'call'"],
        ["Delta '{'"],
        [],
        ["Delta '}'"],
        [],
    ]
    (stop,) = builder.finish()
    assert (type(stop), stop.block.name, stop.block.call_id, stop.block.text) == (BlockStop, "f", "id", "{}")
    assert list(builder.finish()) == []


def test_the_text_of_a_block_so_far() -> None:
    builder = BlockBuilder()
    ((start, _),) = [tuple(builder.feed([Content("a")]))]
    assert start.block.text == "a"
    list(builder.feed([Content("b"), Content("c")]))
    assert start.block.text == "abc"
    ((call,),) = [tuple(event for event in builder.feed([ToolCall(0, "f")]) if isinstance(event, BlockStart))]
    assert call.block.text == ""


def test_blank_text_of_another_kind_is_not_joined() -> None:
    assert blocks_of([Reasoning("\n"), Content("a")]) == [("text", "a")]
    assert blocks_of([Content(" "), Reasoning("\n"), Content(" a")]) == [("text", " a")]
