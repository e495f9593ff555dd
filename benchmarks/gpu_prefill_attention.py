"""Prefill attention on a GPU: right in bfloat16, and how fast against a large matrix product.

usage: python gpu_prefill_attention.py [--tune [--head-dim N --heads N --kv-heads N --float8]]

`measure(device)`: errors against float64 in units of the output's rounding, and FLOP per second; a token's products
with keys that it does not see are not counted. --tune tries block sizes and prints them, the best last, as a line for
tuning.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from gpu_measure import matmul_rate, median_ms
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.chips import Chip, chip_of
from pagoda.backends.torch_cuda.kernels.prefill_attention import make_tiles, prefill_attention, query_tile
from pagoda.backends.torch_cuda.kernels.prefill_attention.kernel import kernel
from pagoda.backends.torch_cuda.kernels.prefill_attention.rules import Rules
from pagoda.backends.torch_cuda.kernels.prefill_attention.tiles import candidates, key, tuned
from pagoda.backends.torch_cuda.kernels.tuning import Settings

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PAGE = 16
ROUNDINGS = 3
"""Of the output, of the weights before the second product, and of what cancels in their sum."""


@dataclass(frozen=True)
class Load:
    """Sequences of (new tokens, tokens before); by default with the heads of Llama-3.1-8B."""

    seqs: tuple[tuple[int, int], ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    cache: torch.dtype = BF16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def flop(self) -> int:
        """Of both products, where each token sees all before it."""
        pairs = sum(new * before + new * (new + 1) // 2 for new, before in self.seqs)
        return 4 * self.heads * self.head_dim * pairs


SPEEDS = {
    "1x8k": Load(((8192, 0),)),
    "8x1k": Load(((1024, 0),) * 8),
    "4x2k after 8k": Load(((2048, 8192),) * 4),
    "1x8k head dim 64": Load(((8192, 0),), heads=64, head_dim=64),
    "1x8k head dim 256": Load(((8192, 0),), heads=16, head_dim=256),
    "1x8k float8": Load(((8192, 0),), cache=FP8),
}
SMALL = Load(((300, 0), (1, 77), (40, 500), (129, 128)))
ERRORS = {
    "llama": SMALL,
    "group of 7": replace(SMALL, heads=28, kv_heads=4),
    "head dim 64, sinks, window": replace(SMALL, head_dim=64, heads=64, sinks=True, window=128),
    "head dim 80, no group": replace(SMALL, head_dim=80, heads=8),
    "head dim 96": replace(SMALL, head_dim=96, heads=8),
    "head dim 112": replace(SMALL, head_dim=112),
    "head dim 192": replace(SMALL, head_dim=192, heads=16),
    "head dim 256, soft cap, window": replace(SMALL, head_dim=256, heads=16, softcap=50.0, window=300),
    "float8": replace(SMALL, cache=FP8),
    "float8 head dim 64": replace(SMALL, cache=FP8, head_dim=64),
    "float8 head dim 80": replace(SMALL, cache=FP8, head_dim=80, heads=8),
    "float8 head dim 256": replace(SMALL, cache=FP8, head_dim=256, heads=16),
}


@dataclass(frozen=True)
class Inputs:
    """Of one call; pages lie in random order."""

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    query_start: Tensor
    kv_lens: Tensor
    tiles: Tensor
    rules: Rules
    tile: int

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """As the api takes them."""
        return self.q, self.keys, self.values, self.tables, self.query_start, self.kv_lens, self.tiles

    def call(self, chip: Chip, *, use_kernel: bool, wide: bool = False) -> Tensor:
        """Attention, `wide` in float64."""
        q, *rest = self.arrays
        names = ("scale", "window", "softcap", "sinks", "k_scale", "v_scale")
        rules = {name: getattr(self.rules, name) for name in names}
        how = {"tile": self.tile, "chip": chip, "use_kernel": use_kernel}
        return prefill_attention(q.double() if wide else q, *rest, **rules, **how)


def make(load: Load, device: torch.device, chip: Chip, tile: int | None = None) -> Inputs:
    """Random inputs, cut into tiles of `tile` tokens (default: as tuned)."""
    torch.manual_seed(0)
    new, before = np.array(load.seqs, np.int32).T
    kv = new + before
    tile = tile or query_tile(load.heads // load.kv_heads, load.head_dim, BF16, chip)
    width = -(-int(kv.max()) // PAGE)
    pages = len(kv) * width
    shape = (2, pages + 1, load.kv_heads, PAGE, load.head_dim)
    cache = torch.randn(shape, device=device, dtype=torch.float32).to(load.cache)
    lists = np.concatenate([[0], np.cumsum(new)]).astype(np.int32), kv, make_tiles(new, 0, tile, kv)
    factor = torch.full((1,), 0.5, device=device) if load.cache == FP8 else None
    sinks = torch.randn(load.heads, device=device).to(BF16) if load.sinks else None
    return Inputs(
        torch.randn(int(new.sum()), load.heads, load.head_dim, device=device).to(BF16),
        *cache,
        (1 + torch.randperm(pages)).view(len(kv), width).to(device, torch.int32),
        *(torch.from_numpy(one).to(device) for one in lists),
        Rules(load.head_dim**-0.5, load.window, load.softcap, sinks, factor, factor),
        tile,
    )


def worst(got: Tensor, want: Tensor) -> float:
    """Largest difference in units of bfloat16's rounding of `want`, or of its head's mean where that is more, allowed
    `ROUNDINGS`: a head's values are sums of the same weights.
    """
    unit = torch.maximum(want.abs(), want.abs().mean(-1, keepdim=True)) * 2.0**-8 * ROUNDINGS
    return float(((got.double() - want) / unit).abs().max())


def error(inputs: Inputs, chip: Chip, *, use_kernel: bool = True) -> tuple[float, float]:
    """Largest absolute error against float64, and the largest in allowed roundings of bfloat16: up to 1 is right."""
    got, want = inputs.call(chip, use_kernel=use_kernel), inputs.call(chip, use_kernel=False, wide=True)
    return float((got.double() - want).abs().max()), worst(got, want)


def speed(load: Load, device: torch.device, chip: Chip, matmul: float) -> dict[str, float]:
    """Milliseconds of a call, FLOP per second, also as a part of a large product's."""
    inputs = make(load, device, chip)
    took = median_ms(lambda _: inputs.call(chip, use_kernel=True)) / 1e3
    return {"ms": took * 1e3, "flop_per_s": load.flop / took, "of_matmul": load.flop / took / matmul}


