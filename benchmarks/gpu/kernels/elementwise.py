"""The kernels between the matrix products on a GPU: correctness in bfloat16, and bandwidth relative to a copy.

`checks`: errors against float64 in units of the output's rounding. `speeds`: bytes per second; launches are recorded in
CUDA graphs, as in the engine, and the inputs together exceed the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.rope_cache import NormWeights, RopeCache
from pagoda.backends.torch_cuda.kernels.pointwise import activation
from pagoda.backends.torch_cuda.kernels.pointwise.norm import RowNorm
from pagoda.benchmarks.gpu.measure import BF16, FP8, Bench, Number, figures, verdict, worst

EPS = 1e-5
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
SHAPES = ((256, 4096), (8192, 4096))
COLD_BYTES = 256 << 20
"""Inputs are rotated over this many bytes, more than an L2 cache holds."""


def heads64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, n, H] in float64."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def tables(device: torch.device, length: int) -> Tensor:
    """Return cos and sin, float32 [length, 2, H/2]."""
    half = HEAD_DIM // 2
    angles = torch.arange(length)[:, None] * 5e5 ** (-torch.arange(half).double() / half)
    return torch.stack((angles.cos(), angles.sin()), 1).float().to(device)


def caches(device: torch.device, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return keys and values for that number of tokens, and the null block."""
    return [torch.zeros(tokens // PAGE + 1, KV_HEADS, PAGE, HEAD_DIM, device=device).to(dtype) for _ in range(2)]


def checks(bench: Bench) -> Iterator[Number]:
    """Yield each kernel in bfloat16."""
    yield from norm_checks(bench)
    for name, act in (("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", partial(F.gelu, approximate="tanh"))):
        yield Number(name, partial(gated_error, bench, name, act))
        yield Number(f"{name}_float8", partial(gated_float8_error, bench, name, act))
    for name in ("rope", "qk_norm", "float8"):
        yield Number(f"rope_cache_{name}", partial(rope_errors, bench, name))


def norm_checks(bench: Bench) -> Iterator[Number]:
    for kind, offset in (("rms", False), ("rms", True), ("layer", False)):
        name = f"{kind}{'_unit_offset' * offset}"
        yield Number(name, partial(norm_error, bench, kind, offset))
        yield Number(f"{name}_float8", partial(norm_float8_error, bench, kind, offset))


def rows_of(bench: Bench, count: int) -> Tensor:
    """Return `count` x [rows, width]."""
    torch.manual_seed(0)
    rows, width = bench.choose((257, 5120), (5, 64))
    return torch.randn(count, rows, width, device=bench.device).to(BF16)


def norm_inputs(bench: Bench, kind: str, offset: bool) -> tuple[RowNorm, Tensor, Tensor, Tensor]:
    """Return a norm, x, a residual, and the expected result in float64."""
    x, residual = rows_of(bench, 2)
    weight, bias = torch.randn(2, x.shape[1], device=bench.device).to(BF16)
    add = bias if kind == "layer" else None
    wide = (x.double() + residual.double()).to(BF16).double()
    wide = wide - wide.mean(-1, keepdim=True) if kind == "layer" else wide
    want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (weight.double() + offset)
    want = want if add is None else want + add.double()
    how = {"eps": EPS, "kind": kind, "unit_offset": offset, "use_kernel": bench.use_kernel, "chip": bench.chip}
    return RowNorm(weight, add, **how), x, residual, want


def norm_error(bench: Bench, kind: str, offset: bool) -> dict:
    norm, x, residual, want = norm_inputs(bench, kind, offset)
    normed, total = norm(x, residual)
    exact = x.double() + residual.double()
    return verdict(max(worst(bench.spoiled(normed), want, 3), worst(total, exact)))


def norm_float8_error(bench: Bench, kind: str, offset: bool) -> dict:
    norm, x, residual, want = norm_inputs(bench, kind, offset)
    stored, scale, _ = norm.quantised(x, residual)
    return verdict(float8_error(bench, stored, scale, want))


def gated_error(bench: Bench, name: str, act: Callable[[Tensor], Tensor]) -> dict:
    x = rows_of(bench, 1)[0]
    first, second = x.double().chunk(2, -1)
    return verdict(worst(bench.spoiled(activation.gated(x, name, use_kernel=bench.use_kernel)), act(first) * second, 3))


def gated_float8_error(bench: Bench, name: str, act: Callable[[Tensor], Tensor]) -> dict:
    x = rows_of(bench, 1)[0]
    first, second = x.double().chunk(2, -1)
    got = activation.gated_quantised(x, name, use_kernel=bench.use_kernel, chip=bench.chip)
    return verdict(float8_error(bench, *got, act(first) * second))


def float8_error(bench: Bench, stored: Tensor, scale: Tensor, want: Tensor) -> float:
    """Largest error of stored * scale in float8's roundings: 2**-4 of the value, or 2**-10 of the scale."""
    unit = torch.maximum(want.abs() * 2.0**-4, scale.double() * 2.0**-10) * 1.15
    return float(((bench.spoiled(stored.double() * scale.double()) - want) / unit).abs().max())


def rope_errors(bench: Bench, case: str) -> dict:
    """Check RopeCache: plain, with QK norm, with a float8 cache."""
    torch.manual_seed(0)
    qk_norm = NormWeights(torch.randn(HEAD_DIM, device=bench.device).to(BF16), EPS)
    qk_norm = qk_norm if case == "qk_norm" else None
    cache_dtype = FP8 if case == "float8" else BF16
    tokens, heads = bench.choose(96, 32), HEADS + 2 * KV_HEADS
    qkv = torch.randn(tokens, heads * HEAD_DIM, device=bench.device).to(BF16)
    cos_sin = tables(bench.device, 4096)
    positions = torch.randint(4096, (tokens,), device=bench.device, dtype=torch.int32)
    slots = (PAGE + torch.randperm(tokens, device=bench.device)).int()
    keys, values = caches(bench.device, tokens, cache_dtype)
    scales = {n: torch.tensor([0.02], device=bench.device) for n in ("k_scale", "v_scale") if case == "float8"}
    facts = {"heads": HEADS, "kv_heads": KV_HEADS, "cos_sin": cos_sin, "q_norm": qk_norm, "k_norm": qk_norm}
    how = {"use_kernel": bench.use_kernel, "chip": bench.chip}
    q = RopeCache(keys, values, **facts, **scales, **how)(qkv, positions, slots)
    wide = qkv.view(tokens, heads, HEAD_DIM).double()
    rotated = wide[:, : HEADS + KV_HEADS]
    if qk_norm is not None:
        rotated = rotated * torch.rsqrt(rotated.square().mean(-1, keepdim=True) + EPS) * qk_norm.weight.double()
    rotated = heads64(rotated, *cos_sin.double()[positions.long()].unbind(1))
    at = slots.long()
    in_cache = [cache.float()[at // PAGE, :, at % PAGE] for cache in (keys, values)]
    wanted = rotated[:, HEADS:], wide[:, HEADS + KV_HEADS :]
    # The rotation adds values that the norm has rounded twice; they may cancel.
    roundings = 3 if qk_norm is None else 9
    errors = [worst(bench.spoiled(q), rotated[:, :HEADS], roundings)]
    if case == "float8":
        errors += [float8_error(bench, got, scales["k_scale"], want) for got, want in zip(in_cache, wanted)]
    else:
        errors += [worst(bench.spoiled(got), want, roundings) for got, want in zip(in_cache, wanted)]
    return verdict(max(errors), q=errors[0], k=errors[1], v=errors[2])


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield each kernel over few and many tokens; `of_copy` of the copy itself is what such a size can reach."""
    for rows, width in bench.choose(SHAPES, ((16, 256),)):
        for name, (make, moved) in timed_kernels(bench, rows, width).items():
            yield Number(f"{name}_{rows}x{width}", partial(timed, bench, make, moved))


def timed(bench: Bench, make: Callable[[], Callable[[], object]], moved: int) -> dict[str, float]:
    """Return microseconds and bytes per second of a kernel; `make()` returns a call over its own inputs."""
    calls = [make() for _ in range(bench.copies(moved, COLD_BYTES, 4))]
    replay = bench.recorded(calls)
    seconds = bench.median_ms(lambda _: replay()) / 1e3 / len(calls)
    return figures(bench, seconds, moved)


def timed_kernels(bench: Bench, rows: int, width: int) -> dict[str, tuple[Callable, int]]:
    """Return name -> (maker of a call, bytes it moves)."""
    size, device, kernel = rows * width * 2, bench.device, bench.use_kernel
    how = {"use_kernel": kernel, "chip": bench.chip}
    norm = RowNorm(torch.ones(width, device=device, dtype=BF16), eps=EPS, kind="rms", **how)
    cos_sin = tables(device, rows)
    positions = torch.arange(rows, device=device, dtype=torch.int32)

    def random(columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=BF16)

    def copied():
        source, target = random(width), random(width)
        return lambda: target.copy_(source)

    def normed():
        x, residual = random(width), random(width)
        return lambda: norm(x, residual)

    def normed_float8():
        x, residual = random(width), random(width)
        return lambda: norm.quantised(x, residual)

    def gated():
        both = random(2 * width)
        return lambda: activation.gated(both, "silu", use_kernel=kernel)

    def gated_float8():
        both = random(2 * width)
        return lambda: activation.gated_quantised(both, "silu", use_kernel=kernel, chip=bench.chip)

    def roped(dtype: torch.dtype = BF16):
        arguments = random((HEADS + 2 * KV_HEADS) * HEAD_DIM), positions, positions + PAGE
        facts = {"heads": HEADS, "kv_heads": KV_HEADS, "cos_sin": cos_sin, "q_norm": None, "k_norm": None}
        write = RopeCache(*caches(device, rows, dtype), **facts, **how)
        return lambda: write(*arguments)

    q, kv = rows * HEADS * HEAD_DIM * 2, rows * 2 * KV_HEADS * HEAD_DIM * 2
    return {
        "copy": (copied, 2 * size),
        "rms_residual": (normed, 4 * size),
        "rms_residual_float8": (normed_float8, 7 * size // 2),
        "silu": (gated, 3 * size),
        "silu_float8": (gated_float8, 5 * size // 2),
        "rope_cache": (roped, 2 * (q + kv)),
        "rope_cache_float8": (lambda: roped(FP8), 2 * q + 3 * kv // 2),
    }
