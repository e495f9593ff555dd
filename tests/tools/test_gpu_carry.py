"""gpu_carry: sizes, names and checks, without downloads or compilation."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import gguf
import gpu_carry
import numpy as np
import pytest

from pagoda.benchmarks.gpu import small_model
from pagoda.benchmarks.gpu.stages import STAGES, TRIALS
from pagoda.common.weights.gguf.file import GgufFile

ROOT = Path(__file__).resolve().parents[2]


def test_base_dependencies_are_included_or_present() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["gguf"], *extras["structured"], *extras["cuda"][:2]]
    names = {re.split(r"[<>=!~\[]", one)[0] for one in needed}
    assert names <= {*gpu_carry.WHEELS, *gpu_carry.PRESENT}


def test_missing_dependencies_are_reported(tmp_path: Path) -> None:
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    needs = 'numpy>=2\nRequires-Dist: strange; python_version >= "3.12"\nRequires-Dist: old; python_version < "3.9"'
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some-1.0.dist-info/METADATA", f"Name: some\nRequires-Dist: {needs}\n\nText\n")
    assert list(gpu_carry.missing(wheel)) == ["strange"]


def test_the_cache_key_matches_triton() -> None:
    """Compares with the installed Triton's own key."""
    triton = pytest.importorskip("triton")
    from triton.runtime.cache import triton_key

    site = Path(triton.__file__).parents[1]
    hashes = []
    for name in gpu_carry._hashed_files(site / "triton"):
        with (site / name).open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    assert triton.__version__ + "-".join(hashes) == triton_key()


def test_a_folder_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a.whl").write_bytes(b"x" * 1000)
    (tmp_path / "model.bin").write_bytes(b"x" * 5000)
    assert gpu_carry.check_size(tmp_path) == 0
    monkeypatch.setattr(gpu_carry, "LIMIT", 5999)
    assert gpu_carry.check_size(tmp_path) == 1
    assert "too large" in capsys.readouterr().err


@pytest.mark.gpu_matrix
def test_what_is_carried_fits(tmp_path: Path) -> None:
    """The real folder: the wheels and Triton's cache of every stage, beside the checkout."""
    command = [sys.executable, str(ROOT / "tools" / "gpu_carry.py"), str(tmp_path / "carry")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    sizes = dict(reversed(line.split(" MiB  ")) for line in done.stdout.splitlines() if " MiB  " in line)
    assert sizes.keys() == {"carry.json", "triton-cache.tar.xz", "wheels", "checkout"}
    assert float(sizes["triton-cache.tar.xz"]) > 1


def tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """Write a model file with two matrices and a vector; return its tensors."""
    rng = np.random.default_rng(0)
    matrices = {name: rng.standard_normal((40, 96)).astype(np.float32) for name in (small_model.EMBEDDING, "blk.0.w")}
    matrices["blk.0.w"][3, 7] = 30.0  # an outlier
    tensors = matrices | {"norm": rng.standard_normal(96).astype(np.float32)}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokens", ["a", "b"])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_packed_models_round_trip(tmp_path: Path) -> None:
    wanted = tiny_gguf(tmp_path / "m.gguf")
    small_model.pack(tmp_path / "m.gguf", tmp_path / "m.bin")
    small_model.unpack(tmp_path / "m.bin", tmp_path / "back.gguf")
    assert not (tmp_path / "back.part").exists()
    back = gguf.GGUFReader(tmp_path / "back.gguf")
    assert back.fields["tokens"].contents() == ["a", "b"]
    for tensor in back.tensors:
        values, want = gguf.dequantize(tensor.data, tensor.tensor_type), wanted[tensor.name]
        apart = np.linalg.norm(values - want) / np.linalg.norm(want)
        assert apart < (0.25 if want.ndim > 1 else 1e-6), tensor.name
        if tensor.name == "blk.0.w":
            assert abs(values[3, 7] - 30) < 3, "what is far from the others is kept"
    assert GgufFile is not None


def test_entropy_of_quantized_levels() -> None:
    """Entropy below 3 bits."""
    weights = np.random.default_rng(0).standard_normal((64, 576)).astype(np.float32)
    blocks = small_model.levels(weights, small_model.STEP).reshape(-1, small_model.BYTES)[:, 2:]
    codes = np.concatenate([blocks & 15, blocks >> 4])
    shares = np.bincount(codes.ravel(), minlength=16) / codes.size
    assert -sum(share * np.log2(share) for share in shares if share) < 3


def test_kernels_of_all_stages_but_trials_are_carried() -> None:
    assert set(gpu_carry.STAGES) == STAGES.keys() - set(TRIALS)


COMPILED = """
import sys
from triton.runtime.jit import JITFunction
names = set()
def compiled(self, key, *_):
    names.add(self.__name__)
    program = self.device_caches[0][0][key] = object()
    return program
JITFunction._do_compile = compiled
from pagoda.benchmarks.gpu.precompile import compile_share
compile_share(sys.argv[1:], 90, 132, 0, 1, verbose=False)
print(*sorted(names))
"""


def test_all_launched_kernels_are_precompiled() -> None:
    """Runs on meta tensors."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED, "decode", "mixers"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    names = set(done.stdout.split())
    assert {"attend", "activation_kernel", "apply_penalties", "add_values", "ban_word"} <= names
    assert {"chunk_states", "convolve", "invert", "gather"} <= names
    assert len(names) >= 30
