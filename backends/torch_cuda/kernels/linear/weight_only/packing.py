"""Matrices in 8 or 4 bits: rounding, memory layout, values.

A value is (number * scale + offset) * row scale, with a scale and an offset per group of inputs of a channel, or one
scale per channel. Eight int4 numbers make one int32 word: of a block of 4 n inputs, word i has inputs 2 i, n + 2 i,
2 n + 2 i, 3 n + 2 i in its lower half, from the lowest bits up, and those after them in its upper half. So a shift and
a mask over a tile of words give two neighbouring inputs as two 16-bit numbers in a register, without exchange between
threads. The other numbers of 4 bits are as checkpoints have them, two neighbouring inputs to a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import decoded
from pagoda.backends.torch_cuda.schemes import KernelScheme
from pagoda.common.weights.quantization.schemes import E2M1, INT4_GROUPS, Activations

CODES: Final = ("mxfp4", "nvfp4", "nf4", "fp4")
"""Schemes whose numbers of 4 bits index a table of values."""

ZERO: Final = 8
"""Added to an int4 number before it is stored."""

_LARGEST: Final = {"int8": 127.0, "fp8": 448.0}
_SEGMENTS: Final = 4
_MAX_SEGMENT: Final = 64

_ZERO_ROUNDS: Final = 3
"""Steps in which the zero point of an int4 group is fitted."""

_CHUNK_NUMBERS: Final = 1 << 25
"""Numbers rounded at a time: each takes a dozen bytes of temporary memory."""


def block(group: int) -> int:
    """Return the inputs that int4 packs together; rows are zero-padded to a multiple."""
    return _SEGMENTS * min(group, _MAX_SEGMENT)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantized matrix [..., O, I], or a stack of them.

    | scheme | data | scale, one for each `rows` outputs and `group` inputs |
    |---|---|---|
    | int8, fp8; group 0 | int8 or float8_e4m3fn [..., O, I] | float32 [..., O] |
    | int8, fp8 | the same | floats [..., groups, O / rows] |
    | int4 | int32 [..., O, I / 8] in whole blocks | floats [..., groups, O], those of whole blocks |
    | mxfp4 | uint8 [..., O, I / 2], lower half first | uint8 [..., O, groups]: exponents plus 127 |
    | nvfp4 | the same | uint8 [..., O, groups]: bits of float8_e4m3fn |
    | nf4, fp4 | the same | floats [..., O, groups] |

    Floats are float16, bfloat16 or float32. Integer offsets are in units of the scale.
    """

    scheme: KernelScheme
    data: Tensor
    scale: Tensor
    inputs: int
    group: int = 0
    rows: int = 1
    offset: Tensor | None = None  # as `scale`: floats, or int8 from -64 to 64; None: 0
    row_scale: Tensor | None = None  # float32 [..., O]; None: 1
    table: Tensor | None = None  # float32 [16], the values of nf4 or fp4
    order: Tensor | None = None  # int32 [..., I]: input order[i] is multiplied by column i; None: input i
    activations: Activations | None = None  # how x is rounded where that makes the product faster; None: it is not
    input_scale: Tensor | None = None  # float32 [...], of static activations

    @property
    def outputs(self) -> int:
        """O."""
        return self.data.shape[-2]

    @property
    def numbers(self) -> Tensor:
        """The data as kernels read it: float8 as bytes."""
        return self.data.view(torch.uint8) if self.scheme == "fp8" else self.data

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The matrix's tensors by field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def mapped(self, change: Callable[[Tensor], Tensor]) -> PackedMatrix:
        """Return the matrix with changed tensors."""
        return self.replaced({name: change(tensor) for name, tensor in self.tensors.items()})

    def replaced(self, tensors: Mapping[str, Tensor]) -> PackedMatrix:
        """Return the matrix with other tensors, by field."""
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes)

    def channels(self, first: int, last: int) -> PackedMatrix:
        """Return output channels first to last - 1, as views; `first` is a multiple of `rows`."""

        def part(of_groups: Tensor) -> Tensor:
            if self.scheme in CODES:
                return of_groups[..., first:last, :]
            return of_groups[..., first // self.rows : -(-last // self.rows)]

        return replace(
            self,
            data=self.data[..., first:last, :],
            scale=part(self.scale),
            offset=None if self.offset is None else part(self.offset),
            row_scale=None if self.row_scale is None else self.row_scale[..., first:last],
        )

    def expert(self, index: int) -> PackedMatrix:
        """Return one matrix of a stack, as views."""
        return self.replaced({name: tensor[index] for name, tensor in self.tensors.items() if name != "table"})


def pack(weight: Tensor, scheme: KernelScheme, group: int = INT4_GROUPS[0]) -> PackedMatrix:
    """Quantize a matrix, or a stack of them, [..., O, I] on its device, to int8, fp8 or int4.

    Raise ValueError for other schemes, which only checkpoints have, and an unsupported int4 group.
    Values round to nearest. In int4 a group's numbers span its minimum and maximum, and zero; then its offset moves
    until its rounding errors sum to nothing, which perplexity is more sensitive to than to their size (benchmarks/LOG).
    """
    if scheme in CODES:
        raise ValueError(f"{scheme} matrices come from checkpoints")
    if scheme == "int4" and group not in INT4_GROUPS:
        raise ValueError(f"int4 groups have {', '.join(map(str, INT4_GROUPS))} inputs, not {group}")
    if weight.ndim > 2:
        return _joined(torch.stack, [pack(part, scheme, group) for part in weight])
    rows = max(1, _CHUNK_NUMBERS // weight.shape[1])
    if weight.shape[0] > rows:
        return _joined(torch.cat, [pack(part, scheme, group) for part in weight.split(rows)], -2, -1)
    return _pack_groups(weight, group) if scheme == "int4" else _pack_channels(weight, scheme)


def _joined(
    join: Callable[..., Tensor], parts: list[PackedMatrix], of_data: int = 0, of_groups: int = 0
) -> PackedMatrix:
    """Join along an axis of the data and one of all others."""
    tensors = [part.tensors for part in parts]
    axes = dict.fromkeys(tensors[0], of_groups) | {"data": of_data}
    return parts[0].replaced({name: join([each[name] for each in tensors], axis) for name, axis in axes.items()})


def _pack_channels(weight: Tensor, scheme: KernelScheme) -> PackedMatrix:
    largest = _LARGEST[scheme]
    wide = weight.float()
    scale = wide.abs().amax(-1) / largest
    scale = torch.where(scale > 0, scale, 1)
    wide = (wide / scale[:, None]).clamp(-largest, largest)
    data = wide.round().to(torch.int8) if scheme == "int8" else wide.to(torch.float8_e4m3fn)
    return PackedMatrix(scheme, data, scale, weight.shape[1])


def _pack_groups(weight: Tensor, group: int) -> PackedMatrix:
    outputs, inputs = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -inputs % block(group))).view(outputs, -1, group)
    low = wide.amin(-1).clamp(max=0)
    high = wide.amax(-1).clamp(min=0)
    step = ((high - low) / 15).to(torch.bfloat16)
    step = torch.where(step > 0, step, 1)
    exact = wide / step[..., None]
    zero = (-low / step).round().to(torch.bfloat16)
    for _ in range(_ZERO_ROUNDS):
        zero = (_nearest(exact, zero) - exact).mean(-1).to(torch.bfloat16)
    numbers = _nearest(exact, zero).to(torch.uint8).view(outputs, -1)
    offset = ((ZERO - zero.float()) * step.float()).to(torch.bfloat16)
    words = int4_words(numbers[:, ::2] | numbers[:, 1::2] << 4, group)
    return PackedMatrix("int4", words, step.T.contiguous(), inputs, group, offset=offset.T.contiguous())


