"""Decode attention: the reference against torch's own attention, the interpreted kernel against the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compile_launches import programs
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.decode_attention import (
    MAX_WAVES,
    MIN_SPLIT_TOKENS,
    PROGRAMS,
    choose_splits,
    decode_attention,
)
from pagoda.backends.torch_cuda.kernels.decode_attention.kernel import DecodeShape, blocks, candidates, shared_bytes
from pagoda.backends.torch_cuda.kernels.launch import CHIPS

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

    def run(self, *, use_kernel: bool, splits: int = 1, chip=NATIVE) -> Tensor:
        more = {"scale": self.dim**-0.5, "query_len": self.query_len, **self.options}
        return decode_attention(*self.arrays(), splits=splits, use_kernel=use_kernel, chip=chip, **more)


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
@pytest.mark.parametrize("splits", [1, 3])
def test_kernel_is_the_reference(name: str, splits: int):
    case = CASES[name]
    out, expected = case.run(use_kernel=True, splits=splits), case.run(use_kernel=False)
    if (counts := case.options.get("query_counts")) is not None:
        assert out.isfinite().all()
        assert expected.isfinite().all()
        real = (torch.arange(case.query_len) >= case.query_len - counts[:, None]).flatten()
        out, expected = out[real], expected[real]
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)


def test_padding_changes_nothing():
    """Two tokens among four are those of two alone."""
    padded = Case([21, 30], query_len=4, options={"window": 5, "query_counts": torch.tensor([2, 2], dtype=torch.int32)})
    q, *rest = padded.arrays()
    more = {"scale": 0.25, "splits": 1, "use_kernel": False, "chip": NATIVE}
    out = decode_attention(q, *rest, query_len=4, **more, **padded.options)
    alone = decode_attention(q.view(2, 4, 4, 16)[:, 2:].flatten(0, 1), *rest, query_len=2, window=5, **more)
    torch.testing.assert_close(out.view(2, 4, 4, 16)[:, 2:].flatten(0, 1), alone, rtol=0, atol=1e-6)


def test_half_precision():
    case = Case([70, 9], heads=8, dim=64, query_len=2, dtype=torch.float16)
    torch.testing.assert_close(case.run(use_kernel=True), case.run(use_kernel=False), rtol=ULP, atol=ULP)


@pytest.mark.parametrize("chip", [NATIVE, OLD], ids=lambda chip: chip.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_float8_cache(chip, dtype: torch.dtype, splits: int):
    case = Case([70, 9, 0], query_len=2, dtype=dtype, cache=E4M3, options=SCALES)
    tolerance = 3e-6 if dtype == torch.float32 else 2 * ULP
    expected = case.run(use_kernel=False)
    torch.testing.assert_close(
        case.run(use_kernel=True, chip=chip, splits=splits), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("chip", [NATIVE, OLD], ids=lambda chip: chip.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_float8_is_exact(chip, dtype: torch.dtype):
    """Sixteen sequences of one token each, whose values are all bytes there are: attention gives them back."""
    values = torch.arange(256, dtype=torch.uint8).view(16, 1, 1, 16).view(E4M3)
    keys, expected = torch.zeros_like(values.float()).to(E4M3), values.float().view(16, 1, 16)
    q, lens = torch.randn(16, 1, 16).to(dtype), torch.ones(16, dtype=torch.int32)
    tables = torch.arange(16, dtype=torch.int32)[:, None]
    out = decode_attention(q, keys, values, tables, lens, scale=1.0, splits=1, use_kernel=True, chip=chip)
    numbers = ~expected.isnan()
    assert numbers.sum() == 254
    torch.testing.assert_close(out.float()[numbers], expected[numbers], rtol=0, atol=0)


@pytest.mark.parametrize("size", [2.0**-60, 1.0, 2.0**60])
def test_bfloat16_queries_of_a_float8_cache_keep_their_range(size: float):
    """Products with float8 run in float16, which has less range. The interpreter can do this, but rounds the output
    towards zero.
    """
    case = Case([40, 9], cache=E4M3, options=SCALES)
    q, *rest = case.arrays()
    q = (q * size).bfloat16()
    more = {"scale": 1 / size, "splits": 1, "chip": NATIVE, **SCALES}
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
    more = {"scale": 0.25, "splits": 1, "use_kernel": False, "chip": NATIVE, **case.options}
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
    single = decode_attention(q.float(), *rest, query_len=2, scale=0.25, splits=1, use_kernel=False, chip=NATIVE)
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
        ({"splits": 0}, "splits"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], message: str):
    arrays = {
        "q": torch.zeros(1, 4, 16),
        "keys": torch.zeros(3, 2, 16, 16),
        "values": torch.zeros(3, 2, 16, 16),
        "tables": torch.zeros(1, 1, dtype=torch.int32),
        "kv_lens": torch.ones(1, dtype=torch.int32),
        "splits": 1,
    }
    decode_attention(**arrays, scale=1.0, use_kernel=False, chip=NATIVE)
    with pytest.raises(ValueError, match=message):
        decode_attention(**{**arrays, **change}, scale=1.0, use_kernel=False, chip=NATIVE)


def test_pages_of_keys_and_values_may_alternate():
    """Views of one array [P, 2, K, B, H]."""
    case = Case([40, 9])
    q, keys, values, *rest = case.arrays()
    both = torch.stack((keys, values), 1)
    more = {"scale": 0.25, "splits": 1, "use_kernel": True, "chip": NATIVE}
    out = decode_attention(q, both[:, 0], both[:, 1], *rest, **more)
    torch.testing.assert_close(out, decode_attention(q, keys, values, *rest, **more), rtol=0, atol=0)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_splits_fill_the_chip(chip):
    slots = PROGRAMS * chip.sms
    for seqs in (1, 2, 8, 32, 64, 100):
        for length in (16, 1024, 4096, 131072):
            splits = choose_splits(seqs, 8, length, chip)
            waves = seqs * 8 * splits / slots
            assert splits <= -(-length // MIN_SPLIT_TOKENS), "no split without a tile"
            assert splits == 1 or waves <= MAX_WAVES
            assert length < 131072 or seqs == 1 or waves > 1.5, "long sequences outlast short ones"
            assert length < 131072 or waves > 0.85 * -(-waves // 1), "the last wave is full enough"
    assert choose_splits(1000, 8, 131072, chip) == 1


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_candidates_hold_the_settings_in_use(chip):
    """What is in the table is among what a benchmark would try, and as many programs as splits count on have room."""
    for dim in (64, 128):
        shape = DecodeShape(dim, 4, 1, torch.bfloat16)
        use = blocks(shape, chip)
        assert use in list(candidates(shape, chip))
        assert PROGRAMS * shared_bytes(shape, use, chip) <= chip.shared_bytes


LAUNCHES = """
import torch
from pagoda.backends.torch_cuda.kernels.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.decode_attention import decode_attention

keys = torch.zeros(2, 1, 16, 16, dtype=torch.bfloat16)
for splits, seqs, width, offset in ((2, 16, 16, 0), (16, 1, 1, 1), (3, 3, 5, 3)):
    q = torch.zeros(seqs, 1, 16, dtype=torch.bfloat16)
    tables = torch.zeros(seqs * width + offset, dtype=torch.int32)[offset:].view(seqs, width)
    lens = torch.zeros(seqs + offset, dtype=torch.int32)[offset:]
    how = {"scale": 1.0, "use_kernel": True, "chip": CHIPS["sm_90"]}
    decode_attention(q, keys, keys.clone(), tables, lens, splits=splits, **how)
"""


def test_what_varies_from_step_to_step_compiles_nothing():
    """Numbers of splits, of sequences and of table columns, and where in a staging buffer the arrays begin."""
    assert programs(LAUNCHES) == 3 * [["attend", "attend 0"], ["reduce", "reduce 1"]]
