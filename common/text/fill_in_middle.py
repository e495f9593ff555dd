"""Prompts of models that were trained to fill in the middle between a prefix and a suffix.

A model's format is known by the special tokens in its vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.common.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FillFormat:
    """Special tokens around prefix and suffix, and tokens that end the middle besides those."""

    prefix: str
    suffix: str
    middle: str = ""  # The last token of the prompt, if any.
    ends: tuple[str, ...] = ()
    suffix_first: bool = False
    drops_space: bool = False  # The tokenizer adds a space before a text, which a suffix does not have.


_FORMATS: Final = (
    FillFormat(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    FillFormat(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<|end_of_text|>", "<fim_pad>", "<file_sep>", "<repo_name>"),
    ),
    FillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    FillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>",)),
    FillFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), drops_space=True),
    FillFormat("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    FillFormat("[PREFIX]", "[SUFFIX]", suffix_first=True),
)


def fill_format(tokenizer: Tokenizer) -> FillFormat | None:
    """Return the format whose tokens the vocabulary has; None for a model that does not fill in the middle."""
    for form in _FORMATS:
        if all(tokenizer.backend.token_to_id(token) is not None for token in _delimiters(form)):
            return form
    return None


def fill_prompt(
    tokenizer: Tokenizer, form: FillFormat, prefix: str | list[int], suffix: str, *, adds_bos: bool
) -> list[int]:
    """Return the token ids of a prompt to fill in. `adds_bos`: start with the token that starts every text."""
    start = _id(tokenizer, form.prefix)
    between = _id(tokenizer, form.suffix)
    before = [start, *(tokenizer.encode(prefix, False) if isinstance(prefix, str) else prefix)]
    after = [between, *(_without_space(tokenizer, suffix) if form.drops_space else tokenizer.encode(suffix, False))]
    ids = [*after, *before] if form.suffix_first else [*before, *after]
    if form.middle:
        ids.append(_id(tokenizer, form.middle))
    bos = tokenizer.bos_token_id
    return [bos, *ids] if adds_bos and bos is not None and bos in tokenizer.encode("") else ids


def fill_ends(tokenizer: Tokenizer, form: FillFormat) -> list[int]:
    """Return the ids of tokens that end the middle."""
    ids = (tokenizer.backend.token_to_id(token) for token in (*_delimiters(form), *form.ends))
    return [token for token in ids if token is not None]


def _delimiters(form: FillFormat) -> Sequence[str]:
    return [token for token in (form.prefix, form.suffix, form.middle) if token]


def _id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.backend.token_to_id(token)
    assert token_id is not None, token
    return int(token_id)


_LEAD: Final = "☺"
"""Precedes a text while it is tokenised, so that no space is added before the text itself."""


def _without_space(tokenizer: Tokenizer, text: str) -> list[int]:
    lead = tokenizer.encode(_LEAD, False)
    with_lead = tokenizer.encode(_LEAD + text, False)
    return with_lead[len(lead) :] if with_lead[: len(lead)] == lead else tokenizer.encode(text, False)
