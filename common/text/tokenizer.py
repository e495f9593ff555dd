"""Text to token ids and back, whole or token by token, on the `tokenizers` library (no transformers).

Reads a tokenizer.json, a vocab.json with merges.txt, or a GGUF file.
"""

from __future__ import annotations

import codecs
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, Protocol

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
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # Role -> text, such as "bos_token" -> "<s>".
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # Name -> jinja source; usually only "default".
    max_tokens: int | None = None  # A text that has surely more tokens is rejected without being tokenised.
    highest_id: int | None = None  # The highest id except those of added tokens, if known.

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
        pattern = self.special_pattern if literal else None
        if pattern is not None:
            before, after = self._added_around if add_special_tokens else ([], [])
            inner = [
                (part.start + start, part.start + end)
                for part in self._parts(text, pattern, literal, offsets=True)
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
        pattern = self.special_pattern if literal else None
        if pattern is None:
            return self.encode(text, add_special_tokens)
        self._check_length(text)
        before, after = self._added_around if add_special_tokens else ([], [])
        inner = [id for part in self._parts(text, pattern, literal) for id in part.encoding.ids[part.lead :]]
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

    def _parts(
        self, text: str, pattern: re.Pattern[str], literal: Collection[Span], *, offsets: bool = False
    ) -> Iterator[_EncodedPart]:
        """Tokenise a text in parts, in which the special tokens at the spans in `literal` are ordinary text.

        `pattern`: `special_pattern`. Where a vocabulary has a special token's text as an ordinary token, too, that text
        is split.
        """
        left, right = self._takes_space
        for stretch in stretches_of(text, pattern, frozenset(literal), left=left, right=right):
            start = stretch.start
            end = stretch.end
            if not stretch.literal:
                yield _EncodedPart(start, _encoding(self.backend, text[start:end], offsets=offsets))
                continue
            part = self._ordinary(text, start, end, offsets)
            literal_ids = {self.backend.token_to_id(text[first:last]) for first, last in stretch.literal}
            if literal_ids.isdisjoint(part.encoding.ids):
                yield part
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
        ids, with_special = (_encode(self.backend, "a", special) for special in (False, True))
        start = next(i for i in range(len(with_special)) if with_special[i : i + len(ids)] == ids)
        return with_special[:start], with_special[start + len(ids) :]

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
        if len(text) > GIL_RELEASE_CHARS:  # Only the batch calls release the GIL; the fast one has no offsets.
            batch = backend.encode_batch if offsets else backend.encode_batch_fast
            return batch([text], add_special_tokens=add_special_tokens)[0]
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except UnicodeEncodeError:
        raise RequestError("prompt", "the text contains half of a surrogate pair, which is not a character") from None
    except TypeError:
        if isinstance(text, str):  # Some versions of the library report the surrogate as a type error.
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
        raise _too_long(
            max_tokens,
            len(text) // _USUAL_CHARS_PER_TOKEN,
            f"{len(text)} characters, of which at most {limit} can fit",
        )
    counted = 0
    for seams, start in enumerate(range(0, len(text), CHUNK_CHARS)):
        counted += count(text[start : start + CHUNK_CHARS])
        if counted - seams * _SEAM_TOKENS > max_tokens:
            measured = min(start + CHUNK_CHARS, len(text))
            raise _too_long(
                max_tokens,
                counted * len(text) // measured,
                f"the first {measured} of its {len(text)} characters are {counted} tokens",
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
                num_tokens=max(len(text) // _USUAL_CHARS_PER_TOKEN, tokens + 1),
                limit=tokens,
            )
        chunk = text[size : size + CHUNK_CHARS] if side == "right" else text[-size - CHUNK_CHARS : len(text) - size]
        counted += max(count(chunk) - _SEAM_TOKENS, 0)
        size += CHUNK_CHARS
    if side == "right":
        return text[:size]
    return _from_word_boundary(text[-size:])


def _from_word_boundary(text: str) -> str:
    """The text from its first space between two alphanumeric characters, if one is near: tokens begin there."""
    for position in range(1, min(_MAX_WORD_CHARS, len(text) - 1)):
        if text[position] == " " and text[position - 1].isalnum() and text[position + 1].isalnum():
            return text[position:]
    return text


def _max_characters(tokens: int, chars_per_token: int) -> int:
    return max(MIN_CHAR_LIMIT, chars_per_token * tokens)


def _too_long(limit: int, estimate: int, why: str) -> PromptTooLongError:
    """Return the error of a text with more than `limit` tokens, about `estimate`."""
    # Clients match the first words of this message to detect that a conversation must be shortened.
    return PromptTooLongError(
        "prompt",
        f"This model's maximum context length is {limit} tokens, but the prompt is too long: {why}; "
        f"shorten it to {limit - 1} tokens or set truncate_prompt_tokens",
        num_tokens=max(estimate, limit + 1),
        limit=limit - 1,
    )


# Incremental detokenisation of one sequence, with stop strings. Streamed and whole text are equal however the tokens
# were chunked: only whole characters are emitted, and no text that may be the beginning of a stop string.

CONTEXT_TOKENS: Final = 8
"""Prompt tokens that a WindowStream decodes as context, so that the first piece keeps its leading space."""
MAX_WINDOW: Final = 64
"""Tokens a WindowStream buffers for an incomplete character; longer than any byte run that can still complete one."""
REPLACEMENT: Final = "\ufffd"

_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental text of one sequence.

    `stop`: the text ends before the first complete stop string (the longest of those that complete at the same
    character), or after it with `include_stop_str_in_output`. A stop string completed within the first `min_tokens`
    tokens is ignored. An incomplete character at the very end is dropped.
    """

    __slots__ = ("_include", "_min_tokens", "_parts", "_pending", "_stop", "_stream", "num_tokens", "stop_hit")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = open_stream(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._parts: list[str] = []  # Pieces of text that were emitted.
        # Text that is decoded but not emitted, as it may begin a stop string; all matches lie within it.
        self._pending = ""
        self.num_tokens = 0  # Number of tokens consumed, up to the one that completed a stop string.
        self.stop_hit: str | None = None  # The stop string that ended the text.

    @property
    def text(self) -> str:
        """All text emitted so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def append(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """Return the text that can be emitted now. `finished`: these are the last tokens, so emit all pending text."""
        if self.stop_hit is not None:
            return ""
        if not self._stop:
            self.num_tokens += len(token_ids)
            return self._emit(self._stream.push(token_ids))
        for token in token_ids:
            if self._completes_stop(token):
                return self._flush(len(self._pending))
        return self._flush(len(self._pending) if finished else self._safe_length())

    def _completes_stop(self, token: int) -> bool:
        """Consume one token. If it completes a stop string, truncate the pending text there and return True."""
        searched = len(self._pending)
        self._pending += self._stream.push((token,))
        self.num_tokens += 1
        if len(self._pending) == searched or self.num_tokens <= self._min_tokens:
            return False
        matches: list[tuple[int, int, str]] = []
        for stop in self._stop:
            start = self._pending.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return False
        end, start, self.stop_hit = min(matches)
        self._pending = self._pending[: end if self._include else start]
        return True

    def _safe_length(self) -> int:
        """Length of the pending text before its longest suffix that is a prefix of a stop string."""
        pending = self._pending
        safe = len(pending)
        for stop in self._stop:
            start = pending.find(stop[0], max(0, len(pending) - len(stop) + 1), safe)
            while start >= 0 and not stop.startswith(pending[start:]):
                start = pending.find(stop[0], start + 1, safe)
            if start >= 0:
                safe = start
        return safe

    def _flush(self, length: int) -> str:
        text = self._pending[:length]
        self._pending = self._pending[length:]
        return self._emit(text)

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


class TextStream(Protocol):
    """Token ids to text, piece by piece; the bytes of an incomplete character are buffered until it is whole."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text these tokens complete."""
        ...

    def peek(self, token_id: int) -> str:
        """Return the text that a token would complete if it were the next."""
        ...

    def finish(self) -> str:
        """Return what stands for an incomplete character at the end."""
        ...


class TokenPieces:
    """The text that each token adds to a sequence, as log-probabilities show it.

    A character of several tokens belongs to the token that completes it; those before it add "". Hence the tokens join
    to the text, special tokens and an incomplete character at the very end apart.
    """

    __slots__ = ("_special", "_stream", "_text_of")

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """`before`: the tokens before the sequence, such as an answer's prompt."""
        self._stream = open_stream(tokenizer, before)
        self._special = tokenizer.special_ids
        self._text_of = tokenizer.token_text

    def push(self, token_id: int) -> str:
        """Return what the next token adds."""
        return self._text_of(token_id) if token_id in self._special else self._stream.push((token_id,))

    def finish(self) -> str:
        """Return what stands for an incomplete character at the end, where the text shows one."""
        return self._stream.finish()

    def peek(self, token_id: int) -> str:
        """Return what a token would add if it were the next."""
        return self._text_of(token_id) if token_id in self._special else self._stream.peek(token_id)


def open_stream(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> TextStream:
    """Return a stream for the text that follows a prompt; options as in `Tokenizer.decode`."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    table = tokenizer.byte_table
    if table is None:
        return WindowStream(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
    at_start = table.strip_first_space and all(token in skipped for token in prompt_token_ids)
    return ByteStream(table, skipped, at_start)


class ByteStream:
    """Concatenates the tokens' bytes and decodes them as UTF-8, invalid bytes as U+FFFD. Serves nearly all tokenizers.

    Fast path for the usual case of one token of whole characters after no incomplete one: a table lookup.
    """

    __slots__ = ("_at_start", "_decoder", "_incomplete", "_skipped", "_table", "_texts")

    def __init__(self, table: TokenBytes, skipped: frozenset[int], at_start: bool) -> None:
        self._table = table
        self._texts = table.texts
        self._skipped = skipped
        self._at_start = at_start  # The next byte is the first of the text and is dropped if it is a space.
        self._decoder = _Utf8Decoder("replace")
        self._incomplete = False  # The decoder has buffered part of a character.

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text these tokens complete."""
        if len(token_ids) == 1 and not (self._incomplete or self._at_start):
            token = token_ids[0]
            if token in self._skipped:
                return ""
            text = self._texts[token]
            if text is not None:
                return text
        return self._decode(token_ids)

    def peek(self, token_id: int) -> str:
        """Return the text that a token would complete if it were the next."""
        if not (self._incomplete or self._at_start):
            text = self._texts[token_id]
            if text is not None:
                return text if token_id not in self._skipped else ""
        data = b"" if token_id in self._skipped else self._table[token_id]
        if self._at_start:
            data = data.removeprefix(b" ")
        return codecs.utf_8_decode(self._decoder.getstate()[0] + data, "replace", False)[0]

    def finish(self) -> str:
        """Return what stands for an incomplete character at the end."""
        return self._decoder.decode(b"", True)

    def _decode(self, token_ids: Sequence[int]) -> str:
        table = self._table
        skipped = self._skipped
        data = b"".join([table[token] for token in token_ids if token not in skipped])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        text = self._decoder.decode(data)
        self._incomplete = bool(self._decoder.getstate()[0])
        return text


class WindowStream:
    """Decodes a short window with and without the new token; the difference is the new text. Serves any tokenizer.

    Window tokens [0, read) are already emitted and serve as context until the next character is whole.
    """

    __slots__ = ("_read", "_skip", "_spaces", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip: bool, spaces: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._spaces = spaces
        visible = [token for token in prompt_token_ids if not (skip and token in tokenizer.special_ids)]
        self._window = visible[-CONTEXT_TOKENS:]
        self._read = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text these tokens complete."""
        return "".join([self._push(token) for token in token_ids])

    def peek(self, token_id: int) -> str:
        """Return the text that a token would complete if it were the next."""
        window = list(self._window)
        read = self._read
        text = self._push(token_id)
        self._window = window
        self._read = read
        return text

    def finish(self) -> str:
        """Return what stands for an incomplete character at the end."""
        return self._text(self._window)[len(self._text(self._window[: self._read])) :]

    def _push(self, token_id: int) -> str:
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        before = self._text(self._window[: self._read])
        after = self._text(self._window)
        unread = len(self._window) - self._read
        if unread < MAX_WINDOW and (len(after) <= len(before) or after.endswith(REPLACEMENT)):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return after[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip, self._spaces)
