"""Text to token ids and back, on the `tokenizers` library (no transformers).

Reads a tokenizer.json, a vocab.json with merges.txt, or a GGUF file.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import tokenizers

from pagoda.common.errors import ModelError, PromptTooLongError, RequestError
from pagoda.common.text.gguf_tokenizer import read_gguf
from pagoda.common.text.literal_stretches import Span, pattern_of, stretches_of
from pagoda.common.text.token_bytes import TokenBytes, token_bytes_of
from pagoda.common.text.tokenizer_files import TokenizerParts, is_panic, read_folder, write_folder

CountTokens = Callable[[str], int]
"""Returns the number of tokens of a text."""

UNMEASURED_CHARS: Final = 1 << 18
"""Texts of at most this many characters are tokenised whole, whatever the context length."""

MIN_CHAR_LIMIT: Final = 1 << 20
"""Character limit for short contexts: tokenizers drop white space and shorten unknown words."""

MAX_CHARS_PER_TOKEN: Final = 32
"""Least upper bound of the characters per token: vocabularies of shorter tokens may drop characters."""

CHUNK_CHARS: Final = 1 << 16
"""Characters tokenised at once while a text is measured."""

_USUAL_CHARS_PER_TOKEN: Final = 4
"""Texts of at most this many characters per token of the context are not measured."""

_SEAM_TOKENS: Final = 64
"""Upper bound of the tokens by which cutting a text in two raises its token count."""

_MARGIN_TOKENS: Final = 2048
"""Extra tokens kept by `pre_truncate`, as tokens near the cut may differ from those of the whole text."""

_MAX_WORD_CHARS: Final = 256
"""Characters to search for a space to cut at."""

_TRIAL: Final = "a b\n1"
"""Text that is encoded when a tokenizer is loaded, since some contradictions are found only then."""

_LEAD: Final = "\n"
"""Precedes a text while it is tokenised, so that no space is added before the text itself."""

GIL_RELEASE_CHARS: Final = 4_096
"""Texts of more characters are tokenised with the GIL released."""

CANCELLED: Final[ContextVar[threading.Event | None]] = ContextVar("CANCELLED", default=None)
"""Event that is set when the request of this context is cancelled: its next piece raises TokenisingCancelledError."""


class TokenisingCancelledError(Exception):
    """The request whose text was being tokenised is cancelled."""


@dataclass(frozen=True, slots=True)
class _EncodedPart:
    """A tokenised part of a text, which begins at `start` with `lead` tokens that are not of the text."""

    start: int
    encoding: tokenizers.Encoding
    lead: int = 0


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer. Thread-safe and stateless."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # role -> text, such as "bos_token" -> "<s>"
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # name -> jinja source; usually only "default"
    max_tokens: int | None = None  # reject texts of surely more tokens without tokenising them whole
    highest_id: int | None = None  # the highest id except those of added tokens, if known

    def with_context(self, max_tokens: int) -> Tokenizer:
        """Return a copy that rejects texts longer than `max_tokens` tokens."""
        return replace(self, max_tokens=max_tokens)

    @cached_property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included. The model's embedding table may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def bos_token_id(self) -> int | None:
        return self._role("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-text token, if any. generation_config.json may name more."""
        return self._role("eos_token")

    @cached_property
    def pad_token_id(self) -> int | None:
        return self._role("pad_token")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` drops."""
        return frozenset(id for id, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written in it are parsed.

        Raises RequestError("prompt") for lone surrogates, PromptTooLongError for surely more than `max_tokens` tokens.
        """
        self._check_length(text)
        return _encode(self.backend, text, add_special_tokens)

    def offsets(self, text: str, add_special_tokens: bool = True, literal: Sequence[Span] = ()) -> list[Span]:
        """Return (start, end) of each token of `text`, in characters; (0, 0) of those that are added.

        `literal`: as of encode_literal. Raises as `encode` does.
        """
        self._check_length(text)
        if literal and self.special_pattern is not None:
            before, after = self._added_around if add_special_tokens else ([], [])
            inner = [
                (part.start + start, part.start + end)
                for part in self._parts(text, literal, offsets=True)
                for start, end in part.encoding.offsets[part.lead :]
            ]
            return [*((0, 0) for _ in before), *inner, *((0, 0) for _ in after)]
        offsets: list[Span] = _encoding(self.backend, text, add_special_tokens, offsets=True).offsets
        return offsets

    def pre_truncate(self, text: str, tokens: int, side: Literal["left", "right"]) -> str:
        """Cut `side` of a long text, keeping surely more than the `tokens` tokens it will be truncated to.

        Raises as `encode` does.
        """
        return pre_truncate(text, tokens, side, self._count, self._chars_per_token)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Return the token ids of a text pair with its special tokens, and the index of the first token of type 1.

        The index is None if all tokens are of type 0. Raises as `encode` does.
        """
        return self.encode_within(None, first, second)

    def encode_within(
        self, max_tokens: int | None, first: str, second: str | None = None, side: Literal["left", "right"] = "right"
    ) -> tuple[list[int], int | None]:
        """Like `encode_pair` for one or two texts, truncated to `max_tokens` tokens (None: no limit).

        Special tokens are always kept. `side`: where to cut; of a pair the longer text is cut until both are equal.
        """
        texts = [text for text in (first, second) if text is not None]
        for text in texts:
            self._check_length(text)
        encodings = [_encoding(self.backend, text) for text in texts]
        if max_tokens is not None:
            budget = max(max_tokens - self.backend.num_special_tokens_to_add(second is not None), 0)
            lengths = _truncated_lengths(budget, [len(encoding.ids) for encoding in encodings])
            for encoding, length in zip(encodings, lengths):
                encoding.truncate(length, direction=side)
        joined = self.backend.post_process(encodings[0], encodings[1] if len(encodings) > 1 else None, True)
        return joined.ids, joined.type_ids.index(1) if 1 in joined.type_ids else None

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the token ids of `text` taken literally: special tokens in it are ordinary text, and none is added.

        Raises as `encode` does.
        """
        self._check_length(text)
        return _encode(self._literal_backend, text, False)

    def encode_literal(self, text: str, literal: Collection[Span], add_special_tokens: bool = True) -> list[int]:
        """Return what `encode` does, but for special tokens at the spans in `literal`, which are ordinary text.

        Raises as `encode` does.
        """
        if not literal or self.special_pattern is None:
            return self.encode(text, add_special_tokens)
        self._check_length(text)
        before, after = self._added_around if add_special_tokens else ([], [])
        inner = [id for part in self._parts(text, literal) for id in part.encoding.ids[part.lead :]]
        return [*before, *inner, *after]

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches the text of a special token, of several the longest; None if there are none."""
        return pattern_of(token.content for token in self._special if token.content)

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary are dropped.

        `spaces_between_special_tokens`: False removes the space that some decoders (neither byte-level nor
        sentencepiece) put between adjacent special tokens.
        """
        ids = list(ids)
        table = self.byte_table
        if table is not None and table.has_literal:
            skipped = self.special_ids if skip_special_tokens else ()
            return b"".join([table[token] for token in ids if token not in skipped]).decode("utf-8", "replace")
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
        """Return the bytes of one token, special tokens as their text; b"" outside the vocabulary."""
        if self.byte_table is not None:
            return self.byte_table[token_id]
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return one token as text with its leading space; U+FFFD for incomplete characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_name(self, token_id: int) -> str:
        """Return one token as spelled in the vocabulary, such as "\u0120the"; "" outside the vocabulary."""
        return self.backend.id_to_token(token_id) or ""

    @cached_property
    def byte_table(self) -> TokenBytes | None:
        """Token id -> bytes, if decoding is the concatenation of bytes; None for any other decoder."""
        return token_bytes_of(self.backend)

    def with_vocab(self, vocab: int) -> Tokenizer:
        """Return a tokenizer for a model with `vocab` tokens: no text yields a larger id.

        Added tokens with larger ids, such as an image placeholder, become ordinary text. Raises ModelError if the base
        vocabulary, or a special token added to every text, has a larger id.
        """
        highest = _highest_id(self.backend) if self.highest_id is None else self.highest_id
        added = self.backend.get_added_tokens_decoder()
        kept = {id for id in added if id < vocab}
        fitted = self if len(kept) == len(added) else replace(self, backend=_with_added(self.backend, kept))
        highest = max([highest, *fitted.encode(""), *fitted.encode_pair("", "")[0]])
        if highest >= vocab:
            raise ModelError(
                f"the tokenizer has ids up to {highest}, but the model's vocabulary has {vocab} entries; name the "
                "tokenizer of this model with --tokenizer"
            )
        return fitted

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` reads into a model folder. Raises OSError."""
        write_folder(folder, TokenizerParts(self.backend, self.special_tokens, self.chat_templates))

    def _check_length(self, text: str) -> None:
        if self.max_tokens is not None:
            check_length(text, self.max_tokens, self._count, self._chars_per_token)

    def _count(self, text: str) -> int:
        return len(_encoding(self.backend, text))

    @cached_property
    def _chars_per_token(self) -> int:
        """Maximum characters that a token stands for: those of the longest one, added tokens included."""
        return max(MAX_CHARS_PER_TOKEN, *map(len, self.backend.get_vocab(with_added_tokens=True)))

    def _role(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A copy that does not parse special tokens: that is a switch on the object, which threads share."""
        copy = _with_added(self.backend, self.backend.get_added_tokens_decoder())
        copy.encode_special_tokens = True
        return copy

    def _parts(self, text: str, literal: Collection[Span], *, offsets: bool = False) -> Iterator[_EncodedPart]:
        """Tokenise a text in parts, in which the special tokens at the spans in `literal` are ordinary text.

        Where a vocabulary has a special token's text as an ordinary token, too, that text is split.
        """
        assert self.special_pattern is not None
        left, right = self._takes_space
        for stretch in stretches_of(text, self.special_pattern, frozenset(literal), left=left, right=right):
            start = stretch.start
            end = stretch.end
            if not stretch.literal:
                yield _EncodedPart(start, _encoding(self.backend, text[start:end], offsets=offsets))
                continue
            whole = self._ordinary(text, start, end, offsets)
            own = {self.backend.token_to_id(text[first:last]) for first, last in stretch.literal}
            if own.isdisjoint(whole.encoding.ids):
                yield whole
                continue
            cuts = [start, *(first + 1 for first, _ in stretch.literal), end]
            for first, last in pairwise(cuts):
                yield self._ordinary(text, first, last, offsets, is_inner=first > start)

    def _ordinary(self, text: str, start: int, end: int, offsets: bool, *, is_inner: bool = False) -> _EncodedPart:
        """Tokenise a part of a text as ordinary text.

        It gets the space that tokenizers add to the start of a text only where they add it after special tokens, too;
        none if it `is_inner`, a part of what belongs together.
        """
        if is_inner or (start > 0 and self._adds_space_at_start):
            lead = _encode(self._literal_backend, _LEAD, False)
            encoding = _encoding(self._literal_backend, _LEAD + text[start:end], offsets=offsets)
            if encoding.ids[: len(lead)] == lead:
                return _EncodedPart(start - len(_LEAD), encoding, len(lead))
        return _EncodedPart(start, _encoding(self._literal_backend, text[start:end], offsets=offsets))

    @cached_property
    def _special(self) -> list[tokenizers.AddedToken]:
        return [token for token in self.backend.get_added_tokens_decoder().values() if token.special]

    @cached_property
    def _takes_space(self) -> tuple[frozenset[str], frozenset[str]]:
        """The special tokens that take up white space to their left, and to their right."""
        left = frozenset(token.content for token in self._special if token.lstrip)
        return left, frozenset(token.content for token in self._special if token.rstrip)

    @cached_property
    def _adds_space_at_start(self) -> bool:
        """Whether a text gets a space at its start, but not what follows a special token in it."""
        name = next(token.content for token in self._special if token.content)
        after = _encode(self.backend, name + "a", False)[1:]
        return after != _encode(self.backend, "a", False)

    @cached_property
    def _added_around(self) -> tuple[list[int], list[int]]:
        """The special tokens that are added before and after a text."""
        ids, whole = (_encode(self.backend, "a", special) for special in (False, True))
        start = next(i for i in range(len(whole)) if whole[i : i + len(ids)] == ids)
        return whole[:start], whole[start + len(ids) :]

    @cached_property
    def _spaces_special_tokens(self) -> bool:
        """Whether decoding inserts text between two adjacent special tokens."""
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
    """Return the tokenizer of a folder, a tokenizer.json, a .gguf file or a hub id.

    `gguf_metadata`: metadata of the .gguf file, if already open. Raises ModelError if files are missing or unreadable.
    """
    parts = read_gguf(gguf_metadata) if gguf_metadata is not None else _read(source, revision, token, download_dir)
    tokenizer = Tokenizer(parts.backend, parts.special_tokens, parts.chat_templates, highest_id=parts.highest_id)
    try:
        tokenizer.encode(_TRIAL)
    except RequestError:  # The vocabulary lacks a character.
        pass
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    return tokenizer


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


