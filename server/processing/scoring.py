"""Scores of pairs of texts: a cross-encoder reads both in one prompt, an embedder's vectors are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagoda.common.engine.pooling.values import PoolingTask
from pagoda.common.errors import RequestError
from pagoda.server.outputs import Array, RawPoolingOutput, ScoringOutput, ScoringRequestOutput
from pagoda.server.processing.inputs import InputProcessor, PairTemplate, Prompt, TextOptions, shortened

Text = str | Mapping[str, Any]
"""A text, or {"content": [{"type": "text", "text": ...}]}."""

MAX_CHARACTERS: Final = 1 << 25
"""Maximum characters in all pairs of one request; a query counts once per document."""

_TASKS: Final[tuple[PoolingTask, ...]] = ("score", "embed", "token_embed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """How pairs become prompts."""

    text: TextOptions = TextOptions()
    max_query_tokens: int = 0  # Number of tokens kept of each query; 0: all.
    max_document_tokens: int = 0  # Number of tokens kept of each document; 0: all.
    template: PairTemplate | None = None


def texts_of(field: str, value: object) -> list[str]:
    """Return one text or several as a list. Raises RequestError."""
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries:
        raise RequestError(field, f"{field} is empty")
    return [_text(field if entries is not value else f"{field}[{index}]", item) for index, item in enumerate(entries)]


def _text(path: str, value: object) -> str:
    if isinstance(value, str):
        return value
    parts = value.get("content") if isinstance(value, Mapping) else None
    if not isinstance(parts, list):
        raise RequestError(path, f"{path} must be a text, or an object with a list of parts as its content")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(path, f"{path} has a part of type {str(kind)[:40]!r}; only text parts are supported")
        texts.append(part["text"])
    return "\n".join(texts)


class Pairs:
    """Pairs of queries and documents: one query for all documents, or one each. Raises RequestError.

    `fields`: the request's names of the two.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        queries: Sequence[str],
        documents: Sequence[str],
        fields: tuple[str, str] = ("data_1", "data_2"),
    ) -> None:
        if len(queries) not in (1, len(documents)):
            raise RequestError(
                fields[0],
                f"{fields[0]} has {len(queries)} texts and {fields[1]} {len(documents)}; give one, or as many",
            )
        self._inputs = inputs
        self._queries = queries
        self._documents = documents
        self._field = fields[1]
        self.task = self._task()

    def __len__(self) -> int:
        return len(self._documents)

    def _task(self) -> PoolingTask:
        info = self._inputs.pooling
        for task in _TASKS:
            if task in info.tasks:
                return task
        if info.num_labels > 1:
            raise RequestError("model", f"scores need a model with one label; this one has {info.num_labels}")
        raise RequestError("model", f"this model has no scores; it offers {', '.join(info.tasks)}")

    def prompts(self, options: ScoreOptions) -> list[Prompt]:
        """Return the prompts to pool. Raises RequestError."""
        tokenizer = self._inputs.tokenizer
        queries = [shortened(tokenizer, text, options.max_query_tokens) for text in self._queries]
        documents = [shortened(tokenizer, text, options.max_document_tokens) for text in self._documents]
        if self.task != "score":
            if options.template is not None:
                raise RequestError(
                    "chat_template",
                    "chat_template is for cross-encoders; this model embeds each text alone; drop it",
                )
            return [self._inputs.parse(text, options.text) for text in (*queries, *documents)]
        repeated = queries * len(documents) if len(queries) == 1 else queries
        characters = sum(map(len, repeated)) + sum(map(len, documents))
        if characters > MAX_CHARACTERS:
            raise RequestError(
                self._field, f"the pairs have {characters} characters in all; at most {MAX_CHARACTERS} are allowed"
            )
        return [
            self._inputs.pair(query, document, options.text, options.template)
            for query, document in zip(repeated, documents)
        ]

    def scores(self, outputs: Sequence[RawPoolingOutput]) -> list[ScoringRequestOutput]:
        """Return the score of each pair from the outputs of `prompts`. Raises RequestError."""
        if self.task == "score":
            return [ScoringRequestOutput.from_base(output) for output in outputs]
        queries = outputs[: len(self._queries)]
        documents = outputs[len(self._queries) :]
        repeated = list(queries) * len(documents) if len(queries) == 1 else queries
        compare = cosine if self.task == "embed" else late_interaction
        return [
            _compared(query, document, compare(query.outputs.data, document.outputs.data))
            for query, document in zip(repeated, documents)
        ]


def cosine(one: Array, two: Array) -> float:
    """Return the cosine similarity of two vectors; 0 if one of them is zero."""
    one = one.astype(np.float64)
    two = two.astype(np.float64)
    length = float(np.linalg.norm(one) * np.linalg.norm(two))
    return float(one @ two) / length if length else 0.0


def late_interaction(query: Array, document: Array) -> float:
    """Return ColBERT's MaxSim: for each query token the best dot product with a document token, summed."""
    return float((query @ document.T).max(axis=1).sum())


def _compared(query: RawPoolingOutput, document: RawPoolingOutput, score: float) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        f"{query.request_id}_{document.request_id}",
        ScoringOutput(score),
        [*query.prompt_token_ids, *document.prompt_token_ids],
        query.num_cached_tokens + document.num_cached_tokens,
    )
