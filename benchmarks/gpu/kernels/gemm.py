"""Products with packed matrices and mixtures of experts on a GPU: correctness in bfloat16, and speed.

`checks`: errors against float64 in units of the output's rounding. `speeds`: times relative to torch and to reading the
numbers at the speed of a large copy; small batches are timed in CUDA graphs over more matrices than the L2 cache holds.
`trials`: settings to try for the tuning.json of both kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.experts.moe import moe
from pagoda.backends.torch_cuda.kernels.frame import launch
from pagoda.backends.torch_cuda.kernels.frame.launch import Settings
from pagoda.backends.torch_cuda.kernels.linear.weight_only import pack, unpack, weight_only_linear
from pagoda.benchmarks.gpu.measure import BF16, Bench, Number, figures, settings_trials, verdict, worst
from pagoda.common.models.spec import Mlp, Router

COLD_BYTES = 256 << 20
"""Matrices are rotated over this many bytes, more than an L2 cache holds."""

SCHEMES = ("int8", "fp8", "int4")
MATRICES = ((28672, 4096), (4096, 14336), (6144, 4096))
"""[O, I]: gate with up, down, and qkv of an 8B model."""
ROWS = (1, 8, 16, 64)
MIXTURES = {"mixtral": (8, 2, 4096, 14336), "qwen3": (128, 8, 2048, 768)}
"""Experts, experts per token, D, F."""
FEW, MANY = (1, 32, 256), 4096


def random(*shape: int, device: torch.device) -> Tensor:
    """Return a random matrix, scaled so that a product has about the size of its input."""
    return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(BF16)


def checks(bench: Bench) -> Iterator[Number]:
    """Yield every scheme and number of rows; mixtures, plain and packed."""
    for scheme, rows in itertools.product(SCHEMES, bench.choose((1, 7, 16, 33, 64, 300), (1, 7, 33))):
        yield Number(f"{scheme}_{rows}", partial(linear_error, bench, scheme, rows))
    sizes = bench.choose(((8, 2, 512, 768), (64, 8, 512, 256)), ((4, 2, 64, 48),))
    for size, rows in itertools.product(sizes, bench.choose((1, 40, 300, 3000), (1, 40))):
        for scheme in (None, "int8"):
            name = f"{size[0]}_experts_{rows}{'_int8' if scheme else ''}"
            yield Number(name, partial(moe_error, bench, size, rows, scheme))


def linear_error(bench: Bench, scheme: str, rows: int) -> dict:
    """Return the worst error in roundings of bfloat16; at most 1 is right."""
    from pagoda.backends.torch_cuda.kernels.linear.weight_only.kernel import FEW

    torch.manual_seed(0)
    outputs, inputs = bench.choose((1040, 4096), (40, 300))
    weight, bias = random(outputs, inputs, device=bench.device), torch.randn(outputs, device=bench.device).to(BF16)
    packed = pack(weight, scheme)
    exact = unpack(packed).double()
    x = torch.randn(rows, inputs, device=bench.device).to(BF16)
    got = weight_only_linear(x, packed, bias, use_kernel=bench.use_kernel, chip=bench.chip)
    want = x.double() @ exact.T + bias.double()
    # Many rows round the matrix too, by 0.1 %; the worst of many errs 5 times as much.
    roundings = 1 if rows <= FEW else 3
    return verdict(worst(bench.spoiled(got), want, roundings))


def moe_error(bench: Bench, size: tuple[int, int, int, int], tokens: int, scheme: str | None) -> dict:
    """Return the same for a mixture of experts; the kernel rounds four times between products, plain torch more."""
    torch.manual_seed(0)
    experts, top, width, ffn = size
    device = bench.device
    inner, down = random(experts, 2 * ffn, width, device=device), random(experts, width, ffn, device=device)
    x, logits = torch.randn(tokens, width, device=device).to(BF16), torch.randn(tokens, experts, device=device)
    facts = {"router": Router(top, True), "expert": Mlp(ffn, "silu", True), "use_kernel": bench.use_kernel}
    stacks = (inner, down) if scheme is None else (pack(inner, scheme), pack(down, scheme))
    exact = (inner, down) if scheme is None else tuple(unpack(part) for part in stacks)
    got = moe(x, logits, *stacks, **facts, chip=bench.chip)
    roundings = 8 if bench.use_kernel else 16
    return verdict(worst(bench.spoiled(got), mixture64(x, logits, *exact, top), roundings))


def mixture64(x: Tensor, logits: Tensor, inner: Tensor, down: Tensor, top: int) -> Tensor:
    """Return the mixture in float64, expert by expert."""
    weights, chosen = logits.double().softmax(-1).topk(top)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(inner.shape[0]):
        rows, ranks = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[rows].double() @ inner[expert].double().T).chunk(2, -1)
        out.index_add_(0, rows, (F.silu(gate) * up) @ down[expert].double().T * weights[rows, ranks, None])
    return out


def microseconds(bench: Bench, make: Callable[[], Callable[[], object]], moved: int) -> float:
    """Return the time of a call, in a graph of calls from `make` over their own matrices, `moved` bytes each."""
    calls = [make() for _ in range(bench.copies(moved, COLD_BYTES))]
    replay = bench.recorded(calls)
    return bench.median_ms(lambda _: replay()) * 1e3 / len(calls)


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield the products, torch's bfloat16 first. `of_copy`: fraction of a copy's speed at which numbers are read."""
    for shape, rows in itertools.product(bench.choose(MATRICES, ((64, 96),)), bench.choose(ROWS, (1,))):
        for scheme in (None, *SCHEMES):
            name = f"{scheme or 'torch'}_{shape[0]}x{shape[1]}_{rows}"
            yield Number(name, partial(linear_speed, bench, scheme, shape, rows))
    mixtures = bench.choose(MIXTURES, {"tiny": (4, 2, 64, 48)})
    for (name, size), tokens in itertools.product(mixtures.items(), bench.choose((*FEW, MANY), (1, MANY // 64))):
        yield Number(f"{name}_{tokens}", partial(moe_speed, bench, size, tokens))


def linear_speed(bench: Bench, scheme: str | None, shape: tuple[int, int], rows: int) -> dict[str, float]:
    weight = random(*shape, device=bench.device)
    x = torch.randn(rows, shape[1], device=bench.device).to(BF16)
    if scheme is None:
        us = microseconds(bench, partial(_torch_linear, x, weight), weight.nbytes)
        return figures(bench, us / 1e6, weight.nbytes)
    moved = pack(weight, scheme).num_bytes
    us = microseconds(bench, partial(_packed_linear, bench, x, weight, scheme), moved)
    return figures(bench, us / 1e6, moved)


def _torch_linear(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Return a call over its own matrix."""
    return partial(F.linear, x, weight.clone())


def _packed_linear(bench: Bench, x: Tensor, weight: Tensor, scheme: str) -> Callable[[], Tensor]:
    """Return a call over its own matrix."""
    return partial(weight_only_linear, x, pack(weight, scheme), None, use_kernel=bench.use_kernel, chip=bench.chip)


def moe_speed(bench: Bench, size: tuple[int, int, int, int], tokens: int) -> dict[str, float]:
    """Return the time, also relative to a loop over experts. `of_copy` counts reading the used experts once.

    With few tokens the L2 cache may contain experts.
    """
    experts, top, width, ffn = size
    device = bench.device
    inner, down = random(experts, 2 * ffn, width, device=device), random(experts, width, ffn, device=device)
    facts = {"router": Router(top, True), "expert": Mlp(ffn, "silu", True), "use_kernel": bench.use_kernel}
    x, logits = torch.randn(tokens, width, device=device).to(BF16), torch.randn(tokens, experts, device=device)
    used = len(logits.topk(top).indices.unique())
    moved = used * (inner[0].nbytes + down[0].nbytes)
    call = partial(moe, x, logits, inner, down, **facts, chip=bench.chip)
    us = eager(bench, call) if tokens == MANY else microseconds(bench, lambda: call, moved)
    loop = eager(bench, partial(loop_over_experts, x, logits, inner, down, top))
    flops = 2 * tokens * top * 3 * ffn * width
    return figures(bench, us / 1e6, moved, flops) | {"of_loop": us / loop}


def eager(bench: Bench, call: Callable[[], object]) -> float:
    """Return microseconds of a call outside any graph."""
    return bench.median_ms(lambda _: call(), 10) * 1e3


def loop_over_experts(x: Tensor, logits: Tensor, inner: Tensor, down: Tensor, top: int) -> Tensor:
    """Return the mixture in plain torch: a dense product for each expert in use."""
    weights, chosen = logits.softmax(-1).topk(top)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, ranks = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[rows] @ inner[expert].T).chunk(2, -1)
        part = (F.silu(gate) * up) @ down[expert].T * weights[rows, ranks, None]
        out.index_add_(0, rows, part.to(x.dtype))
    return out


def candidates(usual: Settings) -> Iterator[Settings]:
    """Yield settings to try in place of `usual`, with DEPTH if it has one."""
    depths = (64, 128) if "DEPTH" in usual else (None,)
    for channels, depth, warps, stages in itertools.product((64, 128), depths, (2, 4, 8), (3, 4, 5)):
        tried = {"CHANNELS": channels, "DEPTH": depth, "num_warps": warps, "num_stages": stages}
        yield {key: value for key, value in tried.items() if value is not None}


def trials(bench: Bench) -> Iterator[Number]:
    """Yield trials for weight_only over the down projection of an 8B model, then for moe."""
    from pagoda.backends.torch_cuda.kernels.experts.moe import kernel as moe_kernel
    from pagoda.backends.torch_cuda.kernels.linear.weight_only import kernel

    for scheme, tile in itertools.product(SCHEMES, kernel.TILES[: bench.choose(None, 1)]):
        yield from _tried(bench, kernel, f"{scheme}-{tile}", partial(linear_calls, bench, scheme, tile))
    for scheme, tile in itertools.product(("plain", *SCHEMES), moe_kernel.TILES[: bench.choose(None, 1)]):
        if scheme == "plain" or tile != moe_kernel.TILES[-1]:
            yield from _tried(bench, moe_kernel, f"{scheme}-{tile}", partial(moe_calls, bench, scheme, tile))


def _tried(bench: Bench, module: ModuleType, key: str, make: Callable[[], list]) -> Iterator[Number]:
    """Yield the settings of one key of a table. The calls are made once, by the first trial that runs."""
    calls = cache(make)
    usual = launch.settings(module.TUNING, bench.chip, key)
    yield from settings_trials(bench, module, key, candidates(usual), calls, launch)
    calls.cache_clear()


def linear_calls(bench: Bench, scheme: str, tile: int) -> list[Callable[[], object]]:
    shape = bench.choose(MATRICES[1], (64, 96))
    weight = random(*shape, device=bench.device)
    x = torch.randn(tile, shape[1], device=bench.device).to(BF16)
    return [_packed_linear(bench, x, weight, scheme) for _ in range(bench.copies(weight.nbytes // 4, COLD_BYTES))]


def moe_calls(bench: Bench, scheme: str, tile: int) -> list[Callable[[], object]]:
    experts, top, width, ffn = bench.choose(MIXTURES["qwen3"], (4, 2, 64, 48))
    device = bench.device
    inner, down = random(experts, 2 * ffn, width, device=device), random(experts, width, ffn, device=device)
    stacks = (inner, down) if scheme == "plain" else (pack(inner, scheme), pack(down, scheme))
    tokens = tile * experts // top
    x = torch.randn(tokens, width, device=device).to(BF16)
    expert = Mlp(ffn, "silu", True)
    if not bench.use_kernel:
        logits = torch.randn(tokens, experts)
        facts = {"router": Router(top, True), "expert": expert, "use_kernel": False, "chip": bench.chip}
        return [partial(moe, x, logits, *stacks, **facts)]
    from pagoda.backends.torch_cuda.kernels.experts.moe import kernel as moe_kernel

    chosen = torch.rand(tokens, experts, device=device).argsort(-1)[:, :top].int().contiguous()
    call = partial(moe_kernel.experts, x, chosen, *stacks, None, None, expert, bench.chip)
    return [call, call]
