"""The blocks that an indexer selects, as pages: interpreted kernels against their definition and dense attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention import block_selection
from pagoda.backends.torch_cuda.kernels.attention.block_selection import SelectedPages, kernel, select_pages
from pagoda.backends.torch_cuda.kernels.attention.decode_attention import decode_attention
from pagoda.backends.torch_cuda.kernels.attention.work_list import cut_evenly
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_decoder.functions import select_blocks
from pagoda.common.models.mixers import BlockIndexer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope

NAN = float("nan")
PAGE, HEADS, GROUP, DIM = 8, 2, 2, 16
LENGTHS = [50, 11, 0, 13, 90]
"""Tokens of each sequence; 0 is padding."""
LARGER = BlockIndexer(DIM, 16, 3, 1, Rope(1e4, 8), Norm(1e-5))
SPECS = {
    "blocks of several pages": LARGER,
    "pages of several blocks": replace(LARGER, tokens=4, top_k=5, local=2),
    "blocks and pages overlap": replace(LARGER, tokens=6, top_k=4),
}


def paged(width: int, seed: int) -> tuple[Tensor, Tensor]:
    """A cache [P, B, width] that is NaN where no sequence has a token, and tables that are wild there."""
    torch.manual_seed(seed)
    columns = -(-max(LENGTHS) // PAGE) + 1
    tables = torch.full((len(LENGTHS), columns), 1 << 30, dtype=torch.int32)
    pages = 1 + torch.randperm(len(LENGTHS) * columns).int()
    cache = torch.full((len(pages) + 1, PAGE, width), NAN)
    for row, length in enumerate(LENGTHS):
        for position in range(length):
            tables[row, position // PAGE] = page = pages[row * columns + position // PAGE]
            cache[page, position % PAGE] = torch.randn(width)
    return cache, tables


def tokens() -> tuple[Tensor, Tensor]:
    """Rows and lengths of two to four tokens of each sequence, the last among them; and one of padding."""
    counts = [0 if not length else 3 if length > 20 else 1 for length in LENGTHS]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    lens = [length - 7 * index for length, count in zip(LENGTHS, counts) for index in reversed(range(count))]
    return torch.tensor([*rows, len(LENGTHS) - 1], dtype=torch.int32), torch.tensor([*lens, 0], dtype=torch.int32)


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_attention_reads_the_selected_blocks_alone(name: str, use_kernel: bool, monkeypatch: pytest.MonkeyPatch):
    """K and V of tokens that no query selects are NaN."""
    monkeypatch.setattr(kernel, "BLOCK", 4)  # several per row
    monkeypatch.setattr(block_selection, "MAX_SCORES", 300)  # tokens in turn
    spec = SPECS[name]
    (rows, lens), (index, tables) = tokens(), paged(DIM, 0)
    cache, kv_tables = paged(2 * HEADS * DIM, 1)
    keys, values = cache.view(-1, PAGE, 2, HEADS, DIM).permute(2, 0, 3, 1, 4)
    q, queries = torch.randn(len(rows), HEADS, DIM), torch.randn(len(rows), HEADS, GROUP, DIM)
    want = torch.zeros(len(rows), HEADS, GROUP, DIM)
    selected = torch.zeros(len(LENGTHS), max(LENGTHS), HEADS, dtype=torch.bool)
    for token, (row, length) in enumerate(zip(rows.tolist(), lens.tolist())):
        if not length:
            continue
        at = torch.arange(length)
        scores = q[token] @ index[tables[row, at // PAGE], at % PAGE].T
        seen = select_blocks(scores[:, None], spec, length - 1)[:, 0]
        selected[row, :length] |= seen.T
        k, v = (each[kv_tables[row, at // PAGE], :, at % PAGE] for each in (keys, values))
        weights = torch.einsum("kgh,ckh->kgc", queries[token], k).masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        want[token] = torch.einsum("kgc,ckh->kgh", weights, v)
    for row, length in enumerate(LENGTHS):
        for position in range(length):
            page = cache.view(-1, PAGE, 2, HEADS, DIM)[kv_tables[row, position // PAGE], position % PAGE]
            page[:, ~selected[row, position]] = NAN
    pages = select_pages(
        q, index, tables, kv_tables, rows, lens, spec=spec, several=spec.tokens != 6, use_kernel=use_kernel
    )
    got = decode_attention(
        queries.flatten(0, 1),
        *(SelectedPages.pages_of(each.contiguous(), spec) for each in (keys, values)),
        pages.tables,
        pages.lens,
        scale=1.0,
        work=cut_evenly(pages.lens.flatten(), 2),
        use_kernel=use_kernel,
        chip=CHIPS["sm_90"],
    )
    torch.testing.assert_close(got.view(want.shape), want, atol=2e-5, rtol=2e-5)


def test_what_does_not_fit_is_refused():
    (rows, lens), (index, tables) = tokens(), paged(DIM, 0)
    arguments = {"q": torch.randn(len(rows), HEADS, DIM), "cache": index, "tables": tables, "kv_tables": tables}
    for change in (
        {"cache": index[:, :3]},
        {"cache": index.half()},
        {"kv_tables": tables.long()},
        {"tables": tables.T},
    ):
        with pytest.raises(ValueError, match=r"cache|tables"):
            select_pages(**arguments | change, rows=rows, lens=lens, spec=LARGER, several=False, use_kernel=False)
