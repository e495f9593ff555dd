"""Experts with 8-bit matrices and activations: the kernel against float64 with the rounding of activations modelled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.suite.slow_matrix import thinned

from pagoda.backends.torch_cuda.kernels.experts.moe import moe
from pagoda.backends.torch_cuda.kernels.experts.moe_w8a8 import kernel
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix, unpack
from pagoda.common.models.spec import ClampedGlu, Mlp, Router
from pagoda.common.weights.quantization.schemes import Activations

CHIP = CHIPS["sm_90"]
NUMBERS = {"fp8": "float8", "int8": "int8"}
LARGEST = {"fp8": 448.0, "int8": 127.0}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def to_numbers(scaled: torch.Tensor, scheme: str) -> torch.Tensor:
    largest = LARGEST[scheme]
    scaled = scaled.clamp(-largest, largest)
    return scaled.round().to(torch.int8) if scheme == "int8" else scaled.float().to(torch.float8_e4m3fn)


def stack(scheme: str, shape: tuple[int, int, int], group: int, rows: int, static: float | None) -> PackedMatrix:
    """Random matrices [E, O, I], scales per channel or per block of rows by group; of each expert another size."""
    experts, outputs, inputs = shape
    data = to_numbers(normal(*shape) * LARGEST[scheme] / 4, scheme)
    kind, size = NUMBERS[scheme], group or "row"
    sizes = (4, experts, -(-inputs // group), -(-outputs // rows)) if group else (4, experts, outputs)
    scale = (
        4 / LARGEST[scheme] * inputs**-0.5 * (0.5 + torch.rand(sizes[1:], generator=torch.Generator().manual_seed(3)))
    )
    packed = PackedMatrix(scheme, data, scale, inputs, group, rows, activations=Activations(kind, size))
    if static is None:
        return packed
    scales = static / LARGEST[scheme] * torch.linspace(0.5, 1, experts)
    return replace(packed, activations=Activations(kind, "tensor", True), input_scale=scales)


def rounded(x: torch.Tensor, packed: PackedMatrix) -> torch.Tensor:
    """Float64 x [R, I] as numbers times scales."""
    largest = LARGEST[packed.scheme]
    if packed.input_scale is not None:
        scale = packed.input_scale.max().double()
        return to_numbers(x / scale, packed.scheme).double() * scale
    parts = []
    for part in x.split(packed.group or x.shape[1], 1):
        scale = part.abs().amax(1, keepdim=True) / largest
        parts.append(to_numbers(part / scale, packed.scheme).double() * scale)
    return torch.cat(parts, 1)


def mixture(arguments: dict, rounds: bool) -> torch.Tensor:
    """The mixture in float64, expert by expert."""
    x, expert, inner, down = (arguments[name] for name in ("x", "expert", "inner", "down"))
    weights, chosen = arguments["router_logits"].double().softmax(-1).topk(arguments["router"].top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64)
    cut = rounded if rounds else lambda rows, packed: rows
    for number in range(inner.data.shape[0]):
        rows, ranks = (chosen == number).nonzero(as_tuple=True)
        if not len(rows):
            continue
        both = cut(x[rows].double(), inner) @ unpack(inner)[number].double().T
        both = both + arguments["inner_bias"][number].double() if "inner_bias" in arguments else both
        hidden = both.relu()
        if expert.gated:
            gate, up = both.chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * up
            if (clamp := expert.clamped) is not None:
                gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
                hidden = gate * (gate * clamp.alpha).sigmoid() * (up + 1)
        part = cut(hidden, down) @ unpack(down)[number].double().T
        part = part + arguments["down_bias"][number].double() if "down_bias" in arguments else part
        out.index_add_(0, rows, part * weights[rows, ranks, None])
    return out


def case(
    scheme: str, group: int = 0, rows: int = 1, *, tokens: int = 40, top: int = 2, experts: int = 4,
    width: int = 160, expert: Mlp | None = None, static: float | None = None, dtype: torch.dtype = torch.float32,
) -> dict:  # fmt: skip
    """Arguments of `moe`; x lies in memory that is NaN elsewhere, rows of different sizes."""
    expert = expert or Mlp(96, "silu", True)
    padded = torch.full((tokens + 1, width + 16), float("nan"), dtype=dtype)
    padded[:tokens, :width] = normal(tokens, width) * torch.linspace(0.5, 2, tokens)[:, None]
    outputs = 2 * expert.width if expert.gated else expert.width
    arguments = {
        "x": padded[:tokens, :width],
        "router_logits": 2 * normal(tokens, experts),
        "inner": stack(scheme, (experts, outputs, width), group, rows, static),
        "down": stack(scheme, (experts, width, expert.width), group, rows, static),
        "router": Router(top, True),
        "expert": expert,
    }
    if expert.bias:
        arguments |= {"inner_bias": normal(experts, outputs).to(dtype), "down_bias": normal(experts, width).to(dtype)}
    return arguments


def check(arguments: dict, near: float = 0.02) -> None:
    """Rounding explains the difference to the unrounded mixture; a number in a thousand may round the other way."""
    want, unrounded = mixture(arguments, True), mixture(arguments, False)
    apart = (want - unrounded).abs().mean()
    assert apart > 1e-3 * want.abs().mean()
    for use_kernel in (True, False):
        actual = moe(**arguments, use_kernel=use_kernel, chip=CHIP).double()
        assert (actual - want).abs().mean() < near * apart


@thinned(
    lambda scheme, scaled: scheme == ("int8" if scaled[1] == 1 else "fp8"),
    scheme=["int8", "fp8"],
    scaled=[(0, 1), (128, 128), (64, 32), (32, 1)],
)
def test_numbers_and_scales(scheme: str, scaled: tuple[int, int]) -> None:
    """Inputs fill no whole number of groups; gate and up start within blocks of 128 rows."""
    check(case(scheme, *scaled))


EXPERTS = {
    "bias": Mlp(96, "silu", True, bias=True),
    "plain": Mlp(80, "relu", False, bias=True),
    "clamped": Mlp(96, "silu", True, bias=True, clamped=ClampedGlu(0.9, 1.702)),
}


@thinned(
    lambda scheme, kind: (scheme == "fp8") == (kind == "clamped"),
    scheme=["int8", "fp8"],
    kind=list(EXPERTS),
)
def test_blocks(scheme: str, kind: str) -> None:
    check(case(scheme, 32 if scheme == "fp8" else 0, expert=EXPERTS[kind]))


@thinned(
    lambda scheme, tokens: (scheme == "fp8") == (tokens == 70),
    scheme=["int8", "fp8"],
    tokens=[70, 150],
)
def test_many_rows(scheme: str, tokens: int) -> None:
    check(case(scheme, tokens=tokens, experts=2, top=1 if tokens == 70 else 2))


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_static_scales(scheme: str) -> None:
    """The largest of all experts counts; what exceeds it saturates."""
    check(case(scheme, static=3.0))


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_16_bits(scheme: str) -> None:
    check(case(scheme, dtype=torch.float16), near=0.1)


def test_a_token_does_not_depend_on_the_others() -> None:
    arguments = case("fp8", 32)
    together = moe(**arguments, use_kernel=True, chip=CHIP)
    some = arguments | {"x": arguments["x"][5:], "router_logits": arguments["router_logits"][5:]}
    assert torch.equal(moe(**some, use_kernel=True, chip=CHIP), together[5:])


@pytest.mark.parametrize(("scheme", "group"), [("int8", 0), ("fp8", 64)])
def test_few_rows_stay_exact(scheme: str, group: int) -> None:
    """Up to 16 per expert on average."""
    arguments = case(scheme, group, group or 1, tokens=32)
    want = mixture(arguments, False).float()
    for use_kernel in (True, False):
        actual = moe(**arguments, use_kernel=use_kernel, chip=CHIP)
        torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
    assert kernel.rounds(arguments["inner"], 65, CHIP)
    assert not kernel.rounds(arguments["inner"], 64, CHIP)


def test_where_rows_are_rounded() -> None:
    """Only as the matrices say, by numbers that the chip multiplies, with groups that fit both."""
    fp8, blocks = stack("fp8", (2, 64, 128), 0, 1, None), stack("fp8", (2, 64, 128), 64, 64, None)
    int8 = stack("int8", (2, 64, 128), 0, 1, None)
    old = CHIPS["sm_80"]
    assert [kernel.supports(each, CHIP) for each in (fp8, blocks, int8)] == [True] * 3
    assert [kernel.supports(each, old) for each in (fp8, blocks, int8)] == [False, False, True]
    assert kernel.supports(replace(blocks, activations=Activations("float8", 128)), CHIP)
    for wrong in (
        replace(int8, activations=None),
        replace(int8, activations=Activations("float8", "row")),
        replace(int8, offset=torch.zeros(2, 1, 64)),
        replace(fp8, activations=Activations("float8", 128)),
        replace(blocks, activations=Activations("float8", "row")),
        replace(blocks, activations=Activations("float8", 32)),
        replace(blocks, group=16, activations=Activations("float8", 16)),
    ):
        assert not kernel.supports(wrong, CHIP)
