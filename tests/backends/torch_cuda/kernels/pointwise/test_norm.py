import pytest
import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import row_stride
from pagoda.backends.torch_cuda.kernels.pointwise.norm import RowNorm

KINDS = [("rms", False, False), ("rms", True, False), ("layer", False, True), ("layer", True, False)]


def norm(x: torch.Tensor, weight: torch.Tensor, bias=None, *, residual=None, **how) -> tuple[torch.Tensor, ...]:
    return RowNorm(weight, bias, **how)(x, residual)


def norm_quantised(x: torch.Tensor, weight: torch.Tensor, bias=None, *, residual, **how) -> tuple[torch.Tensor, ...]:
    return RowNorm(weight, bias, **how).quantised(x, residual)


def _inputs(dtype: torch.dtype, width: int, bias: bool, residual: bool) -> tuple[torch.Tensor | None, ...]:
    """X, weight, bias, residual; x and residual are parts of wider rows, NaN around them."""
    seed = torch.Generator().manual_seed(7)

    def rows(room: int) -> torch.Tensor:
        around = torch.full((3, width + room), float("nan"), dtype=dtype)
        around[:, :width] = 0.5 + 3 * torch.randn(3, width, generator=seed)
        return around[:, :width]

    def vector() -> torch.Tensor:
        return torch.randn(width, generator=seed).to(dtype)

    return rows(5), vector(), vector() if bias else None, rows(9) if residual else None


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("kind", "unit_offset", "bias"), KINDS)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 72), (torch.float16, 64), (torch.float32, 1)])
def test_the_kernel_computes_the_reference(dtype, width, kind, unit_offset, bias, residual) -> None:
    x, weight, add, rest = _inputs(dtype, width, bias, residual)
    facts = {"eps": 1e-5, "kind": kind, "unit_offset": unit_offset, "residual": rest}
    got, got_total = norm(x, weight, add, **facts, use_kernel=True)
    want, want_total = norm(x, weight, add, **facts, use_kernel=False)
    assert torch.equal(got_total, want_total)
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    else:  # rounded at the same places: a sum in another order moves few numbers, and those by one rounding
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)
        assert float((got != want).float().mean()) < 0.02


@pytest.mark.parametrize(("kind", "unit_offset", "bias"), KINDS)
def test_quantised_rows_equal_the_norm(kind, unit_offset, bias) -> None:
    x, weight, add, rest = _inputs(torch.float16, 72, bias, True)
    facts = {"eps": 1e-5, "kind": kind, "unit_offset": unit_offset, "residual": rest}
    stored, scales, total = norm_quantised(x, weight, add, **facts, use_kernel=True)
    want, want_total = norm(x, weight, add, **facts, use_kernel=False)
    assert torch.equal(total, want_total)
    assert stored.dtype == torch.float8_e4m3fn
    assert scales.shape == (3, 1)
    torch.testing.assert_close(stored.float().abs().amax(1), torch.full((3,), 448.0))
    torch.testing.assert_close(stored.float() * scales, want.float(), rtol=1 / 16, atol=float(scales.max()) / 512)
    reference = norm_quantised(x, weight, add, **facts, use_kernel=False)
    torch.testing.assert_close(scales, reference[1])
    assert float((stored.float() != reference[0].float()).float().mean()) < 0.02


def test_without_residual_the_total_is_the_input_itself() -> None:
    x, weight, _, _ = _inputs(torch.float32, 8, False, False)
    for use_kernel in (False, True):
        assert norm(x, weight, eps=1e-5, kind="rms", use_kernel=use_kernel)[1] is x


def test_no_rows_are_accepted() -> None:
    normed, total = norm(torch.empty(0, 8), torch.ones(8), eps=1e-5, kind="rms", use_kernel=True)
    assert normed.shape == total.shape == (0, 8)


def test_wrong_shapes_are_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.ones(8)
    for wrong in (
        {"x": torch.zeros(8, 2).T, "weight": torch.ones(8)},
        {"x": x, "weight": torch.ones(7)},
        {"x": x, "weight": weight, "bias": torch.ones(8)},
        {"x": x, "weight": weight, "residual": torch.zeros(1, 8)},
        {"x": x, "weight": weight, "residual": torch.zeros(2, 8).half()},
        {"x": torch.zeros(1, 32769), "weight": torch.ones(32769)},
    ):
        with pytest.raises(ValueError, match=r"rows|weight|bias|residual"):
            norm(**wrong, eps=1e-5, kind="rms", use_kernel=False)


def test_a_single_row_has_its_width_for_stride() -> None:
    """A kernel would be compiled for a stride of 1."""
    one = torch.empty(64).as_strided((1, 8), (1, 1))
    assert (row_stride(one), row_stride(torch.empty(3, 9)[:, :8])) == (8, 9)
