"""Latent attention: the interpreted kernels against their definitions, which are held against attention over heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.kernels.compile_launches import programs
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.latent_attention import (
    even_latent_pieces,
    latent_decode,
    write_latents,
)
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import (
    BLOCK,
    ExpansionRound,
    latent_prefill,
    plan_rounds,
    round_capacity,
)
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.kernels.attention.rope_cache import NormWeights
from pagoda.backends.torch_cuda.kernels.attention.work_list import NO_SEQUENCE, WorkList, cut_evenly, plan_work
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS

CHIP = CHIPS["sm_90"]
NAN = float("nan")


@dataclass
class Latents:
    """Sequences in a cache in which everything that no token may see is NaN, and every such table entry wild."""

    lens: list[int]
    heads: int = 3
    nope: int = 12
    rotary: int = 8
    rank: int = 20
    values: int = 10
    page: int = 4
    dtype: torch.dtype = torch.float32

    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(sum(self.lens))
        width = -(-max(self.lens) // self.page) + 1
        cache = torch.full((1 + len(self.lens) * width, self.page, self.rank + self.rotary), NAN)
        tables = torch.full((len(self.lens), width), 1 << 30, dtype=torch.int32)
        free = (1 + torch.randperm(len(cache) - 1)).tolist()
        for row, length in enumerate(self.lens):
            for position in range(length):
                at, slot = divmod(position, self.page)
                if not slot:
                    tables[row, at] = free.pop()
                cache[tables[row, at], slot] = torch.randn(self.rank + self.rotary)
        return cache.to(self.dtype), tables, torch.tensor(self.lens, dtype=torch.int32)

    def queries(self, tokens: int) -> tuple[Tensor, Tensor]:
        """q [T, N, H] and kv_b [N * (nope + V), R]."""
        q = torch.randn(tokens, self.heads, self.nope + self.rotary)
        kv_b = torch.randn(self.heads * (self.nope + self.values), self.rank) * self.rank**-0.5
        return q.to(self.dtype), kv_b.to(self.dtype)

    def context(self, cache: Tensor, tables: Tensor, row: int) -> Tensor:
        """The latents [C, R+D] of a sequence."""
        positions = torch.arange(self.lens[row])
        return cache[tables[row, positions // self.page].long(), positions % self.page]


def attended(case: Latents, rows: Tensor, q: Tensor, kv_b: Tensor) -> Tensor:
    """Attention [T, N, V] of the last tokens q [T, N, H] of a sequence with latents [C, R+D], head by head."""
    latent, rotary = rows.split([case.rank, case.rotary], 1)
    expanded = F.linear(latent, kv_b).view(len(rows), case.heads, -1)
    seen = torch.arange(len(rows))[None] <= torch.arange(len(rows) - len(q), len(rows))[:, None]
    heads = []
    for head in range(case.heads):
        k = torch.cat((expanded[:, head, : case.nope], rotary), 1)
        scores = (q[:, head] @ k.T * 0.3).masked_fill(~seen, -torch.inf)
        heads.append(scores.softmax(-1) @ expanded[:, head, case.nope :])
    return torch.stack(heads, 1)


@pytest.fixture(autouse=True)
def dirty_scratch(monkeypatch: pytest.MonkeyPatch):
    """Memory that a kernel allocates holds NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: _spoiled(empty(*a, **k)))


def _spoiled(x: Tensor) -> Tensor:
    return x.fill_(NAN) if x.is_floating_point() else x


@pytest.mark.parametrize("use_kernel", [False, True])
def test_write(use_kernel: bool):
    """Channels i and i + D/2 of the last D of a query head and of a rotary key turn by the position's angle."""
    torch.manual_seed(0)
    case, tokens = Latents([1], heads=17), 3
    (q, _), weight = case.queries(tokens), torch.randn(case.rank)
    latents = torch.randn(tokens, 5 + case.rank + case.rotary)[:, 5:]
    positions, slots = torch.tensor([4, 0, 2], dtype=torch.int32), torch.tensor([6, 0, 9], dtype=torch.int32)
    angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.02])
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    cache, turned = torch.full((3, case.page, case.rank + case.rotary), NAN), q.clone()
    write_latents(turned, latents, positions, slots, cache, cos_sin, NormWeights(weight, 1e-3), use_kernel=use_kernel)

    def turn(x: Tensor) -> Tensor:
        both = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(tokens, 4), angles[positions.long()]).view(
            tokens, *[1] * (x.ndim - 2), 4
        )
        return torch.cat((both.real, both.imag), -1)

    torch.testing.assert_close(turned[..., : case.nope], q[..., : case.nope], rtol=0, atol=0)
    torch.testing.assert_close(turned[..., case.nope :], turn(q[..., case.nope :]), rtol=0, atol=1e-6)
    written = cache.view(-1, case.rank + case.rotary)
    assert written.isfinite().all(-1).nonzero().flatten().tolist() == [0, 6, 9]
    normed = F.rms_norm(latents[:, : case.rank], (case.rank,), weight, 1e-3)
    torch.testing.assert_close(written[slots.long()][:, : case.rank], normed, rtol=0, atol=1e-6)
    torch.testing.assert_close(written[slots.long()][:, case.rank :], turn(latents[:, case.rank :]), rtol=0, atol=1e-6)


