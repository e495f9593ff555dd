"""Activations in 8 bits: the kernel against the definition, and both against float64."""

from __future__ import annotations

import pytest
import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import quantize_rows, quantize_rows_reference

CHIP = CHIPS["sm_90"]


def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of different sizes, one of zeros, with NaN between and behind them."""
    padded = torch.full((count + 1, width + 16), float("nan"), dtype=dtype)
    noise = torch.randn(count, width, generator=torch.Generator().manual_seed(width))
    padded[:count, :width] = noise * 4.0 ** torch.arange(-3, count - 3)[:, None]
    padded[2, :width] = 0
    return padded[:count, :width]


@pytest.mark.parametrize("numbers", ["float8", "int8"])
@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("width", [96, 300, 1152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_equals_the_definition(numbers: str, group: int | None, width: int, dtype: torch.dtype) -> None:
    x = rows(5, width, dtype)
    actual = quantize_rows(x, numbers, group=group, use_kernel=True, chip=CHIP)
    want = quantize_rows_reference(x, numbers, group=group)
    assert actual.data.dtype == want.data.dtype
    assert torch.equal(actual.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(actual.scales, want.scales)
    assert actual.scales.shape == (5, 1 if group is None else -(-width // group))


@pytest.mark.parametrize(("numbers", "largest"), [("float8", 448.0), ("int8", 127.0)])
@pytest.mark.parametrize("group", [None, 64])
def test_every_group_is_rounded_to_the_nearest_number(numbers: str, largest: float, group: int | None) -> None:
    x = rows(5, 160, torch.float32)
    actual = quantize_rows_reference(x, numbers, group=group)
    values = actual.values(group).double()
    assert (values[2] == 0).all()
    for each, rounded in zip(x.double().split(group or 160, 1), values.split(group or 160, 1)):
        most = each.abs().amax(1, keepdim=True)
        step = most / largest if numbers == "int8" else torch.maximum(each.abs() / 8, most / largest * 2**-9)
        assert ((rounded - each).abs() <= step / 2 * 1.001).all()
        torch.testing.assert_close(rounded.abs().amax(1, keepdim=True), most, rtol=1e-6, atol=0)


@pytest.mark.parametrize("numbers", ["float8", "int8"])
@pytest.mark.parametrize("use_kernel", [False, True])
def test_a_static_scale(numbers: str, use_kernel: bool) -> None:
    """What exceeds the range saturates."""
    x, scale = torch.tensor([[0.5, -3.0, 1e4, -1e4], [0.25, 0.0, 1.0, 2.0]]), torch.tensor(0.25)
    actual = quantize_rows(x, numbers, scale=scale, use_kernel=use_kernel, chip=CHIP)
    most = 112.0 if numbers == "float8" else 31.75
    assert actual.values().tolist() == [[0.5, -3.0, most, -most], [0.25, 0.0, 1.0, 2.0]]
    assert actual.scales.shape == (2, 1)


def test_shapes_that_do_not_fit() -> None:
    x = rows(5, 96, torch.float32)
    for wrong, group, scale in ((x[0], None, None), (x.T, None, None), (x, 48, None), (x, 32, torch.ones(()))):
        with pytest.raises(ValueError, match="cannot be rounded with"):
            quantize_rows(wrong, "int8", group=group, scale=scale, use_kernel=False, chip=CHIP)
