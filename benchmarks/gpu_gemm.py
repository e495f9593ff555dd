"""Products with packed matrices and mixtures of experts on a GPU: right in bfloat16, and how fast.

`measure(device)`: errors against float64 in units of the output's rounding; times against torch and against the time
that reading the numbers takes at the speed of a large copy. Small batches are timed in CUDA graphs over more matrices
than the L2 cache holds. `python gpu_gemm.py --tune` prints lines for the tuning.json of both kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton
from gpu_elementwise import recorded, worst
from gpu_measure import copy_bandwidth, median_ms
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.chips import Chip, chip_of
from pagoda.backends.torch_cuda.kernels.moe import kernel as moe_kernel
from pagoda.backends.torch_cuda.kernels.moe import moe
from pagoda.backends.torch_cuda.kernels.weight_only import kernel, pack, unpack, weight_only_linear
from pagoda.common.models.spec import Mlp, Router

BF16 = torch.bfloat16
COLD_BYTES = 256 << 20
"""Matrices are rotated over so many bytes, more than an L2 cache holds."""

SCHEMES = ("int8", "fp8", "int4")
MATRICES = ((28672, 4096), (4096, 14336), (6144, 4096))
"""[O, I]: gate with up, down, and qkv of an 8B model."""
ROWS = (1, 8, 16, 64)
MIXTURES = {"mixtral": (8, 2, 4096, 14336), "qwen3": (128, 8, 2048, 768)}
"""Experts, experts of a token, D, F."""
FEW, MANY = (1, 32, 256), 4096


def find_chip(device: torch.device) -> Chip:
    """What the kernels are tuned for here."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return chip_of(torch.cuda.get_device_capability(device), sms)


def random(*shape: int, device: torch.device) -> Tensor:
    """Numbers of a matrix, so large that a product has about the size of its input."""
    return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(BF16)


def linear_errors(
    device: torch.device, chip: Chip, matrix: tuple[int, int] = (1040, 4096), most: int = 300
) -> dict[str, float]:
    """Worst error of each scheme and number of rows, in bfloat16 roundings of a result; at most 1 is right."""
    found = {}
    outputs, inputs = matrix
    weight, bias = random(outputs, inputs, device=device), torch.randn(outputs, device=device).to(BF16)
    for scheme in SCHEMES:
        packed = pack(weight, scheme)
        exact = unpack(packed).double()
        for rows in (1, 7, 16, 33, 64, most):
            x = torch.randn(rows, inputs, device=device).to(BF16)
            got = weight_only_linear(x, packed, bias, use_kernel=True, chip=chip)
            want = x.double() @ exact.T + bias.double()
            # Many rows round the matrix too, by 0.1 %, or x to float8, by 3 %; the worst of many errs 5 times as much.
            roundings = 1 if rows <= kernel.FEW else 64 if scheme == "fp8" else 3
            found[f"{scheme}_{rows}"] = worst(got, want, roundings)
    return found


def moe_errors(
    device: torch.device,
    chip: Chip,
    sizes: tuple[tuple[int, int, int, int], ...] = ((8, 2, 512, 768), (64, 8, 512, 256)),
    rows: tuple[int, ...] = (1, 40, 300, 3000),
) -> dict[str, float]:
    """The same for mixtures of experts; what lies between the products is rounded up to four times."""
    found = {}
    for experts, top, width, ffn in sizes:
        inner, down = random(experts, 2 * ffn, width, device=device), random(experts, width, ffn, device=device)
        for tokens in rows:
            x, logits = torch.randn(tokens, width, device=device).to(BF16), torch.randn(tokens, experts, device=device)
            want = mixture64(x, logits, inner, down, top)
            facts = {"router": Router(top, True), "expert": Mlp(ffn, "silu", True), "use_kernel": True, "chip": chip}
            found[f"{experts}_experts_{tokens}"] = worst(moe(x, logits, inner, down, **facts), want, 8)
            packed = [pack(part, "int8") for part in (inner, down)]
            exact = mixture64(x, logits, *(unpack(part) for part in packed), top)
            found[f"{experts}_experts_{tokens}_int8"] = worst(moe(x, logits, *packed, **facts), exact, 8)
    return found


