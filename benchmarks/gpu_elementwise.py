"""The kernels between the matrix products on a GPU: right in bfloat16, and how fast against a copy.

`measure(device)`: errors against float64 in units of the output's rounding, and GB/s. Launches are recorded in CUDA
graphs, as the engine launches them; the inputs together exceed the L2 cache.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from gpu_measure import copy_bandwidth, median_ms
from torch import Tensor

from pagoda.backends.torch_cuda.kernels import activation, norm, rope_cache
from pagoda.backends.torch_cuda.kernels.chips import Chip, chip_of

BF16 = torch.bfloat16
EPS = 1e-5
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
SHAPES = ((256, 4096), (8192, 4096))
COLD_BYTES = 256 << 20
"""Inputs are rotated over so many bytes, more than an L2 cache holds."""


def worst(got: Tensor, want: Tensor, roundings: int = 1) -> float:
    """Largest difference in units of bfloat16's rounding of `want`, allowed `roundings`; above 1 is wrong."""
    unit = want.abs().clamp_min(want.abs().mean()) * 2.0**-8 * roundings
    return float(((got.double() - want) / unit).abs().max())


def heads64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation of x [T, n, H] in float64."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def tables(device: torch.device, length: int) -> Tensor:
    """cos and sin float32 [length, 2, H/2]."""
    half = HEAD_DIM // 2
    angles = torch.arange(length)[:, None] * 5e5 ** (-torch.arange(half).double() / half)
    return torch.stack((angles.cos(), angles.sin()), 1).float().to(device)


