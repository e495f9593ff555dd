"""Decode attention on a GPU: right in bfloat16, and how fast it reads the cache against a large copy.

usage: python gpu_decode_attention.py [--tune [--head-dim N --heads N --kv-heads N --query-len N --float8]]

`measure(device)`: errors against float64 in units of the output's rounding, and bytes of K and V per second. Launches
are recorded in a CUDA graph, as the engine launches them, over caches that together exceed the L2 cache. --tune tries
block sizes and prints them, the best last, as lines for tuning.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from gpu_elementwise import recorded, worst
from gpu_measure import copy_bandwidth, median_ms
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.chips import Chip, chip_of
from pagoda.backends.torch_cuda.kernels.decode_attention import choose_splits, decode_attention
from pagoda.backends.torch_cuda.kernels.decode_attention.blocks import Blocks, Shape, blocks, candidates

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PAGE = 16
COLD_BYTES = 512 << 20
"""Calls are rotated over so many bytes, several times an L2 cache."""
CHECKED = 4
"""Sequences of a timed shape that are compared with float64."""


@dataclass(frozen=True)
class Load:
    """Sequences of up to `context` tokens; by default with the heads of Llama-3.1-8B. `ragged`: of all lengths."""

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
    ragged: bool = False

    @property
    def shape(self) -> Shape:
        return Shape(self.head_dim, self.heads // self.kv_heads, self.query_len, self.cache)

    @property
    def bytes_read(self) -> int:
        """Of K and V in one call, all sequences being as long as they can."""
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
    """One cache for all copies of a load, which read pages of their own in random order."""

    load: Load
    q: Tensor  # [copies, T, N, H]
    keys: Tensor  # [P, K, B, H]
    values: Tensor
    tables: Tensor  # [copies, S, W]
    kv_lens: Tensor  # [S]
    sinks: Tensor | None
    scale: Tensor | None  # of an 8-bit cache

    def call(self, copy: int = 0, rows: int | None = None, **how) -> Tensor:
        """Attention of the copy's first `rows` sequences; `how` as the api has it."""
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


