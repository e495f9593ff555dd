"""Text to token ids and back, for one model.

Knows the `tokenizers` library and the files beside a model; knows nothing of requests, streaming or chat messages.
No transformers: a tokenizer.json, a vocab.json with merges.txt, or a GGUF file holds all that is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import tokenizers

from pagoda.common.errors import ModelError, RequestError
from pagoda.common.text.gguf_tokenizer import read_gguf
from pagoda.common.text.text_bounds import check_length, end_with
from pagoda.common.text.token_bytes import TokenBytes, token_bytes_of
from pagoda.common.text.tokenizer_files import TokenizerParts, read_folder, write_folder

LONG_TEXT: Final = 4_096
"""Characters of a text that takes long enough to be tokenised beside other threads."""


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer. Safe to use from several threads; holds no state of any text.

    `special_tokens`: role -> text, such as "bos_token" -> "<s>"; what chat templates see.
    `chat_templates`: name -> jinja source; most models have one, called "default".
    `max_tokens`: texts of surely more tokens are refused, and are not tokenised for it; None: none are.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int | None = None

    def with_context(self, max_tokens: int) -> Tokenizer:
        """The same for a context of `max_tokens` tokens."""
        return replace(self, max_tokens=max_tokens)

    @cached_property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included. A model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, if the model has one."""
        return self._role("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, if the model has one. generation_config.json may name more."""
        return self._role("eos_token")

    @cached_property
    def pad_token_id(self) -> int | None:
        """Id of the padding token, if the model has one."""
        return self._role("pad_token")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return frozenset(id for id, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @property
    def chat_template(self) -> str | None:
        """The jinja source of the default chat template, if the model has one."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are parsed.

        Raises RequestError("prompt") on lone surrogates, and for a text of surely more than `max_tokens` tokens.
        """
        self._check_length(text)
        return _encode(self.backend, text, add_special_tokens)

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        """Where each token of `text` begins and ends, in characters. Raises as `encode` does."""
        self._check_length(text)
        offsets: list[tuple[int, int]] = _encoding(self.backend, text, add_special_tokens, offsets=True).offsets
        return offsets

    def end_with(self, text: str, tokens: int, side: Literal["left", "right"]) -> str:
        """The part of a long text that has all tokens of those that are kept when `side` is cut to `tokens` tokens.

        A shorter text is returned whole. Raises as `encode` does.
        """
        return end_with(text, tokens, side, self._count)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Token ids of two texts in one prompt, joined as the model's tokenizer joins pairs, special tokens included.

        Also where tokens of type 1 begin, None where all are of type 0. Raises as `encode` does.
        """
        return self.encode_within(None, first, second)

    def encode_within(
        self, max_tokens: int | None, first: str, second: str | None = None, side: Literal["left", "right"] = "right"
    ) -> tuple[list[int], int | None]:
        """As `encode` with special tokens, or as `encode_pair`, the texts cut so that all is within `max_tokens`.

        Special tokens stay. `side`: where texts are cut; of a pair the longer one is, until both are as long. No limit
        cuts nothing; one that special tokens alone exceed leaves nothing but them.
        """
        given = [text for text in (first, second) if text is not None]
        for text in given:
            self._check_length(text)
        texts = [_encoding(self.backend, text) for text in given]
        if max_tokens is not None:
            room = max(max_tokens - self.backend.num_special_tokens_to_add(second is not None), 0)
            for encoding, length in zip(texts, _shares(room, [len(text.ids) for text in texts])):
                encoding.truncate(length, direction=side)
        found = self.backend.post_process(texts[0], texts[1] if len(texts) > 1 else None, True)
        return found.ids, found.type_ids.index(1) if 1 in found.type_ids else None

    def encode_ordinary(self, text: str) -> list[int]:
        """Token ids of `text` taken literally: special tokens written in it are ordinary characters, none is added.

        Raises as `encode` does.
        """
        self._check_length(text)
        return _encode(self._literal_backend, text, False)

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing.

        `spaces_between_special_tokens` False: adjacent special tokens stand close together even where the tokenizer's
        decoder puts a space between tokens (those that know no byte-level or sentencepiece spelling).
        """
        ids = list(ids)
        if spaces_between_special_tokens or skip_special_tokens or not self._spaces_special_tokens:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        texts: list[str] = []
        start = 0
        for i in range(1, len(ids) + 1):
            if i == len(ids) or (ids[i] in self.special_ids and ids[i - 1] in self.special_ids):
                texts.append(self.backend.decode(ids[start:i], skip_special_tokens=False))
                start = i
        return "".join(texts)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, special tokens as their text; b"" outside the vocabulary."""
        if self.byte_table is not None:
            return self.byte_table[token_id]
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """One token as text, leading space kept; U+FFFD where its bytes are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_name(self, token_id: int) -> str:
        """One token as the vocabulary writes it, such as "\u0120the"; "" outside the vocabulary."""
        return self.backend.id_to_token(token_id) or ""

    @cached_property
    def byte_table(self) -> TokenBytes | None:
        """Token id -> bytes, where decoding is the concatenation of bytes; None for any other kind of decoder."""
        return token_bytes_of(self.backend)

    def with_vocab(self, vocab: int) -> Tokenizer:
        """The tokenizer for a model with `vocab` tokens: no text yields an id beyond them.

        Added tokens beyond them, such as the placeholder of an image, are left out, and their text is ordinary text.
        Raises ModelError when the tokenizer's own vocabulary goes beyond, or a token that it puts around every text.
        """
        highest = max(self.backend.get_vocab(with_added_tokens=False).values(), default=-1)
        added = self.backend.get_added_tokens_decoder()
        inside = {id for id in added if id < vocab}
        fitted = self if len(inside) == len(added) else replace(self, backend=_with_added(self.backend, inside))
        highest = max([highest, *fitted.encode(""), *fitted.encode_pair("", "")[0]])
        if highest >= vocab:
            raise ModelError(
                f"the tokenizer has ids up to {highest}, but the model's vocabulary has {vocab} entries; name the "
                "tokenizer of this model with --tokenizer"
            )
        return fitted

    def save(self, folder: Path) -> None:
        """Write it into a model folder, from which `load_tokenizer` reads the same one. Raises OSError."""
        write_folder(folder, TokenizerParts(self.backend, self.special_tokens, self.chat_templates))

    def _check_length(self, text: str) -> None:
        if self.max_tokens is not None:
            check_length(text, self.max_tokens, self._count)

    def _count(self, text: str) -> int:
        return len(_encoding(self.backend, text))

    def _role(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A twin, because parsing of special tokens is a switch on the object, and threads share the object."""
        twin = _with_added(self.backend, self.backend.get_added_tokens_decoder())
        twin.encode_special_tokens = True
        return twin

    @cached_property
    def _spaces_special_tokens(self) -> bool:
        """Whether decoding puts something between two adjacent special tokens."""
        if self.byte_table is not None or not self.special_ids:
            return False
        one = min(self.special_ids)
        alone, pair = (self.backend.decode([one] * n, skip_special_tokens=False) for n in (1, 2))
        return pair != alone + alone


def load_tokenizer(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    download_dir: str | None = None,
    gguf_metadata: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """The tokenizer of a folder, a tokenizer.json, a .gguf file or a hub id.

    `gguf_metadata`: the key-value pairs of the .gguf file, when it is open already. Raises ModelError, in one line,
    when files are missing or cannot be read.
    """
    parts = read_gguf(gguf_metadata) if gguf_metadata is not None else _read(source, revision, token, download_dir)
    return Tokenizer(parts.backend, parts.special_tokens, parts.chat_templates)


def _read(source: str | Path, revision: str | None, token: str | None, download_dir: str | None) -> TokenizerParts:
    path = Path(source).expanduser()
    if not path.exists():
        from pagoda.common.weights.hub import resolve_model

        path = resolve_model(str(source), "dummy", revision=revision, token=token, download_dir=download_dir)
    if path.suffix == ".gguf":
        from pagoda.common.weights.gguf.file import GgufFile

        return read_gguf(GgufFile(path).metadata)
    if path.is_file():
        if path.name != "tokenizer.json":
            raise ModelError(f"{path}: not a tokenizer; give a folder, a tokenizer.json or a .gguf file")
        path = path.parent
    return read_folder(path)


def _with_added(backend: tokenizers.Tokenizer, kept: Collection[int]) -> tokenizers.Tokenizer:
    """A tokenizer with the same model and steps, and of the added tokens only those whose ids are `kept`."""
    twin = tokenizers.Tokenizer(backend.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, step)) is not None:
            setattr(twin, step, value)
    tokens = [token for id, token in sorted(backend.get_added_tokens_decoder().items()) if id in kept]
    twin.add_tokens(tokens)
    moved = [token.content for token in tokens if twin.token_to_id(token.content) != backend.token_to_id(token.content)]
    if moved:
        raise ModelError(f"the tokenizer's added tokens have gaps between their ids ({', '.join(moved[:3])} moved)")
    return twin


def _shares(room: int, lengths: list[int]) -> list[int]:
    """Of one or two lengths what is left of each within `room`: the longer gives first."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    half = room // 2
    if lengths[0] <= half:
        return [lengths[0], room - lengths[0]]
    if lengths[1] <= half:
        return [room - lengths[1], lengths[1]]
    return [half + room % 2, half] if lengths[0] > lengths[1] else [half, half + room % 2]


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    ids: list[int] = _encoding(backend, text, add_special_tokens).ids
    return ids


def _encoding(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False, *, offsets: bool = False
) -> tokenizers.Encoding:
    """`offsets` False: they may be left out."""
    try:
        if len(text) > LONG_TEXT:  # the call for one text keeps every other thread of the process waiting
            batch = backend.encode_batch if offsets else backend.encode_batch_fast
            return batch([text], add_special_tokens=add_special_tokens)[0]
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except UnicodeEncodeError:
        raise RequestError("prompt", "the text holds half of a surrogate pair, which is no character") from None
    except TypeError:
        if isinstance(text, str):  # some versions of the library report the surrogate as a type error
            raise RequestError("prompt", "the text holds characters that cannot be encoded as UTF-8") from None
        raise
