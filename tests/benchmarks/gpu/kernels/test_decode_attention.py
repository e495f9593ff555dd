"""What of the decode attention benchmark needs no GPU: its inputs, its errors, its list of cases."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch

from pagoda.backends.torch_cuda.kernels.attention.decode_attention import kernel
from pagoda.backends.torch_cuda.kernels.attention.decode_attention.kernel import blocks
from pagoda.backends.torch_cuda.kernels.attention.shared import ScoreRules
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.benchmarks.gpu.kernels.decode_attention import ERRORS, FP8, SPEEDS, Load, attend, check, error, make, small
from pagoda.benchmarks.gpu.measure import BF16, Bench, worst

CPU = Bench(torch.device("cpu"), CHIPS["sm_90"], tiny=True)
TINY = Load(3, 40, heads=4, kv_heads=2, head_dim=16)


class Recorded(Bench):
    """Calls kernels."""

    is_gpu = True


def test_copies_read_pages_of_their_own():
    inputs = make(TINY, CPU, cold_bytes=5 * TINY.bytes_read)
    assert inputs.tables.shape == (5, 3, 3)
    pages = inputs.tables.flatten().sort().values
    assert pages.tolist() == list(range(1, 46)), "each once, and never the null block"
    assert inputs.keys.shape == (46, 2, 16, 16)
    assert TINY.bytes_read == 3 * 40 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("name", ERRORS)
def test_the_reference_in_bfloat16_passes_and_a_wrong_one_does_not(name: str):
    inputs = make(small(ERRORS[name]), CPU)
    absolute, roundings = error(inputs, CPU)
    assert 0 < absolute < 0.1
    assert 0 < roundings <= 1
    inputs.kv_lens[-1] -= 1
    want = inputs.call(use_kernel=False, chip=CPU.chip)
    inputs.kv_lens[-1] += 1
    got = inputs.call(use_kernel=False, chip=CPU.chip)
    assert worst(got, want.double(), 3) > 1


def test_an_error_of_five_percent_is_wrong():
    assert check(CPU, TINY)["right"]
    assert not check(Bench(CPU.device, CPU.chip, spoil=0.05), TINY)["right"]


def test_a_trial_calls_the_kernel_as_the_api_does(monkeypatch: pytest.MonkeyPatch):
    load = Load(**{**vars(ERRORS["float8"]), "seqs": 2, "sinks": True, "window": 9})
    inputs = make(load, CPU)
    made, calls, steps = inspect.signature(kernel.DecodeLaunch), [], []

    def make_launch(*args):
        calls.append(made.bind(*args).arguments)
        return lambda *step: steps.append(step)

    monkeypatch.setattr(kernel, "DecodeLaunch", make_launch)
    work = inputs.cut(2)
    inputs.call(work=work, use_kernel=True, chip=CPU.chip)
    chosen = blocks(load.shape, CPU.chip)
    attend(Recorded(CPU.device, CPU.chip), inputs, 0, work=work, chosen=chosen)
    assert (calls[0].pop("chosen"), calls[1].pop("chosen")) == (None, chosen)
    assert calls[0].keys() == calls[1].keys()
    for name, one in calls[0].items():
        assert _equal(one, calls[1][name])
    for one, other in list(zip(*steps))[:-1]:
        assert _equal(one, other), "all but the results"


def _equal(one, other) -> bool:
    if isinstance(one, ScoreRules):
        return all(_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return torch.equal(one.float(), other.float()) if isinstance(one, torch.Tensor) else one == other


def test_what_is_timed():
    assert {load.bytes_read for name, load in SPEEDS.items() if name == "64x4k"} == {1 << 30}
    assert {load.cache for load in SPEEDS.values()} == {BF16, FP8}
