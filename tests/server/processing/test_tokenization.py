"""Texts and pairs cut to fit: the same tokens as the tokenizers library keeps when it truncates by itself."""

import random

import pytest
import tokenizers
from support.checkpoints.byte_text import byte_tokenizer, framed_tokenizer
from support.suite.rows import each_row
from tokenizers import processors

from pagoda.common.errors import RequestError
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.processing.inputs import Side, TextOptions, encode, encode_pair, shortened

EOS = 256


def bert_like() -> Tokenizer:
    """Special tokens before, between and after; the second text and what follows it are of type 1."""
    found = byte_tokenizer()
    found.backend.add_special_tokens(["[CLS]", "[SEP]"])
    found.backend.post_processor = processors.BertProcessing(("[SEP]", 258), ("[CLS]", 257))
    return found


def library(tokenizer: Tokenizer, texts: tuple[str, ...], keep: int, side: Side) -> tokenizers.Encoding:
    """What the library makes of texts when it is told to truncate."""
    own = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    own.enable_truncation(keep, strategy="longest_first", direction=side)
    return own.encode(*texts)


@each_row("make", [framed_tokenizer, bert_like])
@each_row("side", ["left", "right"])
def test_texts_are_cut_as_the_library_cuts_them(make: type, side: Side) -> None:
    tokenizer, dice = make(), random.Random(1)
    for _ in range(200):
        text = "".join(dice.choices("abcdef é", k=dice.randrange(12)))
        keep = dice.randrange(3, 12)
        assert (
            encode(tokenizer, text, special=True, keep=keep, side=side) == library(tokenizer, (text,), keep, side).ids
        )


@each_row("make", [framed_tokenizer, bert_like])
@each_row("side", ["left", "right"])
def test_pairs_are_cut_as_the_library_cuts_them(make: type, side: Side) -> None:
    tokenizer, dice = make(), random.Random(2)
    for _ in range(400):
        first, second = ("".join(dice.choices("abcdef é", k=dice.randrange(1, 14))) for _ in range(2))
        keep = dice.randrange(6, 24)
        found = library(tokenizer, (first, second), keep, side)
        ids, begin = encode_pair(tokenizer, first, second, keep=keep, side=side)
        assert (ids, begin) == (found.ids, found.type_ids.index(1)), (first, second, keep)


def test_special_tokens_leave_room_or_it_is_said() -> None:
    with pytest.raises(RequestError, match="leaves no room for text beside 2 special tokens") as caught:
        encode(bert_like(), "abc", special=True, keep=2, side=None)
    assert caught.value.field == "truncate_prompt_tokens"
    assert encode(bert_like(), "abc", special=False, keep=2, side=None) == [97, 98]


def test_a_text_is_shortened_between_its_characters() -> None:
    tokenizer = byte_tokenizer()
    assert shortened(tokenizer, "abc", 0) == shortened(tokenizer, "abc", 3) == "abc"
    assert shortened(tokenizer, "abc", 2) == "ab"
    assert shortened(tokenizer, "aéc", 3) == "aé"


def test_options_by_their_names() -> None:
    assert TextOptions.of(None) == TextOptions()
    options = TextOptions.of({"truncate_prompt_tokens": 3, "truncation_side": "left", "add_special_tokens": False})
    assert options == TextOptions(truncate_prompt_tokens=3, truncation_side="left", add_special_tokens=False)
    for wrong, field in [
        ({"padding": True}, "tokenization_kwargs"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "3"}, "truncate_prompt_tokens"),
        ({"truncation_side": "top"}, "truncation_side"),
    ]:
        with pytest.raises(RequestError) as caught:
            TextOptions.of(wrong)
        assert caught.value.field == field
