"""From MODEL to a path, with a hub that answers from a table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from pagoda.common.errors import ModelError
from pagoda.common.weights.hub import resolve_model, wanted_files


class Hub:
    """Stands in for the client: `problem` is raised by whatever goes to the network."""

    def __init__(self, folder: Path, files: tuple[str, ...] = (), problem: Exception | None = None) -> None:
        self.folder, self.files, self.problem = folder, files, problem
        self.cached = False
        self.asked: dict[str, Any] = {}

    def model_info(self, model: str, **kwargs: Any) -> Any:
        if self.problem:
            raise self.problem
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def snapshot_download(self, model: str, **kwargs: Any) -> str:
        if kwargs.get("local_files_only") and not self.cached:
            raise errors.LocalEntryNotFoundError("nothing here")
        self.asked = {"model": model, **kwargs}
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub(tmp_path, ("config.json", "model.safetensors", "pytorch_model.bin"))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token=None: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_local_paths_need_no_hub(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


@pytest.mark.parametrize("model", ["", "/no/where", "./no", "../no", "~/no", "no.gguf", "a/b/c", "with space", "a//b"])
def test_what_cannot_be_a_hub_id_is_a_wrong_path(model: str, hub: Hub) -> None:
    with pytest.raises(ModelError, match="no such file or folder; give a local folder"):
        resolve_model(model)
    assert not hub.asked


def test_downloads_one_format(hub: Hub) -> None:
    assert resolve_model("org/name", revision="v1", token="t", download_dir="/d") == hub.folder
    assert hub.asked["model"] == "org/name"
    assert (hub.asked["revision"], hub.asked["token"], hub.asked["cache_dir"]) == ("v1", "t", "/d")
    patterns = hub.asked["allow_patterns"]
    assert "model*.safetensors" in patterns
    assert "*.json" in patterns
    assert not any(".bin" in pattern or "gguf" in pattern for pattern in patterns)


def test_wanted_files() -> None:
    assert "pytorch_model*.bin" in wanted_files(["pytorch_model.bin", "x.gguf"], "auto")
    assert "*.gguf" in wanted_files(["x.gguf"], "auto")
    assert "*.gguf" in wanted_files(["x.gguf", "model.safetensors"], "gguf")
    assert not any("model" in pattern for pattern in wanted_files(["model.safetensors"], "dummy") if "safe" in pattern)
    with pytest.raises(ModelError, match=r"several GGUF files; .*: x.gguf, y.gguf"):
        wanted_files(["x.gguf", "y.gguf"], "auto")


def test_a_choice_of_gguf_files_names_the_model(hub: Hub) -> None:
    hub.files = ("x.gguf", "y.gguf")
    with pytest.raises(ModelError, match=r"^org/name: it holds several GGUF files"):
        resolve_model("org/name")


def _http(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("no",)
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.RepositoryNotFoundError, "no such public model on the hub"),
        (errors.GatedRepoError, "accept its terms there and set HF_TOKEN"),
        (errors.RevisionNotFoundError, "the hub has no revision v1"),
        (errors.OfflineModeIsEnabled, "not downloaded before, and the hub cannot be reached"),
        (ConnectionError, "the hub cannot be reached"),
    ],
)
def test_problems_are_one_line_with_a_remedy(kind: type[Exception], message: str, hub: Hub) -> None:
    hub.problem = _http(kind)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model("org/name", revision="v1")
    assert str(caught.value).startswith("org/name: ")
    assert "\n" not in str(caught.value)


def test_an_earlier_download_serves_offline(hub: Hub) -> None:
    hub.problem, hub.cached = ConnectionError("no network\nat all"), True
    assert resolve_model("org/name", revision="v1") == hub.folder
    assert hub.asked["revision"] == "v1"
