"""Products with packed matrices: what packing keeps, the kernel against the definition, many rows."""

from __future__ import annotations

from math import gcd

import pytest
import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.linear.weight_only import (
    PackedMatrix,
    kernel,
    pack,
    unpack,
    weight_only_linear,
    weight_only_reference,
)

CHIP = CHIPS["sm_90"]
SCHEMES = [("int8", 128), ("fp8", 128), ("int4", 128), ("int4", 64), ("int4", 32)]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize(("scheme", "group"), SCHEMES)
def test_packing_rounds_to_the_nearest(scheme: str, group: int) -> None:
    weight = normal(48, 384)
    weight[3], weight[4] = 0, weight[4].abs() + 1
    actual = unpack(pack(weight, scheme, group))
    largest = weight.abs().amax(-1, keepdim=True)
    if scheme == "int8":
        allowed = largest / 127 / 2
    elif scheme == "fp8":
        allowed = torch.maximum(weight.abs() * 2**-4, largest / 448 * 2**-10)
    else:  # half a step, and half a one more where the zero point was rounded too
        groups = weight.view(48, -1, group)
        extent = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
        allowed = (extent / 15).repeat_interleave(group, 1)
    error = (actual - weight).abs()
    assert (error <= allowed * 1.01).all()
    assert (actual[3] == 0).all()
    assert error.mean() < 0.7 * allowed.mean()


def test_int4_packing_order() -> None:
    """Input 64 p + 2 i + h of a block is nibble p of half h of word i."""
    weight = torch.zeros(1, 256)
    weight[0, 0], weight[0, 64 * 2 + 2 * 5 + 1] = -15, 7
    packed = pack(weight, "int4")
    assert packed.data.shape == (1, 32)
    numbers = [[int(word) >> at & 15 for at in range(0, 32, 4)] for word in packed.data[0]]
    assert packed.offset is not None
    zeros = 8 - packed.offset[:, 0].float() / packed.scale[:, 0].float()
    assert zeros.tolist() == pytest.approx([15, 0], abs=1e-3)
    assert numbers[5] == [15, 15, 0, 0, 15, 15, 15, 0]
    assert numbers[0] == [0, 15, 0, 0, 15, 15, 0, 0]


@pytest.mark.parametrize(("scheme", "group"), SCHEMES)
def test_views_and_stacks(scheme: str, group: int) -> None:
    weight = normal(3, 40, 300)
    packed = pack(weight, scheme, group)
    whole = unpack(packed)
    assert packed.outputs == 40
    assert packed.num_bytes < weight.nbytes / 2
    torch.testing.assert_close(unpack(packed.expert(1).channels(8, 24)), whole[1, 8:24], rtol=0, atol=0)
    torch.testing.assert_close(unpack(pack(weight[1], scheme, group)), whole[1], rtol=0, atol=0)
    like = pack(weight.to("meta"), scheme, group)
    assert (like.data.shape, like.data.dtype, like.scale.shape) == (
        packed.data.shape,
        packed.data.dtype,
        packed.scale.shape,
    )


def test_packing_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(50, 300)
    for scheme in ("int8", "fp8", "int4"):
        whole = pack(weight, scheme)
        monkeypatch.setattr("pagoda.backends.torch_cuda.kernels.linear.weight_only.packing._CHUNK_NUMBERS", 16 * 300)
        pieces = pack(weight, scheme)
        monkeypatch.undo()
        assert torch.equal(pieces.data.view(torch.uint8), whole.data.view(torch.uint8))
        assert torch.equal(pieces.scale, whole.scale)


@pytest.mark.parametrize("group", [128, 32])
def test_rounding_errors_of_an_int4_group_sum_to_little(group: int) -> None:
    """Without the fit of zero points the sums are as large as those of independent errors."""
    weight = normal(8, 512).float()
    errors = (unpack(pack(weight, "int4", group)) - weight).view(8, -1, group)
    assert errors.mean(-1).square().mean().sqrt() < 0.75 * errors.square().mean().sqrt() / group**0.5


