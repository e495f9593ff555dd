"""Resolve the MODEL argument to a local path, downloading from the Hugging Face hub if needed.

    folder, file.gguf, folder:Q8_0, org/name, org/name:Q4_K_M

The part after the colon selects one of several GGUF files: a quantisation or a file name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Final

from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.weights.gguf.file import SPLIT_NAME

STORED_TOKEN: Final = "stored"
"""Value of `token` that selects the token stored by the hub's client."""

_COMMON_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
_WEIGHT_FILES = {"safetensors": ("model*.safetensors",), "pt": ("pytorch_model*.bin",), "sharded_state": ("arrays/*",)}
_MODULE_FILES = ("*_Dense/model.safetensors", "*_Dense/pytorch_model.bin", "*_linear.pt")
_TIMEOUT_S = 10.0
_REMEDY = "give a local folder, a .gguf file or a hub id such as org/name"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """What to download of a repository."""

    patterns: tuple[str, ...]
    gguf: str | None = None  # The file to open, if the model is a GGUF file.


@dataclass(frozen=True, slots=True)
class _Repository:
    name: str
    quant: str
    revision: str | None
    token: str | bool | None  # None: the hub's client chooses; True: its stored token.
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
    """Return the local path of MODEL. For a hub id, download config, tokenizer and the weights of one format.

    `weights`: False skips the weights, except a GGUF file, which contains config and tokenizer. `token`: see
    STORED_TOKEN. `ignore_patterns`: files of a repository to skip. Python files are downloaded, to be searched for
    keys of config.json; this runs none.

    Raises ModelError if the file does not exist, or the repository is unknown, not accessible or not reachable.
    """
    path = named_path(model)
    if path is not None:
        return path
    name, quant = split_quant(model)
    hub_token = True if token == STORED_TOKEN else token
    repository = _Repository(name, quant, revision, hub_token, download_dir, tuple(ignore_patterns))

    def plan(names: Sequence[str]) -> DownloadPlan:
        return plan_download(names, load_format, quant=quant, weights=weights)

    return _resolve_on_hub(repository, plan)


def named_path(model: str) -> Path | None:
    """Return what `local_path` returns; None for a hub id. Raises ModelError for a name that is neither."""
    path = local_path(model)
    if path is not None:
        return path
    if "://" in model:
        raise ModelError(
            f"{model}: models are not read from object stores; copy it to a folder first (gcloud storage cp -r, or "
            "aws s3 cp --recursive), or mount the bucket (gcsfuse)"
        )
    if not is_hub_id(split_quant(model)[0]):
        raise ModelError(f"{model or 'MODEL'}: no such file or folder; {_REMEDY}")
    return None


def local_path(model: str) -> Path | None:
    """Return the file or folder of that name, or the GGUF file of `folder:QUANT`; None if there is none.

    Raises ModelError if QUANT matches no file of the folder, or several.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    name, quant = split_quant(model)
    folder = Path(name).expanduser()
    if not quant or not folder.is_dir():
        return None
    try:
        return folder / pick_gguf(_gguf_files(folder), quant)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None


def is_local(model: str) -> bool:
    """Whether MODEL is on disk, so that opening it downloads nothing."""
    return local_path(model) is not None


def split_quant(model: str) -> tuple[str, str]:
    """Split `name:QUANT`; QUANT may be empty."""
    name, colon, quant = model.rpartition(":")
    return (name, quant) if colon and name and "/" not in quant else (model, "")


def is_hub_id(model: str) -> bool:
    """Return whether MODEL has the form of a hub id, without its quantisation."""
    parts = model.split("/")
    allowed = all(part and all(char.isalnum() or char in "-_." for char in part) for part in parts)
    return allowed and len(parts) <= 2 and model[0] not in ".~" and not model.endswith((".gguf", ".safetensors"))


def _resolve_on_hub(repository: _Repository, plan: Callable[[Sequence[str]], DownloadPlan]) -> Path:
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
        return _download(repository, plan)
    except errors.LocalTokenNotFoundError:
        raise ConfigError("--hf-token", "no token is stored; log in with `hf auth login`, or give one") from None
    except (errors.GatedRepoError, errors.DisabledRepoError):
        raise ModelError(
            f"{name}: access to it is restricted; accept its terms on the hub and set HF_TOKEN or --hf-token"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name}: the hub has no revision {repository.revision}; drop or correct --revision") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{name}: no such folder here and no such public model on the hub; {_REMEDY}, "
            "or set HF_TOKEN or --hf-token for a private one"
        ) from None
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    except Exception as error:  # Network errors differ between versions of the hub's client.
        reason = str(error).strip().partition("\n")[0]
        return _cached(repository, f"the hub cannot be reached ({reason})")


def _download(repository: _Repository, plan: Callable[[Sequence[str]], DownloadPlan]) -> Path:
    """Download the missing files; return the snapshot's folder or its GGUF file."""
    import huggingface_hub as hub

    info = hub.HfApi(token=repository.token).model_info(
        repository.name, revision=repository.revision, timeout=_TIMEOUT_S
    )
    names = [file.rfilename for file in info.siblings or ()]
    wanted = plan([name for name in names if not any(fnmatchcase(name, pattern) for pattern in repository.ignored)])
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
    """Path of an earlier download, for offline use."""
    folder = _snapshot(repository)
    if folder is None:
        raise ModelError(
            f"{repository.name}: no such folder here, not downloaded before, and {why}; "
            "check the network or give a local folder"
        )
    try:
        path = folder / pick_gguf(_gguf_files(folder), repository.quant) if repository.quant else folder
    except ModelError as error:
        raise ModelError(f"{repository.name}: {why}, and of an earlier download: {error}") from None
    logger.info("%s: %s; using the earlier download %s", repository.name, why, path)
    return path


