"""From what the user calls MODEL to a path on disk: a folder, a .gguf file, or a repository of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from pagoda.common.errors import ModelError

_COMMON_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHT_FILES = {
    "safetensors": ("model*.safetensors",),
    "pt": ("pytorch_model*.bin",),
    "gguf": ("*.gguf",),
}
_TIMEOUT_S = 10.0
_REMEDY = "give a local folder, a .gguf file or a hub id such as org/name"


def resolve_model(
    model: str,
    load_format: str = "auto",
    *,
    revision: str | None = None,
    token: str | None = None,
    download_dir: str | None = None,
) -> Path:
    """The local path of MODEL. A hub id is downloaded (config, tokenizer and the weights of one format).

    Raises ModelError when there is no such file, or the hub does not know, show or reach the repository.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    if not _is_hub_id(model):
        raise ModelError(f"{model or 'MODEL'}: no such file or folder; {_REMEDY}")
    return _download(model, load_format, revision, token, download_dir)


def _is_hub_id(model: str) -> bool:
    parts = model.split("/")
    allowed = all(part and all(char.isalnum() or char in "-_." for char in part) for part in parts)
    return allowed and len(parts) <= 2 and model[0] not in ".~" and not model.endswith((".gguf", ".safetensors"))


def _download(model: str, load_format: str, revision: str | None, token: str | None, cache: str | None) -> Path:
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        raise ModelError(
            f"{model}: no such file or folder, and fetching it from the hub needs: pip install huggingface_hub"
        ) from None
    try:
        info = hub.HfApi(token=token).model_info(model, revision=revision, timeout=_TIMEOUT_S)
        patterns = wanted_files([file.rfilename for file in info.siblings or ()], load_format)
        return Path(
            hub.snapshot_download(model, revision=revision, token=token, cache_dir=cache, allow_patterns=patterns)
        )
    except (errors.GatedRepoError, errors.DisabledRepoError):
        raise ModelError(f"{model}: the hub does not show it to you; accept its terms there and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{model}: the hub has no revision {revision}") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{model}: no such folder here and no such public model on the hub; {_REMEDY}, "
            "or set HF_TOKEN for a private one"
        ) from None
    except ModelError as error:
        raise ModelError(f"{model}: {error}") from None
    except Exception as error:  # each version of the hub's client has its own network errors; all mean unreachable
        return _cached(model, revision, cache, error)


def _cached(model: str, revision: str | None, cache: str | None, cause: Exception) -> Path:
    """The copy of an earlier download, for a machine that is offline."""
    import huggingface_hub as hub

    try:
        return Path(hub.snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception:
        reason = str(cause).strip().partition("\n")[0]
        raise ModelError(
            f"{model}: no such folder here, not downloaded before, and the hub cannot be reached ({reason}); "
            "check the network or give a local folder"
        ) from None


def wanted_files(names: Sequence[str], load_format: str) -> list[str]:
    """Of a repository's files, the patterns to fetch: what describes the model, and its weights in one format only.

    Raises ModelError where that format is GGUF and there is a choice to make.
    """
    order = ("safetensors", "pt", "gguf") if load_format == "auto" else (load_format,)
    for kind in order:
        patterns = _WEIGHT_FILES.get(kind, ())
        found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if kind == "gguf" and len(found) > 1:
            raise ModelError(f"it holds several GGUF files; download one and give its path: {', '.join(found)}")
        if found:
            return [*_COMMON_FILES, *patterns]
    return list(_COMMON_FILES)
