"""Responses of pooling models, in vLLM's formats, and the wire encodings of vectors."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import RequestError
from pagoda.server.outputs import Array, RawPoolingOutput, ScoringRequestOutput

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]

_EXPONENT_BITS: Final = {"fp8_e4m3": 4, "fp8_e5m2": 5}

MAX_METADATA = 400
"""Maximum number of vectors whose metadata fits into a response header (encoding format "bytes")."""


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
        exponent, fraction = code >> fraction_bits, (code & (2**fraction_bits - 1)) / 2**fraction_bits
        values.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return np.array(values, np.float32)


@dataclass(frozen=True, slots=True)
class PoolingMeta:
    """Fields that all responses share."""

    id: str
    created: int
    model: str
    tokens: int  # of all prompts

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}

    def listing(self, data: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the list object with `data`."""
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.model,
            "data": data,
            "usage": self.usage | {"completion_tokens": 0},
        }


def vectors_response(
    meta: PoolingMeta, outputs: Sequence[RawPoolingOutput], encoding: Encoding, kind: str, key: str
) -> dict[str, Any]:
    """Return a vector per prompt. `kind`: "object" of each entry; `key`: its field with the vector."""
    return meta.listing(
        [
            {"index": index, "object": kind, key: encoding.in_json(output.outputs.data)}
            for index, output in enumerate(outputs)
        ]
    )


def check_binary(encoding: Encoding, count: int) -> None:
    """Raise RequestError if the metadata of `count` vectors does not fit into a header."""
    if encoding.format == "bytes" and count > MAX_METADATA:
        raise RequestError(
            "encoding_format", f"bytes supports at most {MAX_METADATA} vectors; use bytes_only or base64"
        )


def binary_response(
    meta: PoolingMeta, outputs: Sequence[RawPoolingOutput], encoding: Encoding
) -> tuple[bytes, dict[str, Any] | None]:
    """Return the concatenated vectors and their metadata (None for "bytes_only")."""
    chunks = [encoding.in_bytes(output.outputs.data) for output in outputs]
    if encoding.format == "bytes_only":
        return b"".join(chunks), None
    items: list[dict[str, Any]] = []
    end = 0
    for index, (chunk, output) in enumerate(zip(chunks, outputs)):
        start, end = end, end + len(chunk)
        items.append(
            {
                "index": index,
                "embed_dtype": encoding.dtype,
                "endianness": encoding.endianness,
                "start": start,
                "end": end,
                "shape": output.outputs.data.shape,
            }
        )
    metadata = {"id": meta.id, "created": meta.created, "model": meta.model, "data": items, "usage": meta.usage}
    return b"".join(chunks), metadata


def classes_response(meta: PoolingMeta, outputs: Sequence[RawPoolingOutput], labels: Sequence[str]) -> dict[str, Any]:
    """Return the most likely label and all probabilities per prompt."""
    data = []
    for index, output in enumerate(outputs):
        probs = output.outputs.data
        best = int(np.argmax(probs))
        label = labels[best] if best < len(labels) else None
        data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    return meta.listing(data)


def scores_response(meta: PoolingMeta, scores: Sequence[ScoringRequestOutput]) -> dict[str, Any]:
    """Return a score per pair."""
    return meta.listing(
        [{"index": index, "object": "score", "score": each.outputs.score} for index, each in enumerate(scores)]
    )


def ranking_response(
    meta: PoolingMeta, scores: Sequence[ScoringRequestOutput], documents: Sequence[Any] | None, top_n: int
) -> dict[str, Any]:
    """Return the `top_n` best documents (0: all), best first. `documents`: None to omit them from the response."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index].outputs.score)
    results: list[dict[str, Any]] = []
    for index in order[: top_n or len(order)]:
        document = {} if documents is None else {"document": _document(documents[index])}
        results.append({"index": index} | document | {"relevance_score": scores[index].outputs.score})
    return {"id": meta.id, "model": meta.model, "usage": meta.usage, "results": results}


def _document(document: Any) -> dict[str, Any]:
    if isinstance(document, str):
        return {"text": document, "multi_modal": None}
    return {"text": None, "multi_modal": document["content"]}
