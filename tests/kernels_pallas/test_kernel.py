"""The attention kernel in TPU interpret mode: outputs, pages, no races, no reads of uninitialised memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from support.kernels.ragged_batch import STRICT, Limits, attention, make_case, races_found
from support.suite.slow_matrix import some

from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout, plan
from pagoda.kernels_pallas.ragged_paged_attention.attend import ColumnLogits, ColumnSoftmax
from pagoda.kernels_pallas.ragged_paged_attention.transfers import Transfers

LIMITS = Limits()
SMALL = {"queries": 16, "fetch": 16, "tokens": 16}  # several tiles, fetches and passes in a batch of 48 tokens
# (stored type, KV heads, heads per KV head, head dim, page size, knobs, tolerance)
SHAPES = {
    "bf16": ("bfloat16", 2, 4, 128, 8, (), 2e-2),
    "fp32-hd64": ("float32", 3, 3, 64, 16, (), 3e-5),
    "window-softcap": ("bfloat16", 1, 2, 256, 8, ("window", "softcap"), 2e-2),
    "sinks-hd80": ("float32", 1, 4, 80, 8, ("sinks",), 3e-5),
    "slopes": ("bfloat16", 3, 2, 64, 8, ("slopes",), 2e-2),
    "chunks": ("float32", 1, 2, 64, 8, (), 3e-5),
    "chunks of pages": ("bfloat16", 2, 2, 128, 8, (), 2e-2),
    "narrow values, chunks and those before": ("bfloat16", 2, 2, 192, 8, (), 2e-2),
    "narrow values in fp32": ("float32", 2, 2, 192, 8, (), 3e-5),
    "narrow values in 8 bits": ("float8_e4m3fn", 2, 2, 192, 8, ("sinks", "window"), 3e-2),
    "narrow values side by side": ("bfloat16", 3, 2, 64, 8, (), 2e-2),
    "slopes of roots": ("bfloat16", 1, 4, 64, 8, ("slopes",), 2e-2),
    "int8-scales": ("int8", 2, 1, 128, 8, ("k_scale", "v_scale"), 1e-1),
    "e4m3": ("float8_e4m3fn", 1, 2, 64, 8, ("window",), 3e-2),
    "e5m2": ("float8_e5m2", 3, 1, 128, 16, (), 3e-2),
    "every term": ("bfloat16", 1, 4, 64, 8, ("window", "softcap", "sinks", "slopes"), 2e-2),
    "narrow values in 8 bits, chunks and those before": ("float8_e4m3fn", 2, 2, 192, 8, ("sinks",), 3e-2),
}
CHUNKS = "narrow values, chunks and those before"
FEW = ["bf16", "every term", "narrow values in 8 bits, chunks and those before"]
"""Every type of word, every term of the logits and every rule of what is seen, in as few programs as hold them."""
TWO_CORES = replace(STRICT, num_cores_or_threads=2)
RULES = {
    "chunks": plan.StaticRules(11, lookback=11),
    "chunks of pages": plan.StaticRules(24),
    "narrow values, chunks and those before": plan.StaticRules(16, lookback=16),
    "slopes of roots": plan.StaticRules(alibi_root=True),
    "every term": plan.StaticRules(alibi_root=True),
    "narrow values in 8 bits, chunks and those before": plan.StaticRules(16, lookback=16),
}
VALUES = {name: 128 for name in SHAPES if name.startswith("narrow")} | {"narrow values side by side": 40}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Table(dict):
        def get(self, key, default=None):
            quarters = {"fetch": 32, "tokens": 32} if "decode" in key and "float8" in key else {}
            return SMALL | ({"queries": 2} if "decode" in key else {}) | quarters

    monkeypatch.setattr(plan, "_table", lambda: Table())


def run(name: str, seqs: list[tuple[int, int]], seed: int, **static) -> None:
    """Kernel and reference agree with each other and with the definition over one batch."""
    dtype, heads, group, width, page, wanted, tolerance = SHAPES[name]
    layout = PagedKvLayout(heads, width, dtype, page, VALUES.get(name, 0))
    sinks = np.linspace(-1, 2, heads * group).astype(np.float32)
    slopes = np.linspace(0.05, 1, heads * group).astype(np.float32)
    knobs = {"window": 7, "softcap": 2.0, "sinks": sinks, "slopes": slopes, "k_scale": 1.0, "v_scale": 1.0}
    knobs = {key: knobs[key] for key in wanted}
    bent = {key: x for key, x in knobs.items() if "scale" not in key}
    rules = {"rules": RULES.get(name, plan.NO_RULES)}
    case = make_case(layout, group, seqs, limits=LIMITS, seed=seed, **bent, **rules)
    out, cache = compiled(name, layout, **static)(case.arrays, knobs)
    assert not races_found()
    np.testing.assert_allclose(np.asarray(out, np.float32), case.expected, atol=tolerance)
    defined, written = compiled(name, layout, use_kernel=False)(case.arrays, knobs)
    np.testing.assert_allclose(np.asarray(defined, np.float32), case.expected, atol=tolerance)
    np.testing.assert_array_equal(np.asarray(cache).view(np.uint32), np.asarray(written).view(np.uint32))


CALLS: dict = {}


def compiled(name: str, layout: PagedKvLayout, interpret: pltpu.InterpretParams = STRICT, **static):
    """One traced call per shape: examples differ in values only."""
    call = attention(layout, interpret=interpret, rules=RULES.get(name, plan.NO_RULES), **static)
    return CALLS.setdefault((name, interpret, *static.items()), call)


MIXED = [(1, 0), (1, 15), (1, 40), (5, 0), (9, 23), (1, 30), (21, 3)]


@pytest.mark.parametrize("name", FEW)
def test_a_mixed_batch(name: str) -> None:
    run(name, MIXED, seed=1)


@pytest.mark.tpu_matrix
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in FEW])
def test_a_mixed_batch_of_every_type(name: str) -> None:
    run(name, MIXED, seed=1)


@pytest.mark.parametrize("name", some(["bf16", "slopes", "e5m2", CHUNKS], ["bf16"]))
def test_two_cores_divide_the_heads(name: str) -> None:
    """Each core of a v5p runs all tiles for half of the lane heads, at the same time as the other."""
    run(name, [(1, 15), (1, 20), (5, 3), (19, 7)], seed=3, chip=CHIPS["v5p"], interpret=TWO_CORES)


@pytest.mark.slow_matrix
@pytest.mark.parametrize("name", ["bf16", "slopes", "e5m2", CHUNKS])
def test_the_cores_may_run_in_any_order(name: str) -> None:
    run(name, MIXED, seed=3, chip=CHIPS["v5p"])


def test_heads_that_cannot_be_halved_use_one_core() -> None:
    def cores(kv_heads: int, head_dim: int, dtype: str, chip: str = "v5p") -> int:
        layout = PagedKvLayout(kv_heads, head_dim, dtype, 128)
        half = plan.core_layout(CHIPS[chip], layout)
        assert half.rows_per_token * (layout.lane_heads // half.lane_heads) == layout.rows_per_token
        return layout.lane_heads // half.lane_heads

    assert (cores(8, 128, "bfloat16"), cores(8, 128, "bfloat16", "v6e")) == (2, 1)
    assert (cores(1, 128, "bfloat16"), cores(3, 128, "float32"), cores(2, 256, "float32")) == (1, 1, 2)
    assert (cores(2, 64, "bfloat16"), cores(4, 64, "bfloat16")) == (1, 2), "two heads share a row"
    assert (cores(2, 128, "int8"), cores(4, 128, "int8"), cores(6, 128, "int8")) == (1, 2, 1), "two share a word"


@pytest.mark.parametrize("seqs", [[(1, 8), (1, 47), (1, 0)], [(48, 0)], [(17, 31)], []], ids=str)
def test_batches_of_one_kind(seqs: list[tuple[int, int]]) -> None:
    run("bf16", seqs, seed=2)


def of_whole_lanes(
    monkeypatch: pytest.MonkeyPatch, chip: str, terms: tuple[str, ...]
) -> tuple[str, Callable[[], np.ndarray]]:
    """Trace tiles of 128 tokens; return the order of their halves of passes, and what runs, checks and returns them.

    Such tiles are columns of one array, of which a tile has a part per query head of a KV head.
    """
    for name, size in {"queries": 128, "fetch": 128, "tokens": 64}.items():
        monkeypatch.setitem(SMALL, name, size)
    layout, limits = PagedKvLayout(2, 64, "float32", 64), Limits(tokens=300, seqs=4, pages=16, max_pages=4)
    knobs = {name: np.linspace(0.05, 1, 6).astype(np.float32) for name in terms}
    case = make_case(layout, 3, [(1, 70), (150, 30), (1, 5), (110, 0)], limits=limits, seed=3, **knobs)
    order: list[str] = []
    with monkeypatch.context() as patch:
        for half in (ColumnLogits, ColumnSoftmax):
            patch.setattr(half, "run", recorded(half, order))
        traced = attention(layout, interpret=STRICT, chip=CHIPS[chip]).trace(case.arrays, knobs)

    def checked() -> np.ndarray:
        out, _ = traced.lower().compile()(case.arrays, knobs)
        assert not races_found()
        np.testing.assert_allclose(np.asarray(out, np.float32), case.expected, atol=3e-5)
        return np.asarray(out)

    return "".join(order), checked


def recorded(half: type, order: list[str]) -> Callable[..., None]:
    """Return what such a half runs; it notes L for logits, S for a softmax."""
    run = half.run

    def noted(self: ColumnLogits | ColumnSoftmax, first: int) -> None:
        order.append(half.__name__[len("Column")])
        run(self, first)

    return noted


def test_tiles_of_whole_lanes_where_matrix_units_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """On v6e halves of each pair of passes alternate, chain by chain."""
    order, checked = of_whole_lanes(monkeypatch, "v6e", ("sinks", "slopes"))
    assert ("LSLSLS" in order, "LLLSSS" in order) == (True, False)
    checked()


def test_tiles_of_whole_lanes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """v5e computes all logits first."""
    order, _ = of_whole_lanes(monkeypatch, "v5e", ())
    assert ("LSLSLS" in order, "LLLSSS" in order) == (False, True)


@pytest.mark.slow_matrix
@pytest.mark.parametrize("terms", [(), ("sinks", "slopes")], ids=["plain", "sinks and slopes"])
def test_the_order_of_halves_changes_no_bit(monkeypatch: pytest.MonkeyPatch, terms: tuple[str, ...]) -> None:
    (_, wide), (_, narrow) = (of_whole_lanes(monkeypatch, chip, terms) for chip in ("v6e", "v5e"))
    np.testing.assert_array_equal(wide(), narrow())


def test_queries_of_decodes_are_not_transposed() -> None:
    """Neither before the call nor their outputs after it: XLA would copy all of them in every layer."""
    layout = PagedKvLayout(2, 128, "bfloat16", 8)
    case = make_case(layout, 4, [(1, 15), (1, 40)], limits=LIMITS, seed=0)

    def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
        for equation in jaxpr.eqns:
            yield equation
            if equation.primitive.name != "pallas_call":
                for inner in jaxprs_in_params(equation.params):
                    yield from equations(inner)

    def moves(equation: JaxprEqn) -> bool:
        moved = equation.invars[0].aval
        order = [axis for axis in equation.params["permutation"] if moved.shape[axis] > 1]
        return moved.dtype == case.arrays["q"].dtype and order != sorted(order)

    run = attention(layout, interpret=STRICT, decode_only=True)
    found = list(equations(jax.make_jaxpr(lambda arrays: run(arrays, {}))(case.arrays).jaxpr))
    assert "pallas_call" in {equation.primitive.name for equation in found}
    assert not [equation for equation in found if equation.primitive.name == "transpose" and moves(equation)]


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


@pytest.mark.parametrize(
    "knobs",
    [pytest.param({}, marks=pytest.mark.slow_matrix), {"window": 14, "softcap": 2.0}],
    ids=["plain", "window-softcap"],
)
def test_a_batch_invariant_token_is_the_same_bits_alone(knobs: dict[str, float]) -> None:
    """The last tokens of each sequence of a mixed batch, without the others and with the rest of it in the cache."""
    heads, group, tolerance = 1, 3, 3e-5
    layout = PagedKvLayout(heads, 64, "float32", 8)  # two pages per pass, if passes were as large as usual
    case = make_case(layout, group, MIXED, limits=LIMITS, seed=1, **knobs)
    call = attention(layout, interpret=STRICT, batch_invariant=True)
    out, cache = (np.array(array) for array in call(case.arrays, knobs))
    np.testing.assert_allclose(out.astype(np.float32), case.expected, atol=tolerance)
    arrays = {key: np.array(value) for key, value in case.arrays.items()}
    for s, last in ((2, 1), (4, 1), (6, 3)):
        end = arrays["query_start"][s + 1]
        tokens = slice(end - last, end)
        alone = {**arrays, "cache": cache, "counts": np.array([int(last == 1), 1], np.int32)}
        for key in "qkv":
            alone[key] = np.full_like(arrays[key], np.nan)
            alone[key][:last] = arrays[key][tokens]
        alone["query_start"] = np.where(np.arange(LIMITS.seqs + 1) > 0, last, 0).astype(np.int32)
        alone["kv_len"] = np.full_like(arrays["kv_len"], arrays["kv_len"][s])
        alone["page_table"] = np.tile(arrays["page_table"][s], (LIMITS.seqs, 1))
        single, _ = call({key: jax.numpy.asarray(value) for key, value in alone.items()}, knobs)
        np.testing.assert_array_equal(np.asarray(single)[:last], out[tokens])
