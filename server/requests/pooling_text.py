"""Text and pairs of texts as the tokens of a pooling model, cut so that its special tokens stay where they belong.

Knows tokenizers. Does not know requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

from pagoda.common.errors import RequestError
from pagoda.common.text.tokenizer import Tokenizer

Side = Literal["left", "right"]
SIDES: Final[tuple[str, ...]] = get_args(Side)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How text becomes tokens. `truncate_prompt_tokens`: keep so many, -1 what the model takes, None cuts nothing.

    `truncation_side`: where the rest is cut off; None is right.
    """

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> TextOptions:
        """Options by their names, as `tokenization_kwargs` has them. Raises RequestError naming one."""
        known = {field.name for field in fields(cls)}
        for name in values or ():
            if name not in known:
                raise RequestError(
                    "tokenization_kwargs", f"there is no {str(name)[:40]!r}; use {', '.join(sorted(known))}"
                )
        found = cls(**(values or {}))
        keep = found.truncate_prompt_tokens
        if keep is not None and (type(keep) is not int or keep < -1):
            raise RequestError("truncate_prompt_tokens", "truncate_prompt_tokens must be an integer of -1 or more")
        if found.truncation_side is not None and found.truncation_side not in SIDES:
            raise RequestError("truncation_side", f"truncation_side must be one of {', '.join(SIDES)}")
        return found


def encode(tokenizer: Tokenizer, text: str, *, special: bool, keep: int | None, side: Side | None) -> list[int]:
    """Token ids of a text, at most `keep` of them: the text is cut, not the special tokens around it."""
    if keep is not None:
        text = tokenizer.end_with(text, keep, side or "right")
    whole = tokenizer.encode(text, special)
    if keep is None or len(whole) <= keep:
        return whole
    inner = tokenizer.encode(text, False) if special else whole
    start = _find(inner, whole, 0)
    room = _room(keep, len(whole) - len(inner))
    return whole[:start] + cut(inner, room, side) + whole[start + len(inner) :]


def encode_pair(
    tokenizer: Tokenizer, first: str, second: str, *, keep: int | None, side: Side | None
) -> tuple[list[int], int | None]:
    """Token ids of a pair, at most `keep` of them, and where tokens of type 1 begin. The longer text is cut first."""
    if keep is not None:
        first, second = (tokenizer.end_with(text, keep, side or "right") for text in (first, second))
    whole, type_one = tokenizer.encode_pair(first, second)
    if keep is None or len(whole) <= keep:
        return whole, type_one
    one, two = tokenizer.encode(first, False), tokenizer.encode(second, False)
    start = _find(one, whole, 0)
    middle = _find(two, whole, start + len(one))
    room = _room(keep, len(whole) - len(one) - len(two))
    left_one, left_two = _shares(len(one), len(two), room)
    before, between, after = whole[:start], whole[start + len(one) : middle], whole[middle + len(two) :]
    ids = [*before, *cut(one, left_one, side), *between, *cut(two, left_two, side), *after]
    return ids, None if type_one is None else type_one - (len(one) - left_one)


def shortened(tokenizer: Tokenizer, text: str, most: int) -> str:
    """The beginning of a text that is its first `most` tokens; 0: all of it."""
    if not most:
        return text
    offsets = tokenizer.offsets(tokenizer.end_with(text, most, "right"), False)
    return text if len(offsets) <= most else text[: offsets[most - 1][1]]


def cut(ids: Sequence[int], most: int, side: Side | None) -> list[int]:
    """`most` of the ids: the first of them, or the last when the left side is cut off."""
    return list(ids[len(ids) - most :] if side == "left" else ids[:most]) if most < len(ids) else list(ids)


def _shares(one: int, two: int, room: int) -> tuple[int, int]:
    """How much of two lengths is kept, taking from the longer until they fit."""
    if one > two:
        return _shares(two, one, room)[::-1]
    shorter = min(one, room // 2)
    return shorter, room - shorter


def _room(keep: int, special: int) -> int:
    if keep <= special:
        raise RequestError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens {keep} leaves no room for text beside {special} special tokens",
        )
    return keep - special


def _find(part: Sequence[int], whole: Sequence[int], start: int) -> int:
    """Where a text's own tokens are among all."""
    for at in range(start, len(whole) - len(part) + 1):
        if list(whole[at : at + len(part)]) == list(part):
            return at
    raise RequestError("truncate_prompt_tokens", "this model's tokenizer lets no text be cut; shorten it instead")
