"""Events to sections: opened, grown and closed in turn, the same for every way of cutting."""

from hypothesis import given
from hypothesis import strategies as st
from support.scripted import scripts

from pagoda.server.parsers.blocks import BlockBuilder, BlockDelta, BlockStart, BlockStop
from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall


def told(events: list[Event]) -> list[tuple[str, str]]:
    """(kind, text) of each section; fails unless each is opened, grown and closed in turn."""
    sections = BlockBuilder()
    found: list[tuple[str, str]] = []
    current, text = None, ""
    for change in [*sections.feed(events), *sections.finish()]:
        match change:
            case BlockStart(section):
                assert current is None
                current, text = section, ""
            case BlockDelta(section, piece):
                assert section is current
                assert piece
                text += piece
            case BlockStop(section):
                assert section is current
                assert section.text == text
                found.append((section.kind, text))
                current = None
    assert current is None
    return found


@given(scripts())
def test_nothing_is_lost_but_white_space(events: list[Event]) -> None:
    found = told(events)
    for kind, make in (("text", Content), ("reasoning", Reasoning)):
        said = "".join(event.text for event in events if isinstance(event, make))
        assert "".join("".join(text for each, text in found if each == kind).split()) == "".join(said.split())
    calls = [event for event in events if isinstance(event, ToolCall)]
    assert len([kind for kind, _ in found if kind == "call"]) == len(calls)
    assert found


@given(scripts(), st.data())
def test_pieces_make_no_difference(events: list[Event], data: st.DataObject) -> None:
    pieces: list[Event] = []
    for event in events:
        if isinstance(event, Content | Reasoning) and event.text:
            cut = data.draw(st.integers(0, len(event.text)))
            pieces += [type(event)(event.text[:cut]), type(event)(event.text[cut:])]
        else:
            pieces.append(event)
    assert told(pieces) == told(events)


def test_white_space_between_thinking_and_calls_is_no_text() -> None:
    events = [Reasoning("\n"), Reasoning("so"), Content("\n\n"), ToolCall(0, "f"), Arguments(0, "{}"), Content("\n")]
    assert told(events) == [("reasoning", "\nso"), ("call", "{}")]


def test_white_space_before_text_belongs_to_it() -> None:
    assert told([Reasoning("a"), Content("\n"), Content(" b")]) == [("reasoning", "a"), ("text", "\n b")]


def test_an_answer_that_says_nothing_is_an_empty_text() -> None:
    assert told([]) == told([Reasoning(" ")]) == [("text", "")]
    assert told([Content(" ")]) == [("text", " ")]
