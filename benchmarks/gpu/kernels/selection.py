"""What sparse attention reads, on a GPU: the tokens that DeepSeek-V3.2 selects, the blocks that MiniMax-M3 selects.

`checks`: the selections of the same numbers by the definitions, which may differ in scores that are equal within
rounding. `speeds`: decodes in CUDA graphs, bound by reading the keys, and prefills; FLOP are those of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.block_selection import select_pages
from pagoda.backends.torch_cuda.kernels.attention.token_selection import select_tokens
from pagoda.benchmarks.gpu.measure import BF16, Bench, Number, figures
from pagoda.common.models.mixers import BlockIndexer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope

PAGE = 16
SAME = 0.999
"""Share of the selected entries that must be those of the definition."""


@dataclass(frozen=True)
class Indexer:
    """Heads of `dim` channels, one key for all of them; what is selected."""

    heads: int
    dim: int
    top: int  # tokens
    blocks: BlockIndexer | None  # instead of tokens


MODELS = {
    "tokens": (Indexer(64, 128, 2048, None), Indexer(3, 16, 30, None)),
    "blocks": (
        Indexer(4, 128, 2048, BlockIndexer(128, 128, 16, 1, Rope(5e6, 64), Norm(1e-6))),
        Indexer(2, 16, 32, BlockIndexer(16, 16, 2, 1, Rope(1e4, 8), Norm(1e-6))),
    ),
}
"""At the shape of the model, and tiny."""


@dataclass(frozen=True)
class Load:
    """Sequences of `context` tokens, the last `new` of them in this step."""

    seqs: int
    context: int
    new: int = 1

    @property
    def pairs(self) -> int:
        """Queries times the keys that they see."""
        return self.seqs * (self.new * (self.context - self.new) + self.new * (self.new + 1) // 2)


LOADS = {"64x32k": Load(64, 32768), "2k_after_30k": Load(1, 32768, 2048)}


@dataclass(frozen=True)
class Call:
    indexer: Indexer
    load: Load
    q: Tensor
    weights: Tensor
    cache: Tensor
    tables: Tensor
    rows: Tensor
    lens: Tensor

    def run(self, *, use_kernel: bool) -> tuple[Tensor, Tensor]:
        """Return entries [n, width], positions or pages, and how many of them are selected [n]."""
        if (spec := self.indexer.blocks) is None:
            arguments = self.q, self.weights, self.cache, self.tables, self.rows, self.lens
            return select_tokens(*arguments, top=self.indexer.top, use_kernel=use_kernel)
        arguments = self.q, self.cache, self.tables, self.tables, self.rows, self.lens
        several = self.load.new > 1
        selected = select_pages(*arguments, spec=spec, several=several, use_kernel=use_kernel)
        return selected.tables, -(-selected.lens // PAGE)


def make(bench: Bench, name: str, load: Load) -> Call:
    """Return random inputs; pages in random order."""
    torch.manual_seed(0)
    indexer, device = bench.choose(*MODELS[name]), bench.device
    width, tokens = -(-load.context // PAGE), load.seqs * load.new

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(BF16)

    lens = torch.arange(load.context - load.new + 1, load.context + 1, dtype=torch.int32)
    return Call(
        indexer,
        load,
        normal(tokens, indexer.heads, indexer.dim),
        normal(tokens, indexer.heads),
        normal(load.seqs * width + 1, PAGE, indexer.dim),
        (1 + torch.randperm(load.seqs * width)).view(load.seqs, width).to(device, torch.int32),
        torch.arange(load.seqs, dtype=torch.int32).repeat_interleave(load.new).to(device),
        lens.repeat(load.seqs).to(device),
    )


def checks(bench: Bench) -> Iterator[Number]:
    """Yield a decode and a prefill of each model, some of whose queries select all that they see."""
    for name in MODELS:
        for phase, load in (("decode", Load(5, 5000)), ("prefill", Load(2, 2080, 40))):
            yield Number(f"{name}_{phase}", partial(check, bench, name, bench.choose(load, small(load))))


def small(load: Load) -> Load:
    """Return the load, reduced; queries of a prefill see from 27 to 34 tokens."""
    return Load(2, 70) if load.new == 1 else Load(1, 34, 8)


def check(bench: Bench, name: str, load: Load) -> dict:
    """Return how many of the selected entries the definition selects, too."""
    call = make(bench, name, load)
    entries, counts = call.run(use_kernel=bench.use_kernel)
    wanted, expected = call.run(use_kernel=False)
    size = int(call.tables.max() + 1) * max(call.indexer.heads, PAGE)
    mine, its = (marked(*each, size) for each in ((entries + int(bench.spoil > 0), counts), (wanted, expected)))
    same = int((mine & its).sum()) / int(its.sum())
    return {"right": torch.equal(counts, expected) and same >= SAME, "same": same}


def marked(entries: Tensor, counts: Tensor, size: int) -> Tensor:
    """Return which of `size` entries are among the first `counts` of each row, bool [n, size + 1]."""
    real = torch.arange(entries.shape[1], device=entries.device) < counts[:, None]
    marks = torch.zeros(len(entries), size + 1, dtype=torch.bool, device=entries.device)
    return marks.scatter_(1, torch.where(real, entries, size).long(), True)[:, :size]


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield a decode and a prefill of each model."""
    for name in MODELS:
        for which, load in LOADS.items():
            yield Number(f"{name}_{which}", partial(speed, bench, name, bench.choose(load, small(load))))


def speed(bench: Bench, name: str, load: Load) -> dict:
    """Return the figures of a call, a decode in a CUDA graph; bytes are those of the keys."""
    call = make(bench, name, load)
    run: Callable[[], object] = partial(call.run, use_kernel=bench.use_kernel)
    run = bench.recorded([run]) if load.new == 1 else run
    took = bench.median_ms(lambda _: run(), 10) / 1e3
    keys = load.seqs * load.context * call.indexer.dim * 2
    return figures(bench, took, keys, 2 * call.indexer.heads * call.indexer.dim * load.pairs)
