"""Delimiter search and stripping in split text."""

from support.kernels.splits import splits
from support.suite.rows import each_row

from pagoda.server.parsers.parser import DelimiterSet, DelimiterStripper


def strip(delimiters: DelimiterSet, pieces: list[str]) -> str:
    stripper = DelimiterStripper(delimiters)
    return "".join(map(stripper.feed, pieces)) + stripper.finish()


@each_row(
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


def test_the_part_before_delimiter_and_remainder() -> None:
    delimiters = DelimiterSet(["<a>", "<a>b", "cd", ""])
    assert delimiters.split("x<a>by<a>") == ("x", "<a>b", "y<a>")
    assert delimiters.split("x<a>") == ("x", "", "<a>"), "the longer one may follow"
    assert delimiters.split("x<a>", final=True) == ("x", "<a>", "")
    assert delimiters.split("cd<") == ("", "cd", "<")
    assert delimiters.split("x<") == ("x", "", "<")
    assert delimiters.split("x<", final=True) == ("x<", "", "")
    assert delimiters.split("xc<a") == ("xc", "", "<a")
    assert delimiters.split("xcx") == ("xcx", "", "")
    assert delimiters.split("") == ("", "", "")
    assert DelimiterSet(["xyz"]).split("axy") == ("a", "", "xy")
