"""Texts and pairs of texts as token ids, truncated. The text is cut, not the special tokens around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer

Side = Literal["left", "right"]
SIDES: Final[tuple[str, ...]] = get_args(Side)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How text becomes tokens."""

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # tokens to keep; -1: as many as the model takes, None: all
    truncation_side: Side | None = None  # side that is cut off; None: right

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> TextOptions:
        """Build options from `tokenization_kwargs`. Raises RequestError naming the field."""
        known = {field.name for field in fields(cls)}
        for name in values or ():
            if name not in known:
                raise RequestError(
                    "tokenization_kwargs", f"unknown option {str(name)[:40]!r}; use {', '.join(sorted(known))}"
                )
        options = cls(**(values or {}))
        keep = options.truncate_prompt_tokens
        if keep is not None and (type(keep) is not int or keep < -1):
            raise RequestError("truncate_prompt_tokens", "truncate_prompt_tokens must be an integer of -1 or more")
        if options.truncation_side is not None and options.truncation_side not in SIDES:
            raise RequestError("truncation_side", f"truncation_side must be one of {', '.join(SIDES)}")
        return options

    @classmethod
    def of_sampling(cls, params: SamplingParams) -> TextOptions:
        """Return the options that sampling params set; they cut the left side by default."""
        side: Side = "right" if params.truncation_side == "right" else "left"
        return cls(truncate_prompt_tokens=params.truncate_prompt_tokens, truncation_side=side)

    def keep(self, max_tokens: int, reserved: int = 0) -> int | None:
        """Return how many tokens of a prompt are kept, None for all; -1 leaves `reserved` tokens of `max_tokens` free.

        Raises RequestError if more than `max_tokens` are to be kept.
        """
        keep = self.truncate_prompt_tokens
        if keep is None:
            return None
        if keep > max_tokens:
            raise RequestError(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens {keep} is above the model's context of {max_tokens} tokens",
            )
        return max(1, max_tokens - reserved) if keep == -1 else keep


PLAIN: Final = TextOptions()
"""Special tokens as the tokenizer adds them, nothing truncated."""


def encode_kept(
    tokenizer: Tokenizer, text: str, params: SamplingParams, max_model_len: int, add_special_tokens: bool = True
) -> list[int]:
    """Return the token ids of a text, truncated as `params` specify. Raises RequestError."""
    options = TextOptions.of_sampling(params)
    keep = options.keep(max_model_len, reserved=1)
    if keep is not None:
        text = tokenizer.pre_truncate(text, keep, options.truncation_side or "right")
    ids = tokenizer.encode(text, add_special_tokens)
    return ids if keep is None else cut(ids, keep, options.truncation_side)


def encode(tokenizer: Tokenizer, text: str, *, special: bool, keep: int | None, side: Side | None) -> list[int]:
    """Return at most `keep` token ids of a text, special tokens included."""
    if keep is not None:
        text = tokenizer.pre_truncate(text, keep, side or "right")
    whole = tokenizer.encode(text, special)
    if keep is None or len(whole) <= keep:
        return whole
    inner = tokenizer.encode(text, False) if special else whole
    start = _find(inner, whole, 0)
    budget = _text_budget(keep, len(whole) - len(inner))
    return whole[:start] + cut(inner, budget, side) + whole[start + len(inner) :]


def encode_pair(
    tokenizer: Tokenizer, first: str, second: str, *, keep: int | None, side: Side | None
) -> tuple[list[int], int | None]:
    """Return at most `keep` token ids of a pair, and where token type 1 begins. The longer text is cut first."""
    if keep is not None:
        first, second = (tokenizer.pre_truncate(text, keep, side or "right") for text in (first, second))
    whole, type_one = tokenizer.encode_pair(first, second)
    if keep is None or len(whole) <= keep:
        return whole, type_one
    one, two = tokenizer.encode(first, False), tokenizer.encode(second, False)
    start = _find(one, whole, 0)
    middle = _find(two, whole, start + len(one))
    budget = _text_budget(keep, len(whole) - len(one) - len(two))
    keep_one, keep_two = _split_pair(len(one), len(two), budget)
    before, between, after = whole[:start], whole[start + len(one) : middle], whole[middle + len(two) :]
    ids = [*before, *cut(one, keep_one, side), *between, *cut(two, keep_two, side), *after]
    return ids, None if type_one is None else type_one - (len(one) - keep_one)


def shortened(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    """Return the prefix of a text that is its first `max_tokens` tokens; 0: all of it."""
    if not max_tokens:
        return text
    offsets = tokenizer.offsets(tokenizer.pre_truncate(text, max_tokens, "right"), False)
    return text if len(offsets) <= max_tokens else text[: offsets[max_tokens - 1][1]]


def cut(ids: Sequence[int], count: int, side: Side | None) -> list[int]:
    """Return the first `count` ids, or the last if the left side is cut off."""
    return list(ids[len(ids) - count :] if side == "left" else ids[:count]) if count < len(ids) else list(ids)


def _split_pair(one: int, two: int, budget: int) -> tuple[int, int]:
    """Return how much of two lengths is kept, taking from the longer until they fit."""
    if one > two:
        return _split_pair(two, one, budget)[::-1]
    shorter = min(one, budget // 2)
    return shorter, budget - shorter


def _text_budget(keep: int, special: int) -> int:
    if keep <= special:
        raise RequestError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens {keep} leaves no room for text beside {special} special tokens",
        )
    return keep - special


def _find(part: Sequence[int], whole: Sequence[int], start: int) -> int:
    """Return the index of a text's own tokens among all."""
    for index in range(start, len(whole) - len(part) + 1):
        if list(whole[index : index + len(part)]) == list(part):
            return index
    raise RequestError("truncate_prompt_tokens", "this model's tokenizer cannot truncate texts; shorten the text")
