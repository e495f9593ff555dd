"""POST /v2/embed: vectors, as Cohere has them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.server.http.body import Int64, RequestBody, read_body, unsupported
from pagoda.server.http.state import server_of
from pagoda.server.pooling.answer import Array
from pagoda.server.pooling.fields import check_count, renamed
from pagoda.server.pooling.routes import Asked, count_tokens
from pagoda.server.processing.inputs import Prompt
from pagoda.server.processing.scoring import texts_of
from pagoda.server.processing.tokenization import TextOptions

# The body of POST /v2/embed, which is Cohere's, and its answer.

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]
_SIGNED: Final = 128


class CohereEmbedInput(RequestBody):
    """One input, in parts."""

    content: list[dict[str, Any]] = Field(min_length=1)


class CohereEmbedRequest(RequestBody):
    """Vectors of texts. `input_type`: what they are for, one of the names that the model has a text in front for."""

    model: str | None = None
    input_type: str | None = None
    texts: list[str] | None = None
    inputs: list[CohereEmbedInput] | None = None
    output_dimension: Annotated[Int64, Field(ge=1)] | None = None
    embedding_types: list[EmbeddingType] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Annotated[Int64, Field(ge=1)] | None = None
    priority: Int64 | None = 0

    images: Any = unsupported()

    def listed(self, prefixes: Mapping[str, str]) -> list[str]:
        """The texts, each after what goes before its type. Raises RequestError."""
        if (self.texts is None) == (self.inputs is None):
            raise RequestError("texts", "give texts, or inputs")
        if self.texts is not None:
            field, texts = "texts", self.texts
        else:
            field, texts = "inputs", texts_of("inputs", [each.model_dump() for each in self.inputs or ()])
        if not texts:
            raise RequestError(field, f"{field} is empty")
        check_count(field, texts)
        if self.input_type is None:
            return texts
        if self.input_type not in prefixes:
            known = f"it knows {', '.join(sorted(prefixes))}" if prefixes else "it knows none; leave it out"
            raise RequestError("input_type", f"this model has no input_type {self.input_type[:80]!r}: {known}")
        return [prefixes[self.input_type] + text for text in texts]

    @property
    def request_id(self) -> None:
        """Such requests name themselves by header only."""

    @property
    def text_options(self) -> TextOptions:
        """How text becomes tokens."""
        if self.truncate == "NONE":
            return TextOptions()
        return TextOptions(
            truncate_prompt_tokens=-1 if self.max_tokens is None else self.max_tokens,
            truncation_side="left" if self.truncate == "START" else "right",
        )

    @property
    def most_tokens(self) -> int | None:
        """Longest text that is taken, where nothing is cut."""
        return self.max_tokens if self.truncate == "NONE" else None

    def params(self) -> PoolingParams:
        """PoolingParams."""
        return PoolingParams(task="embed", dimensions=self.output_dimension)

    def in_own_names(self, error: RequestError) -> RequestError:
        """An error under the name that the field has in this request."""
        names = {"dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}
        field = names.get(error.field, error.field)
        own = RequestError(field, str(error).replace(error.field, field) if error.field else str(error))
        return renamed(own, "inputs" if self.texts is None else "texts")


def cohere_answer(answer_id: str, body: CohereEmbedRequest, vectors: Sequence[Array], tokens: int) -> dict[str, Any]:
    """The answer, with the vectors in each type that was asked for. Raises RequestError."""
    answer: dict[str, Any] = {
        "response_type": "embeddings_by_type",
        "id": answer_id,
        "embeddings": {
            kind: [_as(kind, each) for each in vectors] for kind in dict.fromkeys(body.embedding_types or ["float"])
        },
    }
    if body.texts is not None:
        answer["texts"] = body.texts
    counted = {"billed_units": {"input_tokens": tokens, "image_tokens": 0}, "tokens": {"input_tokens": tokens}}
    return answer | {"meta": {"api_version": {"version": "2"}} | counted}


def _as(kind: str, vector: Array) -> Any:
    match kind:
        case "float":
            return vector.tolist()
        case "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        case _:
            if len(vector) % 8:
                raise RequestError("embedding_types", f"{kind} packs eight numbers a byte; these are {len(vector)}")
            packed = np.packbits(vector >= 0).astype(np.int16)
            return (packed - _SIGNED if kind == "binary" else packed).tolist()


router = APIRouter(tags=["pooling"])


@router.post("/v2/embed", response_model=None)
async def embed(request: Request) -> Response:
    """Vectors in the types that are asked for."""
    body = await read_body(request, CohereEmbedRequest, server_of(request).config)
    asked = Asked.of(request, body, "embd")
    texts = body.listed(asked.inputs.pooling.prompts)

    def prompts() -> list[Prompt]:
        found = [asked.inputs.parse(text, body.text_options) for text in texts]
        longest = max(len(each.token_ids) for each in found)
        if body.most_tokens is not None and longest > body.most_tokens:
            raise RequestError(
                "max_tokens", f"a text has {longest} tokens, above max_tokens {body.most_tokens}; set truncate to END"
            )
        return found

    outputs = await asked.run(body.params(), prompts, sum(len(text) for text in texts))
    vectors = [output.outputs.data for output in outputs]
    return asked.json(cohere_answer(asked.id, body, vectors, count_tokens(outputs)))