def test_unsupported_int4_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="int4 groups have 128, 64, 32 inputs, not 100"):
        pack(normal(8, 100), "int4", 100)


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [rows, columns] with NaN between and behind them."""
    padded = torch.full((rows + 1, columns + 16), float("nan"), dtype=dtype)
    padded[:rows, :columns] = normal(rows, columns, dtype=dtype)
    return padded[:rows, :columns]


def fours(*shape: int) -> PackedMatrix:
    """Random numbers of 4 bits as a checkpoint has them, near 1."""
    group, noise = gcd(32, shape[-1]), torch.Generator().manual_seed(sum(shape))
    data = torch.randint(256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=noise)
    scale = torch.randint(124, 128, (*shape[:-1], shape[-1] // group), dtype=torch.uint8, generator=noise)
    return PackedMatrix("mxfp4", data, scale, shape[-1], group)


def test_all_numbers_of_four_bits() -> None:
    """With the largest and the smallest power of two that float32 has."""
    data = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 4], dtype=torch.uint8)
    packed = PackedMatrix("mxfp4", data, torch.tensor([[127, 130]], dtype=torch.uint8), 64, 32)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6] * 2)
    assert torch.equal(unpack(packed)[0], torch.cat([values, 8 * values]))
    for exponent in (1, 0, 120, 251):
        packed = PackedMatrix("mxfp4", data, torch.full((1, 2), exponent, dtype=torch.uint8), 64, 32)
        out = kernel.unpack(packed, torch.empty(1, 64), CHIP)
        assert torch.equal(out[0], torch.cat([values, values]).double().mul(2.0 ** (exponent - 127)).float())
        assert torch.equal(out, unpack(packed))
    with pytest.raises(ValueError, match="mxfp4 matrices come from checkpoints"):
        pack(normal(8, 64), "mxfp4")


def test_numbers_of_four_bits_in_views() -> None:
    packed = fours(3, 40, 96)
    whole = unpack(packed)
    torch.testing.assert_close(unpack(packed.expert(1).channels(8, 24)), whole[1, 8:24], rtol=0, atol=0)
    assert packed.num_bytes == 3 * 40 * (48 + 3)


@pytest.mark.parametrize(("scheme", "group"), [*SCHEMES, ("mxfp4", 0)])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 70, 512), (9, 64, 300), (16, 70, 600), (33, 40, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel(scheme: str, group: int, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, bias = poisoned(rows, inputs, dtype), normal(outputs, dtype=dtype)
    packed = fours(outputs, inputs) if scheme == "mxfp4" else pack(normal(outputs, inputs), scheme, group)
    for given in (None, bias):
        actual = weight_only_linear(x, packed, given, use_kernel=True, chip=CHIP)
        want = weight_only_reference(x, packed, given)
        assert actual.dtype == dtype
        scale = want.float().abs().max().item()
        torch.testing.assert_close(actual, want, rtol=0, atol=scale * (3e-6 if dtype == torch.float32 else 1e-3))


@pytest.mark.parametrize(("scheme", "group"), [*SCHEMES[:3], ("mxfp4", 0)])
def test_some_hundred_rows_need_no_unpacked_matrix(scheme: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of rows, the second not full; a matrix with inputs for several splits."""
    monkeypatch.setattr(kernel, "unpack", None)
    x, bias = poisoned(70, 600, torch.float32), normal(45)
    packed = fours(45, 600) if scheme == "mxfp4" else pack(normal(45, 600), scheme, group)
    out = weight_only_linear(x, packed, bias, use_kernel=True, chip=CHIP)
    want = weight_only_reference(x, packed, bias)
    torch.testing.assert_close(out, want, rtol=0, atol=want.abs().max().item() * 3e-6)
    assert kernel.fused_rows(packed) >= 70


def test_splits_are_added_in_order() -> None:
    """A row alone has the bits that it has among others; more splits than one are at work."""
    packed = pack(normal(48, 2000), "int8")
    assert kernel.choose_split(48, 2000, CHIP) == 512
    x = normal(8, 2000)
    together = weight_only_linear(x, packed, None, use_kernel=True, chip=CHIP)
    alone = weight_only_linear(x[5:6], packed, None, use_kernel=True, chip=CHIP)
    parts = [x[:, at : at + 512] @ unpack(packed)[:, at : at + 512].T for at in range(0, 2000, 512)]
    torch.testing.assert_close(together, ((parts[0] + parts[1]) + parts[2]) + parts[3], rtol=1e-5, atol=1e-4)
    assert torch.equal(alone, together[5:6])


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100"])
def test_splits_cover_the_inputs(chip: str) -> None:
    for outputs, inputs in ((28672, 4096), (4096, 14336), (4096, 4096), (64, 100000), (576, 1536), (8, 8)):
        step = kernel.choose_split(outputs, inputs, CHIPS[chip])
        splits = -(-inputs // step)
        assert (splits - 1) * step < inputs <= splits * step
        assert splits <= 16
        assert step % 512 == 0
    assert kernel.choose_split(28672, 4096, CHIPS[chip]) >= 2048
    assert kernel.choose_split(4096, 14336, CHIPS[chip]) <= 2560


@pytest.mark.parametrize(("scheme", "group"), SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_rows_by_pieces(scheme: str, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SCRATCH", 20 * 300 * dtype.itemsize)  # 20 channels, then 20, then 5
    monkeypatch.setattr(kernel, "FUSED", dict.fromkeys(kernel.FUSED, 64))
    x, bias = poisoned(70, 300, dtype), normal(45, dtype=dtype)
    packed = pack(normal(45, 300), scheme, group)
    for given in (None, bias):
        actual = weight_only_linear(x, packed, given, use_kernel=True, chip=CHIP)
        want = weight_only_reference(x, packed, given)
        torch.testing.assert_close(actual, want, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.0625)
    wide = kernel.unpack(packed, torch.empty(45, 300, dtype=torch.float32), CHIP)
    torch.testing.assert_close(wide, unpack(packed), rtol=0, atol=0)
