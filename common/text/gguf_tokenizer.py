"""Build a tokenizer from the metadata of a GGUF file.

GGUF stores a vocabulary and the name of a pre-tokenizer rule, not a pipeline. `tokenizer.ggml.model` "gpt2" is
byte-level BPE: tokens, merges, and `tokenizer.ggml.pre` for the rule. "llama" is sentencepiece BPE: tokens and scores,
higher scores merge first. Source: the GGUF specification (ggml project) and llama.cpp's vocabulary loader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pagoda.common.errors import ModelError
from pagoda.common.text.token_bytes import SPACE_MARK, byte_alphabet
from pagoda.common.text.tokenizer_files import TokenizerParts, add_ends

Array = npt.NDArray[Any]


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_MATCHED_WHOLE: Final = frozenset({int(TokenType.CONTROL), int(TokenType.USER_DEFINED)})

ROLE_KEYS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # the format's own spelling
    "mask_token": "mask_token_id",
}

# Parts of the pre-tokenizer expressions.
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD: Final = r"[^\r\n\p{L}\p{N}]?"
_PATH_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

GPT2: Final = "gpt2"
SINGLE_DIGITS: Final = "single digits"
"""GPT-2's rule after splitting off each digit."""
LLAMA3: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_ENDS}"
QWEN2: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_ENDS}"
QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDS}"
)
TEKKEN: Final = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_PATH_SIGNS}|{_ENDS}"
GPT4O: Final = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_PATH_SIGNS}|{_ENDS}"
)
SPLITS: Final[dict[str, str]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), SINGLE_DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), QWEN2),
    "qwen35": QWEN35,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
}
"""`tokenizer.ggml.pre` -> pre-tokenizer: a regular expression, GPT2 or SINGLE_DIGITS."""

IGNORE_MERGES: Final = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken"})
"""Rules under which a piece that is itself a token skips merging, and bos is added unless the file overrides it."""


