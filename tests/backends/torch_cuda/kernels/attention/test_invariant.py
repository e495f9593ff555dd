"""The kernels of --batch-invariant: as their definitions, and the same bits however the tokens come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.decode_attention import decode_attention
from pagoda.backends.torch_cuda.kernels.attention.invariant_attention import (
    SequenceTokens,
    invariant_attention,
    query_tile,
    span_tokens,
)
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles, prefill_attention
from pagoda.backends.torch_cuda.kernels.attention.shared import ScoreRules
from pagoda.backends.torch_cuda.kernels.attention.work_list import cut_evenly
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip
from pagoda.backends.torch_cuda.kernels.linear.invariant_linear import invariant_linear
from pagoda.backends.torch_cuda.kernels.pointwise import activation

CHIP = CHIPS["sm_90"]
LITTLE = Chip((9, 0), CHIP.shared_bytes, 2, True)
"""So few multiprocessors that one program adds all splits."""

E4M3 = torch.float8_e4m3fn
WILD = 1 << 30
SCALES = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
SINKS = torch.tensor([-1.0, 0.5, 3.0, 1.0])
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.7])
USE = pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "definition"])
TILES = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
"""Small ones, so that short sequences have several, and spans of several."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pagoda.backends.torch_cuda.kernels.attention.invariant_attention.kernel.tuned", lambda *_: TILES
    )


def matrices(dtype: torch.dtype, inputs: int = 520) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, inputs, generator=generator) for rows in (70, 30))
    return x.to(dtype), weight.to(dtype), torch.randn(30, generator=generator).to(dtype)


@USE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_products_are_torchs(dtype: torch.dtype, use_kernel: bool) -> None:
    x, weight, bias = matrices(dtype)
    out = invariant_linear(x, weight, bias, use_kernel=use_kernel, chip=CHIP)
    assert out.dtype == dtype
    want = (x.double() @ weight.double().T + bias.double()).to(dtype)
    torch.testing.assert_close(out, want, rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-4)
    wide = invariant_linear(x[:3], weight, None, dtype=torch.float32, use_kernel=use_kernel, chip=CHIP)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, (x[:3].double() @ weight.double().T).float(), rtol=1e-5, atol=1e-4)


@USE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype: torch.dtype, use_kernel: bool) -> None:
    """Many rows are one program's splits, few are several programs'."""
    x, weight, bias = matrices(dtype)
    whole = invariant_linear(x, weight, bias, use_kernel=use_kernel, chip=CHIP)
    for rows in (slice(7, 8), slice(69, 70), slice(3, 50)):
        assert torch.equal(invariant_linear(x[rows], weight, bias, use_kernel=use_kernel, chip=CHIP), whole[rows])


def test_a_programs_splits_are_those_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = matrices(torch.float32)
    monkeypatch.setattr(
        "pagoda.backends.torch_cuda.kernels.linear.invariant_linear.kernel.choose_split", lambda *_: 512
    )
    one, several = (invariant_linear(x[:5], weight, bias, use_kernel=True, chip=chip) for chip in (LITTLE, CHIP))
    assert torch.equal(one, several)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_an_element_of_a_definition_does_not_depend_on_its_place(name: Any) -> None:
    x = 3 * torch.randn(60, 2 * 1537, generator=torch.Generator().manual_seed(0))
    for function in (activation.plain, activation.gated):
        whole = function(x, name, use_kernel=False)
        assert torch.equal(function(x[7:8], name, use_kernel=False), whole[7:8])
        assert torch.equal(function(x[3:50], name, use_kernel=False), whole[3:50])


def test_shapes_of_products_are_checked() -> None:
    x, weight, _ = matrices(torch.float32)
    for other in (x.half(), x[:, :-1], x.T):
        with pytest.raises(ValueError, match="matrix"):
            invariant_linear(other, weight, None, use_kernel=False, chip=CHIP)


