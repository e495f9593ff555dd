"""Decode attention on a GPU: correctness in bfloat16, and bandwidth relative to a large copy.

`checks`: errors against float64 in units of the output's rounding. `speeds`: bytes of K and V per second; launches are
recorded in a CUDA graph, as in the engine, over caches larger than the L2 cache. `trials`: block sizes to try for
tuning.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.decode_attention import (
    PROGRAMS,
    PagedDecode,
    choose_pieces,
    decode_attention,
)
from pagoda.backends.torch_cuda.kernels.attention.decode_attention.kernel import (
    DecodeBlockSizes,
    DecodeShape,
    blocks,
    candidates,
)
from pagoda.backends.torch_cuda.kernels.attention.shared import ScoreRules
from pagoda.backends.torch_cuda.kernels.attention.work_list import WorkList, cut_evenly, pieces_of_each, plan_work
from pagoda.benchmarks.gpu.measure import BF16, FP8, Bench, Number, copy_bandwidth, is_refusal, verdict, worst

PAGE = 16
COLD_BYTES = 512 << 20
"""Calls are rotated over this many bytes, several times an L2 cache."""
ROUNDINGS = 5
"""Allowed roundings. Interpreted in float16, with errors scaled to bfloat16, drafts after few tokens reach 3.2."""
CHECKED = 4
"""Sequences of a timed shape compared with float64."""


@dataclass(frozen=True)
class Load:
    """Sequences of up to `context` tokens; by default with the heads of Llama-3.1-8B."""

    seqs: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    query_len: int = 1
    cache: torch.dtype = BF16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    ragged: bool = False  # of all lengths

    @property
    def shape(self) -> DecodeShape:
        return DecodeShape(self.head_dim, self.heads // self.kv_heads, self.query_len, self.cache)

    @property
    def bytes_read(self) -> int:
        """Bytes of K and V read by one call at full length."""
        return 2 * self.seqs * self.context * self.kv_heads * self.head_dim * self.cache.itemsize


SPEEDS = {
    "64x4k": Load(64, 4096),
    "1x8k": Load(1, 8192),
    "32x1k": Load(32, 1024),
    "256x1k": Load(256, 1024),
    "8x32k": Load(8, 32768),
    "64x4k_float8": Load(64, 4096, cache=FP8),
    "64x4k_drafts": Load(64, 4096, query_len=4),
}
SMALL = Load(9, 700, ragged=True)
ERRORS = {
    "llama": SMALL,
    "long": Load(3, 9000, ragged=True),
    "100k": Load(2, 100_000, ragged=True),
    "drafts": replace(SMALL, query_len=4),
    "drafts of a large group": replace(SMALL, query_len=8, heads=64),
    "group of 16": replace(SMALL, heads=32, kv_heads=2),
    "head dim 64, sinks, window": replace(SMALL, head_dim=64, heads=64, sinks=True, window=128),
    "head dim 80, no group": replace(SMALL, head_dim=80, heads=8),
    "head dim 96": replace(SMALL, head_dim=96, heads=7, kv_heads=1),
    "head dim 256, soft cap, window": replace(SMALL, head_dim=256, heads=16, softcap=50.0, window=300),
    "float8": replace(SMALL, cache=FP8),
    "float8 drafts": replace(SMALL, cache=FP8, query_len=4),
    "float8 head dim 64": replace(SMALL, cache=FP8, head_dim=64),
    "float8 head dim 80": replace(SMALL, cache=FP8, head_dim=80, heads=8),
    "float8 head dim 256": replace(SMALL, cache=FP8, head_dim=256),
}


@dataclass(frozen=True)
class Inputs:
    """One cache for all copies of a load; each reads its own pages in random order."""

    load: Load
    q: Tensor  # [copies, T, N, H]
    keys: Tensor  # [P, K, B, H]
    values: Tensor
    tables: Tensor  # [copies, S, W]
    kv_lens: Tensor  # [S]
    sinks: Tensor | None
    scale: Tensor | None  # of an 8-bit cache

    def call(self, copy: int = 0, rows: int | None = None, **how) -> Tensor:
        """Return attention of the copy's first `rows` sequences; `how`: arguments of the api."""
        load = self.load
        tokens = None if rows is None else rows * load.query_len
        return decode_attention(
            how.pop("q", self.q[copy])[:tokens],
            self.keys,
            self.values,
            self.tables[copy, :rows],
            self.kv_lens[:rows],
            query_len=load.query_len,
            scale=load.head_dim**-0.5,
            window=load.window,
            softcap=load.softcap,
            sinks=self.sinks,
            k_scale=self.scale,
            v_scale=self.scale,
            **how,
        )

    def cut(self, pieces: int, rows: int | None = None) -> WorkList | None:
        """Return the work list of the first `rows` sequences, with each cut into `pieces` pieces."""
        return cut_evenly(self.kv_lens[:rows], pieces)

    def planned(self, bench: Bench) -> WorkList:
        """Return the work list that a step would have."""
        pieces = choose_pieces(self.load.seqs, self.load.kv_heads, bench.chip)
        items, merges = plan_work(self.kv_lens.cpu().numpy(), pieces)
        return WorkList(*(torch.from_numpy(array).to(self.q.device) for array in (items, merges)))


