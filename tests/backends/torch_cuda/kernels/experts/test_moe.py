"""Routed experts: routing, sorting, products and sums against the reference backend's definitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.checkpoints.random_stored import STORED

from pagoda.backends.reference.model.ops import route as route_reference
from pagoda.backends.torch_cuda.kernels.experts.moe import choose_experts, grouped_experts, kernel, moe, use_grouped_mm
from pagoda.backends.torch_cuda.kernels.experts.moe.kernel import align, most_tiles, route
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix, pack, unpack
from pagoda.backends.torch_cuda.schemes import packed_scheme
from pagoda.backends.torch_cuda.weights.quantized_layout import form_of, write
from pagoda.common.models.spec import ClampedGlu, ExpertGroups, Mlp, Router, SparseMixer
from pagoda.common.weights.quantization.tensors import stack

CHIP = CHIPS["sm_90"]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


@pytest.mark.parametrize(("experts", "top"), [(8, 2), (128, 8), (60, 4), (4, 4), (256, 1)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_route(experts: int, top: int, renormalise: bool) -> None:
    padded = torch.full((7, experts + 8), float("nan"))
    padded[:, :experts] = 3 * normal(7, experts)
    logits, router = padded[:, :experts], Router(top, renormalise)
    weights, chosen = route(logits, router)
    wanted, best = route_reference(logits, router)
    assert torch.equal(chosen.long(), best)
    torch.testing.assert_close(weights, wanted, rtol=2e-6, atol=1e-7)


def test_equal_experts_are_taken_in_their_order() -> None:
    logits = torch.zeros(1, 12)
    logits[0, 7] = 1
    assert route(logits, Router(4, True))[1].tolist() == [[7, 0, 1, 2]]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rows_of_nan_stay_inside() -> None:
    """Padding may hold anything; what it picks must not lead a program elsewhere."""
    _, chosen = route(torch.full((2, 6), float("nan")), Router(2, True))
    order, _, ends = align(chosen, 6, 16)
    assert chosen.tolist() == [[5, 5], [5, 5]]
    assert order.tolist()[:16] == [0, 1, 2, 3] + [4] * 12
    assert ends.tolist() == [0] * 5 + [1]


SPREADS = [(1, 2, 8, 16), (300, 4, 16, 16), (40, 8, 9, 1), (5, 1, 70, 64)]


@pytest.mark.parametrize(("tokens", "top", "experts", "tile"), SPREADS)
def test_align(tokens: int, top: int, experts: int, tile: int) -> None:
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)]).int()
    chosen[chosen == 3] = 4 % experts  # an expert without tokens
    order, tile_experts, ends = align(chosen, experts, tile)
    pairs, flat = tokens * top, chosen.flatten()
    expected_order, at = [], 0
    for expert in range(experts):
        mine = (flat == expert).nonzero().flatten().tolist()
        tiles = -(-len(mine) // tile)
        assert tile_experts[at : at + tiles].tolist() == [expert] * tiles
        expected_order += mine + [pairs] * (tiles * tile - len(mine))
        at += tiles
        assert ends[expert] == at
    assert order[: at * tile].tolist() == expected_order
    assert at <= most_tiles(pairs, experts, tile) == len(tile_experts) == len(order) // tile


@pytest.mark.parametrize("tile", [1, 16, 64])
def test_the_worst_distribution_fills_all_tiles(tile: int) -> None:
    """As many experts as can be have one row more than whole tiles."""
    for pairs, experts in ((1, 8), (8, 8), (9, 8), (100, 8), (257, 4)):
        busy = min(pairs, experts)
        worst = [1] * busy
        worst[0] += (pairs - busy) // tile * tile
        assert sum(-(-rows // tile) for rows in worst) == most_tiles(pairs, experts, tile)


def case(tokens: int, experts: int, top: int, width: int, ffn: int, expert: Mlp, dtype: torch.dtype) -> dict:
    """Arguments of `moe`; x lies in memory that is NaN elsewhere."""
    padded = torch.full((tokens + 1, width + 16), float("nan"), dtype=dtype)
    padded[:tokens, :width] = normal(tokens, width)
    rows = 2 * ffn if expert.gated else ffn
    arguments = {
        "x": padded[:tokens, :width],
        "router_logits": 2 * normal(tokens, experts),
        "inner": (normal(experts, rows, width) * width**-0.5).to(dtype),
        "down": (normal(experts, width, ffn) * ffn**-0.5).to(dtype),
        "router": Router(top, True),
        "expert": expert,
    }
    if expert.bias:
        arguments |= {
            "inner_bias": normal(experts, rows, dtype=dtype),
            "down_bias": normal(experts, width, dtype=dtype),
        }
    return arguments


ROUTERS = {
    "sigmoid": Router(2, True, "sigmoid", scale=1.5),
    "correction": Router(3, False, correction=True),
    "groups": Router(2, True, "sigmoid", correction=True, groups=ExpertGroups(4, 2, "best_two")),
    "best of groups": Router(2, False, groups=ExpertGroups(2, 1, "best")),
    "sparse mixer": SparseMixer(2, 0.2),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_other_routers(kind: str) -> None:
    """Weights and experts are the reference's, and the experts' kernels are fed with them."""
    arguments = case(19, 8, 2, 48, 24, EXPERTS["gated"], torch.float32) | {"router": ROUTERS[kind]}
    if ROUTERS[kind].correction:
        arguments["correction"] = normal(8)
    weights, chosen = choose_experts(arguments["router_logits"], ROUTERS[kind], arguments.get("correction"))
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int32)
    want = moe(**arguments, use_kernel=False, chip=CHIP)
    torch.testing.assert_close(moe(**arguments, use_kernel=True, chip=CHIP), want, rtol=0, atol=3e-6)
    plain = moe(
        **arguments | {"router": Router(ROUTERS[kind].top_k, False), "correction": None}, use_kernel=False, chip=CHIP
    )
    assert not torch.allclose(plain, want, atol=1e-2)


@pytest.mark.parametrize("use_kernel", [False, True])
def test_experts_with_scales_are_experts_with_scaled_matrices(use_kernel: bool) -> None:
    arguments, scale = case(19, 8, 2, 48, 24, EXPERTS["gated"], torch.float32), normal(8)
    want = moe(**arguments | {"down": arguments["down"] * scale[:, None, None]}, use_kernel=use_kernel, chip=CHIP)
    actual = moe(**arguments, expert_scale=scale, use_kernel=use_kernel, chip=CHIP)
    torch.testing.assert_close(actual, want, rtol=0, atol=3e-6)


@pytest.mark.parametrize("kind", ROUTERS)
def test_padding_picks_experts_that_exist(kind: str) -> None:
    correction = normal(8) if ROUTERS[kind].correction else None
    for rows in (torch.full((2, 8), float("nan")), torch.full((2, 8), float("inf"))):
        _, chosen = choose_experts(rows, ROUTERS[kind], correction)
        assert ((chosen >= 0) & (chosen < 8)).all()


def test_only_the_plain_softmax_runs_in_the_routing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "route", None)
    for router in ROUTERS.values():
        choose_experts(normal(3, 8), router, normal(8) if router.correction else None)
    for renormalise in (True, False):
        with pytest.raises(TypeError):
            choose_experts(normal(3, 8), Router(2, renormalise), None)


EXPERTS = {
    "gated": Mlp(24, "silu", True),
    "gelu-bias": Mlp(24, "gelu_tanh", True, bias=True),
    "plain-bias": Mlp(24, "relu", False, bias=True),
    "clipped": Mlp(24, "silu", True, clip=0.1),
}


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "experts", "top"), [(1, 8, 2), (19, 4, 2), (70, 2, 1)])
def test_moe(kind: str, dtype: torch.dtype, tokens: int, experts: int, top: int) -> None:
    arguments = case(tokens, experts, top, 48, 24, EXPERTS[kind], dtype)
    want = moe(**arguments, use_kernel=False, chip=CHIP)
    actual = moe(**arguments, use_kernel=True, chip=CHIP)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, want, rtol=0, atol=3e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("use_kernel", [False, True])
def test_identity_experts_return_their_input(use_kernel: bool, adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rank that adds it; as experts would whose matrices make zeros, with x added by their weights."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, 7, **options))
    arguments = case(19, 5, 3, 48, 24, EXPERTS["gated"], torch.float32) | {"router": Router(3, False, correction=True)}
    arguments |= {"correction": normal(5), "use_kernel": use_kernel, "chip": CHIP}
    if adapted:
        arguments["adapters"] = lambda tokens, experts: ((lambda y, x: y), (lambda y, x: y))
    zeros = arguments | {"down": arguments["down"].clone()}
    zeros["down"][3:] = 0
    weights, chosen = route_reference(arguments["router_logits"], arguments["router"], arguments["correction"])
    returned = (weights * (chosen >= 3)).sum(1, keepdim=True) * arguments["x"]
    assert (chosen >= 3).any(1).sum() > 5
    few = arguments | {name: arguments[name][:3] for name in ("inner", "down")} | {"identity": 2}
    torch.testing.assert_close(moe(**few), moe(**zeros) + returned, rtol=0, atol=3e-6)
    torch.testing.assert_close(moe(**few, adds_identity=False), moe(**zeros), rtol=0, atol=3e-6)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4"])
def test_packed_experts(scheme: str) -> None:
    arguments = case(9, 3, 2, 300, 40, Mlp(40, "silu", True, bias=True), torch.float32)
    arguments |= {name: pack(arguments[name], scheme) for name in ("inner", "down")}
    want = moe(**arguments, use_kernel=False, chip=CHIP)
    torch.testing.assert_close(moe(**arguments, use_kernel=True, chip=CHIP), want, rtol=0, atol=2e-5)


def stored_stack(name: str, *shape: int) -> tuple[PackedMatrix, torch.Tensor]:
    """Random experts [E, O, I] as a checkpoint has them, packed, and their values in float64."""
    kind = STORED[name]
    value = stack([kind.tensor(*shape[1:], seed) for seed in range(shape[0])])
    scheme = packed_scheme(kind.scheme, experts=True)
    assert scheme is not None
    matrix = form_of(scheme, [(0, value)]).allocate(shape, lambda size, dtype: torch.empty(size, dtype=dtype))
    write(matrix, 0, value)
    values = unpack(matrix)
    torch.testing.assert_close(values, torch.from_numpy(value.dequantize()), rtol=0, atol=1e-3)  # offsets are float16
    return matrix, values.double()


@pytest.mark.parametrize("name", [name for name in STORED if name not in ("int4-ordered", "int4-channel")])
@pytest.mark.parametrize("tokens", [7, 24])
def test_experts_as_checkpoints_hold_them(name: str, tokens: int) -> None:
    """Offsets, row scales and tables are each expert's own; up to 24 rows per expert in tiles of 16 and 64."""
    arguments = case(tokens, 2, 2, 128, 128, Mlp(128, "silu", True, bias=True), torch.float32)
    (arguments["inner"], inner), (arguments["down"], down) = (
        stored_stack(name, *arguments[part].shape) for part in ("inner", "down")
    )
    for part in ("inner", "down"):
        arguments[part] = replace(arguments[part], activations=None)
    weights = arguments["router_logits"].double().softmax(-1)
    want = torch.zeros(tokens, 128, dtype=torch.float64)
    for expert in range(2):
        both = arguments["x"].double() @ inner[expert].T + arguments["inner_bias"][expert]
        gate, up = both.chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * up) @ down[expert].T + arguments["down_bias"][expert]
        want += weights[:, expert, None] * rows
    for use_kernel in (True, False):
        actual = moe(**arguments, use_kernel=use_kernel, chip=CHIP).double()
        torch.testing.assert_close(actual, want, rtol=0, atol=1e-5 * want.abs().max().item())


