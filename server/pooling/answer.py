"""Answers of pooling models, in vLLM's shapes."""

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
from pagoda.server.outputs import RawPoolingOutput, ScoringRequestOutput

# Vectors as they go over the wire: numbers in JSON, base64, or bytes; in any of five types and both byte orders.

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
Array = npt.NDArray[np.float32]

_EXPONENT_BITS: Final = {"fp8_e4m3": 4, "fp8_e5m2": 5}


@dataclass(frozen=True, slots=True)
class Encoding:
    """How vectors are to be sent. `dtype` and `endianness` matter to base64 and bytes."""

    format: EncodingFormat = "float"
    dtype: EmbedDType = "float32"
    endianness: Endianness = "native"

    @property
    def is_binary(self) -> bool:
        """Whether the answer is bytes, not JSON."""
        return self.format in ("bytes", "bytes_only")

    def in_json(self, vector: Array) -> Any:
        """A vector as a list of numbers (of lists, where it has rows), or as base64."""
        if self.format == "float":
            return vector.tolist()
        return base64.b64encode(self.in_bytes(vector)).decode()

    def in_bytes(self, vector: Array) -> bytes:
        """A vector's numbers, one after the other."""
        order = sys.byteorder if self.endianness == "native" else self.endianness
        numbers = _converted(vector, self.dtype)
        return numbers.astype(numbers.dtype.newbyteorder("<" if order == "little" else ">")).tobytes()


def _converted(vector: Array, dtype: EmbedDType) -> npt.NDArray[Any]:
    """Numbers of a type, or integers of its bits where numpy has no such type; rounded to the nearest, ties to even."""
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
            return _eight_bits(vector, _EXPONENT_BITS[dtype])


def _eight_bits(vector: Array, exponent_bits: int) -> npt.NDArray[np.uint8]:
    values = _positive_values(exponent_bits)
    size = np.abs(vector)
    middles = (values[1:] + values[:-1]) / 2
    code = np.searchsorted(middles, size, side="left")
    tie = (code < len(middles)) & (middles[np.minimum(code, len(middles) - 1)] == size)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = np.where(np.isnan(size), 0x7F, code)
    return (code | np.where(np.signbit(vector), 0x80, 0)).astype(np.uint8)


@cache
def _positive_values(exponent_bits: int) -> Array:
    """What the codes from 0 stand for, in order.

    The type with five exponent bits ends in an infinity, here the number that is too large to be finite. The other has
    none: what is too large becomes its largest.
    """
    fraction_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    last = 0x7C if exponent_bits == 5 else 0x7E
    values = []
    for code in range(last + 1):
        exponent, fraction = code >> fraction_bits, (code & (2**fraction_bits - 1)) / 2**fraction_bits
        values.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return np.array(values, np.float32)


MAX_METADATA = 400
"""Most vectors whose places in the bytes fit the header that tells them."""


@dataclass(frozen=True, slots=True)
class PoolingHead:
    """What an answer begins and ends with. `tokens`: of all prompts."""

    id: str
    created: int
    model: str
    tokens: int

    @property
    def usage(self) -> dict[str, int]:
        """Prompts are all there is."""
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}

    def listing(self, data: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The object around a list."""
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.model,
            "data": data,
            "usage": self.usage | {"completion_tokens": 0},
        }


def vectors_answer(
    head: PoolingHead, outputs: Sequence[RawPoolingOutput], encoding: Encoding, kind: str, key: str
) -> dict[str, Any]:
    """A vector for each prompt: `kind` is what each is called, `key` what its numbers are."""
    return head.listing(
        [
            {"index": index, "object": kind, key: encoding.in_json(output.outputs.data)}
            for index, output in enumerate(outputs)
        ]
    )


def check_binary(encoding: Encoding, count: int) -> None:
    """Raises RequestError for more vectors than a header can describe."""
    if encoding.format == "bytes" and count > MAX_METADATA:
        raise RequestError(
            "encoding_format", f"bytes describes at most {MAX_METADATA} vectors in a header; use bytes_only or base64"
        )


def binary_answer(
    head: PoolingHead, outputs: Sequence[RawPoolingOutput], encoding: Encoding
) -> tuple[bytes, dict[str, Any] | None]:
    """All vectors one after the other, and where each is; None where only the bytes are wanted."""
    chunks = [encoding.in_bytes(output.outputs.data) for output in outputs]
    if encoding.format == "bytes_only":
        return b"".join(chunks), None
    items: list[dict[str, Any]] = []
    end = 0
    for index, (chunk, output) in enumerate(zip(chunks, outputs)):
        start, end = end, end + len(chunk)
        place = {"embed_dtype": encoding.dtype, "endianness": encoding.endianness, "start": start, "end": end}
        items.append({"index": index} | place | {"shape": output.outputs.data.shape})
    told = {"id": head.id, "created": head.created, "model": head.model, "data": items, "usage": head.usage}
    return b"".join(chunks), told


def classes_answer(head: PoolingHead, outputs: Sequence[RawPoolingOutput], labels: Sequence[str]) -> dict[str, Any]:
    """The likeliest label of each prompt, and the probabilities of all."""
    data = []
    for index, output in enumerate(outputs):
        probs = output.outputs.data
        best = int(np.argmax(probs))
        label = labels[best] if best < len(labels) else None
        data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    return head.listing(data)


def scores_answer(head: PoolingHead, scores: Sequence[ScoringRequestOutput]) -> dict[str, Any]:
    """A score for each pair."""
    return head.listing(
        [{"index": index, "object": "score", "score": each.outputs.score} for index, each in enumerate(scores)]
    )


def ranking_answer(
    head: PoolingHead, scores: Sequence[ScoringRequestOutput], documents: Sequence[Any] | None, top_n: int
) -> dict[str, Any]:
    """The best first. `documents`: as they came; None: they are not repeated."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index].outputs.score)
    results: list[dict[str, Any]] = []
    for index in order[: top_n or len(order)]:
        shown = {} if documents is None else {"document": _document(documents[index])}
        results.append({"index": index} | shown | {"relevance_score": scores[index].outputs.score})
    return {"id": head.id, "model": head.model, "usage": head.usage, "results": results}


def _document(document: Any) -> dict[str, Any]:
    if isinstance(document, str):
        return {"text": document, "multi_modal": None}
    return {"text": None, "multi_modal": document["content"]}