def make(load: Load, device: torch.device, cold_bytes: int = 0, dtype: torch.dtype = BF16) -> Inputs:
    """Random inputs, as many copies as fill `cold_bytes`, two at least where any are asked for."""
    torch.manual_seed(0)
    copies = max(2, math.ceil(cold_bytes / load.bytes_read)) if cold_bytes else 1
    width = -(-load.context // PAGE)
    pages = copies * load.seqs * width
    cache = torch.empty(2, pages + 1, load.kv_heads, PAGE, load.head_dim, device=device, dtype=load.cache)
    for part in cache.flatten(0, 1).split(4096):
        part.copy_(torch.randn(part.shape, device=device).to(load.cache))
    lens = torch.full((load.seqs,), load.context)
    if load.ragged:
        lens = torch.linspace(load.query_len, load.context, load.seqs).long()
        lens[load.seqs // 2] = 0
    q = torch.randn(copies, load.seqs * load.query_len, load.heads, load.head_dim, device=device).to(dtype)
    return Inputs(
        load,
        q,
        *cache,
        (1 + torch.randperm(pages)).view(copies, load.seqs, width).to(device, torch.int32),
        lens.to(device, torch.int32),
        torch.randn(load.heads, device=device).to(dtype) if load.sinks else None,
        torch.full((1,), 0.5, device=device) if load.cache == FP8 else None,
    )


def error(inputs: Inputs, chip: Chip, *, use_kernel: bool = True, splits: int | None = None) -> tuple[float, float]:
    """Largest absolute error against float64, and the largest in roundings of bfloat16, where up to 3 are allowed."""
    load = inputs.load
    rows = min(load.seqs, CHECKED) if load.seqs * load.context > 1 << 16 else load.seqs
    asked = choose_splits(load.seqs, load.kv_heads, load.context, chip) if splits is None else splits
    got = inputs.call(splits=asked, use_kernel=use_kernel, chip=chip)[: rows * load.query_len]
    want = inputs.call(rows=rows, q=inputs.q[0].double(), splits=1, use_kernel=False, chip=chip)
    return float((got.double() - want).abs().max()), worst(got, want, 3)


def errors(device: torch.device, chip: Chip) -> dict[str, dict[str, float]]:
    """Of each case, with one split and with several."""
    found = {}
    for name, load in ERRORS.items():
        inputs = make(load, device)
        each = [error(inputs, chip, splits=splits) for splits in (1, 2, 7)]
        found[name] = {"absolute": max(a for a, _ in each), "roundings": max(r for _, r in each)}
    return found


def seconds(inputs: Inputs, call: Callable[[int], object], repeats: int = 30) -> float:
    """Of a call, in a graph that goes through all copies."""
    copies = len(inputs.tables)
    graph = recorded([lambda copy=copy: call(copy) for copy in range(copies)])
    return median_ms(lambda _: graph.replay(), repeats) / 1e3 / copies


def speed(load: Load, device: torch.device, chip: Chip, bandwidth: float) -> dict[str, float]:
    """Microseconds of a call, bytes per second of K and V, also as a part of a copy's; the error at this size."""
    inputs = make(load, device, COLD_BYTES)
    splits = choose_splits(load.seqs, load.kv_heads, load.context, chip)
    absolute, roundings = error(inputs, chip)
    took = seconds(inputs, lambda copy: inputs.call(copy, splits=splits, use_kernel=True, chip=chip))
    rate = load.bytes_read / took
    return {
        "us": took * 1e6,
        "bytes_per_s": rate,
        "of_copy": rate / bandwidth,
        "splits": splits,
        "absolute": absolute,
        "roundings": roundings,
    }


def chip_here(device: torch.device) -> Chip:
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return chip_of(torch.cuda.get_device_capability(device), sms)


def measure(device: torch.device) -> dict:
    """Errors (each at most 1 is right; `right` says whether all are) and speeds against a large copy."""
    chip, bandwidth = chip_here(device), copy_bandwidth(device)
    found = errors(device, chip)
    speeds = {}
    for name, load in SPEEDS.items():
        speeds[name] = speed(load, device, chip, bandwidth)
        torch.cuda.empty_cache()
    roundings = [one["roundings"] for one in (*found.values(), *speeds.values())]
    return {
        "copy_bytes_per_s": bandwidth,
        "errors": found,
        "right": all(0 <= one <= 1 for one in roundings),
        "speeds": speeds,
    }


def tune(load: Load, device: torch.device) -> Iterator[tuple[float, int, Blocks]]:
    """(bytes per second, splits, blocks) of everything worth trying that the chip can run; the table's own first."""
    from pagoda.backends.torch_cuda.kernels.decode_attention.kernel import launch

    chip, inputs = chip_here(device), make(load, device, COLD_BYTES)
    in_use = blocks(load.shape, chip)
    usual = choose_splits(load.seqs, load.kv_heads, load.context, chip)
    for chosen in dict.fromkeys((in_use, *candidates(load.shape, chip))):
        for splits in sorted({1, 2, 3, 4, 6, 8, 12, usual}):
            how = {"splits": splits, "chip": chip, "chosen": chosen}
            try:
                took = seconds(inputs, lambda copy, how=how: attend(inputs, copy, launch, **how), 10)
            except Exception as refused:  # Triton: more registers or shared memory than there are
                print(chosen, type(refused).__name__, str(refused)[:100], file=sys.stderr)
                break
            yield load.bytes_read / took, splits, chosen


def attend(inputs: Inputs, copy: int, launch: Callable[..., Tensor], **how) -> Tensor:
    """A call with blocks on trial."""
    load = inputs.load
    arrays = inputs.q[copy], inputs.keys, inputs.values, inputs.tables[copy], inputs.kv_lens
    facts = load.query_len, load.head_dim**-0.5, load.window, load.softcap, inputs.sinks, inputs.scale, inputs.scale
    return launch(*arrays, *facts, **how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--query-len", type=int, default=1)
    parser.add_argument("--float8", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda")
    if not args.tune:
        print(json.dumps(measure(device)))
        return
    heads = {"heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
    load = Load(64, 4096, **heads, query_len=args.query_len, cache=FP8 if args.float8 else BF16)
    bandwidth, tried = copy_bandwidth(device), []
    for rate, splits, chosen in tune(load, device):
        tried.append((rate, splits, chosen))
        print(f"{rate / bandwidth:.3f} of a copy, {splits} splits: {json.dumps(asdict(chosen))}", flush=True)
    best = max(tried, key=lambda one: one[0])
    print(f'"{load.shape.key}": {json.dumps(asdict(best[2]))}')


if __name__ == "__main__":
    main()