def absorbed_decode(
    case: Latents, query_len: int, *, use_kernel: bool, work: WorkList | None = None
) -> tuple[Tensor, ...]:
    """(attended latents, what they should be, q, kv_b)."""
    cache, tables, lens = case.arrays()
    q, kv_b = case.queries(len(case.lens) * query_len)
    key_up = kv_b.view(case.heads, -1, case.rank)[:, : case.nope]
    absorbed = torch.bmm(q[..., : case.nope].transpose(0, 1), key_up).transpose(0, 1)
    how = {"scale": 0.3, "query_len": query_len, "chip": CHIP, "work": work}
    return latent_decode(absorbed, q, cache, tables, lens, use_kernel=use_kernel, **how), cache, tables, q, kv_b


@pytest.mark.parametrize(("lens", "query_len"), [([37, 1, 0, 70], 1), ([9, 50, 3], 3)], ids=["one token", "drafts"])
def test_decode_is_attention_over_heads(lens: list[int], query_len: int):
    case = Latents(lens)
    out, cache, tables, q, kv_b = absorbed_decode(case, query_len, use_kernel=False)
    values = torch.einsum("tnr,nvr->tnv", out, kv_b.view(case.heads, -1, case.rank)[:, case.nope :])
    for row, length in enumerate(lens):
        tokens = slice(row * query_len, (row + 1) * query_len)
        if not length:
            assert not out[tokens].any()
            continue
        want = attended(case, case.context(cache, tables, row), q[tokens], kv_b)
        torch.testing.assert_close(values[tokens], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("case", "query_len"),
    [
        (Latents([37, 1, 0, 70]), 1),
        (Latents([9, 150, 3, 2], heads=5, page=64), 3),
        (Latents([40], heads=70, rank=16, rotary=16), 1),
        (Latents([70, 9], heads=16, rank=32, dtype=torch.float16), 2),
    ],
    ids=["ragged", "drafts", "blocks of rows", "half"],
)
@pytest.mark.parametrize("pieces", [1, 3])
def test_decode_kernel_is_its_definition(case: Latents, query_len: int, pieces: int):
    work = cut_evenly(torch.tensor(case.lens, dtype=torch.int32), pieces)
    out, want = (absorbed_decode(case, query_len, work=work, use_kernel=kernel)[0] for kernel in (True, False))
    seen = ~want.isnan()
    assert out.isfinite().all()
    near = 3e-6 if case.dtype == torch.float32 else 2**-9
    torch.testing.assert_close(out[seen], want[seen], rtol=near, atol=near)


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("planned", [[370, 1, 0, 70], [20, 90, 130, 1]])
def test_pieces_of_sequences_are_the_sequences(planned: list[int], query_len: int):
    """Lists that were made for these lengths, and for others."""
    case = Latents([370, 3, 0, 70])
    items, merges = map(torch.from_numpy, plan_work(np.array(planned, np.int32), 4))
    unused = torch.full((3, 4), NO_SEQUENCE, dtype=torch.int32)
    work = WorkList(torch.cat((items, unused)), merges)
    out = absorbed_decode(case, query_len, use_kernel=True, work=work)[0]
    want = absorbed_decode(case, query_len, use_kernel=False)[0]
    torch.testing.assert_close(out, want, rtol=0, atol=3e-6)


def prefill(case: Latents, counts: list[int], capacity: int, tile: int, *, use_kernel: bool) -> tuple[Tensor, ...]:
    """(out [T, N, V], what it should be)."""
    cache, tables, lens = case.arrays()
    q, kv_b = case.queries(sum(counts) + 2)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    decodes = sum(count == 1 for count in counts)
    tiles = make_tiles(np.array(counts, np.int32), decodes, tile)
    rounds = tuple(
        ExpansionRound(torch.from_numpy(blocks), torch.from_numpy(spans))
        for blocks, spans in plan_rounds(lens.numpy(), decodes, capacity)
    )
    out = latent_prefill(
        q,
        cache,
        kv_b,
        tables,
        torch.from_numpy(starts),
        lens,
        torch.from_numpy(tiles),
        rounds,
        nope_dim=case.nope,
        scale=0.3,
        out=torch.full((len(q), case.heads, case.values), 7.0, dtype=case.dtype),
        tile=tile,
        use_kernel=use_kernel,
        chip=CHIP,
    )
    want = torch.full_like(out, 7.0)
    for row in range(decodes, len(counts)):
        tokens = slice(starts[row], starts[row + 1])
        want[tokens] = attended(case, case.context(cache, tables, row), q[tokens], kv_b)
    return out, want


