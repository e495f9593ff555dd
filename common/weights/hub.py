"""From what the user calls MODEL to a path on disk: a folder, a .gguf file, or a repository of the Hugging Face hub.

    folder, file.gguf, folder:Q8_0, org/name, org/name:Q4_K_M

What follows the colon names one of several GGUF files: a quantisation, or the file itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.weights.gguf.file import pick_gguf, with_models

STORED_TOKEN: Final = "stored"
"""In place of a token: the one that the hub's client keeps."""

_COMMON_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHT_FILES = {"safetensors": ("model*.safetensors",), "pt": ("pytorch_model*.bin",), "sharded_state": ("arrays/*",)}
_MODULE_FILES = ("*_Dense/model.safetensors", "*_Dense/pytorch_model.bin")
_TIMEOUT_S = 10.0
_REMEDY = "give a local folder, a .gguf file or a hub id such as org/name"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of a repository: patterns of the files to fetch, and the GGUF file that is the model, if one is."""

    patterns: tuple[str, ...]
    gguf: str | None = None


@dataclass(frozen=True, slots=True)
class _Repository:
    """Where and how to fetch. `token`: None leaves the choice to the hub's client, True is the stored one."""

    name: str
    quant: str
    revision: str | None
    token: str | bool | None
    cache: str | None
    ignored: tuple[str, ...]


def resolve_model(
    model: str,
    load_format: str = "auto",
    *,
    weights: bool = True,
    revision: str | None = None,
    token: str | None = None,
    download_dir: str | None = None,
    ignore_patterns: Sequence[str] = (),
) -> Path:
    """The local path of MODEL. From a hub id, config, tokenizer and the weights of one format are downloaded.

    `weights`: False fetches no weights, except a GGUF file, which holds config and tokenizer too. `token`: `stored`
    means the one that the hub's client keeps. `ignore_patterns`: files of a repository that are not fetched.

    Raises ModelError when there is no such file, or the hub does not know, show or reach the repository.
    """
    path = local_path(model)
    if path is not None:
        return path
    name, quant = split_quant(model)
    if not _is_hub_id(name):
        raise ModelError(f"{model or 'MODEL'}: no such file or folder; {_REMEDY}")
    use = True if token == STORED_TOKEN else token
    repository = _Repository(name, quant, revision, use, download_dir, tuple(ignore_patterns))
    return _found(repository, lambda names: wanted_files(names, load_format, quant=quant, weights=weights))