def was_downloaded(model: str, revision: str | None, download_dir: str | None) -> bool:
    """Return whether there is an earlier download of a hub id."""
    try:
        return _snapshot(_Repository(split_quant(model)[0], "", revision, None, download_dir, ())) is not None
    except ImportError:  # Without the hub's client; resolve_model says so.
        return False


def _snapshot(repository: _Repository) -> Path | None:
    """Folder of an earlier download, if any."""
    import huggingface_hub as hub

    folder: str | None
    try:
        folder = hub.snapshot_download(
            repository.name, revision=repository.revision, cache_dir=repository.cache, local_files_only=True
        )
    except Exception as error:
        # Newer clients raise for a partial snapshot, with its path in the error.
        folder = getattr(error, "snapshot_path", None)
    return None if folder is None else Path(folder)


def plan_download(names: Sequence[str], load_format: str, *, quant: str = "", weights: bool = True) -> DownloadPlan:
    """Select a repository's files to download: config, tokenizer, and the weights of one format.

    Raises ModelError if that format is GGUF and the choice of file is ambiguous.
    """
    if quant and load_format in _WEIGHT_FILES:
        raise ModelError(f":{quant} names a GGUF file, but --load-format is {load_format}; drop one of them")
    if load_format == "dummy" and not quant and "config.json" in names:
        return DownloadPlan(_COMMON_FILES)
    if load_format != "gguf" and not quant:
        for kind in (load_format,) if load_format in _WEIGHT_FILES else tuple(_WEIGHT_FILES):
            patterns = _WEIGHT_FILES[kind]
            if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
                beside = [name for name in names if any(fnmatchcase(name, module) for module in _MODULE_FILES)]
                return DownloadPlan((*_COMMON_FILES, *patterns, *beside) if weights else _COMMON_FILES)
        if load_format in _WEIGHT_FILES or not any(name.endswith(".gguf") for name in names):
            return DownloadPlan(_COMMON_FILES)
    file = pick_gguf(names, quant)
    return DownloadPlan((*_COMMON_FILES, *_parts(names, file)), file)


_NO_MODELS: Final = ("mmproj", "imatrix")  # Name parts of GGUF files that are not language models.


def _gguf_files(folder: Path) -> list[str]:
    """Relative paths of the .gguf files in a folder and its sub-folders."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))


def pick_gguf(names: Sequence[str], quant: str = "") -> str:
    """Return the only GGUF model among `names`, or the one selected by `quant`: Q4_K_M (any case) or a file name.

    Of a model split into several files it is the first.

    Raises ModelError, listing the files, if none or several match.
    """
    files = [name for name in names if _is_model(name)]
    if not files:
        raise ModelError("it has no GGUF file; " + (f"drop :{quant}" if quant else "drop --load-format gguf"))
    matches = [name for name in files if _matches(name, quant)] if quant else files
    if not matches:
        raise ModelError(f"no GGUF file in it is {quant}; there are: {', '.join(files)}")
    if len(matches) > 1 and _parts(names, matches[0]) == sorted(matches):
        return min(matches)
    if len(matches) > 1:
        example = PurePosixPath(matches[0]).stem
        raise ModelError(f"it has several GGUF files; name one after a colon, like :{example}: {', '.join(matches)}")
    return matches[0]


def _parts(names: Sequence[str], file: str) -> list[str]:
    """Return the names of all parts of the split model that `file` is a part of; of a whole model only `file`."""
    stem, parts = SPLIT_NAME.subn("", file)
    return sorted(name for name in names if parts and SPLIT_NAME.sub("", name) == stem) or [file]


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF model that lies in a folder, None without one. Raises ModelError for several."""
    names = sorted(path.name for path in folder.glob("*.gguf"))
    try:
        return folder / pick_gguf(names) if names else None
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


def _is_model(name: str) -> bool:
    base = PurePosixPath(name).name.lower()
    return base.endswith(".gguf") and not any(word in base for word in _NO_MODELS)


def _matches(name: str, quant: str) -> bool:
    """Whether `quant` is the file's name or a separated part of it: Q4_K does not match x-Q4_K_M.gguf."""
    path = PurePosixPath(name)
    if quant in (path.name, path.stem):
        return True
    stem = SPLIT_NAME.sub("", path.name).removesuffix(".gguf")
    return re.search(rf"(?:^|[-._]){re.escape(quant)}(?:$|[-.])", stem, re.IGNORECASE) is not None