def caches(device: torch.device, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Keys and values for so many tokens, and the null block."""
    return [torch.zeros(tokens // PAGE + 1, KV_HEADS, PAGE, HEAD_DIM, device=device).to(dtype) for _ in range(2)]


def correctness(device: torch.device, chip: Chip) -> dict[str, float]:
    """Worst error of each kernel in bfloat16 roundings; each must be at most 1."""
    torch.manual_seed(0)
    rows, width, found = 257, 5120, {}
    x, rest = torch.randn(2, rows, width, device=device).to(BF16)
    weight, bias = torch.randn(2, width, device=device).to(BF16)
    for kind, offset in (("rms", False), ("rms", True), ("layer", False)):
        add = bias if kind == "layer" else None
        facts = {"eps": EPS, "kind": kind, "unit_offset": offset, "residual": rest}
        normed, total = norm.norm(x, weight, add, **facts, use_kernel=True)
        wide = total.double()
        wide = wide - wide.mean(-1, keepdim=True) if kind == "layer" else wide
        want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (weight.double() + offset)
        want = want if add is None else want + add.double()
        name = f"{kind}{'_unit_offset' * offset}"
        found[name] = max(worst(normed, want, 3), worst(total, x.double() + rest.double()))
        stored, scale, _ = norm.norm_quantised(x, weight, add, **facts, use_kernel=True, chip=chip)
        found[f"{name}_float8"] = float8_error(stored, scale, want)
    for name, act in (("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", lambda v: F.gelu(v, approximate="tanh"))):
        first, second = x.double().chunk(2, -1)
        want = act(first) * second
        found[name] = worst(activation.gated(x, name, use_kernel=True), want, 3)
        found[f"{name}_float8"] = float8_error(*activation.gated_quantised(x, name, use_kernel=True, chip=chip), want)
    return found | rope_errors(device, chip)


def float8_error(stored: Tensor, scale: Tensor, want: Tensor) -> float:
    """Largest error of stored * scale in float8's roundings: 2**-4 of the value, or 2**-10 of the scale."""
    unit = torch.maximum(want.abs() * 2.0**-4, scale.double() * 2.0**-10) * 1.15
    return float(((stored.double() * scale.double() - want) / unit).abs().max())


def rope_errors(device: torch.device, chip: Chip) -> dict[str, float]:
    """rope_and_cache with and without QK norm, into a cache of bfloat16 and of float8."""
    tokens, found = 96, {}
    heads = HEADS + 2 * KV_HEADS
    qkv = torch.randn(tokens, heads * HEAD_DIM, device=device).to(BF16)
    cos_sin = tables(device, 4096)
    positions = torch.randint(4096, (tokens,), device=device, dtype=torch.int32)
    slots = (PAGE + torch.randperm(tokens, device=device)).int()
    weights = rope_cache.NormWeights(torch.randn(HEAD_DIM, device=device).to(BF16), EPS)
    cases = ("rope", None, BF16), ("qk_norm", weights, BF16), ("float8", None, torch.float8_e4m3fn)
    for name, qk_norm, dtype in cases:
        # A rotation adds what the norm before has rounded twice, and may cancel it.
        roundings = 3 if qk_norm is None else 9
        keys, values = caches(device, tokens, dtype)
        scales = {n: torch.tensor([0.02], device=device) for n in ("k_scale", "v_scale") if name == "float8"}
        facts = {"heads": HEADS, "kv_heads": KV_HEADS, "cos_sin": cos_sin, "q_norm": qk_norm, "k_norm": qk_norm}
        arguments = qkv, positions, slots, keys, values
        q = rope_cache.rope_and_cache(*arguments, **facts, **scales, use_kernel=True, chip=chip)
        wide = qkv.view(tokens, heads, HEAD_DIM).double()
        turning = wide[:, : HEADS + KV_HEADS]
        if qk_norm is not None:
            turning = turning * torch.rsqrt(turning.square().mean(-1, keepdim=True) + EPS) * weights.weight.double()
        turned = heads64(turning, *cos_sin.double()[positions].unbind(1))
        at = slots.long()
        stored_keys, stored_values = (cache.float()[at // PAGE, :, at % PAGE] for cache in (keys, values))
        found[f"{name}_q"] = worst(q, turned[:, :HEADS], roundings)
        if name == "float8":
            for part, stored, want in (
                ("k", stored_keys, turned[:, HEADS:]),
                ("v", stored_values, wide[:, HEADS + KV_HEADS :]),
            ):
                found[f"float8_{part}"] = float8_error(stored, scales["k_scale"], want)
        else:
            found[f"{name}_k"] = worst(stored_keys, turned[:, HEADS:], roundings)
            found[f"{name}_v"] = worst(stored_values, wide[:, HEADS + KV_HEADS :])
    return found


def recorded(calls: list) -> torch.cuda.CUDAGraph:
    """The calls as one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def timed(make, moved: int, copy: float) -> dict[str, float]:
    """Microseconds and bytes per second of a kernel; `make()` gives a call over inputs of its own."""
    calls = [make() for _ in range(max(4, math.ceil(COLD_BYTES / moved)))]
    graph = recorded(calls)
    seconds = median_ms(lambda _: graph.replay()) / 1e3 / len(calls)
    return {"us": seconds * 1e6, "bytes_per_s": moved / seconds, "of_copy": moved / seconds / copy}


def speeds(device: torch.device, chip: Chip, copy: float, rows: int, width: int) -> dict[str, dict]:
    """Each kernel over so many tokens; `of_copy` of the copy itself says what such a size can reach."""
    size = rows * width * 2
    weight = torch.ones(width, device=device, dtype=BF16)
    cos_sin = tables(device, rows)
    positions = torch.arange(rows, device=device, dtype=torch.int32)

    def random(columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=BF16)

    def copied():
        source, target = random(width), random(width)
        return lambda: target.copy_(source)

    def normed():
        x, rest = random(width), random(width)
        return lambda: norm.norm(x, weight, eps=EPS, kind="rms", residual=rest, use_kernel=True)

    def normed_float8():
        x, rest = random(width), random(width)
        return lambda: norm.norm_quantised(x, weight, eps=EPS, kind="rms", residual=rest, use_kernel=True, chip=chip)

    def gated():
        both = random(2 * width)
        return lambda: activation.gated(both, "silu", use_kernel=True)

    def gated_float8():
        both = random(2 * width)
        return lambda: activation.gated_quantised(both, "silu", use_kernel=True, chip=chip)

    def roped(dtype: torch.dtype = BF16):
        arguments = random((HEADS + 2 * KV_HEADS) * HEAD_DIM), positions, positions + PAGE, *caches(device, rows, dtype)
        facts = {"heads": HEADS, "kv_heads": KV_HEADS, "cos_sin": cos_sin, "q_norm": None, "k_norm": None}
        return lambda: rope_cache.rope_and_cache(*arguments, **facts, use_kernel=True, chip=chip)

    q, kv = rows * HEADS * HEAD_DIM * 2, rows * 2 * KV_HEADS * HEAD_DIM * 2
    kernels = {
        "copy": (copied, 2 * size),
        "rms_residual": (normed, 4 * size),
        "rms_residual_float8": (normed_float8, 7 * size // 2),
        "silu": (gated, 3 * size),
        "silu_float8": (gated_float8, 5 * size // 2),
        "rope_cache": (roped, 2 * (q + kv)),
        "rope_cache_float8": (lambda: roped(torch.float8_e4m3fn), 2 * q + 3 * kv // 2),
    }
    return {f"{name}_{rows}x{width}": timed(make, moved, copy) for name, (make, moved) in kernels.items()}


def measure(device: torch.device) -> dict:
    """Errors (each at most 1 is right; `right` says whether all are) and speeds against a large copy."""
    capability = torch.cuda.get_device_capability(device)
    chip = chip_of(capability, torch.cuda.get_device_properties(device).multi_processor_count)
    errors = correctness(device, chip)
    copy = copy_bandwidth(device)
    return {
        "errors": errors,
        "right": all(error <= 1 for error in errors.values()),
        "copy_bytes_per_s": copy,
        "speeds": {name: figures for shape in SHAPES for name, figures in speeds(device, chip, copy, *shape).items()},
    }
