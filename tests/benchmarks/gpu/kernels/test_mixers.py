"""The checks of mixers and batch-invariant kernels, with the kernels in Triton's interpreter; times need a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import support.kernels.triton_interpreter  # noqa: F401
import torch

from pagoda.backends.torch_cuda.kernels.attention.invariant_attention import kernel as attention_kernel
from pagoda.backends.torch_cuda.kernels.attention.latent_attention import kernel as latent_kernel
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import kernel as latent_prefill_kernel
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.linear.invariant_linear import kernel as linear_kernel
from pagoda.backends.torch_cuda.kernels.recurrent.linear_scan import kernel as scan_kernel
from pagoda.benchmarks.gpu.kernels import (
    decode_attention,
    gemm,
    invariant,
    latent_attention,
    prefill_attention,
    recurrent,
    selection,
)
from pagoda.benchmarks.gpu.measure import Bench

CPU = torch.device("cpu")


class Interpreted(Bench):
    use_kernel = True


BENCH = Interpreted(CPU, CHIPS["sm_90"], tiny=True)
COARSER = 8
"""How many times coarser than float16 bfloat16 rounds."""
PATHS_TWICE = ("channel_delta_bounded", "decode long", "decode head dim", "prefill group of 7", "latent_decode_all")
"""Checks whose code others run, too."""


@pytest.fixture(autouse=True)
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no bfloat16."""
    for module in (invariant, latent_attention, recurrent, selection, decode_attention, prefill_attention, gemm):
        monkeypatch.setattr(module, "BF16", torch.float16)
    for cases in (decode_attention.ERRORS, prefill_attention.ERRORS):
        for name, load in cases.items():
            if load.cache == torch.bfloat16:
                monkeypatch.setitem(cases, name, replace(load, cache=torch.float16))


@pytest.mark.parametrize(("module", "count"), [(recurrent, 20), (latent_attention, 4), (selection, 4), (invariant, 8)])
def test_kernels_pass(module: ModuleType, count: int) -> None:
    """With errors that would pass in bfloat16, too."""
    numbers = [number for number in module.checks(BENCH) if not number.name.startswith(PATHS_TWICE)]
    results = {number.name: number.run() for number in numbers}
    assert len(results) == count
    assert all(one["right"] for one in results.values()), results
    assert all(one.get("error", 0) * COARSER < 1 for one in results.values()), results


def test_states_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    right = scan_kernel.launch

    def forgetful(qkv, scalars, batch, *others):
        return right(qkv, scalars, replace(batch, states=batch.states.clone()), *others)

    monkeypatch.setattr(scan_kernel, "launch", forgetful)
    assert not recurrent.check(BENCH, "linear_scan_mamba2", 3, 1)["right"]


def test_bits_that_depend_on_the_workers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_kernel.launch
    monkeypatch.setattr(attention_kernel, "launch", lambda *a: right(*a) * (1 + 2.0**-10 * (a[7] == 1)))
    load = invariant.small_decode(decode_attention.ERRORS["llama"])
    result = invariant.check_decode(BENCH, load)
    assert result["error"] < 1
    assert not result["same_bits"]
    assert not result["right"]


@pytest.mark.parametrize(
    ("module", "prefix", "kernel", "function"),
    [
        (latent_attention, "latent_attention 16bit", latent_kernel, "decode"),
        (latent_attention, "latent_prefill h128_b2", latent_prefill_kernel, "launch"),
        (invariant, "invariant_linear b2", linear_kernel, "linear"),
        (invariant, "invariant_attention h64_b2", attention_kernel, "launch"),
    ],
)
def test_settings_on_trial_reach_the_kernel(
    module: ModuleType, prefix: str, kernel: ModuleType, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[dict] = []
    monkeypatch.setattr(
        kernel, function, lambda *_, **__: used.append(dict(kernel.settings(kernel.TUNING, BENCH.chip, "b2")))
    )
    results = [number.run() for number in module.trials(BENCH) if number.name.startswith(prefix)]
    tried = [one["settings"] for one in results]
    assert {one["key"] for one in results} == {prefix}
    assert len(tried) == 2
    assert tried[0] != tried[1]
    assert all(one in tried for one in used)
    assert all(one in used for one in tried)
    table = kernel.settings(kernel.TUNING, BENCH.chip, prefix.split()[1])
    assert table == tried[0], "the current settings are tried first"


def test_bytes_and_flop() -> None:
    norm = recurrent.make(BENCH, "gated_norm_heads", 5, 2)
    assert norm.bytes_moved == 2 * (3 * 10 * 32 + 16)
    scan = recurrent.make(BENCH, "linear_scan_lightning", 3, 1)
    assert scan.bytes_moved == 2 * 3 * (96 + 32) + 4 * (2 + 2 * 3 * 2 * 16 * 16)
    assert scan.token_flop == 2 * 2 * (64 * (16 + 16) + 2 * 16 * 16)
    assert selection.Load(2, 10).pairs == 20
    assert selection.Load(1, 5, 3).pairs == 3 + 4 + 5
    load = latent_attention.LatentLoad(2, 5, 3, 4, 16, 8, 32, 24)
    assert load.bytes_of(5) == 2 * 5 * 40 * 2
    assert load.decode_flop(5) == 2 * 2 * 4 * 5 * (40 + 32)
    assert load.prefill_flop == 2 * 2 * 4 * (5 * 32 * 40 + 12 * (16 + 8 + 24))