@dataclass
class Sequences:
    """Queries of whole sequences over a cache in which all that is not theirs is NaN."""

    lens: tuple[int, ...] = (21, 3, 42)
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    values: int | None = None  # channels of a value head; None: dim
    page: int = 16
    span: int = 16
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    rules: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator, stored = torch.Generator().manual_seed(1), self.cache or self.dtype
        width = -(-max(self.lens) // self.page)
        pages = 1 + len(self.lens) * width
        dims = self.dim, self.values or self.dim
        self.caches = [torch.full((pages, self.kv_heads, self.page, dim), float("nan")).to(stored) for dim in dims]
        self.tables = torch.full((len(self.lens), width), WILD, dtype=torch.int32)
        free = (1 + torch.randperm(pages - 1, generator=generator)).tolist()
        for row, length in enumerate(self.lens):
            for position in range(length):
                at, slot = divmod(position, self.page)
                if self.tables[row, at] == WILD:
                    self.tables[row, at] = free.pop()
                for cache, dim in zip(self.caches, dims):
                    new = torch.randn(self.kv_heads, dim, generator=generator)
                    cache[self.tables[row, at], :, slot] = new.to(stored)
        shapes = [(length, self.heads, self.dim) for length in self.lens]
        self.queries = [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]

    def _tables(self, rows: list[int], starts: list[int]) -> Tensor:
        """Without the pages that the window has left."""
        tables, window = self.tables[rows].clone(), self.rules.get("window") or WILD
        for table, start in zip(tables, starts):
            table[: max(start - window + 1, 0) // self.page] = 0
        return tables

    def call(self, q: Tensor, tables: Tensor, tokens: SequenceTokens, use_kernel: bool, **more: Any) -> Tensor:
        rules = {"scale": self.dim**-0.5, "window": None, "softcap": None, "sinks": None, "slopes": None}
        rules |= {"k_scale": None, "v_scale": None, **self.rules}
        more = {"span": self.span, "use_kernel": use_kernel, "chip": CHIP, **more}
        return invariant_attention(q, *self.caches, tables, tokens, ScoreRules(**rules), **more)

    def prefill(self, chunks: list[tuple[int, int, int]], *, use_kernel: bool, tile: int | None = None) -> list[Tensor]:
        """Results of (sequence, begin, end) in one step."""
        tile = tile or query_tile(self.heads // self.kv_heads, self.dim, self.dtype, CHIP)
        new = np.array([end - begin for _, begin, end in chunks], np.int32)
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        tokens = SequenceTokens(
            torch.tensor([end for *_, end in chunks], dtype=torch.int32),
            query_start=torch.from_numpy(starts),
            tiles=torch.from_numpy(make_tiles(new, 0, tile)),
            tile=tile,
        )
        q = torch.cat([self.queries[row][begin:end] for row, begin, end in chunks])
        tables = self._tables([row for row, *_ in chunks], [begin for _, begin, _ in chunks])
        return list(self.call(q, tables, tokens, use_kernel).split(new.tolist()))

    def decode(self, ends: dict[int, int], *, use_kernel: bool, workers: int, length: int = 1) -> list[Tensor]:
        """Results of the last `length` tokens of sequences that end there, and of a padding sequence."""
        rows, lens = list(ends), [*ends.values(), 0]
        counts = [min(length, end) for end in lens]
        q = torch.full((len(lens) * length, self.heads, self.dim), 5.0, dtype=self.dtype)
        for at, row in enumerate(rows):
            q[(at + 1) * length - counts[at] : (at + 1) * length] = self.queries[row][lens[at] - counts[at] : lens[at]]
        starts = [end - count for end, count in zip(lens, counts)]
        tables = torch.cat([self._tables(rows, starts), torch.zeros_like(self.tables[:1])])
        tokens = SequenceTokens(
            torch.tensor(lens, dtype=torch.int32),
            length,
            torch.tensor(counts, dtype=torch.int32) if length > 1 else None,
        )
        out = self.call(q, tables, tokens, use_kernel, workers=workers)
        assert bool(out.isfinite().all())
        assert not out[-length:].any()
        return [out[(at + 1) * length - counts[at] : (at + 1) * length] for at in range(len(rows))]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "group of 3, head dim 24, small pages": {"heads": 3, "kv_heads": 1, "dim": 24, "page": 4},
    "window": {"rules": {"window": 11}},
    "window over spans": {"rules": {"window": 30}},
    "narrow values": {"dim": 24, "values": 16, "rules": {"window": 11}},
    "root of the distance": {"rules": {"slopes": SLOPES, "root": True}},
    "soft cap, sinks": {"rules": {"softcap": 2.0, "sinks": SINKS}},
    "slopes": {"rules": {"slopes": SLOPES}},
    "half precision": {"dtype": torch.float16, "dim": 64, "lens": (21, 3, 70), "page": 32, "span": 64},
    "float8, window, sinks": {"cache": E4M3, "rules": {"window": 20, "sinks": SINKS, **SCALES}},
}


def usual(case: Sequences) -> list[Tensor]:
    """What the usual attention's definition returns for whole sequences, in float64 where it can."""
    rules = {"scale": case.dim**-0.5, **case.rules}
    lens = np.array(case.lens, np.int32)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))
    tiles = torch.from_numpy(make_tiles(lens, 0, 8))
    q = torch.cat(case.queries)
    out = prefill_attention(
        q, *case.caches, case.tables, starts, torch.from_numpy(lens), tiles, use_kernel=False, chip=CHIP, **rules
    )
    return list(out.split(lens.tolist()))


