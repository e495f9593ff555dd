"""Read and write the tokenizer files of a model folder, in the layout of the Hugging Face hub.

tokenizer.json is the tokenizer, bos and eos included; tokenizer_config.json names the special tokens and may contain
the chat template (newer models: chat_template.jinja). Its `add_bos_token` and `add_eos_token` apply only without a
tokenizer.json, as in transformers. sentence_bert_config.json may request lower-casing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from pagoda.common.errors import ModelError, reading

ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BYTE_LEVEL_CLASSES: Final = ("GPT2Tokenizer", "GPT2TokenizerFast")
"""Tokenizer classes fully described by vocab.json and merges.txt: byte-level BPE with GPT-2's pre-tokenizer."""

_UNSUPPORTED_FILES: Final = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "*.tiktoken")


_REMEDY: Final = "fetch the file again"


@dataclass(frozen=True, eq=False)
class TokenizerParts:
    """A tokenizer as read from its files."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # Role -> text, such as "bos_token" -> "<s>".
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # Name -> jinja source.
    highest_id: int | None = (
        None  # The highest id except those of added tokens; None if only reading every token would tell.
    )


def add_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Set the post-processor that adds `bos` before and `eos` after the text; None adds nothing."""
    first, second = (_with_ends(text, segment, bos, eos) for segment, text in enumerate(("$A", "$B")))
    backend.post_processor = processors.TemplateProcessing(
        single=first,
        pair=[*first, *second],
        special_tokens=[(token, _id(backend, token)) for token in dict.fromkeys((bos, eos)) if token is not None],
    )


def _with_ends(text: str, segment: int, bos: str | None, eos: str | None) -> list[str]:
    return [f"{piece}:{segment}" for piece in (bos, text, eos) if piece is not None]


def _id(backend: tokenizers.Tokenizer, token: str) -> int:
    token_id = backend.token_to_id(token)
    assert token_id is not None, token
    return token_id


def read_folder(folder: Path) -> TokenizerParts:
    """Return the tokenizer of a model folder. Raises ModelError if it is missing or unreadable."""
    config = _read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _read_vocab_and_merges(folder, config)
    else:
        raise ModelError(_missing(folder))
    backend.no_truncation()
    backend.no_padding()
    special = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    with reading(folder / "tokenizer_config.json", _REMEDY):
        _add_tokens(backend, config, special)
        templates = _chat_templates(folder, config)
    if not (folder / "tokenizer.json").is_file():
        add_ends(
            backend,
            special.get("bos_token") if config.get("add_bos_token") else None,
            special.get("eos_token") if config.get("add_eos_token") else None,
        )
    if _read_json(folder / "sentence_bert_config.json").get("do_lower_case"):
        before = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
    return TokenizerParts(backend, special, templates)


def write_folder(folder: Path, parts: TokenizerParts) -> None:
    """Write a tokenizer in the layout that `read_folder` and transformers read. Raises OSError."""
    parts.backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    for name, source in parts.chat_templates.items():
        path = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")


def is_panic(error: BaseException) -> bool:
    """Return whether it is a panic of the Rust code of the library tokenizers, whose type cannot be imported."""
    return type(error).__name__ == "PanicException"


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # The library raises bare Exception; its panics are not even that.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(f"{path}: cannot be read ({error}); fetch the file again") from None


def _read_vocab_and_merges(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    kind = config.get("tokenizer_class", BYTE_LEVEL_CLASSES[0])
    if kind not in BYTE_LEVEL_CLASSES:
        raise ModelError(_missing(folder))
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except BaseException as error:  # The library raises bare Exception here, too.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(f"{folder}: vocab.json and merges.txt cannot be read ({error}); fetch them again") from None
    backend = tokenizers.Tokenizer(model)
    prefix = bool(config.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    return backend


def _missing(folder: Path) -> str:
    names = sorted(path.name for pattern in _UNSUPPORTED_FILES for path in folder.glob(pattern))
    if (folder / "vocab.json").is_file():
        names.append("vocab.json")
    if not names:
        return (
            f"{folder}: no tokenizer: tokenizer.json is missing; copy it from the model's repository, name another "
            "folder with --tokenizer, or serve token ids only with --skip-tokenizer-init"
        )
    return (
        f"{folder}: has {', '.join(names)} but no tokenizer.json; make one with `pip install transformers` and "
        f"`AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})`"
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    token_texts = {role: _token_text(config.get(role)) for role in ROLES}
    return {role: text for role, text in token_texts.items() if text is not None}


def _token_text(token: object) -> str | None:
    """Text of a token given as a string, or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add the tokens that the config names and the backend lacks: first those listed by id, then special tokens."""
    added_texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    by_id = [_added_token(listed[key]) for key in sorted(listed, key=int)]
    backend.add_tokens([token for token in by_id if token.content not in added_texts])
    added_texts.update(token.content for token in by_id)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    names: Iterable[object] = extra.values() if isinstance(extra, Mapping) else extra
    wanted = [*special.values(), *(text for name in names if (text := _token_text(name)) is not None)]
    new = [text for text in dict.fromkeys(wanted) if text not in added_texts]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in new])


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    rules = {
        key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in entry
    }
    return AddedToken(str(entry["content"]), **rules)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> jinja source. .jinja files take precedence over entries in JSON files."""
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if (folder / "chat_template.jinja").is_file():
        files.append(folder / "chat_template.jinja")
    if files:
        return {_template_name(path): path.read_text(encoding="utf-8") for path in files}
    entry = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, Mapping):
        return {str(name): str(source) for name, source in entry.items()}
    return {str(item["name"]): str(item["template"]) for item in entry or ()}


def _template_name(path: Path) -> str:
    return "default" if path.name == "chat_template.jinja" else path.stem


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file does not exist."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object; fetch the file again")
    return value