def _highest_id(backend: tokenizers.Tokenizer) -> int:
    """Return the largest id but of added tokens, -1 if there is none."""
    size = backend.get_vocab_size(with_added_tokens=False)
    token_of = backend.model.id_to_token
    if all(token_of(index) is not None for index in range(size)):
        return size - 1
    return max(
        backend.get_vocab(with_added_tokens=False).values(), default=-1
    )  # Including them takes several times as long.


def _with_added(backend: tokenizers.Tokenizer, kept: Collection[int]) -> tokenizers.Tokenizer:
    """A copy of the tokenizer whose added tokens are only those with ids in `kept`."""
    copy = tokenizers.Tokenizer(backend.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, step)) is not None:
            setattr(copy, step, value)
    tokens = [token for id, token in sorted(backend.get_added_tokens_decoder().items()) if id in kept]
    copy.add_tokens(tokens)
    moved = [token.content for token in tokens if copy.token_to_id(token.content) != backend.token_to_id(token.content)]
    if moved:
        raise ModelError(f"the tokenizer's added tokens have gaps between their ids ({', '.join(moved[:3])} moved)")
    return copy


def _truncated_lengths(budget: int, lengths: list[int]) -> list[int]:
    """Truncate one or two lengths to `budget` in total, the longer one first."""
    if sum(lengths) <= budget:
        return lengths
    if len(lengths) == 1:
        return [budget]
    half = budget // 2
    if lengths[0] <= half:
        return [lengths[0], budget - lengths[0]]
    if lengths[1] <= half:
        return [budget - lengths[1], lengths[1]]
    return [half + budget % 2, half] if lengths[0] > lengths[1] else [half, half + budget % 2]


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    ids: list[int] = _encoding(backend, text, add_special_tokens).ids
    return ids