def mixture64(x: Tensor, logits: Tensor, inner: Tensor, down: Tensor, top: int) -> Tensor:
    """The mixture in float64, expert by expert."""
    weights, chosen = logits.double().softmax(-1).topk(top)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(inner.shape[0]):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[rows].double() @ inner[expert].double().T).chunk(2, -1)
        out.index_add_(0, rows, (F.silu(gate) * up) @ down[expert].double().T * weights[rows, places, None])
    return out


def microseconds(make: Callable[[], Callable[[], object]], moved: int) -> float:
    """Of a call, in a graph of enough calls that `make` gives over matrices of their own, `moved` bytes each."""
    calls = [make() for _ in range(max(2, math.ceil(COLD_BYTES / moved)))]
    graph = recorded(calls)
    return median_ms(lambda _: graph.replay()) * 1e3 / len(calls)


def linear_speeds(device: torch.device, chip: Chip, copy: float) -> Iterator[tuple[str, dict]]:
    """`of_copy`: share of the copy's speed at which the numbers are read; `of_torch`: time against bfloat16 torch."""
    for outputs, inputs in MATRICES:
        weight = random(outputs, inputs, device=device)
        plain: dict[int, float] = {}
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=device).to(BF16)
            plain[rows] = microseconds(partial(_torch_linear, x, weight), weight.nbytes)
            yield f"torch_{outputs}x{inputs}_{rows}", _figures(plain[rows], weight.nbytes, copy)
        for scheme, rows in itertools.product(SCHEMES, ROWS):
            packed, x = pack(weight, scheme), torch.randn(rows, inputs, device=device).to(BF16)
            us = microseconds(partial(_packed_linear, x, weight, scheme, chip), packed.num_bytes)
            figures = _figures(us, packed.num_bytes, copy) | {"of_torch": us / plain[rows]}
            yield f"{scheme}_{outputs}x{inputs}_{rows}", figures


def _torch_linear(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """A call over a matrix of its own."""
    return partial(F.linear, x, weight.clone())


def _packed_linear(x: Tensor, weight: Tensor, scheme: str, chip: Chip) -> Callable[[], Tensor]:
    """A call over a matrix of its own."""
    return partial(weight_only_linear, x, pack(weight, scheme), None, use_kernel=True, chip=chip)


def _figures(us: float, moved: int, copy: float) -> dict[str, float]:
    """`copy` counts bytes read and written, so it is what a pure reader may reach."""
    speed = moved / us * 1e6
    return {"us": us, "bytes_per_s": speed, "of_copy": speed / copy}


def moe_speeds(device: torch.device, chip: Chip, copy: float) -> Iterator[tuple[str, dict]]:
    """Few tokens: against reading the experts in use once. Many: FLOP per second. Both against a loop over experts."""
    for name, (experts, top, width, ffn) in MIXTURES.items():
        inner, down = random(experts, 2 * ffn, width, device=device), random(experts, width, ffn, device=device)
        facts = {"router": Router(top, True), "expert": Mlp(ffn, "silu", True), "use_kernel": True, "chip": chip}
        for tokens in (*FEW, MANY):
            x, logits = torch.randn(tokens, width, device=device).to(BF16), torch.randn(tokens, experts, device=device)
            used = len(logits.topk(top).indices.unique())
            moved = used * (inner[0].nbytes + down[0].nbytes)
            call = partial(moe, x, logits, inner, down, **facts)
            us = eager(call) if tokens == MANY else microseconds(partial(_same, call), moved)
            loop = eager(partial(loop_over_experts, x, logits, inner, down, top))
            flops = 2 * tokens * top * 3 * ffn * width
            figures = _figures(us, moved, copy) | {"flop_per_s": flops / us * 1e6, "of_loop": us / loop}
            yield f"{name}_{tokens}", figures


def _same(call: Callable[[], object]) -> Callable[[], object]:
    return call


def eager(call: Callable[[], object]) -> float:
    """Microseconds of a call outside any graph."""
    return median_ms(lambda _: call(), 10) * 1e3


def loop_over_experts(x: Tensor, logits: Tensor, inner: Tensor, down: Tensor, top: int) -> Tensor:
    """The mixture as torch alone would have it: a dense product for each expert in use."""
    weights, chosen = logits.softmax(-1).topk(top)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[rows] @ inner[expert].T).chunk(2, -1)
        part = (F.silu(gate) * up) @ down[expert].T * weights[rows, places, None]
        out.index_add_(0, rows, part.to(x.dtype))
    return out