def read_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Return the tokenizer described by a GGUF file's metadata. Raises ModelError if absent or unsupported."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or not metadata.get("tokenizer.ggml.tokens"):
        raise ModelError("the GGUF file has no tokenizer; name the original model's folder with --tokenizer")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"the GGUF file's tokenizer {kind!r} is not supported (gpt2 and llama are); "
            "name the original model's folder with --tokenizer"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    rule = str(metadata.get("tokenizer.ggml.pre", "default"))
    byte_level = kind == "gpt2"
    if not byte_level:
        types = types or [TokenType.NORMAL] * len(tokens)
        tokens = _lookup_spelling(tokens, types)
    special = _special_tokens(metadata, tokens)
    backend = _byte_level(metadata, tokens, rule) if byte_level else _sentencepiece(metadata, tokens, types, special)
    _add_tokens(backend, tokens, types, set(special.values()), byte_level)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", not byte_level or rule in IGNORE_MERGES)
    add_ends(
        backend,
        special.get("bos_token") if add_bos else None,
        special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return TokenizerParts(backend, special, _chat_templates(metadata))


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], rule: str) -> tokenizers.Tokenizer:
    split = SPLITS.get(rule)
    if split is None:
        raise ModelError(
            f"the GGUF file's splitting rule tokenizer.ggml.pre = {rule!r} is not known here; "
            "name the original model's folder with --tokenizer"
        )
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _need(metadata, "merges"))]
    try:
        model = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=rule in IGNORE_MERGES
        )
    except Exception as error:  # the library raises bare Exception
        raise _broken(error) from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _splitter(split)
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitter(split: str) -> pre_tokenizers.PreTokenizer:
    if split == GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == SINGLE_DIGITS:
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    first = pre_tokenizers.Split(Regex(split), behavior="isolated")
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], special: Mapping[str, str]
) -> tokenizers.Tokenizer:
    kinds = np.asarray(types)
    try:
        merges = merges_from_scores(
            tokens, _need(metadata, "scores"), (kinds == TokenType.NORMAL) | (kinds == TokenType.UNUSED)
        )
        model = models.BPE(
            vocab=dict(zip(tokens, range(len(tokens)))),
            merges=merges,
            unk_token=special.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise _broken(error) from None
    backend = tokenizers.Tokenizer(model)
    normal: list[Any] = [normalizers.Replace(" ", SPACE_MARK)]
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normal.insert(0, normalizers.Prepend(SPACE_MARK))
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(normal)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _lookup_spelling(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Spell tokens as they are looked up: user-defined ones with real spaces, all others with space marks.

    User-defined tokens are matched in the raw text, others after spaces became marks; some files spell tokens that are
    runs of spaces with real ones.
    """
    spelled = [SPACE_MARK * len(token) if token[:1] == " " and not token.strip(" ") else token for token in tokens]
    for i in np.flatnonzero(np.asarray(types) == TokenType.USER_DEFINED).tolist():
        spelled[i] = tokens[i].replace(SPACE_MARK, " ")
    return spelled


def _add_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    roles: Collection[str],
    byte_level: bool,
) -> None:
    """Register special tokens (control tokens and those with a role) and user-defined ones, which are matched whole.

    All are in the vocabulary and keep their ids. In a byte-level vocabulary, a control token with a character outside
    the byte alphabet is left alone, as the original tokenizer treats it as text.
    """
    alphabet = set(byte_alphabet()) if byte_level else None
    added: list[AddedToken] = []
    for token, kind in zip(tokens, types):
        if kind in _MATCHED_WHOLE or token in roles:
            special = kind != TokenType.USER_DEFINED or token in roles
            if not special or alphabet is None or alphabet.issuperset(token):
                added.append(AddedToken(token, special=special, normalized=False))
    if not types:
        added = [AddedToken(token, special=True, normalized=False) for token in sorted(roles)]
    backend.add_tokens(added)  # in one call: every call rebuilds the matcher


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    special: dict[str, str] = {}
    for role, key in ROLE_KEYS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            special[role] = tokens[token_id]
    return special


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): str(value) for key, value in metadata.items() if key.startswith(prefix)}
    default = metadata.get("tokenizer.chat_template")
    return named if default is None else {**named, "default": str(default)}


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise ModelError(f"the GGUF file's tokenizer lacks tokenizer.ggml.{key}; fetch the file again")
    return value


def _broken(error: Exception) -> ModelError:
    return ModelError(f"the GGUF file's tokenizer is inconsistent ({error}); fetch the file again")


# The merges that a sentencepiece vocabulary implies.

_BASE: Final = 0x9E3779B97F4A7C15  # odd, so that powers of it have inverses modulo 2**64
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_FILTER_BITS: Final = 22
_GUESS_BITS: Final = 20
_CHUNK_TOKENS: Final = 1 << 14  # temporaries of a chunk fit the CPU cache


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool] | Array
) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a mergeable token, highest score first, then by id.

    A large vocabulary has about two million split positions; candidates are filtered by 64-bit hashes in numpy. A hash
    collision would yield a pair that is no token, which the library rejects (about one vocabulary in ten million).
    The order among the splits of one token does not matter: earlier merges leave at most one of them.
    Raises ValueError if the lengths differ. Source: Kudo and Richardson, "SentencePiece" (2018), section 3.
    """
    if not len(tokens) == len(scores) == len(mergeable):
        raise ValueError(f"{len(tokens)} tokens, {len(scores)} scores and {len(mergeable)} types")
    union, left, right = _splits(tokens, np.asarray(mergeable, np.bool_))
    order = np.argsort(-np.asarray(scores, np.float64)[union], kind="stable")
    texts = np.array(tokens, np.object_)
    return list(zip(texts[left[order]].tolist(), texts[right[order]].tolist()))


def _splits(tokens: Sequence[str], mergeable: Array) -> tuple[Array, Array, Array]:
    """Ids of (token, left part, right part) for every split of a mergeable token into two tokens, by token id."""
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    text = _HashedText("".join(tokens))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    ids = _Ids(text.hashes(starts, ends))
    parts: list[tuple[Array, Array, Array]] = []
    for first in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = slice(first, first + _CHUNK_TOKENS)
        begin, sizes = starts[first], lengths[chunk]
        left = text.prefixes(starts[chunk], sizes)  # for each character of a token: the part before it
        candidate = np.repeat(mergeable[chunk], sizes) & ids.possible(left)
        candidate[starts[chunk][sizes > 0] - begin] = False  # the empty prefix
        at = np.flatnonzero(candidate)
        union = np.repeat(np.arange(first, first + len(sizes)), sizes)[at]
        left, right = left[at], text.hashes(at + begin, ends[union])
        known = ids.possible(right)
        union, pair = union[known], (ids.of(left[known]), ids.of(right[known]))
        known = (pair[0] >= 0) & (pair[1] >= 0)
        parts.append((union[known], pair[0][known], pair[1][known]))
    union, left, right = (np.concatenate(column) for column in zip(*parts))
    return union, left, right


class _HashedText:
    """Polynomial hash of any substring: the sum of (character + 1) * base**position, shifted back to position 0."""

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        self._sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum((codes + np.uint64(1)) * _powers(_BASE, len(codes)), out=self._sums[1:])
        self._back = _powers(pow(_BASE, -1, 1 << 64), len(self._sums))

    def hashes(self, start: Array, end: Array) -> Array:
        """Hashes of the substrings [start, end); equal substrings have equal hashes at any position."""
        hashes: Array = (self._sums[end] - self._sums[start]) * self._back[start]
        return hashes

    def prefixes(self, start: Array, length: Array) -> Array:
        """Hashes of all prefixes (from length 0) of consecutive substrings, concatenated."""
        positions = slice(start[0], start[-1] + length[-1])
        hashes: Array = self._sums[positions] - np.repeat(self._sums[start], length)
        hashes *= np.repeat(self._back[start], length)
        return hashes


class _Ids:
    """Index from hash to position in `hashes`."""

    def __init__(self, hashes: Array) -> None:
        self._hashes = hashes
        self._order = np.argsort(hashes)
        self._sorted = hashes[self._order]
        self._used = np.zeros(1 << _FILTER_BITS, np.bool_)
        self._used[_slot(hashes, _FILTER_BITS)] = True
        self._guess = np.zeros(1 << _GUESS_BITS, np.int32)
        self._guess[_slot(hashes, _GUESS_BITS)] = np.arange(len(hashes))

    def possible(self, hashes: Array) -> Array:
        """False for most hashes that are not in the index (a one-hash Bloom filter)."""
        return self._used[_slot(hashes, _FILTER_BITS)]

    def of(self, hashes: Array) -> Array:
        """Position of each hash, -1 if absent."""
        positions = self._guess[_slot(hashes, _GUESS_BITS)]
        missed = np.flatnonzero(self._hashes[positions] != hashes)
        at = np.minimum(np.searchsorted(self._sorted, hashes[missed]), len(self._sorted) - 1)
        positions[missed] = np.where(self._sorted[at] == hashes[missed], self._order[at], -1)
        return positions


def _powers(base: int, count: int) -> Array:
    """base**0, base**1, ... modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, out=powers)


def _slot(hashes: Array, bits: int) -> Array:
    slots = hashes >> np.uint64(29)
    slots ^= hashes
    slots *= _MIX
    slots >>= np.uint64(64 - bits)
    return slots
