"""Decode attention: the reference against torch's own attention, the interpreted kernel against the reference."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.kernels.compile_launches import programs
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.decode_attention import (
    PROGRAMS,
    PagedDecode,
    decode_attention,
    even_pieces,
)
from pagoda.backends.torch_cuda.kernels.attention.decode_attention.kernel import (
    TUNING,
    DecodeBlockSizes,
    DecodeShape,
    blocks,
    candidates,
    multiplies8,
    shared_bytes,
)
from pagoda.backends.torch_cuda.kernels.attention.shared import ScoreRules
from pagoda.backends.torch_cuda.kernels.attention.work_list import (
    GRAIN,
    MAX_WAVES,
    NO_SEQUENCE,
    WHOLE,
    WorkList,
    WorkPlanner,
    cut_evenly,
    pieces_for,
    pieces_of_each,
    plan_work,
)
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, table

NATIVE, OLD = CHIPS["sm_90"], CHIPS["sm_80"]
E4M3 = torch.float8_e4m3fn
ULP = 2**-10


@dataclass
class Case:
    """Random sequences in a cache in which everything that no token may see is NaN, and every such table entry wild."""

    lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    values: int | None = None  # channels of a value head; None: dim
    page: int = 16
    query_len: int = 1
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(len(self.lens) + sum(self.lens))
        width, cached = -(-max(self.lens) // self.page) + 2, self.cache or self.dtype
        pages = 1 + len(self.lens) * width
        dims = self.dim, self.values or self.dim
        caches = [torch.full((pages, self.kv_heads, self.page, dim), float("nan")).to(cached) for dim in dims]
        tables = torch.full((len(self.lens), width), 1 << 30, dtype=torch.int32)
        free = (1 + torch.randperm(pages - 1)).tolist()
        counts = self.options.get("query_counts", [self.query_len] * len(self.lens))
        for row, (length, count) in enumerate(zip(self.lens, counts)):
            first, window, chunk = 0, self.options.get("window"), self.options.get("chunk")
            if window is not None:
                first = max(0, length - int(count) - window + 1)
            if chunk is not None:
                first = max(0, max(0, length - int(count)) // chunk * chunk - self.options.get("lookback", 0))
            for position in range(first, length):
                at, slot = divmod(position, self.page)
                if tables[row, at] == 1 << 30:
                    tables[row, at] = free.pop()
                for cache, dim in zip(caches, dims):
                    cache[tables[row, at], :, slot] = torch.randn(self.kv_heads, dim).to(cached)
        q = torch.randn(len(self.lens) * self.query_len, self.heads, self.dim).to(self.dtype)
        return q, caches[0], caches[1], tables, torch.tensor(self.lens, dtype=torch.int32)

    def run(self, *, use_kernel: bool, chip=NATIVE, work: WorkList | None = None) -> Tensor:
        more = {"scale": self.dim**-0.5, "query_len": self.query_len, "work": work, **self.options}
        return decode_attention(*self.arrays(), use_kernel=use_kernel, chip=chip, **more)

    def cut(self, pieces: int) -> WorkList | None:
        return cut_evenly(torch.tensor(self.lens, dtype=torch.int32), pieces)


def work_list(lens: list[int], pieces: int, planned: list[int] | None = None) -> WorkList:
    """The pieces of sequences that had `planned` tokens when they were cut; two are unused."""
    items, merges = plan_work(np.array(planned or lens, np.int32), pieces)
    unused = np.full((len(lens) + pieces - len(items), 4), NO_SEQUENCE, np.int32)
    return WorkList(torch.from_numpy(np.concatenate((items, unused))), torch.from_numpy(merges))


@pytest.fixture(autouse=True)
def dirty_scratch(monkeypatch: pytest.MonkeyPatch):
    """Memory that a kernel allocates holds NaN."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: _filled(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: _filled(empty_like(*a, **k)))


def _filled(x: Tensor) -> Tensor:
    return x.fill_(float("nan")) if x.is_floating_point() else x


