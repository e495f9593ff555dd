"""Long texts: rejected without being tokenised whole, or pre-truncated."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.common.errors import PromptTooLongError, RequestError
from pagoda.common.text.tokenizer import (
    CHUNK_CHARS,
    MAX_CHARS_PER_TOKEN,
    MIN_CHAR_LIMIT,
    UNMEASURED_CHARS,
    Tokenizer,
    check_length,
    load_tokenizer,
    pre_truncate,
)


class Counting:
    """`size` characters to a token; notes how many characters were tokenised."""

    def __init__(self, size: float) -> None:
        self._size, self.seen = size, 0

    def __call__(self, text: str) -> int:
        self.seen += len(text)
        return int(len(text) / self._size)


def test_a_text_that_cannot_fit_is_not_tokenised() -> None:
    for limit, length in (
        (8, MIN_CHAR_LIMIT + 1),
        (8192, 30_000_000),
        (131_072, MAX_CHARS_PER_TOKEN * 131_072 + 1),
    ):
        count = Counting(4)
        with pytest.raises(PromptTooLongError, match=f"maximum context length is {limit} tokens"):
            check_length("a" * length, limit, count)
        assert count.seen == 0


def test_a_text_is_tokenised_until_it_is_too_long() -> None:
    for limit in (8, 8192, 131_072):
        count = Counting(4)
        with pytest.raises(PromptTooLongError, match="the first "):
            check_length("a" * (max(MIN_CHAR_LIMIT, MAX_CHARS_PER_TOKEN * limit) - 1), limit, count)
        assert count.seen <= 5 * limit + CHUNK_CHARS


def test_texts_that_may_fit_are_accepted() -> None:
    for limit, length, size in (
        (8, UNMEASURED_CHARS, 1),
        (8192, MIN_CHAR_LIMIT, 129),
        (131_072, MAX_CHARS_PER_TOKEN * 131_072, 33),
        (1 << 20, 1 << 22, 1),
    ):
        check_length("a" * length, limit, Counting(size))


def test_pre_truncate_tokenises_only_the_kept_side() -> None:
    for side in ("left", "right"):
        count = Counting(4)
        text = "".join(map(str, range(500_000)))
        end = pre_truncate(text, 512, side, count)
        assert len(end) < 2 * CHUNK_CHARS
        assert count.seen < 2 * CHUNK_CHARS
        assert text.startswith(end) if side == "right" else text.endswith(end)
    assert pre_truncate("a" * UNMEASURED_CHARS, 1, "left", count) == "a" * UNMEASURED_CHARS
    with pytest.raises(PromptTooLongError):
        pre_truncate(" " * (MIN_CHAR_LIMIT + 2 * CHUNK_CHARS), 512, "left", lambda _: 0)


def test_pre_truncate_keeps_a_text_of_long_tokens_whole() -> None:
    text = " " * (UNMEASURED_CHARS + 1)
    assert pre_truncate(text, 512, "left", lambda _: 1) == text


def words(model: Tokenizer, length: int) -> str:
    """Text of the vocabulary's own words, runs of spaces and of other characters among them."""
    source = random.Random(7)
    parts = [model.token_text(source.randrange(model.vocab_size)) for _ in range(length)]
    return "".join(source.choice((" ", "", "  ", "\n", "é", "12")) + part for part in parts if "<" not in part)


@pytest.fixture(scope="module")
def tokenizer(model_file: Path) -> Tokenizer:
    return load_tokenizer(model_file)


@pytest.mark.parametrize("make", [words, lambda *_: "The cat sat on the mat, and so on. " * 12_000])
def test_pre_truncated_text_keeps_the_tokens_of_the_whole(
    tokenizer: Tokenizer, make: Callable[[Tokenizer, int], str]
) -> None:
    text = make(tokenizer, 100_000)
    assert len(text) > UNMEASURED_CHARS
    whole = tokenizer.encode(text)
    for keep in (1, 100, 8191):
        last, first = tokenizer.pre_truncate(text, keep, "left"), tokenizer.pre_truncate(text, keep, "right")
        assert max(len(last), len(first)) < len(text)
        assert tokenizer.encode(last)[-keep:] == whole[-keep:]
        assert tokenizer.encode(first)[:keep] == whole[:keep]


def test_every_encode_method_checks_the_length(tokenizer: Tokenizer) -> None:
    bound, text = tokenizer.with_context(64), "a cat, " * 200_000
    for encode in (
        bound.encode,
        bound.encode_ordinary,
        bound.offsets,
        lambda text: bound.encode_pair(text, "a"),
        lambda text: bound.encode_pair("a", text),
    ):
        with pytest.raises(PromptTooLongError):
            encode(text)
        encode("a cat, " * 1000)
    with pytest.raises(RequestError, match=r"surrogate|UTF-8"):
        bound.encode("\ud800" * (UNMEASURED_CHARS + 1))
    assert bound.offsets("a cat") == [(0, 1), (1, 5)]


def test_prompts_of_the_longest_token_fit(tokenizer: Tokenizer) -> None:
    """A text may have as many characters as the context has tokens of the longest kind, and no more."""
    spelling = max((tokenizer.token_text(token) for token in range(tokenizer.vocab_size)), key=len)
    longest = tokenizer._chars_per_token
    assert len(spelling) == longest > MAX_CHARS_PER_TOKEN
    tokens = MIN_CHAR_LIMIT // longest + 1
    text = spelling * tokens
    assert len(tokenizer.encode(text)) == tokens
    assert len(tokenizer.with_context(tokens).encode(text)) == tokens
    with pytest.raises(PromptTooLongError, match=f"of which at most {tokens * longest} can fit"):
        tokenizer.with_context(tokens).encode(text + "a")
