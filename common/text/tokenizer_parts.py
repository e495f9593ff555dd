"""What every source of a tokenizer yields, and the post-processor that adds bos and eos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers
from tokenizers import processors


@dataclass(frozen=True, eq=False)
class TokenizerParts:
    """A tokenizer as read from its files.

    `special_tokens`: role ("bos_token") -> text. `chat_templates`: name -> jinja source.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def add_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes `encode(..., add_special_tokens=True)` put `bos` before and `eos` after the text; None adds nothing."""
    ends = [token for token in (bos, eos) if token is not None]
    before = [f"{bos}:0"] if bos is not None else []
    after = [f"{eos}:0"] if eos is not None else []
    single = [*before, "$A:0", *after]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[
            *single,
            *(piece.replace(":0", ":1") for piece in before),
            "$B:1",
            *(p.replace(":0", ":1") for p in after),
        ],
        special_tokens=[(token, _id(backend, token)) for token in dict.fromkeys(ends)],
    )


def _around(text: str, segment: int, bos: str | None, eos: str | None) -> list[str]:
    return [f"{piece}:{segment}" for piece in (bos, text, eos) if piece is not None]


def _id(backend: tokenizers.Tokenizer, token: str) -> int:
    token_id = backend.token_to_id(token)
    assert token_id is not None, token
    return token_id
