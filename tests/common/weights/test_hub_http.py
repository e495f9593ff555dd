"""The real hub client against a local HTTP hub: requests, cached files, and offline use."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.servers.hub_server import HubServer

from pagoda.common.errors import ModelError
from pagoda.common.weights.hub import resolve_model
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import open_model
from pagoda.server.settings.tokenizer import open_tokenizer

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickled",
    "modeling_trap.py": b"raise SystemExit",
    "original/a/params.json": b"{}",
}
QUANTS = {"m-Q8_0.gguf": b"eight", "m-Q4_0.gguf": b"four", "config.json": b"{}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    repositories = {
        "org/m": {"main": FILES, "v1": {**FILES, "model.safetensors": b"older"}},
        "org/q": {"main": QUANTS},
    }
    with HubServer(repositories) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        yield server


def test_one_format_is_fetched(hub: HubServer) -> None:
    folder = resolve_model("org/m", ignore_patterns=("original/**/*",))
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert hub.fetched == {"config.json", "tokenizer.json", "model.safetensors", "modeling_trap.py"}


def test_without_weights(hub: HubServer) -> None:
    folder = resolve_model("org/m", weights=False, ignore_patterns=("original/**/*",))
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "modeling_trap.py"}


def test_revisions(hub: HubServer) -> None:
    assert (resolve_model("org/m", revision="v1") / "model.safetensors").read_bytes() == b"older"
    with pytest.raises(ModelError, match=r"^org/m: the hub has no revision v2"):
        resolve_model("org/m", revision="v2")


def test_a_revision_is_that_of_every_file(hub: HubServer) -> None:
    """Of the model's files and, unless --tokenizer-revision names another, of the tokenizer's."""

    def revisions(**settings: str) -> tuple[set[str], set[str]]:
        hub.requests.clear()
        config = EngineArgs(model="org/m", revision="v1", **settings).create_engine_config()
        with suppress(ModelError):  # the files have no content
            open_model(config, weights=True)
        model = commits(hub)
        hub.requests.clear()
        with suppress(ModelError):
            open_tokenizer(config)
        return model, commits(hub)

    model, tokenizer = revisions()
    assert len(model) == 1
    assert tokenizer == model
    assert main_of(hub).isdisjoint(model)
    assert revisions(tokenizer_revision="main") == (model, main_of(hub))


def commits(hub: HubServer) -> set[str]:
    """What the requests since the last clearing asked for: revisions by name as the commits that they are."""
    shas = {revision: sha for (name, revision), (sha, _) in hub._commits.items() if name == "org/m"}
    paths = [re.search(r"/(?:resolve|revision|tree)/([^/]+)", path) for path, _ in hub.requests]
    assert all(paths), [path for path, _ in hub.requests]
    return {shas.get(path[1], path[1]) for path in paths if path}


def main_of(hub: HubServer) -> set[str]:
    return {hub._commits["org/m", "main"][0]}


def test_a_token_goes_with_the_requests(hub: HubServer, tmp_path: Path) -> None:
    resolve_model("org/m", token="secret", weights=False)
    assert "secret" in hub.tokens
    hub.requests.clear()
    (tmp_path / "token").write_text("kept")
    resolve_model("org/q:Q8_0", token="stored")
    assert "kept" in hub.tokens
    assert "secret" not in hub.tokens


def test_stored_token_must_be_there(hub: HubServer) -> None:
    with pytest.raises(ValueError, match=r"--hf-token: no token is stored; log in with `hf auth login`"):
        resolve_model("org/m", token="stored")


def test_download_dir_and_ignored_files(hub: HubServer, tmp_path: Path) -> None:
    folder = resolve_model("org/m", download_dir=str(tmp_path / "mine"), ignore_patterns=("*.safetensors",))
    assert folder.is_relative_to(tmp_path / "mine")
    assert "pytorch_model.bin" in hub.fetched  # the next best format
    assert not (folder / "model.safetensors").exists()


def test_a_quantisation_is_one_file(hub: HubServer) -> None:
    path = resolve_model("org/q:Q4_0")
    assert path.read_bytes() == b"four"
    assert hub.fetched == {"config.json", "m-Q4_0.gguf"}


def test_offline_uses_the_earlier_download(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, file = resolve_model("org/m"), resolve_model("org/q:Q4_0")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with caplog.at_level(logging.INFO):
        assert resolve_model("org/m") == folder
        assert resolve_model("org/q:Q4_0") == file
    assert f"org/m: HF_HUB_OFFLINE is set; using the earlier download {folder}" in caplog.text
    assert not hub.requests
    with pytest.raises(ModelError, match="not downloaded before, and HF_HUB_OFFLINE is set"):
        resolve_model("org/other")
    with pytest.raises(ModelError, match=r"of an earlier download: no GGUF file in it is Q8_0; there are: m-Q4_0.gguf"):
        resolve_model("org/q:Q8_0")


@pytest.mark.variable("HF_HUB_OFFLINE")
def test_hf_hub_offline_keeps_a_process_off_the_network(hub: HubServer, tmp_path: Path) -> None:
    folder = resolve_model("org/m")
    hub.requests.clear()
    program = "from pagoda.common.weights.hub import resolve_model; print(resolve_model('org/m'))"
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(folder)
    assert not hub.requests


def test_an_unreachable_hub_falls_back_to_the_earlier_download(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model("org/m")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("org/m") == folder
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        resolve_model("org/q")
