"""Scores of pairs of texts, by whatever the model is: a cross-encoder reads both, an embedder's vectors are compared.

Knows prompts and vectors. Does not know who runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagoda.common.engine.pooling import PoolingTask
from pagoda.common.errors import RequestError
from pagoda.server.outputs import Array, RawPoolingOutput, ScoringOutput, ScoringRequestOutput
from pagoda.server.processing.inputs import InputProcessor, PairTemplate, Prompt
from pagoda.server.processing.tokenization import TextOptions, shortened

Text = str | Mapping[str, Any]
"""A text, or {"content": [{"type": "text", "text": ...}]}."""

MAX_CHARACTERS: Final = 1 << 25
"""Most characters in all pairs of one request; a query is read once for each of its documents."""

_TASKS: Final[tuple[PoolingTask, ...]] = ("score", "embed", "token_embed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """How pairs become prompts. `most_query` and `most_document`: tokens kept of each text, 0 keeps all."""

    text: TextOptions = TextOptions()
    most_query: int = 0
    most_document: int = 0
    template: PairTemplate | None = None


def texts_of(field: str, value: object) -> list[str]:
    """One text or several, as a list. Raises RequestError."""
    many = value if isinstance(value, list | tuple) else [value]
    if not many:
        raise RequestError(field, f"{field} is empty")
    return [_text(field if many is not value else f"{field}[{index}]", each) for index, each in enumerate(many)]


def _text(place: str, value: object) -> str:
    if isinstance(value, str):
        return value
    parts = value.get("content") if isinstance(value, Mapping) else None
    if not isinstance(parts, list):
        raise RequestError(place, f"{place} must be a text, or an object with a list of parts as its content")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(place, f"{place} has a part of type {str(kind)[:40]!r}; only text parts are supported")
        texts.append(part["text"])
    return "\n".join(texts)


class Pairs:
    """Queries and documents: one with one, one with many, or as many with as many. Raises RequestError.

    `fields`: what the two are called where they came from.
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
        self._inputs, self._queries, self._documents = inputs, queries, documents
        self._field = fields[1]
        self.task = self._task()

    def __len__(self) -> int:
        return len(self._documents)

    def _task(self) -> PoolingTask:
        offered = self._inputs.pooling
        for task in _TASKS:
            if task in offered.tasks:
                return task
        if offered.num_labels > 1:
            raise RequestError("model", f"scores need a model with one label; this one has {offered.num_labels}")
        raise RequestError("model", f"this model gives no scores; it offers {', '.join(offered.tasks)}")

    def prompts(self, options: ScoreOptions) -> list[Prompt]:
        """What the model is to read. Raises RequestError."""
        tokenizer = self._inputs.tokenizer
        queries = [shortened(tokenizer, text, options.most_query) for text in self._queries]
        documents = [shortened(tokenizer, text, options.most_document) for text in self._documents]
        if self.task != "score":
            if options.template is not None:
                raise RequestError(
                    "chat_template", "templates are for models that read both texts; this one reads each alone"
                )
            return [self._inputs.parse(text, options.text) for text in (*queries, *documents)]
        wide = queries * len(documents) if len(queries) == 1 else queries
        characters = sum(map(len, wide)) + sum(map(len, documents))
        if characters > MAX_CHARACTERS:
            raise RequestError(
                self._field, f"the pairs have {characters} characters in all; at most {MAX_CHARACTERS} are allowed"
            )
        return [self._inputs.pair(*pair, options.text, options.template) for pair in zip(wide, documents)]

    def scores(self, outputs: Sequence[RawPoolingOutput]) -> list[ScoringRequestOutput]:
        """A score for each pair, of the outputs of `prompts`. Raises RequestError."""
        if self.task == "score":
            return [ScoringRequestOutput.from_base(output) for output in outputs]
        queries, documents = outputs[: len(self._queries)], outputs[len(self._queries) :]
        wide = list(queries) * len(documents) if len(queries) == 1 else queries
        compare = cosine if self.task == "embed" else late_interaction
        return [
            _compared(query, document, compare(query.outputs.data, document.outputs.data))
            for query, document in zip(wide, documents)
        ]


def cosine(one: Array, two: Array) -> float:
    """Cosine of the angle between two vectors; 0 when one of them is no direction."""
    one, two = one.astype(np.float64), two.astype(np.float64)
    length = float(np.linalg.norm(one) * np.linalg.norm(two))
    return float(one @ two) / length if length else 0.0


def late_interaction(query: Array, document: Array) -> float:
    """Each token of the query with the document's token that suits it best, added up (ColBERT's MaxSim)."""
    return float((query @ document.T).max(axis=1).sum())


def _compared(query: RawPoolingOutput, document: RawPoolingOutput, score: float) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        f"{query.request_id}_{document.request_id}",
        ScoringOutput(score),
        [*query.prompt_token_ids, *document.prompt_token_ids],
        query.num_cached_tokens + document.num_cached_tokens,
    )
