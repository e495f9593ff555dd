"""Low-rank adapters: kernels against y + B A x, row by row, with NaN in all memory that is not to be read."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip
from pagoda.backends.torch_cuda.kernels.linear.lora import (
    AdapterStack,
    add_adapters,
    add_expanded,
    output_sections,
    padded_rank,
    sort_by_slot,
)
from pagoda.backends.torch_cuda.kernels.linear.lora.kernel import choose_splits, choose_tile, rank_block

CHIP = CHIPS["sm_90"]
NAN = float("nan")
USE = pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "definition"])


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def padded(x: Tensor) -> Tensor:
    """Return x as a part of wider rows, NaN around it."""
    around = torch.full((len(x) + 1, x.shape[1] + 16), NAN, dtype=x.dtype)
    around[: len(x), : x.shape[1]] = x
    return around[: len(x), : x.shape[1]]


def make_stack(
    ranks: tuple[int, ...], rank: int, inputs: int, outputs: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> AdapterStack:
    """Return random adapters; whole blocks of ranks that an adapter does not have, and empty slots, are NaN."""
    a = (normal(len(ranks), len(outputs), rank, inputs) * inputs**-0.5).to(dtype)
    b = normal(len(ranks), sum(outputs), rank).to(dtype)
    block = rank_block(rank)
    for slot, own in enumerate(ranks):
        a[slot, :, own:], b[slot, :, own:] = 0, 0
        a[slot, :, -(-own // block) * block :], b[slot, :, -(-own // block) * block :] = NAN, NAN
    ends = list(accumulate(outputs))
    sections = output_sections(zip([0, *ends], ends))
    factors = normal(len(ranks), sum(outputs)) + 1
    scaled = (torch.arange(len(ranks)) % 2).int()
    factors[scaled == 0] = NAN
    return AdapterStack(a.flatten(1, 2), b, torch.tensor(ranks, dtype=torch.int32), sections, factors, scaled)


def plain(
    y: Tensor, x: Tensor, stack: AdapterStack, slots: Tensor, outputs: tuple[int, ...], bias: Tensor | None = None
) -> Tensor:
    """Return y + B A x, of every other slot diag(f) (y - bias) + bias + B A x, in float64."""
    want, ranks = y.double(), stack.ranks.tolist()
    for row, slot in enumerate(slots.tolist()):
        if slot == stack.slots:
            continue
        first = 0
        if slot % 2 and ranks[slot]:
            assert stack.factors is not None
            constant = 0 if bias is None else bias.double()
            want[row] = (want[row] - constant) * stack.factors[slot].double() + constant
        for projection, count in enumerate(outputs):
            a = stack.a[slot].unflatten(0, (len(outputs), -1))[projection, : ranks[slot]].double()
            b = stack.b[slot, first : first + count, : ranks[slot]].double()
            want[row, first : first + count] += b @ (a @ x[row].double())
            first += count
    return want


@USE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("slots", "rank"),
    [
        ([0], 16),
        ([3, 2, 1, 0, 4, 4], 16),  # decode tokens of four adapters, two without
        ([1] * 40 + [4] * 3 + [2] * 17 + [1] * 2, 16),  # prompts of an adapter each
        ([4, 2, 0, 3], 64),
        ([4, 4, 4], 32),
    ],
)
def test_adapters_of_one_step(slots: list[int], rank: int, dtype: torch.dtype, use_kernel: bool) -> None:
    """Slot 1's adapter has half the rank, slot 3 has none, 4 is no slot."""
    outputs, inputs, rows = (160, 24, 24), 520, torch.tensor(slots, dtype=torch.int32)
    stack = make_stack((rank, rank // 2, 5, 0), rank, inputs, outputs, dtype)
    x, y = padded(normal(len(slots), inputs, dtype=dtype)), padded(normal(len(slots), sum(outputs), dtype=dtype))
    bias = normal(sum(outputs), dtype=dtype)
    want = plain(y, x, stack, rows, outputs, bias)
    before = y.clone()
    got = add_adapters(y, x, stack, sort_by_slot(rows, stack.slots, use_kernel=use_kernel), CHIP, bias=bias)
    assert got is y
    tolerance = {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 2e-2}
    torch.testing.assert_close(got.double(), want, **tolerance)
    without = (rows == 4) | (rows == 3)
    assert torch.equal(got[without], before[without]), "rows without an adapter are not written"


@USE
def test_outputs_of_another_type(use_kernel: bool) -> None:
    """Float32 logits of 16-bit adapters: nothing is rounded but A x and the factors."""
    stack, x, y = make_stack((16,), 16, 64, (200,), torch.float16), normal(3, 64, dtype=torch.float16), normal(3, 200)
    rows = torch.tensor([0, 1, 0], dtype=torch.int32)
    want = plain(y, x, stack, rows, (200,))
    got = add_adapters(y, x, stack, sort_by_slot(rows, 1, use_kernel=use_kernel), CHIP)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=2e-3)


@USE
def test_large_steps_have_large_tiles(use_kernel: bool) -> None:
    assert choose_tile(300) > choose_tile(256)
    stack, x, y = make_stack((16, 8), 16, 40, (72,)), normal(300, 40), normal(300, 72)
    slots = (torch.arange(300) % 3).int()
    want = plain(y, x, stack, slots, (72,))
    got = add_adapters(y, x, stack, sort_by_slot(slots, 2, use_kernel=use_kernel), CHIP)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)


