import numpy as np
import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import LARGEST, decode, encode, quantised_rows, saturated


@triton.jit
def encode_kernel(x_ptr, bits_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(bits_ptr + at, encode(tl.load(x_ptr + at), False))


@triton.jit
def decode_kernel(bits_ptr, x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, decode(tl.load(bits_ptr + at), False))


def _every_float8() -> torch.Tensor:
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)


def _encoded(x: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(triton.next_power_of_2(len(x)))
    padded[: len(x)] = x
    bits = torch.empty(len(padded), dtype=torch.uint8)
    encode_kernel[(1,)](padded, bits, BLOCK=len(padded))
    return bits[: len(x)]


def test_every_number_decodes_to_itself() -> None:
    out = torch.empty(256, dtype=torch.float16)
    decode_kernel[(1,)](_every_float8().view(torch.uint8), out, BLOCK=256)
    torch.testing.assert_close(out, _every_float8().half(), rtol=0, atol=0, equal_nan=True)


def test_rounding_is_to_nearest_with_ties_to_even_on_both_sides_of_every_middle() -> None:
    numbers = _every_float8().float()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = ((numbers[1:] + numbers[:-1]) / 2).numpy()
    near = [middles, np.nextafter(middles, np.float32(-np.inf)), np.nextafter(middles, np.float32(np.inf)), numbers]
    x = torch.cat([torch.as_tensor(part) for part in near])
    assert torch.equal(_encoded(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_what_is_too_large_becomes_the_largest_and_nan_stays() -> None:
    x = torch.tensor([449.0, 470.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan"), 1e-30, -1e-30])
    got = _encoded(x).view(torch.float8_e4m3fn).float()
    want = torch.tensor([LARGEST] * 3 + [-LARGEST, LARGEST, -LARGEST, float("nan"), 0.0, 0.0])
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(saturated(x).float(), want, rtol=0, atol=0, equal_nan=True)


def test_a_row_fills_the_range_and_a_row_of_zeros_has_scale_one() -> None:
    stored, scales = quantised_rows(torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]]))
    assert stored.float().tolist() == [[112.0, -448.0, 224.0], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(scales, torch.tensor([[2.0 / 448], [1.0]]), rtol=1e-7, atol=0)
