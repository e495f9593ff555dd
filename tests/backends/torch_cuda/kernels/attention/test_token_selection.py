"""The tokens that an indexer selects, and attention to them: interpreted kernels against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention import token_selection
from pagoda.backends.torch_cuda.kernels.attention.latent_attention import latent_selected
from pagoda.backends.torch_cuda.kernels.attention.token_selection import kernel, select_tokens
from pagoda.backends.torch_cuda.kernels.attention.work_list import fixed_work
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS

NAN = float("nan")
PAGE, HEADS, DIM, TOP = 8, 3, 16, 12
LENGTHS = [70, 11, 0, 12, 13, 150]
"""Tokens of each sequence; 0 is padding."""


def paged(width: int) -> tuple[Tensor, Tensor]:
    """A cache [P, B, width] that is NaN where no sequence has a token, and tables that are wild there."""
    columns = -(-max(LENGTHS) // PAGE) + 1
    tables = torch.full((len(LENGTHS), columns), 1 << 30, dtype=torch.int32)
    pages = 1 + torch.randperm(len(LENGTHS) * columns, generator=torch.Generator().manual_seed(1)).int()
    cache = torch.full((len(pages) + 1, PAGE, width), NAN)
    for row, length in enumerate(LENGTHS):
        for position in range(length):
            tables[row, position // PAGE] = page = pages[row * columns + position // PAGE]
            cache[page, position % PAGE] = torch.randn(width)
    return cache, tables


def case() -> dict[str, Tensor]:
    """Two tokens of each sequence, the last and an earlier one."""
    torch.manual_seed(0)
    cache, tables = paged(DIM)
    rows = torch.arange(len(LENGTHS), dtype=torch.int32).repeat_interleave(2)
    lens = torch.tensor([each for length in LENGTHS for each in (length // 2, length)], dtype=torch.int32)
    q, weights = torch.randn(len(rows), HEADS, DIM), torch.randn(len(rows), HEADS)
    return {"q": q, "weights": weights, "cache": cache, "tables": tables, "rows": rows, "lens": lens}


@pytest.mark.parametrize("most", [1 << 26, 500], ids=["at once", "in turn"])
def test_the_kernels_select_what_the_reference_selects(most: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_selection, "MAX_SCORES", most)
    monkeypatch.setattr(kernel, "BLOCK", 32)  # several per row
    arguments = case()
    got, counts = select_tokens(**arguments, top=TOP, use_kernel=True)
    want, expected = select_tokens(**arguments, top=TOP, use_kernel=False)
    assert counts.tolist() == expected.tolist() == [min(int(n), TOP) for n in arguments["lens"]]
    for mine, its, count in zip(got, want, counts.tolist()):
        assert mine[:count].tolist() == its[:count].tolist()


@pytest.mark.parametrize("use_kernel", [False, True])
def test_of_equal_scores_the_earlier_is_selected(use_kernel: bool):
    """Weights of 0 make all scores 0, and -0; one key is better than all others."""
    arguments = case()
    arguments["weights"].zero_()
    arguments["weights"][::2] = -0.0
    selected, _ = select_tokens(**arguments, top=TOP, use_kernel=use_kernel)
    assert selected[-1].tolist() == list(range(TOP))
    page = arguments["tables"][5, 100 // PAGE]
    arguments["weights"][-1], arguments["q"][-1] = 1.0, -1.0
    for other in arguments["tables"][5, : -(-150 // PAGE)]:
        arguments["cache"][other] = arguments["cache"][other].abs()
    arguments["cache"][page, 100 % PAGE] = -1.0
    selected, _ = select_tokens(**arguments, top=TOP, use_kernel=use_kernel)
    assert selected[-1].tolist() == [*range(TOP - 1), 100]


def test_what_does_not_fit_is_refused():
    arguments = case()
    for change in (
        {"weights": arguments["weights"][:, :2]},
        {"cache": arguments["cache"][:, :3]},
        {"cache": arguments["cache"].half()},
        {"lens": arguments["lens"].long()},
    ):
        with pytest.raises(ValueError, match=r"cache|lens"):
            select_tokens(**arguments | change, top=TOP, use_kernel=False)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("use_kernel", [False, True])
def test_attention_reads_the_selected_latents_alone(use_kernel: bool, pieces: int):
    """Every other latent may be NaN."""
    torch.manual_seed(2)
    rank, rotary, heads = 20, 8, 3
    cache, tables = paged(rank + rotary)
    rows = torch.tensor([0, 5, 5, 2], dtype=torch.int32)
    selected = torch.stack([torch.randperm(70)[:TOP].sort().values for _ in rows]).int()
    counts = torch.tensor([TOP, 7, TOP, 0], dtype=torch.int32)
    read = {(int(row), int(at)) for row, chosen, n in zip(rows, selected, counts) for at in chosen[:n]}
    for row in (0, 5):
        for at in range(LENGTHS[row]):
            if (row, at) not in read:
                cache[tables[row, at // PAGE], at % PAGE] = NAN
    absorbed, q = torch.randn(len(rows), heads, rank), torch.randn(len(rows), heads, 10 + rotary)
    out = latent_selected(
        absorbed,
        q,
        cache,
        tables,
        rows,
        selected,
        counts,
        scale=0.3,
        work=fixed_work(len(rows), TOP, pieces, counts.device),
        use_kernel=use_kernel,
        chip=CHIPS["sm_90"],
    )
    for token, count in enumerate(counts.tolist()):
        if not count:
            assert not out[token].any()
            continue
        chosen = selected[token, :count].long()
        latents = cache[tables[rows[token], chosen // PAGE].long(), chosen % PAGE].double()
        queries = torch.cat((absorbed[token], q[token, :, 10:]), -1).double()
        want = (queries @ latents.T * 0.3).softmax(-1) @ latents[:, :rank]
        torch.testing.assert_close(out[token].double(), want, rtol=0, atol=3e-6)
