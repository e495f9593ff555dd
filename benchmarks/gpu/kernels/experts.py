"""Mixtures of quantised experts on a GPU: correctness, speed, settings to try.

`checks`: errors against the plain torch definition in float32, which rounds activations as the kernels do. `speeds`:
times, bfloat16 first, and relative to reading the used experts at the speed of a large copy. `trials`: settings for
the tuning.json of `moe_w8a8`; `gemm` tries those of widened numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from math import gcd
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.experts.moe import moe
from pagoda.backends.torch_cuda.kernels.experts.moe_w8a8 import kernel
from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix, pack
from pagoda.benchmarks.gpu.kernels.gemm import COLD_BYTES, MIXTURES, candidates, eager, microseconds, random
from pagoda.benchmarks.gpu.measure import BF16, Bench, Number, figures, settings_trials, verdict, worst
from pagoda.common.models.spec import Mlp, Router
from pagoda.common.weights.quantization.schemes import Activations

SCHEMES = ("fp8", "fp8-blocks", "int8", "int8-weights", "int4", "mxfp4", "nvfp4")
ROUNDED: Final = {"fp8": "float8", "fp8-blocks": "float8", "int8": "int8"}
"""Schemes with activations of 8 bits, and their numbers."""

LARGE = {**MIXTURES, "latent": (256, 8, 7168, 2048 // 8)}
"""Experts, experts per token, D, F; the last as a rank of eight has it."""

Size = tuple[int, int, int, int]


def stack(bench: Bench, scheme: str, *shape: int) -> Tensor | PackedMatrix:
    """Return random experts [E, O, I]; scheme "": bfloat16."""
    weight = random(*shape, device=bench.device)
    match scheme:
        case "":
            return weight
        case "fp8" | "int8":
            return replace(pack(weight, scheme), activations=Activations(ROUNDED[scheme], "row"))
        case "int8-weights":
            return pack(weight, "int8")
        case "int4":
            return pack(weight, scheme)
        case "fp8-blocks":
            return blocks(weight, bench.choose(128, 32))
    group = gcd(32, shape[-1]) if scheme == "mxfp4" else 16
    data = torch.randint(256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=bench.device)
    low, high = (118, 122) if scheme == "mxfp4" else (48, 64)  # e8m0 near 2**-7, e4m3 from 0.5 to 2
    scale = torch.randint(low, high, (*shape[:-1], shape[-1] // group), dtype=torch.uint8, device=bench.device)
    packed = PackedMatrix(scheme, data, scale, shape[-1], group)
    if scheme == "mxfp4":
        return packed
    return replace(packed, row_scale=torch.full(shape[:-1], 0.3 * shape[-1] ** -0.5, device=bench.device))


def blocks(weight: Tensor, size: int) -> PackedMatrix:
    """Return experts [E, O, I] in float8 with a scale per block of `size` by `size`."""
    outputs, inputs = weight.shape[1:]
    padded = torch.nn.functional.pad(weight.float(), (0, -inputs % size, 0, -outputs % size))
    tiles = padded.unflatten(2, (-1, size)).unflatten(1, (-1, size))
    scale = tiles.abs().amax((2, 4)) / 448
    numbers = (tiles / scale[:, :, None, :, None]).flatten(3).flatten(1, 2)[:, :outputs, :inputs]
    data = numbers.contiguous().to(torch.float8_e4m3fn)
    rounding = Activations("float8", size)
    return PackedMatrix("fp8", data, scale.mT.contiguous(), inputs, size, size, activations=rounding)


def arguments(bench: Bench, scheme: str, size: Size, tokens: int) -> dict:
    """Return those of `moe` but for use_kernel."""
    torch.manual_seed(0)
    experts, top, width, ffn = size
    return {
        "x": torch.randn(tokens, width, device=bench.device).to(BF16),
        "router_logits": torch.randn(tokens, experts, device=bench.device),
        "inner": stack(bench, scheme, experts, 2 * ffn, width),
        "down": stack(bench, scheme, experts, width, ffn),
        "router": Router(top, True),
        "expert": Mlp(ffn, "silu", True),
        "chip": bench.chip,
    }


def checks(bench: Bench) -> Iterator[Number]:
    """Yield every scheme with few and with many rows per expert."""
    size = bench.choose((16, 4, 512, 768), (4, 2, 64, 48))
    for scheme, tokens in itertools.product(SCHEMES, bench.choose((1, 40, 300, 3000), (1, 40))):
        yield Number(f"{scheme}_experts_{tokens}", partial(error, bench, scheme, size, tokens))


def error(bench: Bench, scheme: str, size: Size, tokens: int) -> dict:
    """Return the worst error in roundings of bfloat16; at most 1 is right.

    Hidden values in bfloat16 may round to another 8-bit number than those in float32, by up to 6 %.
    """
    given = arguments(bench, scheme, size, tokens)
    got = moe(**given, use_kernel=bench.use_kernel)
    want = moe(**given | {"x": given["x"].float()}, use_kernel=False)
    rounds = scheme in ROUNDED and tokens * size[1] > kernel.FEW * size[0]
    return verdict(worst(bench.spoiled(got), want.double(), 36 if rounds else 16))


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield the schemes of each mixture, bfloat16 first."""
    sizes = bench.choose(LARGE, {"tiny": (4, 2, 64, 48)})
    for (name, size), tokens in itertools.product(sizes.items(), bench.choose((1, 64, 4096), (1,))):
        for scheme in ("", *SCHEMES):
            yield Number(f"{name}_{scheme or 'bf16'}_{tokens}", partial(speed, bench, scheme, size, tokens))


def speed(bench: Bench, scheme: str, size: Size, tokens: int) -> dict[str, float]:
    """Return the time of a call, routing included. `of_copy`: of reading once the experts that are used on average."""
    given = arguments(bench, scheme, size, tokens)
    used = 1 - (1 - size[1] / size[0]) ** tokens
    moved = int(used * sum(nbytes(given[name]) for name in ("inner", "down")))
    call = partial(moe, **given, use_kernel=bench.use_kernel)
    us = eager(bench, call) if tokens > 1024 else microseconds(bench, lambda: call, max(moved, COLD_BYTES // 4))
    return figures(bench, us / 1e6, moved, 6 * tokens * size[1] * size[2] * size[3])


def nbytes(matrices: Tensor | PackedMatrix) -> int:
    return matrices.nbytes if isinstance(matrices, Tensor) else matrices.num_bytes


def trials(bench: Bench) -> Iterator[Number]:
    """Yield trials for both products of a mixture of many small experts."""
    kinds = [each for each in ROUNDED if bench.chip.float8 or each == "int8"]
    for scheme, tile in itertools.product(kinds, kernel.TILES[: bench.choose(None, 1)]):
        key = f"{scheme if '-' in scheme else f'{scheme}-rows'}-{tile}"
        calls = cache(partial(timed, bench, scheme, tile))
        usual = kernel.settings(kernel.TUNING, bench.chip, key)
        yield from settings_trials(bench, kernel, key, candidates(usual), calls)
        calls.cache_clear()


def timed(bench: Bench, scheme: str, tile: int) -> list[Callable[[], object]]:
    """Return calls with `tile` rows per expert."""
    size = bench.choose(MIXTURES["qwen3"], (4, 2, 64, 48))
    call = partial(moe, **arguments(bench, scheme, size, tile * size[0] // size[1]), use_kernel=bench.use_kernel)
    return [call, call]