def _encoding(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False, *, offsets: bool = False
) -> tokenizers.Encoding:
    cancelled = CANCELLED.get()
    if cancelled is not None and cancelled.is_set():
        raise TokenisingCancelledError
    try:
        if len(text) > GIL_RELEASE_CHARS:  # `encode` holds the GIL, the batch calls do not; the fast one has no offsets
            batch = backend.encode_batch if offsets else backend.encode_batch_fast
            return batch([text], add_special_tokens=add_special_tokens)[0]
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except UnicodeEncodeError:
        raise RequestError("prompt", "the text contains half of a surrogate pair, which is not a character") from None
    except TypeError:
        if isinstance(text, str):  # some versions of the library report the surrogate as a type error
            raise RequestError("prompt", "the text contains characters that cannot be encoded as UTF-8") from None
        raise
    except Exception as error:  # The library raises it for a character that no token has.
        raise RequestError("prompt", f"the model's tokenizer cannot encode the text: {error}") from None
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ModelError(f"the tokenizer's files contradict themselves ({error}); fetch them again") from None


# Bounds on how much of a long text is tokenised, which costs seconds and hundreds of bytes per token. Long texts are
# measured chunk by chunk first: those that cannot fit are rejected, those that will be truncated are cut.


def check_length(text: str, max_tokens: int, count: CountTokens, chars_per_token: int = MAX_CHARS_PER_TOKEN) -> None:
    """Raise PromptTooLongError if a text surely has more than `max_tokens` tokens; stops measuring soon after those.

    `chars_per_token`: what one token can stand for. Longer texts than that allows are not tokenised at all.
    """
    if len(text) <= max(UNMEASURED_CHARS, _USUAL_CHARS_PER_TOKEN * max_tokens):
        return
    limit = _max_characters(max_tokens, chars_per_token)
    if len(text) > limit:
        raise _too_long(max_tokens, f"{len(text)} characters, of which at most {limit} can fit")
    counted = 0
    for seams, start in enumerate(range(0, len(text), CHUNK_CHARS)):
        counted += count(text[start : start + CHUNK_CHARS])
        if counted - seams * _SEAM_TOKENS > max_tokens:
            raise _too_long(
                max_tokens,
                f"the first {min(start + CHUNK_CHARS, len(text))} of its {len(text)} characters are {counted} tokens",
            )


