"""pagoda under the name `vllm`: what programs that use vLLM import from it.

`tests/data/vllm_users.tsv` has import statements of public programs: repository, commit, file, statement, and the
reason if pagoda refuses it. stanfordnlp/dspy at 4ed377ee imports nothing of vLLM: it speaks to a server.
"""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.byte_text import byte_tokenizer
from support.suite.rows import each_row

import pagoda
from pagoda.server.vllm import stand_in
from pagoda.server.vllm.modules import MISSING, MODULES, PROGRAMS, VLLM_VERSION
from pagoda.server.vllm.tokenizer_view import HfTokenizer

USERS = Path(__file__).parents[2] / "data" / "vllm_users.tsv"
ROWS = [
    (f"{row['repository']} {row['statement']}"[:80], row["statement"], row["reason"])
    for row in csv.DictReader(USERS.read_text(encoding="utf-8").splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
]


@pytest.fixture(autouse=True, scope="module")
def vllm() -> Iterator[Any]:
    """The package `vllm`, for the tests of this file."""
    path = list(sys.path)
    finders = list(sys.meta_path)
    environment = os.environ.get("PYTHONPATH")
    stand_in.install()
    yield importlib.import_module("vllm")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.path[:] = path
    sys.meta_path[:] = finders
    if environment is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = environment


@each_row(("name", "statement", "reason"), ROWS)
def test_imports_of_programs(name: str, statement: str, reason: str) -> None:
    names: dict[str, Any] = {}
    if reason:
        with pytest.raises(ImportError) as caught:
            exec(statement, names)
        assert reason in str(caught.value)
    else:
        exec(statement, names)


def test_names_are_pagodas_objects(vllm: Any) -> None:
    assert vllm.LLM is pagoda.LLM
    assert importlib.import_module("vllm.sampling_params").SamplingParams is pagoda.SamplingParams
    assert (vllm.__version__, version("vllm")) == (VLLM_VERSION, VLLM_VERSION)
    assert importlib.import_module("vllm.version").__version__ == VLLM_VERSION
    assert importlib.import_module("pagoda.version").__version__ == pagoda.__version__


@each_row("name", [*MODULES, *PROGRAMS])
def test_every_path_exists(name: str) -> None:
    assert importlib.import_module(f"vllm.{name}").__name__ == f"vllm.{name}"


@each_row("name", MISSING)
def test_missing_paths_have_a_reason(name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(f"vllm.{name}")
    assert MISSING[name] in str(caught.value)


def test_unknown_names_are_refused(vllm: Any) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"there is no vllm\.nothing: pagoda, which stands in for vLLM"):
        importlib.import_module("vllm.nothing")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vllm.nothing
    params = importlib.import_module("vllm.sampling_params")
    with pytest.raises(AttributeError, match="use StructuredOutputsParams"):
        _ = params.GuidedDecodingParams
    assert not hasattr(params, "Nothing")
    assert not hasattr(importlib.import_module("vllm"), "common"), "pagoda's own folders have no name in vLLM"


def test_vllm_itself_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", sys)
    with pytest.raises(ImportError, match="vLLM itself was imported before"):
        stand_in.install()


def test_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = importlib.import_module("vllm.envs")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert (envs.VLLM_SERVER_DEV_MODE, envs.VLLM_LOGGING_LEVEL, envs.VLLM_API_KEY) == (1, "debug", None)
    with pytest.raises(AttributeError, match="VLLM_NOTHING has no counterpart"):
        _ = envs.VLLM_NOTHING


def test_what_programs_do_with_parameters_and_tokenizers() -> None:
    params = pagoda.SamplingParams(temperature=0.5, stop="x", n=2)
    copied = pagoda.SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__})  # outlines
    assert copied == params
    tokenizer = HfTokenizer(byte_tokenizer())
    tokenizer.pad_token_id = tokenizer.eos_token_id  # lm_eval
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<eos>", 256)
    tokenizer.pad_token = "<eos>"
    with pytest.raises(ValueError, match="no token 'nothing'"):
        tokenizer.pad_token = "nothing"
    template = importlib.import_module("vllm.renderers.hf").resolve_chat_template
    assert template(tokenizer, None, None, model_config=None) == tokenizer.chat_template
    assert template(tokenizer, "given", None, model_config=None) == "given"


PROGRAM = "import os, sys, vllm; print(vllm.SamplingParams.__module__, os.environ['PYTHONPATH'], *sys.argv[1:])"


def test_a_program_and_its_children_import_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pagoda.as_vllm", str(tmp_path / "script.py"), "an argument"]
    run = subprocess.run(command, capture_output=True, text=True)
    module, path, argument = run.stdout.split(" ", 2)
    assert (module, argument) == ("pagoda.common.sampling_params", "an argument\n"), run.stderr
    assert path.split(os.pathsep)[0] == str(stand_in.FOLDER), "what a child process finds first"


def test_programs_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert stand_in.main([]) == 2
    assert "usage: python -m pagoda.as_vllm" in capsys.readouterr().err
    assert stand_in.main(["there-is-none"]) == 2
    assert "no script and no command 'there-is-none'" in capsys.readouterr().err
