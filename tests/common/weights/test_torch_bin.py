"""Files of torch.save against torch, and malicious pickles."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.suite.rows import each_row

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import dtype_name
from pagoda.common.weights.torch_bin import TorchFile

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
)


def _save(folder: Path, state: Any, **kwargs: Any) -> Path:
    torch.save(state, folder / "f.bin", **kwargs)
    return folder / "f.bin"


@each_row("dtype", DTYPES, ids=str)
def test_every_dtype_equals_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = (torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 4).abs().to(dtype)
    file = TorchFile(_save(tmp_path, {"a": tensor}))
    array = file.tensor("a")
    assert dtype_name(array.dtype) == str(dtype).removeprefix("torch.")
    assert array.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    assert dict(file.sizes) == {"a": array.nbytes}


def test_views_parameters_and_scalars(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "base": base,
        "transposed": base.T,
        "part": base[1:3, 2:5],
        "strided": base[:, ::2],
        "expanded": base[0, :1].expand(3),
        "scalar": base[2, 3],
        "empty": base[:0],
        "parameter": torch.nn.Parameter(base * 2),
    }
    file = TorchFile(_save(tmp_path, state))
    assert list(file.sizes) == list(state)
    for name, tensor in state.items():
        np.testing.assert_array_equal(file.tensor(name), tensor.detach().numpy(), err_msg=name)


def test_state_dict_of_a_module(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))  # its state dict carries _metadata
    file = TorchFile(_save(tmp_path, module.state_dict()))
    for name, tensor in module.state_dict().items():
        np.testing.assert_array_equal(file.tensor(name), tensor.numpy())


def test_a_state_dict_beside_its_name_is_found(tmp_path: Path) -> None:
    state = {"model_key": "model", "model": {"a": torch.ones(2)}, "step": 5}
    assert list(TorchFile(_save(tmp_path, state)).sizes) == ["a"]
    with pytest.raises(WeightError, match="contains no state dict but a int"):
        TorchFile(_save(tmp_path, {**state, "model_key": "step"}))


def test_values_are_mapped_and_private(tmp_path: Path) -> None:
    path = _save(tmp_path, {"a": torch.ones(4)})
    file, before = TorchFile(path), path.read_bytes()
    array = file.tensor("a")
    assert np.shares_memory(array, file.tensor("a"))
    array[...] = 7
    assert path.read_bytes() == before


def test_compressed_archives_are_readable(tmp_path: Path) -> None:
    path = _save(tmp_path, {"a": torch.arange(5.0)})
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(tmp_path / "z.bin", "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    np.testing.assert_array_equal(TorchFile(tmp_path / "z.bin").tensor("a"), np.arange(5.0))


class Trap:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def _archive(folder: Path, data: bytes, records: dict[str, bytes] | None = None) -> Path:
    path = folder / "f.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for name, content in (records or {}).items():
            archive.writestr(f"archive/{name}", content)
    return path


def _refused(path: Path, message: str) -> None:
    with pytest.raises(WeightError, match=message) as caught:
        TorchFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@each_row(
    ("function", "name"),
    [(os.system, r"posix\.system"), (eval, r"\w+\.eval"), (getattr, r"\w+\.getattr"), (open, r"io\.open")],
)
def test_a_booby_trapped_pickle_does_not_run(function: Any, name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    argument = {os.system: f"touch {marker}", eval: f"open({str(marker)!r}, 'w')"}.get(function, str(marker))
    args = (argument, "w") if function is open else (argument,)
    _refused(_save(tmp_path, {"a": torch.ones(1), "b": Trap(function, *args)}), f"refers to {name}")
    assert not marker.exists()


@pytest.mark.parametrize("target", ["torch\nFloatStorage", "torch._utils\n_rebuild_tensor_v2", "torch\nfloat32"])
def test_a_pickle_cannot_change_what_later_files_get(target: str, tmp_path: Path) -> None:
    # BUILD with a state of (dict, slots) sets attributes on whatever the pickle was handed.
    changed = b"\x80\x02c" + target.encode() + b"\nN}X\x0c\x00\x00\x00__defaults__)s\x86b."
    with pytest.raises(WeightError):
        TorchFile(_archive(tmp_path, changed))
    file = TorchFile(_save(tmp_path, {"a": torch.arange(3.0)}))
    assert file.tensor("a").tolist() == [0, 1, 2]


class Storage:
    """Pickles as torch's reference to a storage of ten float32."""