def measure(device: torch.device) -> dict:
    """Errors (`right`: each is at most 1) and speeds. Of mixtures with few tokens the L2 cache may hold experts."""
    chip = find_chip(device)
    torch.manual_seed(0)
    errors = linear_errors(device, chip) | moe_errors(device, chip)
    copy = copy_bandwidth(device)
    return {
        "errors": errors,
        "right": all(error <= 1 for error in errors.values()),
        "copy_bytes_per_s": copy,
        "linear": dict(linear_speeds(device, chip, copy)),
        "moe": dict(moe_speeds(device, chip, copy)),
    }


def best_settings(module, name: str, usual: dict, time: Callable[[], float]) -> str:
    """A line of tuning.json: the settings that make `time` least, of those that the chip can run."""
    depths = (64, 128, 256) if "DEPTH" in usual else (None,)
    found = []
    for channels, depth, warps, stages in itertools.product((32, 64, 128), depths, (2, 4, 8), (2, 3, 4, 5)):
        tried = {"CHANNELS": channels, "DEPTH": depth, "num_warps": warps, "num_stages": stages}
        tried = {key: value for key, value in tried.items() if value is not None}
        with patch.object(module.tuning, "settings", lambda *_, tried=tried: tried):
            try:
                found.append((time(), tried))
            except (triton.errors.TritonError, RuntimeError) as error:
                print(f"{name} {tried}: {str(error).splitlines()[0]}", file=sys.stderr)
    us, best = min(found, key=lambda each: each[0])
    print(f"{name}: {us:.1f} us", file=sys.stderr)
    return f'"{name}": {json.dumps(best)}'


def tune(device: torch.device) -> Iterator[str]:
    """Lines for weight_only/tuning.json, over the down projection of an 8B model, then for moe/tuning.json."""
    chip = find_chip(device)
    weight = random(*MATRICES[1], device=device)
    for scheme, tile in itertools.product(SCHEMES, kernel.TILES):
        usual = kernel.tuning.settings(kernel.TUNING, chip, f"{scheme}-{tile}")
        x = torch.randn(tile, MATRICES[1][1], device=device).to(BF16)
        calls = [_packed_linear(x, weight, scheme, chip) for _ in range(COLD_BYTES // (weight.nbytes // 4))]
        yield best_settings(kernel, f"{scheme}-{tile}", usual, _timer(calls))
    experts, top, width, ffn = MIXTURES["qwen3"]
    inner, down = random(experts, 2 * ffn, width, device=device), random(experts, width, ffn, device=device)
    for scheme, tile in itertools.product(("plain", *SCHEMES), moe_kernel.TILES):
        if scheme != "plain" and tile == moe_kernel.TILES[-1]:
            continue
        stacks = (inner, down) if scheme == "plain" else (pack(inner, scheme), pack(down, scheme))
        tokens = tile * experts // top
        x = torch.randn(tokens, width, device=device).to(BF16)
        chosen = torch.rand(tokens, experts, device=device).argsort(-1)[:, :top].int().contiguous()
        expert = Mlp(ffn, "silu", True)
        usual = moe_kernel.tuning.settings(moe_kernel.TUNING, chip, f"{scheme}-{tile}")
        call = partial(moe_kernel.experts, x, chosen, *stacks, None, None, expert, chip)
        yield best_settings(moe_kernel, f"{scheme}-{tile}", usual, _timer([call, call]))


def _timer(calls: list) -> Callable[[], float]:
    return lambda: _replayed(recorded(calls)) / len(calls)


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    return median_ms(lambda _: graph.replay(), repeats=10, warmup=2) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="print lines for tuning.json instead")
    device = torch.device("cuda")
    if parser.parse_args().tune:
        for line in tune(device):
            print(line, flush=True)
    else:
        print(json.dumps(measure(device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
