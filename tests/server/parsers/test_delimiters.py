"""Texts found in pieces, and special tokens taken out."""

import pytest
from support.splits import splits

from pagoda.server.parsers.delimiters import DelimiterSet, DelimiterStripper


def without(marks: DelimiterSet, pieces: list[str]) -> str:
    reader = DelimiterStripper(marks)
    return "".join(map(reader.feed, pieces)) + reader.finish()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("plain", "plain"),
        ("a<|end|>b", "ab"),
        ("<|end|><|end|>", ""),
        ("<<|end|>|end|>", "<|end|>"),  # taken out once: what remains is text
        ("a<|en", "a<|en"),
        ("a<|end|", "a<|end|"),
        ("<|end|>more", ""),  # the longer of two that begin alike
        ("<|end|>mor", "mor"),
        ("größe<|end|>→", "größe→"),
    ],
)
def test_marks_are_taken_out_however_the_text_is_cut(text: str, left: str) -> None:
    marks = DelimiterSet(["<|end|>", "<|end|>more", "[x]"])
    for pieces in splits(text):
        assert without(marks, pieces) == left, pieces


def test_nothing_is_kept_back_longer_than_it_must_be() -> None:
    reader = DelimiterStripper(DelimiterSet(["<|end|>"]))
    assert reader.feed("a <") == "a "
    assert reader.feed("b") == "<b"


def test_no_marks_change_nothing() -> None:
    assert DelimiterSet([]).split("abc") == ("abc", "", "")