def pre_truncate(
    text: str,
    tokens: int,
    side: Literal["left", "right"],
    count: CountTokens,
    chars_per_token: int = MAX_CHARS_PER_TOKEN,
) -> str:
    """Return a part of `text` that surely contains its last `tokens` tokens (first, if the `side` cut off is "right").

    Raises PromptTooLongError if that would take more characters than so few tokens can have.
    """
    if len(text) <= UNMEASURED_CHARS:
        return text
    wanted = tokens + _MARGIN_TOKENS
    limit = _max_characters(tokens, chars_per_token)
    counted = size = 0
    while counted < wanted:
        if size >= len(text):
            return text
        if size > limit:
            raise PromptTooLongError(
                "prompt",
                f"the prompt is too long: {size} of its {len(text)} characters are {counted} tokens; shorten it",
            )
        chunk = text[size : size + CHUNK_CHARS] if side == "right" else text[-size - CHUNK_CHARS : len(text) - size]
        counted += max(count(chunk) - _SEAM_TOKENS, 0)
        size += CHUNK_CHARS
    if side == "right":
        return text[:size]
    return _from_word_boundary(text[-size:])


def _from_word_boundary(text: str) -> str:
    """The text from its first space between two alphanumeric characters, if one is near: tokens begin there."""
    for at in range(1, min(_MAX_WORD_CHARS, len(text) - 1)):
        if text[at] == " " and text[at - 1].isalnum() and text[at + 1].isalnum():
            return text[at:]
    return text


def _max_characters(tokens: int, chars_per_token: int) -> int:
    return max(MIN_CHAR_LIMIT, chars_per_token * tokens)


def _too_long(limit: int, why: str) -> PromptTooLongError:
    # Clients match the first words of this message to detect that a conversation must be shortened.
    return PromptTooLongError(
        "prompt",
        f"This model's maximum context length is {limit} tokens, but the prompt is too long: {why}; "
        f"shorten it to {limit - 1} tokens or set truncate_prompt_tokens",
    )
