"""The attention kernel in TPU interpret mode: outputs, pages, no races, no reads of uninitialised memory."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ragged_batch import STRICT, Limits, attention, make_case, races_found

from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout, plan
from pagoda.kernels_pallas.ragged_paged_attention.transfers import Transfers

LIMITS = Limits()
SMALL = {"queries": 16, "fetch": 16, "tokens": 16}  # several tiles, fetches and passes in a batch of 48 tokens
# (stored type, KV heads, heads per KV head, head dim, page size, knobs, tolerance)
SHAPES = {
    "bf16": ("bfloat16", 2, 4, 128, 8, (), 2e-2),
    "fp32-hd64": ("float32", 3, 3, 64, 16, (), 3e-5),
    "window-softcap": ("bfloat16", 1, 2, 256, 8, ("window", "softcap"), 2e-2),
    "sinks-hd80": ("float32", 1, 4, 80, 8, ("sinks",), 3e-5),
    "int8-scales": ("int8", 2, 1, 128, 8, ("k_scale", "v_scale"), 1e-1),
    "e4m3": ("float8_e4m3fn", 1, 2, 64, 8, ("window",), 3e-2),
    "e5m2": ("float8_e5m2", 3, 1, 128, 16, (), 3e-2),
}
FEW = ["bf16", "fp32-hd64", "window-softcap"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Table(dict):
        def get(self, key, default=None):
            return SMALL | ({"queries": 2} if "decode" in key else {})

    monkeypatch.setattr(plan, "_table", lambda: Table())


def run(name: str, seqs: list[tuple[int, int]], seed: int) -> None:
    """Kernel and reference agree with each other and with the definition over one batch."""
    dtype, heads, group, width, page, wanted, tolerance = SHAPES[name]
    layout = PagedKvLayout(heads, width, dtype, page)
    sinks = np.linspace(-1, 2, heads * group).astype(np.float32)
    knobs = {"window": 7, "softcap": 2.0, "sinks": sinks, "k_scale": 1.0, "v_scale": 1.0}
    knobs = {key: knobs[key] for key in wanted}
    bent = {key: x for key, x in knobs.items() if "scale" not in key}
    case = make_case(layout, group, seqs, limits=LIMITS, seed=seed, **bent)
    out, cache = compiled(name, layout)(case.arrays, knobs)
    assert not races_found()
    np.testing.assert_allclose(np.asarray(out, np.float32), case.expected, atol=tolerance)
    _, written = attention(layout, use_kernel=False)(case.arrays, knobs)
    np.testing.assert_array_equal(np.asarray(cache).view(np.uint32), np.asarray(written).view(np.uint32))


CALLS: dict = {}


def compiled(name: str, layout: PagedKvLayout):
    """One traced call per shape: examples differ in values only."""
    return CALLS.setdefault(name, attention(layout, interpret=STRICT))


MIXED = [(1, 0), (1, 15), (1, 40), (5, 0), (9, 23), (1, 30), (21, 3)]


@pytest.mark.parametrize("name", FEW)
def test_a_mixed_batch(name: str) -> None:
    run(name, MIXED, seed=1)


@pytest.mark.tpu_matrix
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in FEW])
def test_a_mixed_batch_of_every_type(name: str) -> None:
    run(name, MIXED, seed=1)


@pytest.mark.parametrize("seqs", [[(1, 8), (1, 47), (1, 0)], [(48, 0)], [(17, 31)], []], ids=str)
def test_batches_of_one_kind(seqs: list[tuple[int, int]]) -> None:
    run("bf16", seqs, seed=2)


@st.composite
def batches(draw):
    """Sequences that fit `LIMITS` at page size 8: decode rows first."""
    seqs = [(1, draw(st.integers(0, 47))) for _ in range(draw(st.integers(0, 4)))]
    room = LIMITS.tokens - len(seqs)
    for _ in range(draw(st.integers(0, LIMITS.seqs - len(seqs)))):
        new = draw(st.integers(1, 20))
        if new <= room and len(seqs) < 6:
            seqs.append((new, draw(st.integers(0, 48 - new))))
            room -= new
    return seqs


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(seqs=batches(), seed=st.integers(0, 2**31))
def test_random_batches(seqs: list[tuple[int, int]], seed: int) -> None:
    run("bf16", seqs, seed)


def test_an_injected_race_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Transfers.wait_fetched

    def late(self: Transfers, tokens, slot) -> None:
        self.kv[slot, 0, 0, :, :] = self.kv[slot, 0, 0, :, :]  # touches the buffer while its DMA is in flight
        wait(self, tokens, slot)

    monkeypatch.setattr(Transfers, "wait_fetched", late)
    layout = PagedKvLayout(1, 128, "bfloat16", 8)
    case = make_case(layout, 2, [(1, 20), (1, 9)], limits=LIMITS, seed=0)
    try:
        jax.block_until_ready(attention(layout, interpret=STRICT, decode_only=True)(case.arrays, {}))
        caught = races_found()
    except Exception as error:
        caught = "race" in str(error).lower()
    assert caught
