"""Build a tokenizer from the metadata of a GGUF file.

GGUF stores a vocabulary and the name of a pre-tokenizer rule, not a pipeline. `tokenizer.ggml.model` "gpt2" is
byte-level BPE: tokens, merges, and `tokenizer.ggml.pre` for the rule. "llama" is sentencepiece BPE: tokens and scores,
higher scores merge first. "bert" is WordPiece, "t5" sentencepiece's unigram model, "gemma4" merges over marked text.
Source: the GGUF specification (ggml project) and llama.cpp's vocabulary loader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import repeat
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pagoda.common.errors import ModelError
from pagoda.common.text.gguf_merges import merges_from_scores
from pagoda.common.text.gguf_splits import ADD_BOS, IGNORE_MERGES, RAW_TEXT, SPLITS, splitter
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


_MATCHED_WHOLE: Final = (int(TokenType.CONTROL), int(TokenType.USER_DEFINED))

ROLE_KEYS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # The format spells it so.
    "mask_token": "mask_token_id",
}


def read_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Return the tokenizer described by a GGUF file's metadata. Raises ModelError if absent or unsupported."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or not metadata.get("tokenizer.ggml.tokens"):
        raise ModelError("the GGUF file has no tokenizer; name the original model's folder with --tokenizer")
    rule = str(metadata.get("tokenizer.ggml.pre", "default"))
    if kind == "gpt2" and rule in RAW_TEXT:
        kind = "gemma4"
    build = _KINDS.get(str(kind))
    if build is None:
        raise ModelError(
            f"the GGUF file's tokenizer {kind!r} is not supported ({', '.join(_KINDS)} are); "
            "name the original model's folder with --tokenizer"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = np.asarray(metadata.get("tokenizer.ggml.token_type") or [], np.int64)
    byte_level = kind == "gpt2"
    if not byte_level and not len(types):
        types = np.full(len(tokens), TokenType.NORMAL)
    if kind in ("llama", "gemma4"):
        tokens = _lookup_spelling(tokens, types)
    elif kind == "bert":
        tokens = _wordpiece_spelling(tokens, types)
    special = _special_tokens(metadata, tokens)
    try:
        backend = build(metadata, tokens, types, special)
    except ModelError:
        raise
    except Exception as error:  # The library raises bare Exception.
        raise _broken(error) from None
    _add_tokens(backend, tokens, types, special, str(metadata.get("general.name", "")), byte_level)
    bos, eos = _ends(metadata, str(kind), rule, special)
    sep = special.get("sep_token") if _flag(metadata, "add_sep_token", False) else None
    if kind in ("bert", "t5"):
        _pair_ends(backend, bos, eos, None if kind == "bert" else sep)
    elif sep is not None:
        _pair_ends(backend, bos, eos, sep)
    else:
        add_ends(backend, bos, eos)
    return TokenizerParts(backend, special, _chat_templates(metadata), highest_id=len(tokens) - 1)


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Array, special: Mapping[str, str]
) -> tokenizers.Tokenizer:
    rule = str(metadata.get("tokenizer.ggml.pre", "default"))
    split = SPLITS.get(rule)
    if split is None:
        raise ModelError(
            f"the GGUF file's splitting rule tokenizer.ggml.pre = {rule!r} is not known here; "
            "name the original model's folder with --tokenizer"
        )
    model = models.BPE(
        vocab=dict(zip(tokens, range(len(tokens)))),
        merges=_merges(metadata),
        ignore_merges=rule in IGNORE_MERGES,
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = splitter(split)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Array, special: Mapping[str, str]
) -> tokenizers.Tokenizer:
    merges = merges_from_scores(
        tokens,
        _need(metadata, "scores"),
        (types == TokenType.NORMAL) | (types == TokenType.UNUSED),
        (types == TokenType.BYTE) | (types == TokenType.UNKNOWN),
    )
    backend = tokenizers.Tokenizer(_byte_fallback_model(tokens, merges, special))
    normal: list[Any] = [normalizers.Replace(" ", SPACE_MARK)]
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normal.insert(0, normalizers.Prepend(SPACE_MARK))
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(normal)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merged_text(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Array, special: Mapping[str, str]
) -> tokenizers.Tokenizer:
    """Merged pairs over text with marked spaces; lines are merged apart from the runs of newlines between them."""
    merges = _merges(metadata)
    if not any("\n" in left for left, _ in merges):
        runs = [token.strip("\n") == "" for token in tokens]
        merges += merges_from_scores(tokens, [-len(token) for token in tokens], runs)
    backend = tokenizers.Tokenizer(_byte_fallback_model(tokens, merges, special))
    backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), behavior="isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _byte_fallback_model(
    tokens: Sequence[str], merges: list[tuple[str, str]], special: Mapping[str, str]
) -> models.BPE:
    return models.BPE(
        vocab=dict(zip(tokens, range(len(tokens)))),
        merges=merges,
        unk_token=special.get("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )


def _wordpiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Array, special: Mapping[str, str]
) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=special["unk_token"]))
    lowercase = _flag(metadata, "normalizer.lowercase", True)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=_flag(metadata, "normalizer.strip_accents", lowercase)
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _unigram(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Array, special: Mapping[str, str]
) -> tokenizers.Tokenizer:
    """A unigram model. Only ordinary tokens keep their scores, since an unknown character costs 10 below the worst."""
    scores = np.where(types == TokenType.NORMAL, np.asarray(_need(metadata, "scores"), np.float64), 0.0)
    worst = scores.min(initial=0.0)
    scores[(types == TokenType.BYTE) | (types == TokenType.UNUSED)] = worst
    model = models.Unigram(
        list(zip(tokens, scores.tolist())),
        unk_id=metadata.get("tokenizer.ggml.unknown_token_id", 2),
        byte_fallback=bool(np.any(types == TokenType.BYTE)),
    )
    backend = tokenizers.Tokenizer(model)
    if charsmap := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        backend.normalizer = normalizers.Precompiled(bytes(value & 0xFF for value in charsmap))
    words = _flag(metadata, "remove_extra_whitespaces", False)
    scheme = "always" if words or _flag(metadata, "add_space_prefix", True) else "never"
    marked: Any = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme)
    split: Any = pre_tokenizers.WhitespaceSplit()
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, marked]) if words else marked
    backend.decoder = decoders.Metaspace(SPACE_MARK, prepend_scheme=scheme)
    return backend


_Build = Callable[[Mapping[str, Any], Sequence[str], Array, Mapping[str, str]], tokenizers.Tokenizer]
_KINDS: Final[dict[str, _Build]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "bert": _wordpiece,
    "t5": _unigram,
    "gemma4": _merged_text,
}
"""`tokenizer.ggml.model` -> builder from metadata, tokens as spelled for lookup, their types and the special tokens."""


def _ends(
    metadata: Mapping[str, Any], kind: str, rule: str, special: Mapping[str, str]
) -> tuple[str | None, str | None]:
    """Return the tokens put before and after every text.

    A gemma4 vocabulary adds none, whatever the file states: the model's chat template writes its bos.
    """
    if kind == "bert":
        return special.get("bos_token"), special.get("sep_token")
    if kind == "gemma4":
        return None, None
    add_bos = _flag(metadata, "add_bos_token", kind == "llama" or (kind == "gpt2" and rule in ADD_BOS))
    add_eos = _flag(metadata, "add_eos_token", kind == "t5")
    return special.get("bos_token") if add_bos else None, special.get("eos_token") if add_eos else None


def _pair_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None, sep: str | None) -> None:
    """Set the post-processor of an encoder: bos A eos, and bos A eos [sep] B eos for a pair."""
    first = [piece for piece in (bos and f"{bos}:0", "$A:0", eos and f"{eos}:0") if piece]
    second = [piece for piece in (sep and f"{sep}:1", "$B:1", eos and f"{eos}:1") if piece]
    ends = dict.fromkeys(token for token in (bos, eos, sep) if token is not None)
    backend.post_processor = processors.TemplateProcessing(
        single=first, pair=first + second, special_tokens=[(token, backend.token_to_id(token)) for token in ends]
    )


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs to merge, best first. The space between the two is not the first character."""
    merges = _need(metadata, "merges")
    pairs = [(left, right) for left, _, right in map(str.partition, merges, repeat(" "))]
    if "" in map(itemgetter(0), pairs):
        cuts = ((merge, merge.find(" ", 1)) for merge in merges)
        pairs = [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]
    return pairs


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{key}", default))


