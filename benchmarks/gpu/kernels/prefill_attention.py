"""Prefill attention on a GPU: correctness in bfloat16, and speed relative to a large matrix product.

`checks`: errors against float64 in units of the output's rounding. `speeds`: FLOP per second, without products with
keys that a token does not see. `trials`: block sizes to try for tuning.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import (
    PagedPrefill,
    make_tiles,
    prefill_attention,
    query_tile,
)
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention.kernel import candidates, key, tuned
from pagoda.backends.torch_cuda.kernels.attention.shared import ScoreRules
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, Settings
from pagoda.benchmarks.gpu.measure import BF16, FP8, Bench, Number, is_refusal, matmul_rate, verdict

PAGE = 16
ROUNDINGS = 4
"""Allowed roundings: of the output, of the weights before the second product, and cancellation in their sum.

Interpreted in float16, with errors scaled to bfloat16, short prompts reach 2.3.
"""


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
        """FLOP of both products, where each token sees all before it."""
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
    """Inputs of one call; pages are in random order."""

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    query_start: Tensor
    kv_lens: Tensor
    tiles: Tensor
    rules: ScoreRules
    tile: int

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """Arguments of the api."""
        return self.q, self.keys, self.values, self.tables, self.query_start, self.kv_lens, self.tiles

    def call(self, chip: Chip, *, use_kernel: bool, wide: bool = False) -> Tensor:
        """Return attention, in float64 if `wide`."""
        q, *rest = self.arrays
        names = ("scale", "window", "softcap", "sinks", "k_scale", "v_scale")
        rules = {name: getattr(self.rules, name) for name in names}
        how = {"tile": self.tile, "chip": chip, "use_kernel": use_kernel}
        return prefill_attention(q.double() if wide else q, *rest, **rules, **how)


def make(load: Load, device: torch.device, chip: Chip, tile: int | None = None) -> Inputs:
    """Return random inputs, cut into tiles of `tile` tokens (default: as tuned)."""
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
        ScoreRules(load.head_dim**-0.5, load.window, load.softcap, sinks, None, factor, factor),
        tile,
    )


def worst(got: Tensor, want: Tensor) -> float:
    """Return the largest difference in units of ROUNDINGS roundings of bfloat16.

    The unit is that of `want`, or of its head's mean if larger: a head's values are sums with the same weights.
    """
    unit = torch.maximum(want.abs(), want.abs().mean(-1, keepdim=True)) * 2.0**-8 * ROUNDINGS
    return float(((got.double() - want) / unit).abs().max())


def error(inputs: Inputs, bench: Bench) -> tuple[float, float]:
    """Return the largest absolute error against float64, and the largest in allowed roundings: up to 1 is right."""
    got = bench.spoiled(inputs.call(bench.chip, use_kernel=bench.use_kernel))
    want = inputs.call(bench.chip, use_kernel=False, wide=True)
    return float((got.double() - want).abs().max()), worst(got, want)


def checks(bench: Bench) -> Iterator[Number]:
    """Yield every case."""
    for name, load in ERRORS.items():
        yield Number(name, partial(check, bench, replace(load, seqs=((20, 30), (7, 0))) if bench.tiny else load))


def check(bench: Bench, load: Load) -> dict:
    absolute, roundings = error(make(load, bench.device, bench.chip), bench)
    if not bench.use_kernel:  # plain torch rounds scores, the kernel does not
        roundings /= 6
    return verdict(roundings, absolute=absolute)


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield each load."""
    for name, load in SPEEDS.items():
        yield Number(name, partial(speed, bench, replace(load, seqs=((20, 30),)) if bench.tiny else load))


def speed(bench: Bench, load: Load) -> dict[str, float]:
    """Return milliseconds of a call and FLOP per second, also relative to a large product's."""
    inputs = make(load, bench.device, bench.chip)
    took = bench.median_ms(lambda _: inputs.call(bench.chip, use_kernel=bench.use_kernel)) / 1e3
    return {"ms": took * 1e3, "flop_per_s": load.flop / took, "of_matmul": load.flop / took / matmul_rate(bench)}


TUNED = {
    "llama": Load(((8192, 0),)),
    "head dim 64": Load(((8192, 0),), heads=64, head_dim=64),
    "head dim 256": Load(((8192, 0),), heads=16, head_dim=256),
    "float8": Load(((8192, 0),), cache=FP8),
}
"""Loads of stage tune."""


def trials(bench: Bench) -> Iterator[Number]:
    """Yield all candidates for the chip; the current settings first."""
    for name, load in bench.choose(TUNED, {"llama": Load(((20, 30),))}).items():
        float8 = load.cache == FP8
        every = [tuned(load.head_dim, BF16, bench.chip, float8=float8)]
        every += [one for one in candidates(load.head_dim, BF16, bench.chip, float8=float8) if one != every[0]]
        for chosen in every[: bench.choose(None, 3)]:
            yield Number(f"{name}: {' '.join(map(str, chosen.values()))}", partial(trial, bench, load, chosen), 40)


def trial(bench: Bench, load: Load, chosen: Settings) -> dict:
    about = {"key": key(load.head_dim, BF16, float8=load.cache == FP8), "settings": dict(chosen)}
    tile = max(1, chosen["BLOCK_M"] // (load.heads // load.kv_heads))
    inputs = make(load, bench.device, bench.chip, tile)
    try:
        us = 1e3 * bench.median_ms(lambda _: attend(bench, inputs, chosen), 10)
    except Exception as refused:
        if not is_refusal(refused):
            raise
        return about | {"refused": str(refused)[:200]}
    return about | {"us": us, "of_matmul": load.flop / us * 1e6 / matmul_rate(bench)}


def attend(bench: Bench, inputs: Inputs, chosen: Settings) -> Tensor:
    """Call with settings on trial; on a CPU in plain torch, which has none."""
    if not bench.use_kernel:
        return inputs.call(bench.chip, use_kernel=False)
    q, keys, values, *step = inputs.arrays
    group, out = q.shape[1] // keys.shape[1], torch.empty_like(inputs.q)
    how = {"dtype": q.dtype, "group": group, "tile": inputs.tile, "use_kernel": True, "chip": bench.chip}
    return PagedPrefill(keys, values, inputs.rules, **how, chosen=chosen)(q, *step, out)
