"""Delimiter search and stripping in split text."""

import pytest
from support.splits import splits

from pagoda.server.parsers.parser import DelimiterSet, DelimiterStripper


def strip(delimiters: DelimiterSet, pieces: list[str]) -> str:
    stripper = DelimiterStripper(delimiters)
    return "".join(map(stripper.feed, pieces)) + stripper.finish()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("plain", "plain"),
        ("a<|end|>b", "ab"),
        ("<|end|><|end|>", ""),
        ("<<|end|>|end|>", "<|end|>"),  # stripped once: what remains is text
        ("a<|en", "a<|en"),
        ("a<|end|", "a<|end|"),
        ("<|end|>more", ""),  # the longer of two with the same prefix
        ("<|end|>mor", "mor"),
        ("größe<|end|>→", "größe→"),
    ],
)
def test_delimiters_are_stripped_for_every_split(text: str, left: str) -> None:
    delimiters = DelimiterSet(["<|end|>", "<|end|>more", "[x]"])
    for pieces in splits(text):
        assert strip(delimiters, pieces) == left, pieces


def test_text_is_emitted_as_early_as_possible() -> None:
    stripper = DelimiterStripper(DelimiterSet(["<|end|>"]))
    assert stripper.feed("a <") == "a "
    assert stripper.feed("b") == "<b"


def test_an_empty_set() -> None:
    assert DelimiterSet([]).split("abc") == ("abc", "", "")