@USE
@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_usual_one_in_the_same_bits_always(name: str, use_kernel: bool) -> None:
    case = Sequences(**CASES[name])
    whole = case.prefill([(row, 0, length) for row, length in enumerate(case.lens)], use_kernel=use_kernel)
    near = 2e-3 if case.dtype == torch.float16 else 5e-6
    for actual, want in zip(whole, usual(case)):
        torch.testing.assert_close(actual, want, rtol=0, atol=near)
    for chunks in ([(2, 37, 42)], [(0, 14, 17), (1, 0, 3), (2, 30, 34)]):
        for (row, begin, end), part in zip(chunks, case.prefill(chunks, use_kernel=use_kernel, tile=1)):
            assert torch.equal(part, whole[row][begin:end]), (row, begin, end)
    for ends in ({2: 42}, {0: 16, 1: 1, 2: 39}):
        for workers in (1, 2):
            for row, part in zip(ends, case.decode(ends, use_kernel=use_kernel, workers=workers)):
                assert torch.equal(part[0], whole[row][ends[row] - 1]), (row, ends[row], workers)


@USE
@pytest.mark.parametrize("name", ["plain", "window"])
def test_tokens_of_one_decode_are_those_of_single_ones(name: str, use_kernel: bool) -> None:
    """More than a tile holds in the group of 4; the sequence of 3 tokens is padded at the front."""
    case = Sequences(heads=8, kv_heads=1, **CASES[name])
    whole = case.prefill([(row, 0, length) for row, length in enumerate(case.lens)], use_kernel=use_kernel)
    assert query_tile(8, 16, torch.float32, CHIP) < 4
    for workers in (1, 3):
        for row, part in enumerate(case.decode({0: 21, 1: 3, 2: 38}, use_kernel=use_kernel, workers=workers, length=4)):
            end = (21, 3, 38)[row]
            assert torch.equal(part, whole[row][end - len(part) : end])


def test_decode_is_the_usual_kernels() -> None:
    case = Sequences()
    lens = torch.tensor([21, 3, 42], dtype=torch.int32)
    q = torch.stack([queries[-1] for queries in case.queries])
    work = cut_evenly(lens, 2)
    want = decode_attention(q, *case.caches, case.tables, lens, scale=0.25, work=work, use_kernel=True, chip=CHIP)
    torch.testing.assert_close(case.call(q, case.tables, SequenceTokens(lens), True), want, rtol=0, atol=3e-6)


def test_spans_are_those_of_the_longest_sequence() -> None:
    assert [span_tokens(length) for length in (1, 8192, 8193, 131072)] == [256, 256, 512, 4096]


def test_tiles_larger_than_the_block_are_an_error() -> None:
    case = Sequences()
    with pytest.raises(ValueError, match="at most"):
        case.prefill([(0, 0, 21)], use_kernel=True, tile=64)
    with pytest.raises(ValueError, match="spans have 24 tokens, not a multiple of the 16 of a tile"):
        case.call(case.queries[0], case.tables[:1], SequenceTokens(torch.tensor([21]), 21), True, span=24)
    with pytest.raises(ValueError, match="do not fit"):
        case.call(case.queries[0].half(), case.tables, SequenceTokens(torch.tensor([1])), True)