PREFILLS = {
    "whole prompts": (Latents([5, 20, 2]), [5, 20, 2], 2 * BLOCK, 16),
    "chunks after a decode": (Latents([30, 3, 90], page=16), [1, 2, 30], 4 * BLOCK, 7),
    "several rounds": (Latents([200, 70, 130], heads=1), [9, 70, 40], BLOCK, 16),
    "a round of parts": (Latents([150, 40, 100], heads=1), [80, 40, 3], 2 * BLOCK, 64),
}


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_is_attention_over_heads(name: str, use_kernel: bool):
    out, want = prefill(*PREFILLS[name], use_kernel=use_kernel)
    torch.testing.assert_close(out, want, rtol=0, atol=4e-6)


def test_half_precision_prefill():
    case = Latents([40, 9], nope=16, rank=32, dtype=torch.float16)
    out, definition = (prefill(case, [33, 9], BLOCK, 16, use_kernel=kernel)[0] for kernel in (True, False))
    torch.testing.assert_close(out, definition, rtol=2**-9, atol=2**-8)


def test_rounds_hold_every_token_once():
    lens, capacity = np.array([500, 3, 64, 0, 129, 65], np.int32), 2 * BLOCK
    seen = [np.zeros(length, int) for length in lens]
    for blocks, spans in plan_rounds(lens, 1, capacity):
        assert 0 < len(blocks) * BLOCK <= capacity
        for sequence, (begin, end, row) in enumerate(spans.tolist()):
            seen[sequence][begin:end] += 1
            for position in range(begin, end, BLOCK):
                assert blocks[(row + position - begin) // BLOCK].tolist() == [sequence, position]
    assert not seen[0].any(), "a decode"
    assert all((counts == 1).all() for counts in seen[1:])


def test_capacity():
    assert round_capacity(1 << 15, 1 << 20) == (256 << 20) >> 15
    assert round_capacity(1 << 10, 1000) == 960
    assert round_capacity(1 << 30, 1000) == BLOCK


def test_pieces_fill_the_chip_with_few_sequences():
    for heads, blocks in ((128, 2), (16, 1)):
        work = even_latent_pieces(1, heads, 100_000, torch.device("cpu"), CHIP)
        assert work is not None
        assert 0.9 * CHIP.sms < blocks * len(work.items) <= 1.1 * CHIP.sms
    assert even_latent_pieces(500, 128, 100_000, torch.device("cpu"), CHIP) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_len": 9}, "query_len is 9"),
        ({"cache": torch.zeros(3, 12, 28)}, "cache"),
        ({"q": torch.zeros(2, 1, 20)}, "q is"),
        ({"tables": torch.zeros(1, 1, dtype=torch.int64)}, "int64"),
    ],
)
def test_what_does_not_fit(change: dict, message: str):
    arrays = {
        "absorbed": torch.zeros(1, 1, 20),
        "q": torch.zeros(1, 1, 20),
        "cache": torch.zeros(3, 4, 28),
        "tables": torch.zeros(1, 1, dtype=torch.int32),
        "kv_lens": torch.ones(1, dtype=torch.int32),
    }
    latent_decode(**arrays, scale=1.0, use_kernel=False, chip=CHIP)
    with pytest.raises(ValueError, match=message):
        latent_decode(**{**arrays, **change}, scale=1.0, use_kernel=False, chip=CHIP)


LAUNCHES = """
import torch
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.attention.latent_attention import latent_decode
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import ExpansionRound, latent_prefill
from pagoda.backends.torch_cuda.kernels.attention.work_list import WorkList

cache = torch.zeros(2, 16, 48, dtype=torch.bfloat16)
how = {"scale": 1.0, "use_kernel": True, "chip": CHIPS["sm_90"]}
for pieces, seqs, width, offset in ((2, 16, 16, 0), (16, 1, 1, 1), (3, 3, 5, 3)):
    q = torch.zeros(seqs, 2, 32, dtype=torch.bfloat16)
    absorbed = torch.zeros(2, seqs, 32, dtype=torch.bfloat16).transpose(0, 1)
    tables = torch.zeros(seqs * width + offset, dtype=torch.int32)[offset:].view(seqs, width)
    lens = torch.zeros(seqs + offset, dtype=torch.int32)[offset:]
    items, merges = (torch.zeros(n + offset, m, dtype=torch.int32)[offset:] for n, m in ((seqs + pieces, 4), (seqs, 2)))
    latent_decode(absorbed, q, cache, tables, lens, work=WorkList(items, merges), **how)
    spans = torch.zeros(seqs * 3 + offset, dtype=torch.int32)[offset:].view(seqs, 3)
    blocks = torch.zeros(pieces * 2 + offset, dtype=torch.int32)[offset:].view(pieces, 2)
    starts, kv_b = torch.zeros(seqs + 1, dtype=torch.int32), torch.zeros(64, 32, dtype=torch.bfloat16)
    out = torch.zeros(seqs, 2, 16, dtype=torch.bfloat16)
    rounds = (ExpansionRound(blocks, spans),)
    latent_prefill(q, cache, kv_b, tables, starts, lens, blocks, rounds, nope_dim=16, out=out, tile=16, **how)
"""


def test_what_varies_from_step_to_step_compiles_nothing():
    names = "attend", "reduce", "gather", "attend"
    assert programs(LAUNCHES) == 3 * [[name, f"{name} {number}"] for number, name in enumerate(names)]