def test_experts_of_four_bits_with_a_clamped_gate() -> None:
    expert = Mlp(48, "silu", True, bias=True, clamped=ClampedGlu(0.9, 1.702))
    arguments = case(9, 3, 2, 96, 48, expert, torch.float32)
    wide = moe(**arguments, use_kernel=True, chip=CHIP)
    torch.testing.assert_close(wide, moe(**arguments, use_kernel=False, chip=CHIP), rtol=0, atol=3e-6)
    for name, group in (("inner", 32), ("down", 16)):
        experts, rows, inputs = arguments[name].shape
        numbers = torch.randint(256, (experts, rows, inputs // 2), dtype=torch.uint8)
        powers = torch.randint(120, 124, (experts, rows, inputs // group), dtype=torch.uint8)
        arguments[name] = PackedMatrix("mxfp4", numbers, powers, inputs, group)
    want = moe(**arguments, use_kernel=False, chip=CHIP)
    torch.testing.assert_close(moe(**arguments, use_kernel=True, chip=CHIP), want, rtol=0, atol=1e-5)


def test_a_token_does_not_depend_on_the_others() -> None:
    arguments = case(12, 4, 2, 48, 24, EXPERTS["gated"], torch.float32)
    together = moe(**arguments, use_kernel=True, chip=CHIP)
    one = arguments | {"x": arguments["x"][7:8], "router_logits": arguments["router_logits"][7:8]}
    assert torch.equal(moe(**one, use_kernel=True, chip=CHIP), together[7:8])


@pytest.mark.parametrize("bias", [True, False])
def test_many_rows_by_torch(bias: bool) -> None:
    arguments = case(140, 2, 1, 48, 24, Mlp(24, "silu", True, bias=bias), torch.bfloat16)
    arguments["x"] = arguments["x"].contiguous()
    weights, chosen = route(arguments["router_logits"], arguments["router"])
    given = [arguments.get(name) for name in ("inner", "down", "inner_bias", "down_bias")]
    assert use_grouped_mm(arguments["x"], chosen, *given[:2], CHIP)
    for other in ("sm_80", "sm_120"):  # there torch waits for the device
        assert not use_grouped_mm(arguments["x"], chosen, *given[:2], CHIPS[other])
    assert not use_grouped_mm(arguments["x"][:60], chosen[:60], *given[:2], CHIP)
    assert not use_grouped_mm(arguments["x"].half(), chosen, *given[:2], CHIP)
    parts = grouped_experts(arguments["x"], chosen, *given, arguments["expert"])
    wide = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    want = moe(**wide, use_kernel=False, chip=CHIP)
    torch.testing.assert_close((parts.float() * weights).float(), want, rtol=0.03, atol=0.08)


def test_tiles() -> None:
    actual = [kernel.choose_tile(pairs, 128, widened=False) for pairs in (8, 2048, 2056, 8192, 8200)]
    assert actual == [16, 16, 64, 64, 128]
    assert kernel.choose_tile(8200, 128, widened=True) == 64


def test_shapes_that_do_not_fit() -> None:
    arguments = case(3, 4, 2, 48, 24, EXPERTS["gated"], torch.float32)
    for name in ("inner", "down"):
        wrong = arguments | {name: arguments[name][:, :44]}
        with pytest.raises(ValueError, match="down is"):
            moe(**wrong, use_kernel=False, chip=CHIP)
    with pytest.raises(ValueError, match=r"router_logits is \(2, 4\), not \(3, 4\)"):
        moe(**arguments | {"router_logits": arguments["router_logits"][:2]}, use_kernel=False, chip=CHIP)