def chip_here(device: torch.device) -> Chip:
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return chip_of(torch.cuda.get_device_capability(device), sms)


def measure(device: torch.device) -> dict:
    """Errors (each at most 1 is right; `right` says whether all are) and speeds against a large product."""
    chip, matmul = chip_here(device), matmul_rate(device)
    found = {name: error(make(load, device, chip), chip) for name, load in ERRORS.items()}
    return {
        "matmul_flop_per_s": matmul,
        "errors": {name: {"absolute": absolute, "roundings": many} for name, (absolute, many) in found.items()},
        "right": all(0 <= many <= 1 for _, many in found.values()),
        "speeds": {name: speed(load, device, chip, matmul) for name, load in SPEEDS.items()},
    }


def trial(inputs: Inputs, chip: Chip, chosen: Settings) -> Tensor:
    """A call with settings on trial."""
    return kernel(*inputs.arrays, torch.empty_like(inputs.q), inputs.rules, inputs.tile, chip, chosen)


def tune(load: Load, device: torch.device) -> Iterator[tuple[float, Settings]]:
    """(FLOP per second, settings) of everything worth trying that the chip can run; those in use come first."""
    chip, float8 = chip_here(device), load.cache == FP8
    in_use = tuned(load.head_dim, BF16, chip, float8=float8)
    for chosen in (in_use, *candidates(load.head_dim, BF16, chip, float8=float8)):
        inputs = make(load, device, chip, max(1, chosen["BLOCK_M"] // (load.heads // load.kv_heads)))
        try:
            took = median_ms(lambda _, inputs=inputs, chosen=chosen: trial(inputs, chip, chosen), 10) / 1e3
        except Exception as refused:  # Triton: more registers or shared memory than there are
            print(chosen, type(refused).__name__, str(refused)[:100], file=sys.stderr)
            continue
        yield load.flop / took, chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--float8", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda")
    if not args.tune:
        print(json.dumps(measure(device)))
        return
    heads = {"heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
    load = Load(((8192, 0),), **heads, cache=FP8 if args.float8 else BF16)
    matmul, tried = matmul_rate(device), []
    for rate, chosen in tune(load, device):
        tried.append((rate, chosen))
        print(f"{rate / matmul:.3f} of a product: {json.dumps(dict(chosen))}", flush=True)
    best = max(tried, key=lambda one: one[0])[1]
    print(f'"{key(load.head_dim, BF16, float8=args.float8)}": {json.dumps(dict(best))}')


if __name__ == "__main__":
    main()