def _nearest(exact: Tensor, zero: Tensor) -> Tensor:
    """Return the numbers 0 to 15 nearest to exact [O, groups, group] plus zero [O, groups]."""
    return (exact + zero[..., None]).round().clamp(0, 15)


def int4_words(pairs: Tensor, group: int) -> Tensor:
    """Return the words int32 of pairs uint8 [..., I / 2]: two neighbouring inputs to a byte, the first lower."""
    size = block(group) // 2
    padded = torch.nn.functional.pad(pairs, (0, -pairs.shape[-1] % size))
    wide = padded.unflatten(-1, (-1, _SEGMENTS, size // _SEGMENTS)).to(torch.int32)
    shifts = torch.arange(0, 4 * _SEGMENTS, 4, dtype=torch.int32, device=pairs.device)[:, None]
    words = ((wide & 15) << shifts) | ((wide >> 4) << (shifts + 16))
    return words.sum(-2).to(torch.int32).flatten(-2)


def unpack(packed: PackedMatrix) -> Tensor:
    """Return the values, float32 [..., O, I], columns in the matrix's order."""
    scale = packed.scale
    offset = packed.offset
    match packed.scheme:
        case "mxfp4":
            bits = scale.int()
            scale = torch.where(bits > 0, bits << 23, 1 << 22).int().view(torch.float32)
        case "nvfp4":
            scale = decoded(scale)
        case "int4" | "int8" | "fp8" if packed.group:
            scale = _per_output(packed, scale)
            offset = None if offset is None else _per_output(packed, offset)
    numbers = _numbers(packed)
    if not packed.group:
        return numbers.mul_(scale[..., None])
    values = torch.nn.functional.pad(numbers, (0, -packed.inputs % packed.group)).unflatten(-1, (-1, packed.group))
    groups = values.shape[-2]
    steps = scale[..., :groups].float()
    values = values.mul_(steps[..., None])
    if offset is not None:
        added = offset[..., :groups].float()
        values = values.add_((added if offset.is_floating_point() else added * steps)[..., None])
    values = values.flatten(-2)[..., : packed.inputs]
    return values if packed.row_scale is None else values * packed.row_scale[..., None]


def _per_output(packed: PackedMatrix, of_groups: Tensor) -> Tensor:
    """Return [..., O, groups] of [..., groups, O / rows]."""
    return of_groups.transpose(-1, -2).repeat_interleave(packed.rows, -2)[..., : packed.outputs, :]


def _numbers(packed: PackedMatrix) -> Tensor:
    """Return the numbers, float32 [..., O, I]."""
    if packed.scheme in ("int8", "fp8"):
        return packed.data.float()
    if packed.scheme == "int4":
        pairs = packed.data.view(torch.uint8).unflatten(-1, (-1, block(packed.group) // 8, 2, _SEGMENTS // 2))
        nibbles = torch.stack((pairs & 15, pairs >> 4), -1).movedim((-2, -1), (-4, -3))  # by segment, word, half
        return nibbles.flatten(-5)[..., : packed.inputs].float().sub_(ZERO)
    codes = torch.stack((packed.data & 15, packed.data >> 4), -1).flatten(-2).int()
    table = torch.from_numpy(E2M1).to(codes.device) if packed.table is None else packed.table
    return table[codes]
