"""Token id -> bytes, for tokenizers whose decoding is the concatenation of each token's bytes.

These are byte-level BPE (GPT-2's alphabet of 256 printable characters) and sentencepiece with byte fallback. Other
decoders depend on neighbouring tokens; for them `token_bytes_of` returns None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import tokenizers

SPACE_MARK: Final = "\u2581"
"""Sentencepiece's replacement for a space."""


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled lazily; b"" outside the vocabulary."""

    def __init__(
        self,
        text_of: Callable[[int], str | None],
        spell: Callable[[str], bytes],
        *,
        strip: bool = False,
        literal: Mapping[int, bytes] = {},
    ) -> None:
        super().__init__(literal)
        self._text_of = text_of
        self._spell = spell
        self.strip_first_space = strip  # Decoding drops one space at the start of the whole text.
        self.has_literal = bool(literal)  # The package tokenizers decodes these tokens as other bytes.
        self.texts = TokenTexts(self)

    def __missing__(self, token_id: int) -> bytes:
        text = self._text_of(token_id) if 0 <= token_id < 1 << 32 else None
        data = b"" if text is None else self._spell(text)
        self[token_id] = data
        return data


class TokenTexts(dict[int, str | None]):
    """Token id -> text of the token alone, filled lazily; None if its bytes are not whole characters."""

    def __init__(self, table: TokenBytes) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        try:
            text = self._table[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def token_bytes_of(backend: tokenizers.Tokenizer) -> TokenBytes | None:
    """Return a tokenizer's table; None if its decoder is neither byte-level nor sentencepiece with byte fallback."""
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(backend.id_to_token, _spell_byte_level, literal=_literal(backend))
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or not _replaces_space_mark(steps[0]):
        return None
    if kinds[3:] == []:
        return TokenBytes(backend.id_to_token, _spell_sentencepiece)
    if kinds[3:] == ["Strip"] and [steps[3].get(key) for key in ("content", "start", "stop")] == [" ", 1, 0]:
        return TokenBytes(backend.id_to_token, _spell_sentencepiece, strip=True)
    return None


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character -> byte: printable Latin-1 as itself, all others from U+0100 on, in order.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), the released encoder.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return alphabet


_ALPHABET: Final = byte_alphabet()
_NOT_IN_UTF8: Final = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])
"""Bytes that no text has."""
_BYTE_TOKENS: Final = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _literal(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """Return the added tokens that stand for their own characters, though the alphabet has these for bytes.

    Added tokens are found in a text as they are written. DeepSeek-LLM adds those of the alphabet's characters whose
    bytes no text has, such as "\u00fc". One that the vocabulary has, too, and whose bytes may occur, stands for these.
    """
    tokens = {}
    for id, token in backend.get_added_tokens_decoder().items():
        data = _spell_byte_level(token.content)
        text = token.content.encode()
        is_in_model = backend.model.token_to_id(token.content) is not None
        if data != text and not (is_in_model and _NOT_IN_UTF8.isdisjoint(data)):
            tokens[id] = text
    return tokens


def _spell_byte_level(text: str) -> bytes:
    """Bytes of a token; one with a character outside the alphabet (an added token) is literal text."""
    try:
        return bytes([_ALPHABET[char] for char in text])
    except KeyError:
        return text.encode()


def _spell_sentencepiece(text: str) -> bytes:
    return _BYTE_TOKENS.get(text) or text.replace(SPACE_MARK, " ").encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _replaces_space_mark(step: dict[str, Any]) -> bool:
    return bool(step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " ")
