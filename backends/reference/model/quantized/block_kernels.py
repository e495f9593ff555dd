"""Dequantise ggml's block formats; the same values as `common.weights.gguf.dequantize`.

Types without a kernel here are converted to numbers with scales first, in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from pagoda.common.weights.gguf.dequantize import UNSIGNED_E4M3, BlockType
from pagoda.common.weights.gguf.groups import IQ4_VALUES, group_format, write_values
from pagoda.common.weights.quantization.schemes import E2M1


def dequantize_blocks(blocks: Tensor, kind: BlockType, out: Tensor) -> None:
    """Write the values of blocks uint8 [n, bytes] to `out` float32 [n, elements]. `has_kernel` of their type."""
    kernel = _KERNELS.get(kind.name)
    if kernel is None:
        write_values(blocks.numpy(), kind, out.numpy())
    else:
        kernel(blocks, out)


def has_kernel(kind: BlockType) -> bool:
    """Return whether blocks of this type can be dequantised here."""
    return kind.name in _KERNELS or group_format(kind) is not None


def _half(blocks: Tensor, offset: int) -> Tensor:
    """Return the float16 at `offset` of every block in float32, as a column."""
    return blocks[:, offset : offset + 2].view(torch.float16).float()


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    torch.mul(_nibbles(blocks[:, 2:]).sub_(8).view(torch.int8), _half(blocks, 0), out=out)


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    torch.mul(_nibbles(blocks[:, 4:]), _half(blocks, 0), out=out).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    numbers = _nibbles(blocks[:, 6:]).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    torch.mul(numbers.sub_(16).view(torch.int8), _half(blocks, 0), out=out)


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    numbers = _nibbles(blocks[:, 8:]).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    torch.mul(numbers, _half(blocks, 0), out=out).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), _half(blocks, 0), out=out)


def _mxfp4(blocks: Tensor, out: Tensor) -> None:
    values = torch.from_numpy(E2M1)[_nibbles(blocks[:, 1:]).int()]
    torch.ldexp(2 * values, blocks[:, :1].int() - 128, out=out)  # 2 * values: the largest power is infinite else


def _nvfp4(blocks: Tensor, out: Tensor) -> None:
    codes = _nibbles(blocks[:, 4:].reshape(-1, 8)).int()
    scales = torch.from_numpy(UNSIGNED_E4M3)[blocks[:, :4].int()]
    torch.mul(torch.from_numpy(E2M1)[codes], scales.view(-1, 1), out=out.view(-1, 16))


def _nibbles(quants: Tensor) -> Tensor:
    """Return the numbers [n, 2m] of bytes [n, m]: the low halves, then the high ones."""
    return torch.cat((quants & 15, quants >> 4), 1)


def _fifth_bits(bits: Tensor) -> Tensor:
    """Return 32 bits as 16 times each [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (bits[..., None] >> shifts).bitwise_and_(1).bitwise_left_shift_(4).flatten(1)


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    numbers = blocks[:, 16:80].view(-1, 2, 32)
    values = out.view(-1, 2, 4, 32)
    for quarter in range(4):
        values[:, :, quarter] = (numbers >> 2 * quarter) & 3
    packed = blocks[:, :16]
    groups = out.view(-1, 16, 16)
    scales = _half(blocks, 80) * (packed & 15)
    minima = _half(blocks, 82) * (packed >> 4)
    groups.mul_(scales[..., None]).sub_(minima[..., None])


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    high = blocks[:, None, :32]
    low = blocks[:, 32:96].view(-1, 2, 32)
    values = out.view(-1, 2, 4, 32)
    halves = torch.arange(2, dtype=torch.uint8)[:, None] * 4
    for quarter in range(4):
        number = (low >> 2 * quarter) & 3
        values[:, :, quarter] = (number | ((high >> halves + quarter) & 1) << 2).sub_(4).view(torch.int8)
    first = _nibbles(blocks[:, 96:104])
    last = blocks[:, 104:108]
    top = torch.cat([(last >> 2 * quarter) & 3 for quarter in range(4)], 1)
    scales = _half(blocks, 108) * (first | top << 4).sub_(32).view(torch.int8)
    out.view(-1, 16, 16).mul_(scales[..., None])


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    numbers = blocks[:, 16:].view(-1, 4, 32)
    values = out.view(-1, 4, 2, 32)
    values[:, :, 0] = numbers & 15
    values[:, :, 1] = numbers >> 4
    _scale_and_shift(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    high = blocks[:, 16:48]
    numbers = blocks[:, 48:].view(-1, 4, 32)
    values = out.view(-1, 4, 2, 32)
    for pair in range(4):
        values[:, pair, 0] = (numbers[:, pair] & 15) | ((high >> 2 * pair) & 1) << 4
        values[:, pair, 1] = (numbers[:, pair] >> 4) | ((high >> 2 * pair + 1) & 1) << 4
    _scale_and_shift(blocks, out)


def _scale_and_shift(blocks: Tensor, out: Tensor) -> None:
    """Multiply the groups of a K block by their 6-bit scales and subtract their minima."""
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    packed = blocks[:, 12:16]
    scales = torch.cat((first & 63, (packed & 15) | ((first >> 2) & 48)), 1)
    minima = torch.cat((second & 63, (packed >> 4) | ((second >> 2) & 48)), 1)
    groups = out.view(-1, 8, 32)
    groups.mul_((_half(blocks, 0) * scales)[..., None]).sub_((_half(blocks, 2) * minima)[..., None])


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = blocks[:, :128].view(-1, 2, 2, 32)
    high = blocks[:, 128:192].view(-1, 2, 32)
    numbers = torch.stack((low & 15, low >> 4), 1).transpose(1, 2).reshape(-1, 2, 4, 32)
    for quarter in range(4):
        numbers[:, :, quarter] |= ((high >> 2 * quarter) & 3) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    torch.mul(numbers.sub_(32).view(torch.int8).view(-1, 16, 16), scales[..., None], out=out.view(-1, 16, 16))


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    torch.mul(_IQ4[_nibbles(blocks[:, 2:]).int()], _half(blocks, 0), out=out)


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    high = blocks[:, 2:4].repeat_interleave(4, 1) >> torch.tensor([0, 2, 4, 6] * 2, dtype=torch.uint8)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).flatten(1)
    scales = _half(blocks, 0) * (low | (high & 3) << 4).sub_(32).view(torch.int8)
    numbers = blocks[:, 8:].reshape(-1, 16)
    values = _IQ4[_nibbles(numbers).int()].view(-1, 8, 32)
    torch.mul(values, scales[..., None], out=out.view(-1, 8, 32))


_IQ4: Final = torch.from_numpy(IQ4_VALUES).float()

_KERNELS: Final[Mapping[str, Callable[[Tensor, Tensor], None]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
