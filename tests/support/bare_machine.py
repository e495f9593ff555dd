"""A machine that lacks packages which this one has, for processes: they see those alone that lie outside site-packages.

`bare(folder, absent)` makes a folder for PYTHONPATH whose sitecustomize hides the packages; `carry(folder, names)`
makes wheels of what is installed here.
"""

from __future__ import annotations

import importlib.metadata
import zipfile
from pathlib import Path

HIDE = """
import importlib.abc, importlib.machinery, importlib.metadata, sys

ABSENT, MODULES = {names!r}, {modules!r}
outside = lambda: [path for path in sys.path if "site-packages" not in path]


class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in MODULES:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, outside() if path is None else path)
        if found is None:
            raise ModuleNotFoundError(f"No module named {{name!r}}, as on a bare machine", name=name)
        return found


find = importlib.metadata.MetadataPathFinder.find_distributions


def distributions(context=importlib.metadata.DistributionFinder.Context()):
    if context.name is not None and context.name.lower().replace("_", "-") in ABSENT:
        context = importlib.metadata.DistributionFinder.Context(name=context.name, path=outside())
    return find(context)


importlib.metadata.MetadataPathFinder.find_distributions = staticmethod(distributions)
sys.meta_path.insert(0, Hidden())
"""


def bare(folder: Path, absent: tuple[str, ...]) -> Path:
    """`absent`: distributions, whose modules are hidden too."""
    modules = {path.parts[0].partition(".")[0] for name in absent for path in _files(name)}
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE.format(names=set(absent), modules=modules))
    return folder


def carry(folder: Path, names: tuple[str, ...]) -> None:
    """Wheels of distributions that are installed here, for this Python."""
    folder.mkdir(parents=True)
    for name in names:
        installed = importlib.metadata.distribution(name)
        with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{installed.version}-py3-none-any.whl", "w") as wheel:
            for path in _files(name):
                wheel.write(str(installed.locate_file(path)), str(path))


def _files(name: str) -> list[importlib.metadata.PackagePath]:
    files = importlib.metadata.distribution(name).files or []
    return [path for path in files if path.parts[0] != ".." and "__pycache__" not in path.parts]
