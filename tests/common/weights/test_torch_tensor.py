"""One tensor of torch.save from untrusted bytes; test_prompt_embeds_http lists what a server rejects."""

from __future__ import annotations

import io
import random
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from support.suite.rows import each_row

from pagoda.common.errors import WeightError
from pagoda.common.weights import dtypes
from pagoda.common.weights.torch_bin import read_tensor


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


@each_row("kind", [torch.float32, torch.float16, torch.float64, torch.int64, torch.bool])
@each_row("protocol", [2, 3, 4, 5])
def test_values_equal_torch(kind: torch.dtype, protocol: int) -> None:
    value = (torch.randn(5, 7) * 9).to(kind)
    for view in (value, value[2:4], value.T, value[:, 3], value[1, 1], value[:0]):
        array = read_tensor(saved(view, pickle_protocol=protocol))
        assert torch.equal(torch.from_numpy(array.copy()), view)


def test_bfloat16_is_tagged() -> None:
    value = torch.randn(3, 4).to(torch.bfloat16)
    array = read_tensor(saved(value))
    assert array.dtype == dtypes.BFLOAT16
    np.testing.assert_array_equal(dtypes.to_float32(array), value.float().numpy())


def test_reading_a_tensor_does_not_copy_it() -> None:
    data = saved(torch.zeros(1 << 20))
    tracemalloc.start()
    values = read_tensor(data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values.nbytes == 4 << 20
    assert most < 5 << 20, "the archive is looked at through one copy at most"


def test_a_big_endian_file_is_refused() -> None:
    whole = zipfile.ZipFile(io.BytesIO(saved(torch.zeros(2))))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in whole.namelist():
            archive.writestr(name, b"big" if name.endswith("byteorder") else whole.read(name))
    with pytest.raises(WeightError, match="big-endian"):
        read_tensor(file.getvalue())


def test_random_damage_never_escapes_as_another_error() -> None:
    rng, whole = random.Random(0), saved(torch.randn(3, 4))
    outcomes, longest = set(), 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            array = read_tensor(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
            outcomes.add("read")
            assert array.nbytes <= len(data)
        except WeightError as error:
            outcomes.add("refused")
            longest = max(longest, len(str(error)))
    assert longest < 200
    assert outcomes == {"read", "refused"}
