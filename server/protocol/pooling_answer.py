"""Answers of pooling models, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagoda.common.errors import RequestError
from pagoda.server.protocol.vectors import Encoding
from pagoda.server.requests.pooling_outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput

BaseOutput = PoolingRequestOutput[PoolingOutput]

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
    head: PoolingHead, outputs: Sequence[BaseOutput], encoding: Encoding, kind: str, key: str
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
    head: PoolingHead, outputs: Sequence[BaseOutput], encoding: Encoding
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


def classes_answer(head: PoolingHead, outputs: Sequence[BaseOutput], labels: Sequence[str]) -> dict[str, Any]:
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