def test_inputs_are_split_where_tiles_are_few() -> None:
    sizes = {"columns": 48, "rank": 16, "inputs": 4096, "dtype": torch.bfloat16, "tile": 16, "chip": CHIP}
    assert choose_splits(11, **sizes) == 8
    assert choose_splits(1, **sizes) == 8
    assert choose_splits(500, **sizes) == 1
    stack, x, y = make_stack((16,), 16, 1400, (40,)), normal(2, 1400), normal(2, 40)
    assert choose_splits(1, 16, 16, 1400, torch.float32, 16, CHIP) == 3
    want = plain(y, x, stack, torch.tensor([0, 0]), (40,))
    got = add_adapters(y, x, stack, sort_by_slot(torch.zeros(2, dtype=torch.int32), 1, use_kernel=True), CHIP)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)


@USE
def test_a_row_does_not_depend_on_the_others(use_kernel: bool) -> None:
    """With --batch-invariant: alone, among others, on a chip with fewer multiprocessors' worth of tiles."""
    stack, x, y = make_stack((16, 16), 16, 1400, (40,)), normal(300, 1400), normal(300, 40)
    slots = (torch.arange(300) % 2).int()

    def run(rows: slice, chip: Chip = CHIP) -> Tensor:
        mine = sort_by_slot(slots[rows], 2, batch_invariant=True, use_kernel=use_kernel)
        return add_adapters(y[rows].clone(), x[rows], stack, mine, chip)

    whole = run(slice(300))
    assert torch.equal(run(slice(7, 8)), whole[7:8])
    assert torch.equal(run(slice(200, 233)), whole[200:233])


@USE
def test_rows_that_are_shrunk_already(use_kernel: bool) -> None:
    """Those of an embedding, whose A is a table."""
    stack, h, y = make_stack((16, 4), 16, 8, (72,)), normal(4, 16), normal(4, 72)
    h[:, 4:] = 0
    slots = torch.tensor([1, 2, 0, 1], dtype=torch.int32)
    want = y.double()
    assert stack.factors is not None
    for row in (0, 2, 3):
        slot = int(slots[row])
        want[row] *= stack.factors[slot].double() if slot % 2 else 1
        want[row] += stack.b[slot, :, : stack.ranks[slot]].double() @ h[row, : stack.ranks[slot]].double()
    h[1] = NAN
    got = add_expanded(y, h[None], stack, sort_by_slot(slots, 2, use_kernel=use_kernel), CHIP)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)


def test_slots_have_whole_blocks_of_ranks() -> None:
    assert [padded_rank(rank) for rank in (1, 8, 16, 32, 64, 320, 512)] == [16, 16, 16, 32, 64, 320, 512]
    assert all(padded_rank(rank) % rank_block(padded_rank(rank)) == 0 for rank in range(1, 513))


def test_wrong_shapes_and_types() -> None:
    stack, rows = make_stack((16,), 16, 8, (24,)), sort_by_slot(torch.zeros(2, dtype=torch.int32), 1, use_kernel=False)
    with pytest.raises(ValueError, match="do not fit"):
        add_adapters(normal(2, 24), normal(2, 9), stack, rows, CHIP)
    with pytest.raises(ValueError, match="do not fit"):
        add_adapters(normal(3, 24), normal(3, 8), stack, rows, CHIP)
    with pytest.raises(ValueError, match=r"x is torch\.float16"):
        add_adapters(normal(2, 24), normal(2, 8).half(), stack, rows, CHIP)
