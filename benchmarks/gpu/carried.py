"""Files carried to a machine without a network, unpacked into a folder by the standard library and numpy alone.

A carried folder has `wheels/*.whl`, `triton-cache.tar.xz` and `model.bin` (see small_model); each may be missing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pagoda.benchmarks.gpu import small_model

WHEELS, CACHE, MODEL, ABOUT = "wheels", "triton-cache.tar.xz", "model.bin", "carry.json"
KEPT_CACHE = "triton-cache.tar.xz"
"""The cache that a run leaves in its output, to be carried next time."""


@dataclass(frozen=True)
class CarriedFiles:
    """The unpacked files."""

    site: Path  # for PYTHONPATH
    cache: Path
    unpacked: tuple[str, ...]  # wheels in `site`
    model: Path | None  # a GGUF file
    commit: str  # of the checkout


def unpack(carry: Path | None, root: Path) -> CarriedFiles:
    """Unpack everything under `root`, unless it is there already. Packages installed on the machine are left alone."""
    files = CarriedFiles(root / "site", root / "triton-cache", (), None, "")
    for folder in (files.site, files.cache):
        folder.mkdir(parents=True, exist_ok=True)
    if carry is None:
        return files
    unpacked = tuple(
        _install(wheel, files.site) for wheel in sorted((carry / WHEELS).glob("*.whl")) if _is_missing(wheel)
    )
    _fill_cache(carry / CACHE, files.cache)
    about = json.loads((carry / ABOUT).read_text()) if (carry / ABOUT).is_file() else {}
    model = root / "model.gguf" if (carry / MODEL).is_file() else None
    if model is not None and not model.is_file():
        small_model.unpack(carry / MODEL, model)
    return CarriedFiles(files.site, files.cache, unpacked, model, about.get("commit", ""))


def keep_cache(cache: Path, target: Path, before: set[str]) -> int:
    """Pack Triton's cache if it has entries besides `before`; return the number of new ones."""
    entries = cache_entries(cache)
    if new := len(entries - before):
        with (
            tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file,
            tarfile.open(fileobj=file, mode="w:xz", preset=1) as archive,
        ):
            for name in sorted(entries):
                archive.add(cache / name, name, filter=_plain)
        os.replace(file.name, target)
    return new


def cache_entries(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Skip files that a process left half written."""
    return None if "/tmp.pid_" in entry.name else entry


def _is_missing(wheel: Path) -> bool:
    """Return whether the package is missing; an installed one may be needed by others as it is."""
    try:
        importlib.metadata.version(wheel.name.split("-")[0].replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def _install(wheel: Path, site: Path) -> str:
    """Extract a wheel, without pip."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return "-".join(wheel.name.split("-")[:2])


def _fill_cache(archive: Path, cache: Path) -> None:
    """Extract the missing entries. Triton stores absolute paths, which are updated."""
    if not archive.is_file():
        return
    with tarfile.open(archive) as packed:
        existing = cache_entries(cache)
        packed.extractall(cache, [one for one in packed if one.name.split("/")[0] not in existing], filter="data")
    for group in cache.glob("*/__grp__*.json"):
        entry = json.loads(group.read_text())
        moved = {name: str(group.parent / Path(path).name) for name, path in entry["child_paths"].items()}
        group.write_text(json.dumps({"child_paths": moved}))
