"""What of the decode attention benchmark needs no GPU: its inputs, its errors, its list of cases."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_decode_attention as benchmark
from gpu_decode_attention import BF16, ERRORS, FP8, SPEEDS, Load, error, make

from pagoda.backends.torch_cuda.kernels.chips import CHIPS
from pagoda.backends.torch_cuda.kernels.decode_attention import kernel
from pagoda.backends.torch_cuda.kernels.decode_attention.kernel import launch

CPU, CHIP = torch.device("cpu"), CHIPS["sm_90"]
TINY = Load(3, 40, heads=4, kv_heads=2, head_dim=16)


def test_copies_read_pages_of_their_own():
    inputs = make(TINY, CPU, cold_bytes=5 * TINY.bytes_read)
    assert inputs.tables.shape == (5, 3, 3)
    pages = inputs.tables.flatten().sort().values
    assert pages.tolist() == list(range(1, 46)), "each once, and never the null block"
    assert inputs.keys.shape == (46, 2, 16, 16)
    assert TINY.bytes_read == 3 * 40 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("name", ERRORS)
def test_the_reference_in_bfloat16_passes_and_a_wrong_one_does_not(name: str):
    load = ERRORS[name]
    inputs = make(Load(**{**vars(load), "seqs": 3, "context": 70}), CPU)
    absolute, roundings = error(inputs, CHIP, use_kernel=False)
    assert 0 < absolute < 0.1
    assert 0 < roundings <= 1
    inputs.kv_lens[-1] -= 1
    want = inputs.call(splits=1, use_kernel=False, chip=CHIP)
    inputs.kv_lens[-1] += 1
    got = inputs.call(splits=1, use_kernel=False, chip=CHIP)
    assert benchmark.worst(got, want.double(), 3) > 1


def test_a_trial_calls_the_kernel_as_the_api_does(monkeypatch: pytest.MonkeyPatch):
    inputs = make(Load(**{**vars(ERRORS["float8"]), "seqs": 2, "sinks": True, "window": 9}), CPU)
    calls = []
    monkeypatch.setattr(kernel, "launch", lambda *args: calls.append(launches.bind(*args).arguments))
    launches = inspect.signature(launch)
    inputs.call(splits=2, use_kernel=True, chip=CHIP)
    trial = lambda *args, **how: calls.append(launches.bind(*args, **how).arguments)  # noqa: E731
    benchmark.attend(inputs, 0, trial, splits=2, chip=CHIP)
    assert calls[0].keys() == calls[1].keys()
    for name, one in calls[0].items():
        assert (
            torch.equal(one.float(), calls[1][name].float()) if isinstance(one, torch.Tensor) else one == calls[1][name]
        )


def _equal(one, other) -> bool:
    return torch.equal(one.float(), other.float()) if isinstance(one, torch.Tensor) else one == other


def test_what_is_timed():
    assert {load.bytes_read for name, load in SPEEDS.items() if name == "64x4k"} == {1 << 30}
    assert {load.cache for load in SPEEDS.values()} == {BF16, FP8}
