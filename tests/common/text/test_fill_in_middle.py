"""Prompts that fill in the middle: the format of each family, known by its tokens."""

from __future__ import annotations

from support.checkpoints.byte_text import byte_tokenizer
from support.suite.rows import each_row
from tokenizers import AddedToken

from pagoda.common.text.fill_in_middle import fill_ends, fill_format, fill_prompt
from pagoda.common.text.tokenizer import Tokenizer


def with_tokens(*tokens: str) -> Tokenizer:
    """Ids of the tokens: 257, 258, ..."""
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return tokenizer


@each_row(
    ("tokens", "ids"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), [257, 97, 258, 98, 259]),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), [257, 97, 258, 98, 259]),
        (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), [257, 97, 258, 98, 259]),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), [257, 97, 258, 98, 259]),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), [257, 97, 258, 98, 259]),
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), [258, 98, 257, 97, 259]),
        (("[PREFIX]", "[SUFFIX]"), [258, 98, 257, 97]),
    ],
)
def test_formats(tokens: tuple[str, ...], ids: list[int]) -> None:
    tokenizer = with_tokens(*tokens)
    form = fill_format(tokenizer)
    assert form is not None
    assert fill_prompt(tokenizer, form, "a", "b", adds_bos=True) == ids
    assert fill_prompt(tokenizer, form, [97], "b", adds_bos=False) == ids
    assert fill_ends(tokenizer, form) == list(range(257, 257 + len(tokens)))


def test_a_tokenizer_without_the_tokens() -> None:
    assert fill_format(byte_tokenizer()) is None
    assert fill_format(with_tokens("<|fim_prefix|>", "<|fim_suffix|>")) is None


def test_known_ends_of_a_format() -> None:
    tokenizer = with_tokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>")
    form = fill_format(tokenizer)
    assert form is not None
    assert fill_ends(tokenizer, form) == [257, 258, 259, 260]
