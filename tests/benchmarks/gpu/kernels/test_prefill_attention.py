"""What of the prefill attention benchmark needs no GPU: its inputs, its errors, its count of FLOP."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import kernel
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.benchmarks.gpu.kernels.prefill_attention import ERRORS, FP8, SPEEDS, Load, attend, check, error, make, worst
from pagoda.benchmarks.gpu.measure import Bench

CPU, CHIP = torch.device("cpu"), CHIPS["sm_90"]
BENCH = Bench(CPU, CHIP, tiny=True)


class Recorded(Bench):
    """Calls kernels."""

    is_gpu = True


def test_flop_are_those_of_what_is_seen():
    assert Load(((3, 0),), heads=1, head_dim=1).flop == 4 * 6
    assert Load(((3, 10),), heads=2, head_dim=8).flop == 4 * 2 * 8 * 36
    assert SPEEDS["1x8k"].flop == 4 * 32 * 128 * 8192 * 8193 // 2


@pytest.mark.parametrize("name", ERRORS)
def test_the_reference_in_bfloat16_passes_and_a_wrong_one_does_not(name: str):
    inputs = make(replace(ERRORS[name], seqs=((20, 30), (7, 0))), CPU, CHIP)
    absolute, roundings = error(inputs, BENCH)
    rounds_scores = inputs.rules.softcap or inputs.rules.sinks is not None  # as the kernel does not
    assert 0 < absolute < 0.2
    assert 0 < roundings <= (6 if rounds_scores else 1)
    want = inputs.call(CHIP, use_kernel=False, wide=True)
    assert worst(want.bfloat16(), want) < 1
    inputs.kv_lens[0] -= 1
    assert worst(inputs.call(CHIP, use_kernel=False), want) > 3


def test_an_error_of_ten_percent_is_wrong():
    load = Load(((20, 30), (7, 0)), heads=4, kv_heads=2, head_dim=16)
    assert check(BENCH, load)["right"]
    assert not check(Bench(CPU, CHIP, spoil=0.1), load)["right"]


def test_a_trial_calls_the_kernel_as_the_api_does(monkeypatch: pytest.MonkeyPatch):
    inputs = make(Load(((9, 20), (5, 0)), heads=4, kv_heads=2, head_dim=16, cache=FP8, window=7), CPU, CHIP, tile=8)
    made, calls, steps = inspect.signature(kernel.PrefillLaunch), [], []

    def make_launch(*args):
        calls.append(made.bind(*args).arguments)
        return lambda *step: steps.append(step)

    monkeypatch.setattr(kernel, "PrefillLaunch", make_launch)
    inputs.call(CHIP, use_kernel=True)
    chosen = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    attend(Recorded(CPU, CHIP), inputs, chosen)
    assert (calls[0].pop("chosen"), calls[1].pop("chosen")) == (None, chosen)
    assert calls[0].keys() == calls[1].keys()
    assert (calls[0].pop("tile"), calls[1].pop("tile")) == (8, 8)
    for name in ("keys", "values"):
        assert calls[0][name] is calls[1][name]
    for first, second in list(zip(*steps))[:-1]:
        assert first is second, "all but the results"
    assert {calls[i]["rules"].window for i in range(2)} == {7}
