"""What of the prefill attention benchmark needs no GPU: its inputs, its errors, its count of FLOP."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_prefill_attention as benchmark
from gpu_prefill_attention import ERRORS, FP8, SPEEDS, Load, error, make, trial, worst

from pagoda.backends.torch_cuda.kernels.chips import CHIPS
from pagoda.backends.torch_cuda.kernels.prefill_attention import api

CPU, CHIP = torch.device("cpu"), CHIPS["sm_90"]


def test_flop_are_those_of_what_is_seen():
    assert Load(((3, 0),), heads=1, head_dim=1).flop == 4 * 6
    assert Load(((3, 10),), heads=2, head_dim=8).flop == 4 * 2 * 8 * 36
    assert SPEEDS["1x8k"].flop == 4 * 32 * 128 * 8192 * 8193 // 2


@pytest.mark.parametrize("name", ERRORS)
def test_the_reference_in_bfloat16_passes_and_a_wrong_one_does_not(name: str):
    inputs = make(replace(ERRORS[name], seqs=((20, 30), (7, 0))), CPU, CHIP)
    absolute, roundings = error(inputs, CHIP, use_kernel=False)
    rounds_scores = inputs.rules.softcap or inputs.rules.sinks is not None  # as the kernel does not
    assert 0 < absolute < 0.2
    assert 0 < roundings <= (6 if rounds_scores else 1)
    want = inputs.call(CHIP, use_kernel=False, wide=True)
    assert worst(want.bfloat16(), want) < 1
    inputs.kv_lens[0] -= 1
    assert worst(inputs.call(CHIP, use_kernel=False), want) > 3


def test_a_trial_calls_the_kernel_as_the_api_does(monkeypatch: pytest.MonkeyPatch):
    inputs = make(Load(((9, 20), (5, 0)), heads=4, kv_heads=2, head_dim=16, cache=FP8, window=7), CPU, CHIP, tile=8)
    launches, calls = inspect.signature(api.kernel), []
    record = lambda *args: calls.append(launches.bind(*args).arguments)  # noqa: E731
    monkeypatch.setattr(benchmark, "kernel", record)
    monkeypatch.setattr(api, "kernel", record)
    inputs.call(CHIP, use_kernel=True)
    chosen = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    trial(inputs, CHIP, chosen)
    assert calls[1].pop("chosen") == chosen
    assert calls[0].keys() == calls[1].keys()
    assert (calls[0].pop("tile"), calls[1].pop("tile")) == (8, 8)
    for name in ("q", "keys", "values", "tables", "query_start", "kv_lens", "tiles"):
        assert calls[0][name] is calls[1][name]
    assert {calls[i]["rules"].window for i in range(2)} == {7}
