"""The wheel holds what the tree holds: every package is listed, every public name resolves."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {"pagoda"}
    for top in ("common", "backends", "kernels_pallas", "server"):
        for init in (ROOT / top).rglob("__init__.py"):
            present.add("pagoda." + ".".join(init.parent.relative_to(ROOT).parts))
    assert listed == present


def test_every_module_lives_in_a_package() -> None:
    for top in ("common", "backends", "server"):
        for module in (ROOT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


def test_public_names_resolve() -> None:
    import pagoda

    for name in pagoda.__all__:
        assert getattr(pagoda, name) is not None
