"""vLLM's import paths."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
from support.suite.rows import each_row

import pagoda
from pagoda.server.vllm import modules
from pagoda.server.vllm.modules import MISSING, MODULES, PROGRAMS, RENAMED

PACKAGES = sorted({name[:index] for name in MODULES for index, letter in enumerate(name) if letter == "."})


@each_row("name", MODULES)
def test_a_path_holds_pagodas_objects(name: str) -> None:
    module = import_module(f"pagoda.{name}")
    for word in MODULES[name].split():
        word, _, alias = word.partition(":")
        home, own = RENAMED.get(word) or (modules.HOMES[word], word)
        assert getattr(module, alias or word) is getattr(import_module(home), own)


@each_row("name", PACKAGES)
def test_what_is_above_a_path_is_a_package(name: str) -> None:
    assert import_module(f"pagoda.{name}").__path__ == []


@each_row("name", pagoda._NAMES)
def test_top_level_names(name: str) -> None:
    assert getattr(pagoda, name) is modules.public_object(name)


@each_row("name", MISSING)
def test_features_that_do_not_exist_are_named(name: str) -> None:
    for path in (f"pagoda.{name}", f"pagoda.{name}.something"):
        with pytest.raises(ImportError, match=f"there is no pagoda.{name}.*: "):
            import_module(path)


def test_other_paths_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pagoda\.nothing"):
        import_module("pagoda.nothing")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from pagoda.sampling_params import Nothing")
    assert find_spec("pagoda.server.llm").origin.endswith("llm.py")


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run(name: str) -> None:
    run = subprocess.run([sys.executable, "-m", f"pagoda.{name}", "--help"], capture_output=True, text=True)
    assert run.returncode == 0
    assert "usage" in run.stdout
