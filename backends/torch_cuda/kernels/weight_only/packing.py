"""Matrices in 8 or 4 bits: rounding, memory layout, values.

`int8` and `fp8` (e4m3) are symmetric with one scale per output channel, stored [O, I]. `int4` is asymmetric, with a
scale and a zero point per group of inputs of a channel. Eight int4 numbers make one int32 word: of a block of 4 n
inputs, word i has inputs 2 i, n + 2 i, 2 n + 2 i, 3 n + 2 i in its lower half, from the lowest bits up, and those after
them in its upper half. So a shift and a mask over a tile of words give two neighbouring inputs as two 16-bit numbers in
a register, without exchange between threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

Scheme = Literal["int8", "int4", "fp8"]

GROUPS: Final = (128, 64, 32)
"""Supported int4 group sizes."""

_LARGEST: Final = {"int8": 127.0, "fp8": 448.0}
_SEGMENTS: Final = 4
_MAX_SEGMENT: Final = 64

_CHUNK_NUMBERS: Final = 1 << 25
"""Numbers rounded at a time: each takes a dozen bytes of temporary memory."""


def block(group: int) -> int:
    """Return the inputs that int4 packs together; rows are zero-padded to a multiple."""
    return _SEGMENTS * min(group, _MAX_SEGMENT)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantized matrix [..., O, I], or a stack of them.

    int8: `data` int8 [..., O, I], `scale` float32 [..., O]. fp8: the same with float8_e4m3fn. int4: `data` int32 [...,
    O, I / 8] in whole blocks; `scale` int32 [..., groups, O]: bfloat16 scale in the upper 16 bits, zero point 0 to 15
    in the lower ones. `group` is 0 for schemes without groups.
    """

    scheme: Scheme
    data: Tensor
    scale: Tensor
    inputs: int
    group: int = 0

    @property
    def outputs(self) -> int:
        """O."""
        return self.data.shape[-2]

    @property
    def numbers(self) -> Tensor:
        """The data as kernels read it: float8 as bytes."""
        return self.data.view(torch.uint8) if self.scheme == "fp8" else self.data

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def channels(self, first: int, last: int) -> PackedMatrix:
        """Return output channels first to last - 1, as views."""
        return replace(self, data=self.data[..., first:last, :], scale=self.scale[..., first:last])

    def expert(self, index: int) -> PackedMatrix:
        """Return one matrix of a stack, as views."""
        return replace(self, data=self.data[index], scale=self.scale[index])


def pack(weight: Tensor, scheme: Scheme, group: int = GROUPS[0]) -> PackedMatrix:
    """Quantize a matrix, or a stack of them, [..., O, I] on its device. Raise ValueError for an unsupported int4 group.

    Values round to nearest. In int4 a group's numbers span its minimum and maximum, and zero.
    """
    if scheme == "int4" and group not in GROUPS:
        raise ValueError(f"int4 groups have {', '.join(map(str, GROUPS))} inputs, not {group}")
    if weight.ndim > 2:
        parts = [pack(part, scheme, group) for part in weight]
        data, scale = torch.stack([part.data for part in parts]), torch.stack([part.scale for part in parts])
        return replace(parts[0], data=data, scale=scale)
    rows = max(1, _CHUNK_NUMBERS // weight.shape[1])
    if weight.shape[0] > rows:
        parts = [pack(part, scheme, group) for part in weight.split(rows)]
        data, scale = torch.cat([part.data for part in parts]), torch.cat([part.scale for part in parts], -1)
        return replace(parts[0], data=data, scale=scale)
    return _pack_groups(weight, group) if scheme == "int4" else _pack_channels(weight, scheme)


def _pack_channels(weight: Tensor, scheme: Scheme) -> PackedMatrix:
    largest, wide = _LARGEST[scheme], weight.float()
    scale = wide.abs().amax(-1) / largest
    scale = torch.where(scale > 0, scale, 1)
    wide = (wide / scale[:, None]).clamp(-largest, largest)
    data = wide.round().to(torch.int8) if scheme == "int8" else wide.to(torch.float8_e4m3fn)
    return PackedMatrix(scheme, data, scale, weight.shape[1])


def _pack_groups(weight: Tensor, group: int) -> PackedMatrix:
    outputs, inputs = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -inputs % block(group))).view(outputs, -1, group)
    low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
    step = ((high - low) / 15).to(torch.bfloat16)
    step = torch.where(step > 0, step, 1)
    zero = (-low / step).round().clamp(0, 15)
    numbers = (wide / step[..., None] + zero[..., None]).round().clamp(0, 15).to(torch.int32)
    words = (numbers.view(outputs, -1, _SEGMENTS, block(group) // 8, 2) << _shifts(weight.device)).sum((2, 4))
    bits = step.view(torch.int16).to(torch.int32) << 16 | zero.to(torch.int32)
    return PackedMatrix("int4", words.to(torch.int32).view(outputs, -1), bits.T.contiguous(), inputs, group)


def unpack(packed: PackedMatrix) -> Tensor:
    """Return the values, float32 [..., O, I]."""
    if packed.scheme != "int4":
        return packed.data.float() * packed.scale[..., None]
    pairs = packed.data.view(torch.uint8).unflatten(-1, (-1, block(packed.group) // 8, 2, _SEGMENTS // 2))
    nibbles = torch.stack((pairs & 15, pairs >> 4), -1).movedim((-2, -1), (-4, -3))  # by segment, then word, then half
    numbers = nibbles.flatten(-5).unflatten(-1, (-1, packed.group)).float()
    bits = packed.scale.transpose(-1, -2)[..., None]
    numbers.sub_(bits & 15).mul_((bits & -65536).view(torch.float32))
    return numbers.flatten(-2)[..., : packed.inputs]


def _shifts(device: torch.device) -> Tensor:
    """Return the bit offsets of a word's numbers, int32 [4, 1, 2]."""
    offsets = torch.arange(0, 4 * _SEGMENTS, 4, dtype=torch.int32, device=device)
    return torch.stack((offsets, offsets + 16), -1)[:, None]
