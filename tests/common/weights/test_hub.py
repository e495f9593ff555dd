"""Resolving MODEL to a path, with a fake hub client."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from support.suite.rows import each_row

from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.weights.hub import DownloadPlan, gguf_in, is_local, pick_gguf, plan_download, resolve_model


class Hub:
    """A fake hub client; `problem` is raised by every network call."""

    def __init__(self, folder: Path, files: tuple[str, ...] = (), problem: Exception | None = None) -> None:
        self.folder, self.files, self.problem = folder, files, problem
        self.cached = False
        self.request: dict[str, Any] = {}

    def model_info(self, model: str, **kwargs: Any) -> Any:
        if self.problem:
            raise self.problem
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def snapshot_download(self, model: str, **kwargs: Any) -> str:
        if kwargs.get("local_files_only") and not self.cached:
            raise errors.LocalEntryNotFoundError("nothing here")
        self.request = {"model": model, **kwargs}
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
def test_invalid_hub_ids_are_reported_as_missing_paths(model: str, hub: Hub) -> None:
    with pytest.raises(ModelError, match="no such file or folder; give a local folder"):
        resolve_model(model)
    assert not hub.request


def test_downloads_one_format(hub: Hub) -> None:
    assert resolve_model("org/name", revision="v1", token="t", download_dir="/d") == hub.folder
    assert hub.request["model"] == "org/name"
    assert (hub.request["revision"], hub.request["token"], hub.request["cache_dir"]) == ("v1", "t", "/d")
    patterns = hub.request["allow_patterns"]
    assert "model*.safetensors" in patterns
    assert "*.json" in patterns
    assert not any(".bin" in pattern or "gguf" in pattern for pattern in patterns)


COMMON = plan_download([], "auto").patterns
SAFETENSORS = (*COMMON, "model*.safetensors")
TORCH = (*COMMON, "pytorch_model*.bin")


@each_row(
    ("names", "load_format", "wanted"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin", "x.gguf"], "auto", DownloadPlan(SAFETENSORS)),
        (["config.json", "model.safetensors", "pytorch_model.bin"], "pt", DownloadPlan(TORCH)),
        (["config.json", "model.safetensors", "x.gguf"], "gguf", DownloadPlan((*COMMON, "x.gguf"), "x.gguf")),
        (["config.json", "model.safetensors", "x.gguf"], "dummy", DownloadPlan(COMMON)),
        (["pytorch_model.bin", "x.gguf"], "auto", DownloadPlan(TORCH)),
        (["pytorch_model.bin", "x.gguf"], "safetensors", DownloadPlan(COMMON)),
        (["config.json", "x.gguf"], "auto", DownloadPlan((*COMMON, "x.gguf"), "x.gguf")),
        (["config.json", "x.gguf", "y.gguf"], "dummy", DownloadPlan(COMMON)),
        (["x.gguf", "mmproj-x.gguf"], "dummy", DownloadPlan((*COMMON, "x.gguf"), "x.gguf")),
        (["tokenizer.json"], "auto", DownloadPlan(COMMON)),
        (
            ["model.safetensors", "2_Dense/pytorch_model.bin"],
            "auto",
            DownloadPlan((*SAFETENSORS, "2_Dense/pytorch_model.bin")),
        ),
    ],
)
def test_plan_download_selects_files(names: list[str], load_format: str, wanted: DownloadPlan) -> None:
    assert plan_download(names, load_format) == wanted


def test_without_weights_only_config_and_tokenizer_are_downloaded() -> None:
    assert plan_download(["config.json", "model.safetensors"], "auto", weights=False) == DownloadPlan(COMMON)
    # A GGUF file contains config and tokenizer, so it is downloaded anyway.
    assert plan_download(["x.gguf"], "auto", weights=False).gguf == "x.gguf"


def test_a_quantisation_names_the_file() -> None:
    names = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "model.safetensors", "config.json"]
    assert plan_download(names, "auto", quant="q8_0") == DownloadPlan((*COMMON, "m-Q8_0.gguf"), "m-Q8_0.gguf")
    with pytest.raises(ModelError, match=r"no GGUF file in it is Q2_K; there are: m-Q4_K_M.gguf, m-Q8_0.gguf"):
        plan_download(names, "auto", quant="Q2_K")
    with pytest.raises(ModelError, match=r":Q8_0 names a GGUF file, but --load-format is safetensors"):
        plan_download(names, "safetensors", quant="Q8_0")
    with pytest.raises(ModelError, match=r"it has no GGUF file; drop :Q8_0"):
        plan_download(["model.safetensors"], "auto", quant="Q8_0")


@pytest.mark.parametrize("quant", ["Q2_K", "Model-1B-Q2_K-00001-of-00002"])
def test_all_parts_of_a_split_model_are_downloaded(quant: str) -> None:
    first, second = (f"Q2_K/Model-1B-Q2_K-0000{part}-of-00002.gguf" for part in (1, 2))
    assert plan_download(FILES, "auto", quant=quant) == DownloadPlan((*COMMON, first, second), first)


def test_a_folder_with_a_split_model_is_one_model(tmp_path: Path) -> None:
    for part in (1, 2):
        (tmp_path / f"m-0000{part}-of-00002.gguf").touch()
    assert gguf_in(tmp_path) == tmp_path / "m-00001-of-00002.gguf"
    (tmp_path / "n.gguf").touch()
    with pytest.raises(ModelError, match="several GGUF files"):
        gguf_in(tmp_path)


def test_an_ambiguous_gguf_error_names_the_model(hub: Hub) -> None:
    hub.files = ("x.gguf", "y.gguf")
    with pytest.raises(ModelError, match=r"^org/name: it has several GGUF files; name one .*: x.gguf, y.gguf$"):
        resolve_model("org/name")
    assert resolve_model("org/name:y") == hub.folder / "y.gguf"
    assert hub.request["allow_patterns"][-1] == "y.gguf"


def test_a_local_folder_and_a_quantisation(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("m.Q8_0.gguf", "sub/m.Q4_0.gguf"):
        (tmp_path / name).touch()
    assert resolve_model(f"{tmp_path}:Q8_0") == tmp_path / "m.Q8_0.gguf"
    assert resolve_model(f"{tmp_path}:q4_0") == tmp_path / "sub" / "m.Q4_0.gguf"
    assert is_local(f"{tmp_path}:Q8_0")
    assert not is_local("org/name:Q8_0")
    with pytest.raises(ModelError, match=r"no GGUF file in it is Q5_0; there are: m.Q8_0.gguf, sub/m.Q4_0.gguf"):
        resolve_model(f"{tmp_path}:Q5_0")
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_model(f"{tmp_path}/none:Q5_0")


def _http(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("no",)
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.RepositoryNotFoundError, "no such public model on the hub"),
        (errors.GatedRepoError, "accept its terms on the hub and set HF_TOKEN"),
        (errors.RevisionNotFoundError, "the hub has no revision v1"),
        (errors.LocalTokenNotFoundError, "no token is stored; log in with `hf auth login`"),
        (errors.OfflineModeIsEnabled, "not downloaded before, and the hub cannot be reached"),
        (ConnectionError, "the hub cannot be reached"),
    ],
)
def test_problems_are_one_line_with_a_remedy(kind: type[Exception], message: str, hub: Hub) -> None:
    hub.problem = _http(kind)
    with pytest.raises((ModelError, ConfigError), match=message) as caught:
        resolve_model("org/name", revision="v1")
    assert str(caught.value).startswith(("org/name: ", "--hf-token: "))
    assert "\n" not in str(caught.value)


def test_an_earlier_download_serves_offline(hub: Hub) -> None:
    hub.problem, hub.cached = ConnectionError("no network\nat all"), True
    assert resolve_model("org/name", revision="v1") == hub.folder
    assert hub.request["revision"] == "v1"


FILES = [
    "Model-1B-Q4_K_M.gguf",
    "Model-1B-Q4_K_S.gguf",
    "Model-1B-IQ4_XS.gguf",
    "Model-1B.Q8_0.gguf",
    "model_f16.gguf",
    "BF16/Model-1B-BF16.gguf",
    "Q2_K/Model-1B-Q2_K-00001-of-00002.gguf",
    "Q2_K/Model-1B-Q2_K-00002-of-00002.gguf",
    "mmproj-Q8_0.gguf",
    "Model-1B-imatrix.gguf",
    "README.md",
]


@each_row(
    ("quant", "file"),
    [
        ("Q4_K_M", "Model-1B-Q4_K_M.gguf"),
        ("q4_k_s", "Model-1B-Q4_K_S.gguf"),
        ("IQ4_XS", "Model-1B-IQ4_XS.gguf"),
        ("Q8_0", "Model-1B.Q8_0.gguf"),
        ("F16", "model_f16.gguf"),
        ("BF16", "BF16/Model-1B-BF16.gguf"),
        ("Model-1B-Q4_K_M", "Model-1B-Q4_K_M.gguf"),
        ("Model-1B.Q8_0.gguf", "Model-1B.Q8_0.gguf"),
        ("Q2_K", "Q2_K/Model-1B-Q2_K-00001-of-00002.gguf"),
        ("Model-1B-Q2_K-00002-of-00002", "Q2_K/Model-1B-Q2_K-00002-of-00002.gguf"),
    ],
)
def test_a_quantisation_names_one_file(quant: str, file: str) -> None:
    assert pick_gguf(FILES, quant) == file


@each_row(
    ("names", "quant", "words"),
    [
        (FILES, "Q4_K", "no GGUF file in it is Q4_K; there are: Model-1B-Q4_K_M.gguf, "),
        (FILES, "", "several GGUF files; name one after a colon, like :Model-1B-Q4_K_M: "),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "several GGUF files; .*: a-Q8_0.gguf, b-Q8_0.gguf$"),
        (["config.json", "mmproj.gguf"], "", "it has no GGUF file; drop --load-format gguf"),
    ],
)
def test_an_unknown_quantisation_lists_the_files(names: list[str], quant: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        pick_gguf(names, quant)


def test_a_single_gguf_file_is_picked() -> None:
    assert pick_gguf(["mmproj-m.gguf", "m.gguf", "config.json"]) == "m.gguf"