SCALES = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
SINKS = torch.tensor([-1.0, 0.5, 3.0, 1.0])
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.7])
CASES = {
    "ragged": Case([1, 0, 37, 16, 70]),
    "one token": Case([1]),
    "group of 7, head dim 80": Case([5, 40], heads=7, kv_heads=1, dim=80),
    "no group, head dim 12": Case([33, 20], heads=2, kv_heads=2, dim=12),
    "drafts": Case([9, 64, 0, 3], query_len=3),
    "more rows than a program has": Case([50], heads=6, kv_heads=1, query_len=8),
    "window": Case([100, 7, 40], options={"window": 20}),
    "window of drafts": Case([90, 21, 30], query_len=4, options={"window": 5}),
    "window of padded drafts": Case(
        [90, 21, 30, 0, 3, 66],
        query_len=4,
        options={"window": 5, "query_counts": torch.tensor([1, 4, 2, 0, 3, 1], dtype=torch.int32)},
    ),
    "window of one": Case([90, 1], options={"window": 1}),
    "chunks": Case([100, 7, 40, 41], options={"chunk": 20}),
    "chunks of padded drafts, one begins among them": Case(
        [90, 22, 30, 0, 3, 66],
        query_len=4,
        options={"chunk": 21, "query_counts": torch.tensor([1, 4, 2, 0, 3, 1], dtype=torch.int32)},
    ),
    "chunks and those before them": Case([100, 7, 41, 0], query_len=2, options={"chunk": 20, "lookback": 20}),
    "narrow values": Case([37, 70], dim=24, values=16, options={"window": 30}),
    "wide values, scaled": Case([37, 70], dim=12, values=20, query_len=2, options=SCALES),
    "soft cap": Case([40, 9], options={"softcap": 2.0}),
    "sinks": Case([40, 9, 0], options={"sinks": SINKS}),
    "slopes": Case([40, 9, 0], query_len=2, options={"slopes": SLOPES, "window": 30}),
    "root of the distance": Case([40, 9, 0], query_len=2, options={"slopes": SLOPES, "root": True}),
    "fewer tokens than query_len": Case([1, 2, 5], query_len=3, options={"sinks": SINKS}),
    "large pages": Case([100, 129], page=128),
    "small pages": Case([35, 8], page=4),
    "scaled": Case([40, 9], options=SCALES),
    "everything": Case(
        [100, 9], query_len=2, dim=24, page=8, options={"window": 40, "softcap": 5.0, "sinks": SINKS, **SCALES}
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pieces", [1, 3])
def test_kernel_is_the_reference(name: str, pieces: int):
    case = CASES[name]
    out, expected = case.run(use_kernel=True, work=case.cut(pieces)), case.run(use_kernel=False)
    if (counts := case.options.get("query_counts")) is not None:
        assert out.isfinite().all()
        assert expected.isfinite().all()
        real = (torch.arange(case.query_len) >= case.query_len - counts[:, None]).flatten()
        out, expected = out[real], expected[real]
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_sequences_are_the_sequences(name: str):
    """Of those that are longer than a piece, and those that are not."""
    case = CASES[name]
    case = replace(case, lens=[length * 3 if length > 30 else length for length in case.lens])
    out, expected = case.run(use_kernel=True, work=work_list(case.lens, 3)), case.run(use_kernel=False)
    if (counts := case.options.get("query_counts")) is not None:
        real = (torch.arange(case.query_len) >= case.query_len - counts[:, None]).flatten()
        assert out.isfinite().all()
        out, expected = out[real], expected[real]
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("planned", [[300, 5, 0, 64], [80, 250, 130, 1], [1, 1, 1, 1], [400, 400, 400, 400]])
def test_a_work_list_fits_sequences_of_other_lengths(planned: list[int]):
    """Lists of longer and of shorter ones: the host knows bounds of what the device computes."""
    case = Case([300, 5, 0, 64], options={"sinks": SINKS})
    out = case.run(use_kernel=True, work=work_list(case.lens, 4, planned))
    torch.testing.assert_close(out, case.run(use_kernel=False), rtol=0, atol=3e-6)


@pytest.mark.parametrize("page", [16, 128])
def test_pieces_may_end_within_a_tile(page: int):
    case = Case([330, 70], page=page, options={"scale": 0.25})
    rules = ScoreRules(0.25, None, None, None, None, None, None)
    sizes = DecodeBlockSizes(16, 128, 4, 2)
    work = work_list(case.lens, 7)
    assert work.items[:, 1].tolist().count(64), "a piece begins in the middle of a tile"
    q, keys, values, *step = case.arrays()
    how = {"dtype": q.dtype, "group": q.shape[1] // keys.shape[1], "use_kernel": True, "chip": NATIVE, "chosen": sizes}
    out = PagedDecode(keys, values, rules, **how)(q, *step, torch.empty_like(q), work=work)
    torch.testing.assert_close(out, case.run(use_kernel=False), rtol=0, atol=3e-6)


def test_pieces_are_balanced():
    """One of 128k tokens among 95 of 1k: no program reads more than a fraction of what is read in all."""
    lens = np.array([1024] * 95 + [131072], np.int32)
    pieces = pieces_for(len(lens), 8, NATIVE, PROGRAMS)
    items, merges = plan_work(lens, pieces)
    assert len(items) <= len(lens) + pieces
    lengths = np.minimum(items[:, 2], lens[items[:, 0]]) - items[:, 1]
    assert lengths.max() <= -(-lens.sum() // pieces // GRAIN) * GRAIN + GRAIN
    assert (np.diff(lengths) <= 0).all(), "the longest first"
    assert lengths.sum() == lens.sum()
    assert merges[:, 1].tolist() == np.bincount(items[:, 0]).tolist()
    slots = items[items[:, 3] >= 0, 3]
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) <= work_list(lens.tolist(), pieces).num_slots
    assert _rounds(lengths, 8, PROGRAMS * NATIVE.sms) < 1.3 * lens.sum() * 8 / (PROGRAMS * NATIVE.sms)


def _rounds(lengths, heads: int, programs: int) -> float:
    """Tokens that the busiest of `programs` concurrent programs reads, each starting when one ends."""
    busy = [0.0] * programs
    for length in np.repeat(lengths, heads):
        heapq.heapreplace(busy, busy[0] + float(length))
    return max(busy)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20), st.integers(1, 300))
def test_every_token_is_in_one_piece(lens: list[int], pieces: int):
    items, merges = plan_work(np.array(lens, np.int32), pieces)
    assert len(items) <= len(lens) + pieces
    for sequence, length in enumerate(lens):
        own = sorted((begin, end, slot) for at, begin, end, slot in items.tolist() if at == sequence)
        assert [begin for begin, _, _ in own] == [0, *(end for _, end, _ in own[:-1])][: len(own)]
        assert merges[sequence, 1] == len(own)
        assert not length or own[-1][1] >= length
        first = merges[sequence, 0]
        assert [slot for _, _, slot in own] == ([WHOLE] if len(own) == 1 else list(range(first, first + len(own))))


def test_a_planner_keeps_its_list_until_lengths_change():
    planner, made = WorkPlanner(), []

    def plan(lens: list[int], pieces: int = 9) -> None:
        items, merges = np.full((len(lens) + pieces, 4), 7, np.int32), np.full((len(lens) + 1, 2), 7, np.int32)
        planner.plan(np.array(lens, np.int32), pieces, items, merges)
        assert merges[-1].tolist() == [0, 0]
        used = items[items[:, 0] != NO_SEQUENCE]
        assert sorted(set(used[:, 0].tolist())) == list(range(len(lens)))
        made.append(items.tolist())

    plan([1000, 100])
    plan([1000 + GRAIN - 1, 100])
    assert made[0] == made[1]
    plan([1000 + GRAIN, 100])
    plan([100, 1000 + GRAIN])
    plan([100, 1000 + GRAIN, 5])
    plan([100, 1000 + GRAIN, 5], 10)
    assert all(one != other for one, other in itertools.pairwise(made[1:]))


def test_padding_changes_nothing():
    """Two tokens among four are those of two alone."""
    padded = Case([21, 30], query_len=4, options={"window": 5, "query_counts": torch.tensor([2, 2], dtype=torch.int32)})
    q, *rest = padded.arrays()
    more = {"scale": 0.25, "use_kernel": False, "chip": NATIVE}
    out = decode_attention(q, *rest, query_len=4, **more, **padded.options)
    alone = decode_attention(q.view(2, 4, 4, 16)[:, 2:].flatten(0, 1), *rest, query_len=2, window=5, **more)
    torch.testing.assert_close(out.view(2, 4, 4, 16)[:, 2:].flatten(0, 1), alone, rtol=0, atol=1e-6)


def test_half_precision():
    case = Case([70, 9], heads=8, dim=64, query_len=2, dtype=torch.float16)
    torch.testing.assert_close(case.run(use_kernel=True), case.run(use_kernel=False), rtol=ULP, atol=ULP)


@pytest.mark.parametrize("chip", [NATIVE, OLD], ids=lambda chip: chip.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pieces", [1, 2])
def test_float8_cache(chip, dtype: torch.dtype, pieces: int):
    case = Case([70, 9, 0], query_len=2, dtype=dtype, cache=E4M3, options=SCALES)
    tolerance = 3e-6 if dtype == torch.float32 else 2 * ULP
    expected = case.run(use_kernel=False)
    out = case.run(use_kernel=True, chip=chip, work=case.cut(pieces))
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chip", [NATIVE, OLD], ids=lambda chip: chip.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_float8_is_exact(chip, dtype: torch.dtype):
    """Sixteen sequences of one token each, whose values are all bytes there are: attention gives them back."""
    values = torch.arange(256, dtype=torch.uint8).view(16, 1, 1, 16).view(E4M3)
    keys, expected = torch.zeros_like(values.float()).to(E4M3), values.float().view(16, 1, 16)
    q, lens = torch.randn(16, 1, 16).to(dtype), torch.ones(16, dtype=torch.int32)
    tables = torch.arange(16, dtype=torch.int32)[:, None]
    out = decode_attention(q, keys, values, tables, lens, scale=1.0, use_kernel=True, chip=chip)
    numbers = ~expected.isnan()
    assert numbers.sum() == 254
    torch.testing.assert_close(out.float()[numbers], expected[numbers], rtol=0, atol=0)


@pytest.mark.parametrize(("chip", "multiplied"), [(NATIVE, True), (CHIPS["sm_89"], True), (CHIPS["sm_100"], False)])
def test_float8_products_keep_every_bit_of_bfloat16_queries(chip, multiplied: bool):
    """Against float64, in float16, which the interpreter can compute; the largest channel is 30 times the others."""
    case = Case([70, 9, 0], dim=64, query_len=2, dtype=torch.float16, cache=E4M3, options=SCALES)
    shape = DecodeShape(64, 2, 2, E4M3)
    assert multiplies8(shape, torch.bfloat16, blocks(shape, chip).TILE, chip) == multiplied
    q, *rest = case.arrays()
    q[..., 5] *= 30
    q = q.bfloat16().half()
    more = {"scale": 0.1, "query_len": 2, "chip": chip, **SCALES}
    expected = decode_attention(q.double(), *rest, use_kernel=False, **more)
    out = decode_attention(q, *rest, use_kernel=True, **more).double()
    assert (out - expected).norm() < 5e-4 * expected.norm(), "weights and values of 11 bits"


@pytest.mark.parametrize("size", [2.0**-60, 1.0, 2.0**60])
def test_bfloat16_queries_of_a_float8_cache_keep_their_range(size: float):
    """Products with float8 run in float16, which has less range. The interpreter can do this, but rounds the output
    towards zero.
    """
    case = Case([40, 9], cache=E4M3, dim=32, options=SCALES)
    q, *rest = case.arrays()
    q = (q * size).bfloat16()
    more = {"scale": 1 / size, "chip": NATIVE, **SCALES}
    expected = decode_attention(q.float(), *rest, use_kernel=False, **more)
    out = decode_attention(q, *rest, use_kernel=True, **more)
    torch.testing.assert_close(out.float(), expected, rtol=8 * ULP, atol=2 * ULP)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("limit", [{}, {"window": 6}, {"chunk": 6}], ids=str)
def test_reference_is_attention(limit: dict[str, int], softcap: float | None):
    """Against a loop over sequences with torch's own attention, or the formula where that has no soft cap."""
    case = Case([1, 19, 30], query_len=1, dim=8, page=4, options={"softcap": softcap, **limit})
    q, keys, values, tables, lens = case.arrays()
    out = case.run(use_kernel=False)
    for row, length in enumerate(lens.tolist()):
        first = max(0, length - limit.get("window", length))
        first = (length - 1) // 6 * 6 if "chunk" in limit else first
        slots = [(int(tables[row, at // 4]), at % 4) for at in range(first, length)]
        k, v = (torch.stack([cache[p, :, s] for p, s in slots], 1).repeat_interleave(2, 0) for cache in (keys, values))
        if softcap is None:
            expected = F.scaled_dot_product_attention(q[row][:, None], k, v, scale=8**-0.5)[:, 0]
        else:
            scores = torch.tanh((q[row][:, None] @ k.transpose(1, 2)) * 8**-0.5 / softcap) * softcap
            expected = (scores.softmax(-1) @ v)[:, 0]
        torch.testing.assert_close(out[row], expected, rtol=0, atol=2e-6)


def test_reference_of_drafts_is_the_reference_of_each_token():
    """Three tokens at once see what each would have seen had it been the last; sinks are logits without a value."""
    case = Case([3, 21], query_len=3, options={"sinks": SINKS, "window": 9})
    q, keys, values, tables, lens = case.arrays()
    more = {"scale": 0.25, "use_kernel": False, "chip": NATIVE, **case.options}
    out = decode_attention(q, keys, values, tables, lens, query_len=3, **more)
    for j in range(3):
        alone = decode_attention(q[j::3].contiguous(), keys, values, tables, lens - 2 + j, **more)
        torch.testing.assert_close(out[j::3], alone, rtol=0, atol=2e-6)
    more["sinks"] = torch.full((4,), 50.0)
    assert decode_attention(q, keys, values, tables, lens, query_len=3, **more).abs().max() < 1e-15


def test_reference_in_float64():
    case = Case([21], query_len=2, cache=torch.bfloat16, dtype=torch.float64)
    out = case.run(use_kernel=False)
    assert out.dtype == torch.float64
    q, *rest = case.arrays()
    single = decode_attention(q.float(), *rest, query_len=2, scale=0.25, use_kernel=False, chip=NATIVE)
    assert 0 < (out - single).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_len": 9}, "query_len is 9, not 1 to 8"),
        ({"query_len": 2}, "tokens"),
        ({"keys": torch.zeros(3, 2, 16, 8)}, "keys"),
        ({"keys": torch.zeros(3, 16, 2, 16).transpose(1, 2)}, "contiguous"),
        ({"q": torch.zeros(1, 16, 4).transpose(1, 2)}, "contiguous"),
        ({"keys": torch.zeros(3, 2, 12, 16), "values": torch.zeros(3, 2, 12, 16)}, "12"),
        ({"q": torch.zeros(1, 3, 16)}, "3 heads do not share 2 KV heads"),
        ({"tables": torch.zeros(1, 1, dtype=torch.int64)}, "int64"),
        ({"sinks": torch.zeros(2)}, "sinks"),
        ({"work": work_list([1, 1], 1)}, "work list has 2 sequences"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], message: str):
    arrays = {
        "q": torch.zeros(1, 4, 16),
        "keys": torch.zeros(3, 2, 16, 16),
        "values": torch.zeros(3, 2, 16, 16),
        "tables": torch.zeros(1, 1, dtype=torch.int32),
        "kv_lens": torch.ones(1, dtype=torch.int32),
    }
    decode_attention(**arrays, scale=1.0, use_kernel=False, chip=NATIVE)
    with pytest.raises(ValueError, match=message):
        decode_attention(**{**arrays, **change}, scale=1.0, use_kernel=False, chip=NATIVE)


def test_pages_of_keys_and_values_may_alternate():
    """Views of one array [P, 2, K, B, H]."""
    case = Case([40, 9])
    q, keys, values, *rest = case.arrays()
    both = torch.stack((keys, values), 1)
    more = {"scale": 0.25, "use_kernel": True, "chip": NATIVE}
    out = decode_attention(q, both[:, 0], both[:, 1], *rest, **more)
    torch.testing.assert_close(out, decode_attention(q, keys, values, *rest, **more), rtol=0, atol=0)


def test_sequences_are_cut_evenly():
    """Pieces begin at multiples of GRAIN; the last one has no end, for sequences may have grown since."""
    lens = [5 * GRAIN, 0, 70]
    work = cut_evenly(torch.tensor(lens, dtype=torch.int32), 3)
    assert work is not None
    end = 2**31 - 1
    assert [row[:3] for row in work.items.tolist()[:3]] == [[0, 0, 128], [0, 128, 256], [0, 256, end]]
    assert work.items[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert work.items[:, 3].tolist() == list(range(9))
    assert work.merges.tolist() == [[0, 3], [3, 3], [6, 3]]
    assert work.num_slots >= 9
    assert (work.items.dtype, work.merges.dtype) == (torch.int32, torch.int32)
    assert cut_evenly(torch.tensor(lens, dtype=torch.int32), 1) is None


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_equal_pieces_fill_the_chip(chip):
    slots = PROGRAMS * chip.sms
    for seqs in (1, 2, 8, 32, 64, 100):
        for length in (16, 1024, 4096, 131072):
            pieces = pieces_of_each(seqs, 8, length, chip, PROGRAMS)
            waves = seqs * 8 * pieces / slots
            assert pieces <= -(-length // GRAIN), "no piece is empty"
            assert pieces == 1 or waves <= MAX_WAVES
            work = even_pieces(seqs, 8, length, torch.device("cpu"), chip)
            assert (1 if work is None else work.merges[0, 1].item()) == pieces
            assert length < 131072 or seqs == 1 or waves > 1.5, "long sequences outlast short ones"
            assert length < 131072 or waves > 0.85 * -(-waves // 1), "the last wave is full enough"
    assert pieces_of_each(1000, 8, 131072, chip, PROGRAMS) == 1


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_candidates_hold_the_settings_in_use(chip):
    """What is in the table is among what a benchmark would try, and as many programs as work lists expect fit."""
    for dim in (64, 128):
        shape = DecodeShape(dim, 4, 1, torch.bfloat16)
        use = blocks(shape, chip)
        assert use in list(candidates(shape, chip))
        assert PROGRAMS * shared_bytes(shape, use, chip) <= chip.shared_bytes


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3], ids=str)
def test_every_head_dim_has_settings(chip, cache: torch.dtype):
    """None has the settings of what was never thought of."""
    listed = set().union(*(entries for entries in table(TUNING).values()))
    for dim in range(8, 513, 8):
        for group in (1, 4, 8, 16, 64):
            shape = DecodeShape(dim, group, 1, cache)
            assert shape.key in listed
            assert shared_bytes(shape, blocks(shape, chip), chip) <= chip.shared_bytes


LAUNCHES = """
import torch
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.attention.decode_attention import decode_attention
from pagoda.backends.torch_cuda.kernels.attention.work_list import WorkList

keys = torch.zeros(2, 1, 16, 16, dtype=torch.bfloat16)
for pieces, seqs, width, offset in ((2, 16, 16, 0), (16, 1, 1, 1), (3, 3, 5, 3)):
    q = torch.zeros(seqs, 1, 16, dtype=torch.bfloat16)
    tables = torch.zeros(seqs * width + offset, dtype=torch.int32)[offset:].view(seqs, width)
    lens = torch.zeros(seqs + offset, dtype=torch.int32)[offset:]
    how = {"scale": 1.0, "use_kernel": True, "chip": CHIPS["sm_90"]}
    decode_attention(q, keys, keys.clone(), tables, lens, **how)
    items, merges = (torch.zeros(n + offset, m, dtype=torch.int32)[offset:] for n, m in ((seqs + pieces, 4), (seqs, 2)))
    decode_attention(q, keys, keys.clone(), tables, lens, work=WorkList(items, merges), **how)
"""


def test_what_varies_from_step_to_step_compiles_nothing():
    """Numbers of pieces, of sequences and of table columns, and where in a staging buffer the arrays begin."""
    assert programs(LAUNCHES) == 3 * [["attend", "attend 0"], ["attend", "attend 1"], ["reduce", "reduce 2"]]