def local_path(model: str) -> Path | None:
    """The file or folder of that name, or the GGUF file that `folder:QUANT` names; None when there is none.

    Raises ModelError when QUANT names none of the folder's files, or several.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    name, quant = split_quant(model)
    folder = Path(name).expanduser()
    if not quant or not folder.is_dir():
        return None
    try:
        return folder / pick_gguf(with_models(folder), quant)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None


def is_local(model: str) -> bool:
    """Whether MODEL is on disk, so that opening it fetches nothing."""
    return local_path(model) is not None


def split_quant(model: str) -> tuple[str, str]:
    """`name:QUANT` in two; no QUANT is an empty one."""
    name, colon, quant = model.rpartition(":")
    return (name, quant) if colon and name and "/" not in quant else (model, "")


def _is_hub_id(model: str) -> bool:
    parts = model.split("/")
    allowed = all(part and all(char.isalnum() or char in "-_." for char in part) for part in parts)
    return allowed and len(parts) <= 2 and model[0] not in ".~" and not model.endswith((".gguf", ".safetensors"))


def _found(repository: _Repository, choose: Callable[[Sequence[str]], Wanted]) -> Path:
    name = repository.name
    try:
        from huggingface_hub import constants, errors
    except ImportError:
        raise ModelError(
            f"{name}: no such file or folder, and fetching it from the hub needs: pip install huggingface_hub"
        ) from None
    if constants.HF_HUB_OFFLINE:
        return _cached(repository, "HF_HUB_OFFLINE is set")
    try:
        return _downloaded(repository, choose)
    except errors.LocalTokenNotFoundError:
        raise ConfigError("--hf-token", "no token is stored; log in with `hf auth login`, or give one") from None
    except (errors.GatedRepoError, errors.DisabledRepoError):
        raise ModelError(
            f"{name}: the hub does not show it to you; accept its terms there and set HF_TOKEN or --hf-token"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name}: the hub has no revision {repository.revision}; drop or mend --revision") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{name}: no such folder here and no such public model on the hub; {_REMEDY}, "
            "or set HF_TOKEN or --hf-token for a private one"
        ) from None
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    except Exception as error:  # each version of the hub's client has its own network errors; all mean unreachable
        reason = str(error).strip().partition("\n")[0]
        return _cached(repository, f"the hub cannot be reached ({reason})")


def _downloaded(repository: _Repository, choose: Callable[[Sequence[str]], Wanted]) -> Path:
    """Fetch what is wanted and not there yet: the repository's folder, or its GGUF file."""
    import huggingface_hub as hub

    info = hub.HfApi(token=repository.token).model_info(
        repository.name, revision=repository.revision, timeout=_TIMEOUT_S
    )
    names = [file.rfilename for file in info.siblings or ()]
    kept = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in repository.ignored)]
    wanted = choose(kept)
    folder = Path(
        hub.snapshot_download(
            repository.name,
            revision=repository.revision,
            token=repository.token,
            cache_dir=repository.cache,
            allow_patterns=list(wanted.patterns),
            ignore_patterns=list(repository.ignored) or None,
        )
    )
    return folder / wanted.gguf if wanted.gguf else folder


def _cached(repository: _Repository, why: str) -> Path:
    """The copy of an earlier download, for a machine that is offline."""
    folder = _snapshot(repository)
    if folder is None:
        raise ModelError(
            f"{repository.name}: no such folder here, not downloaded before, and {why}; "
            "check the network or give a local folder"
        )
    try:
        path = folder / pick_gguf(with_models(folder), repository.quant) if repository.quant else folder
    except ModelError as error:
        raise ModelError(f"{repository.name}: {why}, and of an earlier download: {error}") from None
    logger.info("%s: %s; using the earlier download %s", repository.name, why, path)
    return path


def _snapshot(repository: _Repository) -> Path | None:
    """The folder of an earlier download; None when there is none."""
    import huggingface_hub as hub

    found: str | None
    try:
        found = hub.snapshot_download(
            repository.name, revision=repository.revision, cache_dir=repository.cache, local_files_only=True
        )
    except Exception as error:
        # Newer clients call a snapshot of some of a repository's files incomplete, and say where it is.
        found = getattr(error, "snapshot_path", None)
    return None if found is None else Path(found)


def wanted_files(names: Sequence[str], load_format: str, *, quant: str = "", weights: bool = True) -> Wanted:
    """Of a repository's files, those to fetch: what describes the model, and its weights in one format only.

    Raises ModelError where that format is GGUF and there is a choice to make.
    """
    if quant and load_format in _WEIGHT_FILES:
        raise ModelError(f":{quant} names a GGUF file, but --load-format is {load_format}; drop one of them")
    if load_format == "dummy" and not quant and "config.json" in names:
        return Wanted(_COMMON_FILES)
    if load_format != "gguf" and not quant:
        for kind in (load_format,) if load_format in _WEIGHT_FILES else tuple(_WEIGHT_FILES):
            patterns = _WEIGHT_FILES[kind]
            if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
                beside = [name for name in names if any(fnmatchcase(name, module) for module in _MODULE_FILES)]
                return Wanted((*_COMMON_FILES, *patterns, *beside) if weights else _COMMON_FILES)
        if load_format in _WEIGHT_FILES or not any(name.endswith(".gguf") for name in names):
            return Wanted(_COMMON_FILES)
    file = pick_gguf(names, quant)
    return Wanted((*_COMMON_FILES, file), file)
