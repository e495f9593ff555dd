"""Products with matrices as checkpoints hold them, on a GPU: correctness in bfloat16, and speed.

`checks`: errors against float64 of the dequantised matrix and of x rounded as the matrix says, in units of the output's
rounding. `speeds`: few rows relative to reading the numbers at the speed of a large copy, many rows relative to a large
bfloat16 product. `trials`: settings to try for the tuning.json of `scaled_linear`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame import launch
from pagoda.backends.torch_cuda.kernels.linear.packed_linear import packed_linear
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import quantize_rows_reference
from pagoda.backends.torch_cuda.kernels.linear.scaled_linear import multiplies
from pagoda.backends.torch_cuda.kernels.linear.weight_only import FEW, PackedMatrix, unpack
from pagoda.backends.torch_cuda.schemes import packed_scheme
from pagoda.backends.torch_cuda.weights.quantized_layout import as_scheme, form_of, write
from pagoda.benchmarks.gpu.kernels.gemm import COLD_BYTES, MATRICES, eager, microseconds
from pagoda.benchmarks.gpu.measure import BF16, Bench, Number, figures, settings_trials, verdict, worst
from pagoda.common.weights.quantization.schemes import Activations, Codes4, Float8, Int4, Int8, Mxfp4, Nvfp4, Scheme
from pagoda.common.weights.quantization.tensors import random_quantized

SCHEMES: dict[str, Scheme] = {
    "fp8_channel": Float8("channel", Activations("float8", "row")),
    "fp8_static": Float8("tensor", Activations("float8", "tensor", static=True)),
    "fp8_blocks": Float8((128, 128), Activations("float8", 128)),
    "mxfp8": Float8((1, 32), Activations("float8", 32)),
    "int8_channel": Int8("channel", Activations("int8", "row")),
    "int8_groups": Int8((1, 32)),
    "int4": Int4((1, 128)),
    "int4_small": Int4((1, 32)),
    "int4_ordered": Int4((1, 128), ordered=True),
    "mxfp4": Mxfp4(),
    "nvfp4": Nvfp4(),
    "nf4": Codes4("nf4", (1, 64)),
}
ROUNDINGS = {"nf4": 3}
"""Allowed roundings of few rows, if not 1: NF4's values are rounded to x's type, 0.2 % each."""


def matrix(scheme: Scheme, outputs: int, inputs: int, device: torch.device, seed: int = 0) -> PackedMatrix:
    """Return a random matrix on a device, scaled so that a product has about the size of its input."""
    name = packed_scheme(scheme, experts=False)
    assert name is not None
    part = as_scheme(random_quantized(scheme, (outputs, inputs), seed, inputs**-0.5), name)
    packed = form_of(name, [(0, part)]).allocate((outputs, inputs), partial(_empty, device))
    if device.type != "meta":
        write(packed, 0, part)
    return packed


def _empty(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def checks(bench: Bench) -> Iterator[Number]:
    """Yield every scheme and number of rows."""
    for name, rows in itertools.product(SCHEMES, bench.choose((1, 7, 33, 64, 90, 300), (1, 33, 70))):
        yield Number(f"{name}_{rows}", partial(error, bench, name, rows))


def error(bench: Bench, name: str, rows: int) -> dict:
    """Return the worst error in roundings of bfloat16; at most 1 is right."""
    torch.manual_seed(0)
    outputs, inputs = bench.choose((1040, 4096), (48, 256))
    packed = matrix(SCHEMES[name], outputs, inputs, bench.device)
    bias = torch.randn(outputs, device=bench.device).to(BF16)
    x = torch.randn(rows, inputs, device=bench.device).to(BF16)
    got = packed_linear(x, packed, bias, use_kernel=bench.use_kernel, chip=bench.chip)
    want = rounded(bench, x, packed) @ unpack(packed).double().T + bias.double()
    roundings = ROUNDINGS.get(name, 1) if rows <= FEW else 2 if multiplies(packed, bench.chip) else 3
    return verdict(worst(bench.spoiled(got), want, roundings))


def rounded(bench: Bench, x: Tensor, packed: PackedMatrix) -> Tensor:
    """Return x in float64 in the matrix's order, rounded as the product does."""
    x = x if packed.order is None else x[:, packed.order.long()]
    if len(x) <= FEW or not multiplies(packed, bench.chip):
        return x.double()
    activations = packed.activations
    assert activations is not None
    assert activations.numbers != "fp4"
    group = packed.group if packed.group and isinstance(activations.group, int) else None
    return quantize_rows_reference(x, activations.numbers, group=group, scale=packed.input_scale).values(group).double()


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield few rows of the down projection of an 8B model, then many."""
    shape = bench.choose(MATRICES[1], (64, 128))
    for name, rows in itertools.product(SCHEMES, bench.choose((1, 16, 64), (1,))):
        yield Number(f"{name}_{rows}", partial(few_speed, bench, name, shape, rows))
    for name, rows in itertools.product(SCHEMES, bench.choose((512, 4096), (70,))):
        yield Number(f"{name}_{rows}", partial(many_speed, bench, name, shape, rows))


def few_speed(bench: Bench, name: str, shape: tuple[int, int], rows: int) -> dict[str, float]:
    """Return the time of a call in a CUDA graph over more matrices than the L2 cache holds."""
    packed = matrix(SCHEMES[name], *shape, bench.device)
    x = torch.randn(rows, shape[1], device=bench.device).to(BF16)
    us = microseconds(bench, partial(_call, bench, x, packed), packed.num_bytes)
    return figures(bench, us / 1e6, packed.num_bytes)


def _call(bench: Bench, x: Tensor, packed: PackedMatrix) -> Callable[[], Tensor]:
    """Return a call over its own matrix."""
    return partial(packed_linear, x, packed.mapped(Tensor.clone), None, use_kernel=bench.use_kernel, chip=bench.chip)


def many_speed(bench: Bench, name: str, shape: tuple[int, int], rows: int) -> dict[str, float]:
    packed = matrix(SCHEMES[name], *shape, bench.device)
    x = torch.randn(rows, shape[1], device=bench.device).to(BF16)
    us = eager(bench, partial(packed_linear, x, packed, None, use_kernel=bench.use_kernel, chip=bench.chip))
    return figures(bench, us / 1e6, packed.num_bytes, 2 * rows * shape[0] * shape[1])


TRIED = {"int8": "int8_channel", "fp8-groups": "fp8_blocks"}
"""Key of the table without its tile -> scheme. torch multiplies float8 with scales per channel."""


def candidates(groups: bool) -> Iterator[launch.Settings]:
    """Yield settings to try; `groups`: sums are scaled in the loop, which takes registers."""
    sizes = (64, 128) if groups else (64, 128, 256)
    for channels, depth, warps, stages in itertools.product(sizes, (64, 128), (4, 8), (3, 4)):
        yield {"CHANNELS": channels, "DEPTH": depth, "num_warps": warps, "num_stages": stages}


def trials(bench: Bench) -> Iterator[Number]:
    """Yield trials of the products of rounded rows."""
    from pagoda.backends.torch_cuda.kernels.linear.scaled_linear import kernel

    for (key, name), tile in itertools.product(TRIED.items(), kernel.TILES[: bench.choose(None, 1)]):
        calls = cache(partial(_trial_calls, bench, name, tile))
        yield from settings_trials(bench, kernel, f"{key}-{tile}", candidates("groups" in key), calls, launch)
        calls.cache_clear()


def _trial_calls(bench: Bench, name: str, tile: int) -> list[Callable[[], object]]:
    packed = matrix(SCHEMES[name], *bench.choose(MATRICES[1], (64, 128)), bench.device)
    rows = bench.choose({64: 128, 128: 2048}[tile], 70)
    x = torch.randn(rows, packed.inputs, device=bench.device).to(BF16)
    return [_call(bench, x, packed) for _ in range(bench.copies(packed.num_bytes, COLD_BYTES))]