def make(load: Load, bench: Bench, cold_bytes: int = 0) -> Inputs:
    """Return random inputs, as many copies as fill `cold_bytes`, at least two unless it is 0."""
    torch.manual_seed(0)
    device = bench.device
    copies = max(2, -(-cold_bytes // load.bytes_read)) if cold_bytes else 1
    width = -(-load.context // PAGE)
    pages = copies * load.seqs * width
    cache = torch.empty(2, pages + 1, load.kv_heads, PAGE, load.head_dim, device=device, dtype=load.cache)
    for part in cache.flatten(0, 1).split(4096):
        part.copy_(torch.randn(part.shape, device=device).to(load.cache))
    lens = torch.full((load.seqs,), load.context)
    if load.ragged:
        lens = torch.linspace(load.query_len, load.context, load.seqs).long()
        lens[load.seqs // 2] = 0
    q = torch.randn(copies, load.seqs * load.query_len, load.heads, load.head_dim, device=device).to(BF16)
    return Inputs(
        load,
        q,
        *cache,
        (1 + torch.randperm(pages)).view(copies, load.seqs, width).to(device, torch.int32),
        lens.to(device, torch.int32),
        torch.randn(load.heads, device=device).to(BF16) if load.sinks else None,
        torch.full((1,), 0.5, device=device) if load.cache == FP8 else None,
    )


def error(inputs: Inputs, bench: Bench, work: WorkList | None = None) -> tuple[float, float]:
    """Return the largest absolute error against float64, and the largest in allowed roundings of bfloat16."""
    load = inputs.load
    rows = min(load.seqs, CHECKED) if load.seqs * load.context > 1 << 16 else load.seqs
    got = inputs.call(work=work, use_kernel=bench.use_kernel, chip=bench.chip)[: rows * load.query_len]
    want = inputs.call(rows=rows, q=inputs.q[0].double(), use_kernel=False, chip=bench.chip)
    got = bench.spoiled(got)
    return float((got.double() - want).abs().max()), worst(got, want, ROUNDINGS)


def checks(bench: Bench) -> Iterator[Number]:
    """Yield every case, its sequences whole and in several pieces."""
    for name, load in ERRORS.items():
        yield Number(name, partial(check, bench, small(load) if bench.tiny else load))


def check(bench: Bench, load: Load) -> dict:
    inputs = make(load, bench)
    each = [error(inputs, bench, inputs.cut(pieces)) for pieces in (1, 2, 7)]
    return verdict(max(r for _, r in each), absolute=max(a for a, _ in each))


def small(load: Load) -> Load:
    """Return the load reduced for a CPU."""
    return replace(load, seqs=3, context=70)


def seconds(bench: Bench, inputs: Inputs, call: Callable[[int], object], repeats: int = 30) -> float:
    """Return the seconds of a call, in a graph over all copies."""
    copies = len(inputs.tables)
    replay = bench.recorded([partial(call, copy) for copy in range(copies)])
    return bench.median_ms(lambda _: replay(), repeats) / 1e3 / copies


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield each load, checked at its own size."""
    for name, load in SPEEDS.items():
        yield Number(name, partial(speed, bench, small(load) if bench.tiny else load))


def speed(bench: Bench, load: Load) -> dict:
    """Return microseconds of a call, bytes of K and V per second, also relative to a copy, and the error."""
    inputs = make(load, bench, bench.choose(COLD_BYTES, 1))
    work = inputs.planned(bench)
    absolute, roundings = error(inputs, bench, work)
    how = {"work": work, "use_kernel": bench.use_kernel, "chip": bench.chip}
    took = seconds(bench, inputs, lambda copy: inputs.call(copy, **how))
    rate = load.bytes_read / took
    speed = {"us": took * 1e6, "bytes_per_s": rate, "of_copy": rate / copy_bandwidth(bench), "pieces": len(work.items)}
    return verdict(roundings, absolute=absolute, **speed)


TUNED = {
    "llama": Load(64, 4096),
    "few rows": Load(1, 8192),
    "head dim 64": Load(64, 4096, heads=64, head_dim=64),
    "float8": Load(64, 4096, cache=FP8),
    "drafts": Load(64, 4096, query_len=4),
    "head dim 256": Load(64, 4096, heads=16, kv_heads=8, head_dim=256),
}
"""Loads of stage tune; its tuning.json key is that of the load's shape."""


def trials(bench: Bench) -> Iterator[Number]:
    """Yield all candidates for the chip; the current settings first."""
    for name, load in bench.choose(TUNED, {"llama": small(Load(64, 4096))}).items():
        every = dict.fromkeys((blocks(load.shape, bench.chip), *candidates(load.shape, bench.chip)))
        inputs: list[Inputs] = []
        for chosen in list(every)[: bench.choose(None, 3)]:
            label = " ".join(map(str, asdict(chosen).values()))
            yield Number(f"{name}: {label}", partial(trial, bench, load, chosen, inputs), 40)
        inputs.clear()


def trial(bench: Bench, load: Load, chosen: DecodeBlockSizes, shared: list[Inputs]) -> dict:
    """Return the best number of pieces of a sequence for these blocks. `shared`: the inputs of all trials of a load."""
    if not shared:
        shared.append(make(load, bench, bench.choose(COLD_BYTES, 1)))
    inputs, tried = shared[0], {}
    usual = pieces_of_each(load.seqs, load.kv_heads, load.context, bench.chip, PROGRAMS)
    for pieces in sorted({1, 2, 4, 8, usual}):
        work = inputs.cut(pieces)
        try:
            took = seconds(bench, inputs, partial(attend, bench, inputs, work=work, chosen=chosen), 10)
        except Exception as refused:
            if not is_refusal(refused):
                raise
            return {"key": load.shape.key, "settings": asdict(chosen), "refused": str(refused)[:200]}
        tried[pieces] = took * 1e6
    best = min(tried, key=lambda pieces: tried[pieces])
    of_copy = load.bytes_read / tried[best] * 1e6 / copy_bandwidth(bench)
    us = {"us": tried[best], "pieces": best, "us_of_pieces": tried, "of_copy": of_copy}
    return {"key": load.shape.key, "settings": asdict(chosen), **us}


def attend(bench: Bench, inputs: Inputs, copy: int, *, work: WorkList | None, chosen: DecodeBlockSizes) -> Tensor:
    """Call with blocks on trial; on a CPU in plain torch, which has none."""
    if not bench.use_kernel:
        return inputs.call(copy, work=work, use_kernel=False, chip=bench.chip)
    load, q = inputs.load, inputs.q[copy]
    rules = ScoreRules(load.head_dim**-0.5, load.window, load.softcap, inputs.sinks, None, inputs.scale, inputs.scale)
    how = {"dtype": q.dtype, "group": load.heads // load.kv_heads, "query_len": load.query_len}
    paged = PagedDecode(inputs.keys, inputs.values, rules, **how, use_kernel=True, chip=bench.chip, chosen=chosen)
    return paged(q, inputs.tables[copy], inputs.kv_lens, torch.empty_like(q), work=work)
