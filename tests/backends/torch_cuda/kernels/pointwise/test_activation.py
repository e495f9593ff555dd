import pytest
import torch

from pagoda.backends.torch_cuda.kernels.pointwise.activation import gated, gated_quantised, plain
from pagoda.backends.torch_cuda.kernels.pointwise.activation.kernel import BLOCK, WHOLE_BLOCK

NAMES = ("silu", "gelu", "gelu_tanh", "relu")
# In the interpreter exp overflows to infinity, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
NEAR = {torch.float32: {"rtol": 3e-6, "atol": 1e-5}, torch.float16: {"rtol": 2e-3, "atol": 1e-4}}


def _rows(dtype: torch.dtype, width: int) -> torch.Tensor:
    """[2, width] within wider rows of NaN; large and small numbers of both signs."""
    around = torch.full((2, width + 7), float("nan"), dtype=dtype)
    around[:, :width] = 4 * torch.randn(2, width, generator=torch.Generator().manual_seed(3))
    return around[:, :width]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernels_compute_the_reference(dtype, name) -> None:
    for function, width in ((gated, 2 * (BLOCK + 3)), (gated, 10), (plain, BLOCK + 5), (plain, 16)):
        x = _rows(dtype, width)
        got, want = function(x, name, use_kernel=True), function(x, name, use_kernel=False)
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, **NEAR[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gate_and_product_are_limited(dtype) -> None:
    both = _rows(dtype, 300)
    got, want = (gated(both, "silu", limit=0.7, use_kernel=use_kernel) for use_kernel in (True, False))
    torch.testing.assert_close(got, want, **NEAR[dtype])
    assert float(want.abs().max()) == pytest.approx(0.49, rel=1e-3)


@pytest.mark.parametrize(("name", "width"), [*((name, 72) for name in NAMES), ("silu", WHOLE_BLOCK + 9)])
def test_quantised_rows_equal_the_gated_activation(name, width) -> None:
    both = _rows(torch.float16, 2 * width)
    stored, scales = gated_quantised(both, name, use_kernel=True)
    reference, want_scales = gated_quantised(both, name, use_kernel=False)
    want = gated(both, name, use_kernel=False)
    torch.testing.assert_close(scales, want_scales, rtol=2e-3, atol=0)
    torch.testing.assert_close(stored.float() * scales, want.float(), rtol=1 / 16, atol=float(scales.max()) / 512)
    assert float((stored.float() != reference.float()).float().mean()) < 0.02


def test_no_rows_are_accepted_and_wrong_shapes_refused() -> None:
    assert gated(torch.empty(0, 8), "silu", use_kernel=True).shape == (0, 4)
    assert gated_quantised(torch.empty(0, 8), "silu", use_kernel=True)[1].shape == (0, 1)
    for wrong in (torch.zeros(2, 7), torch.zeros(8), torch.zeros(8, 2).T):
        with pytest.raises(ValueError, match="side by side"):
            gated(wrong, "silu", use_kernel=False)