def _wordpiece_spelling(tokens: Sequence[str], types: Array) -> list[str]:
    """Spell words without the file's leading mark, and the continuations of words with ##."""
    return [
        token.removeprefix(SPACE_MARK)
        if token.startswith(SPACE_MARK) or kind == TokenType.CONTROL or (token[:1] == "[" and token[-1:] == "]")
        else f"##{token}"
        for token, kind in zip(tokens, types.tolist())
    ]


def _lookup_spelling(tokens: Sequence[str], types: Array) -> list[str]:
    """Spell tokens as they are looked up: user-defined ones with real spaces, all others with space marks.

    User-defined tokens are matched in the raw text, others after spaces became marks; some files spell tokens that are
    runs of spaces with real ones.
    """
    spelled = list(tokens)
    blank = np.fromiter(map(str.isspace, tokens), np.bool_, len(tokens))
    for i in np.flatnonzero(blank).tolist():
        if not tokens[i].strip(" "):
            spelled[i] = SPACE_MARK * len(tokens[i])
    for i in np.flatnonzero(types == TokenType.USER_DEFINED).tolist():
        spelled[i] = tokens[i].replace(SPACE_MARK, " ")
    return spelled


def _add_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    types: Array,
    special: Mapping[str, str],
    model_name: str,
    byte_level: bool,
) -> None:
    """Register special tokens (control tokens and those with a role) and user-defined ones, which are matched whole.

    All are in the vocabulary and keep their ids. In a byte-level vocabulary, a control token with a character outside
    the byte alphabet is left alone, as the original tokenizer treats it as text.
    """
    alphabet = set(byte_alphabet()) if byte_level else None
    roles = set(special.values())
    trims = re.search("phi-?3", model_name, re.IGNORECASE) is not None
    added: list[AddedToken] = []
    types = types[: len(tokens)]
    matched = np.isin(types, _MATCHED_WHOLE) | np.fromiter(map(roles.__contains__, tokens), np.bool_, len(types))
    for i, kind in zip(np.flatnonzero(matched).tolist(), types[matched].tolist()):
        token = tokens[i]
        is_special = kind != TokenType.USER_DEFINED or token in roles
        if not is_special or alphabet is None or alphabet.issuperset(token):
            rstrip = trims and token not in _UNTRIMMED
            added.append(AddedToken(token, special=is_special, normalized=False, rstrip=rstrip))
    if not len(types):
        added = [AddedToken(token, special=True, normalized=False) for token in sorted(roles)]
    backend.add_tokens(added)  # All are added by one call, as every call rebuilds the matcher.


_UNTRIMMED: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Special tokens of Phi-3 that keep the white space after them, which GGUF does not state."""


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    special: dict[str, str] = {}
    defaults = _DEFAULT_IDS if metadata["tokenizer.ggml.model"] == "bert" else {}
    for role, key in ROLE_KEYS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}", defaults.get(role))
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            special[role] = tokens[token_id]
    return special


_DEFAULT_IDS: Final = {"bos_token": 101, "unk_token": 100, "sep_token": 102, "pad_token": 0, "mask_token": 103}
"""Ids that a file of BERT's vocabulary need not state."""


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template."
    templates = {key.removeprefix(prefix): str(value) for key, value in metadata.items() if key.startswith(prefix)}
    default = metadata.get("tokenizer.chat_template")
    return templates if default is None else {**templates, "default": str(default)}


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise ModelError(f"the GGUF file's tokenizer lacks tokenizer.ggml.{key}; fetch the file again")
    return value


def _broken(error: Exception) -> ModelError:
    return ModelError(f"the GGUF file's tokenizer is inconsistent ({error}); fetch the file again")
