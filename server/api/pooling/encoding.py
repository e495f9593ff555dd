"""Encodings of vectors in answers of pooling routes, and the functions with which clients read them (vLLM's names)."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from pagoda.server.outputs import Array

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]

_EXPONENT_BITS: Final = {"fp8_e4m3": 4, "fp8_e5m2": 5}


@dataclass(frozen=True, slots=True)
class Encoding:
    """Wire encoding of vectors. `dtype` and `endianness` apply to base64 and bytes only."""

    format: EncodingFormat = "float"
    dtype: EmbedDType = "float32"
    endianness: Endianness = "native"

    @property
    def is_binary(self) -> bool:
        """Whether the response body is bytes, not JSON."""
        return self.format in ("bytes", "bytes_only")

    def in_json(self, vector: Array) -> Any:
        """Return a vector or matrix as (nested) lists of numbers or as base64."""
        if self.format == "float":
            return vector.tolist()
        return base64.b64encode(self.in_bytes(vector)).decode()

    def in_bytes(self, vector: Array) -> bytes:
        """Return the elements of a vector or matrix in row-major order."""
        order = sys.byteorder if self.endianness == "native" else self.endianness
        numbers = _converted(vector, self.dtype)
        return numbers.astype(numbers.dtype.newbyteorder("<" if order == "little" else ">")).tobytes()


def _converted(vector: Array, dtype: EmbedDType) -> npt.NDArray[Any]:
    """Convert to `dtype`, or to unsigned integers of its bits if numpy lacks it. Rounds half to even."""
    match dtype:
        case "float32":
            return vector
        case "float16":
            with np.errstate(over="ignore"):
                return vector.astype(np.float16)
        case "bfloat16":
            bits = np.ascontiguousarray(vector).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return np.where(np.isnan(vector), 0x7FC0, rounded).astype(np.uint16)
        case _:
            return _fp8_bits(vector, _EXPONENT_BITS[dtype])


def _fp8_bits(vector: Array, exponent_bits: int) -> npt.NDArray[np.uint8]:
    values = _fp8_values(exponent_bits)
    size = np.abs(vector)
    midpoints = (values[1:] + values[:-1]) / 2
    code = np.searchsorted(midpoints, size, side="left")
    tie = (code < len(midpoints)) & (midpoints[np.minimum(code, len(midpoints) - 1)] == size)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = np.where(np.isnan(size), 0x7F, code)
    return (code | np.where(np.signbit(vector), 0x80, 0)).astype(np.uint8)


@cache
def _fp8_values(exponent_bits: int) -> Array:
    """Return the values of the non-negative codes in order.

    E5M2 ends with infinity, represented by the smallest number that overflows. E4M3 has no infinity and saturates.
    """
    fraction_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    last = 0x7C if exponent_bits == 5 else 0x7E
    values = []
    for code in range(last + 1):
        exponent = code >> fraction_bits
        fraction = (code & (2**fraction_bits - 1)) / 2**fraction_bits
        values.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return np.array(values, np.float32)


# Reading, and tensors of requests. Tensors are torch's, which is imported when one is made.


@dataclass(frozen=True, slots=True)
class EmbeddingDType:
    """A data type of vectors in answers."""

    torch_name: str  # The attribute of torch.
    nbytes: int  # Bytes of a number.

    @property
    def torch_dtype(self) -> Any:
        """The torch.dtype."""
        return getattr(import_module("torch"), self.torch_name)


EMBED_DTYPES: Final[Mapping[str, EmbeddingDType]] = {
    "float32": EmbeddingDType("float32", 4),
    "float16": EmbeddingDType("float16", 2),
    "bfloat16": EmbeddingDType("bfloat16", 2),
    "fp8_e4m3": EmbeddingDType("float8_e4m3fn", 1),
    "fp8_e5m2": EmbeddingDType("float8_e5m2", 1),
}
ENDIANNESS: Final[tuple[str, ...]] = get_args(Endianness)


@dataclass(frozen=True, slots=True)
class MetadataItem:
    """Where a vector is in the body of an answer with encoding_format "bytes": an entry of the header's `data`."""

    index: int
    embed_dtype: EmbedDType
    endianness: Endianness
    start: int  # The first byte.
    end: int  # The byte after the last.
    shape: tuple[int, ...]


def binary2tensor(binary: bytes, shape: Sequence[int], embed_dtype: EmbedDType, endianness: Endianness) -> Any:
    """Return the torch tensor [*shape] of the bytes that an answer has for it, in its own data type.

    Raises ValueError if their number does not fit the shape.
    """
    dtype = EMBED_DTYPES[embed_dtype]
    order = sys.byteorder if endianness == "native" else endianness
    numbers = np.frombuffer(binary, np.dtype(f"{'<' if order == 'little' else '>'}i{dtype.nbytes}"))
    native = numbers.astype(numbers.dtype.newbyteorder("="))
    return import_module("torch").from_numpy(native.reshape(tuple(shape))).view(dtype.torch_dtype)


def tensor2binary(tensor: Any, embed_dtype: EmbedDType, endianness: Endianness) -> bytes:
    """Return the elements of a torch tensor in row-major order."""
    return Encoding("bytes", embed_dtype, endianness).in_bytes(tensor.float().cpu().numpy())


def decode_pooling_output(items: Sequence[MetadataItem], body: bytes) -> list[Any]:
    """Return the tensors of an answer with encoding_format "bytes", in the order of the inputs."""
    return [
        binary2tensor(body[item.start : item.end], item.shape, item.embed_dtype, item.endianness)
        for item in sorted(items, key=lambda item: item.index)
    ]


def tensor2base64(tensor: Any) -> str:
    """Return a torch tensor as the request field prompt_embeds takes it: the base64 of what torch.save writes."""
    buffer = io.BytesIO()
    import_module("torch").save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()