class Names(pickle.Pickler):
    """Writes torch's persistent ids."""

    def __init__(self, file: Any, pid: Any) -> None:
        super().__init__(file, protocol=2)
        self.pid = pid

    def persistent_id(self, value: Any) -> Any:
        return self.pid if isinstance(value, Storage) else None


def _described(folder: Path, *args: Any, pid: Any = None, records: dict[str, bytes] | None = None) -> Path:
    import io

    buffer = io.BytesIO()
    pid = pid or ("storage", torch.FloatStorage, "0", "cpu", 10)
    state = OrderedDict(a=Trap(torch._utils._rebuild_tensor_v2, Storage(), *args, False, OrderedDict()))
    Names(buffer, pid).dump(state)
    return _archive(folder, buffer.getvalue(), {"data/0": b"\0" * 40} if records is None else records)


def test_described_tensor_within_its_storage_is_read(tmp_path: Path) -> None:
    assert TorchFile(_described(tmp_path, 0, (2, 5), (5, 1))).tensor("a").shape == (2, 5)


@each_row(
    ("args", "message"),
    [
        ((0, (11,), (1,)), "needs 44 bytes, its record data/0 has 40"),
        ((5, (2, 3), (3, 1)), "needs 44 bytes"),
        ((0, (2, 2), (1 << 40, 1)), "needs .* bytes"),
        ((0, (2,), (-1,)), "corrupt"),
        ((-1, (2,), (1,)), "corrupt"),
        ((0, (2, 2), (1,)), "corrupt"),
        ((0, ("x",), (1,)), "corrupt"),
        ((0, 3, 1), "corrupt"),
        ((0, (1 << 70,), (1,)), "corrupt"),
    ],
)
def test_tensors_that_reach_outside_their_storage_are_refused(args: Any, message: str, tmp_path: Path) -> None:
    _refused(_described(tmp_path, *args), message)


@each_row(
    "pid", [("storage", "nonsense", "0", "cpu", 10), ("module", torch.FloatStorage, "0", "cpu", 10), "0", ("storage",)]
)
def test_corrupt_storages(pid: Any, tmp_path: Path) -> None:
    _refused(_described(tmp_path, 0, (2,), (1,), pid=pid), "corrupt")


def test_missing_record(tmp_path: Path) -> None:
    _refused(_described(tmp_path, 0, (2,), (1,), records={}), "its record data/0 is missing")


def test_records_with_a_wrong_offset(tmp_path: Path) -> None:
    path = _described(tmp_path, 0, (10,), (1,))
    with zipfile.ZipFile(path, "a") as archive:
        archive.getinfo("archive/data/0").header_offset = 10_000
        archive.writestr("archive/version", b"3")  # makes the directory be written again
    with pytest.raises(WeightError, match="corrupt record data/0"):
        TorchFile(path).tensor("a")


def test_records_that_state_more_bytes_than_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "f.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.getinfo("archive/data.pkl").compress_size = 4_000_000_000  # in the directory, written at the end
    _refused(path, "record archive/data.pkl states 4000000000 bytes")


@each_row(
    ("state", "message"),
    [
        ([torch.ones(1)], "contains no state dict but a list"),
        ({"a": 1}, "entry 'a' of the state dict is no tensor"),
        ({1: torch.ones(1)}, "entry 1 of the state dict is no tensor"),
        ({"model": {"a": torch.ones(1)}}, "entry 'model'"),
    ],
)
def test_other_contents_are_named(state: Any, message: str, tmp_path: Path) -> None:
    _refused(_save(tmp_path, state), message)


def test_broken_files(tmp_path: Path) -> None:
    path = _save(tmp_path, {"a": torch.ones(100)})
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    _refused(path, f"truncated or corrupt archive of {len(whole) - 20} bytes")
    path.write_bytes(b"")
    _refused(path, "empty")
    path.write_bytes(b"nonsense")
    _refused(path, "not a file of torch.save")
    _refused(_archive(tmp_path, b"\x80\x02nonsense"), "corrupt description")
    _refused(_save(tmp_path, {"a": torch.ones(1)}, _use_new_zipfile_serialization=False), r"before 1\.6; save it again")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", b"")
    _refused(path, "the archive has 0 data.pkl")


def test_big_endian_is_refused(tmp_path: Path) -> None:
    _refused(_archive(tmp_path, pickle.dumps({}), {"byteorder": b"big"}), "big-endian")


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    path = _save(tmp_path, {"a": torch.ones(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)})
    whole, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(400):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 6)):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            file = TorchFile(path)
            for name in file.sizes:
                file.tensor(name)
        except WeightError:
            refused += 1
    assert refused > 50
