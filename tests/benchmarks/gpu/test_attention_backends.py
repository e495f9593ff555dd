"""Attention backends as the benchmark calls them, with our own kernels in place of a package."""

from __future__ import annotations

import pytest
import torch

from pagoda.backends.torch_cuda.attention_backends.triton import TritonAttn
from pagoda.backends.torch_cuda.backend import PREFILL_MODULES
from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.kernels.attention.decode_attention import decode_attention
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.benchmarks.gpu import attention_backends
from pagoda.benchmarks.gpu.measure import Bench


class StandIn(TritonAttn):
    """A package that computes both kinds of steps; a cache that it misreads gives other results."""

    def decode(self, queries, batch, cache, spec):
        tables = batch.groups[cache.group].tables
        assert (batch.num_decodes, tables.shape[0]) == (len(queries), len(queries))
        how = {"scale": spec.scale, "use_kernel": False, "chip": CPU.chip}
        return decode_attention(queries, cache.keys, cache.values, tables, batch.kv_lens, **how)


class Planned(StandIn):
    """A package that plans decodes on the host: one plan per copy, made before its call."""

    def __init__(self, device) -> None:
        super().__init__(device)
        self.decode = PlannedCall(super().decode)


class PlannedCall:
    def __init__(self, decode) -> None:
        self._decode, self._step = decode, None

    def plan(self, step) -> None:
        self._step = step

    def __call__(self, queries, batch, cache, spec):
        step = self._step
        assert (step.size, step.fixed, step.kv_lens.tolist()) == (len(queries), True, batch.kv_lens.tolist())
        assert step.tables[0].tolist() == batch.groups[0].tables.tolist()
        return self._decode(queries, batch, cache, spec)


@pytest.mark.parametrize("spoil", [0.0, 0.1])
def test_every_backend_is_checked_and_timed(spoil: float, monkeypatch: pytest.MonkeyPatch) -> None:
    create = attention_backends.create
    monkeypatch.setattr(
        attention_backends,
        "create",
        lambda bench, shape, name: stand_ins[name](CPU) if name in stand_ins else create(bench, shape, name),
    )
    stand_ins = {"FLASH_ATTN": StandIn, "FLASHINFER": Planned}
    bench = Bench(torch.device("cpu"), CHIPS["sm_90"], tiny=True, spoil=spoil)
    numbers = [number.run() for number in attention_backends.speeds(bench)]
    assert {(one["kind"], one["backend"]) for one in numbers} == {
        (kind, name) for kind in ("decode", "prefill") for name in PREFILL_MODULES
    }
    timed = [one for one in numbers if "us" in one]
    assert [one["backend"] for one in timed] == ["TRITON_ATTN", "FLASH_ATTN", "FLASHINFER"] * 2
    assert [(one["kind"], one["backend"]) for one in timed if "plan_us" in one] == [("decode", "FLASHINFER")]
    assert {one["right"] for one in timed} == {not spoil}
    assert all("needs a GPU" in one["absent"] for one in numbers if one not in timed)
