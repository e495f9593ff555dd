"""POST /v2/embed (Cohere Embed API)."""

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
from pagoda.server.api.pooling.fields import check_count, renamed
from pagoda.server.api.pooling.routes import PoolingCall, count_tokens
from pagoda.server.http.body import Int64, RequestBody, read_body, unsupported
from pagoda.server.http.state import server_of
from pagoda.server.outputs import Array
from pagoda.server.processing.inputs import Prompt, TextOptions
from pagoda.server.processing.scoring import texts_of

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]
_BINARY_OFFSET: Final = 128  # Offset from unsigned to signed bytes.


class CohereEmbedInput(RequestBody):
    """One input in content parts."""

    content: list[dict[str, Any]] = Field(min_length=1)


class CohereEmbedRequest(RequestBody):
    """Texts to embed. `input_type`: name of one of the model's prompt prefixes."""

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

    def prefixed_texts(self, prefixes: Mapping[str, str]) -> list[str]:
        """Return the texts with the prefix of `input_type`. Raise RequestError."""
        if (self.texts is None) == (self.inputs is None):
            raise RequestError("texts", "set either texts or inputs")
        if self.texts is not None:
            field = "texts"
            texts = self.texts
        else:
            field = "inputs"
            texts = texts_of("inputs", [item.model_dump() for item in self.inputs or ()])
        if not texts:
            raise RequestError(field, f"{field} is empty")
        check_count(field, texts)
        if self.input_type is None:
            return texts
        if self.input_type not in prefixes:
            remedy = f"use one of {', '.join(sorted(prefixes))}" if prefixes else "leave it out"
            raise RequestError("input_type", f"Unsupported input_type {self.input_type[:80]!r}; {remedy}")
        return [prefixes[self.input_type] + text for text in texts]

    @property
    def request_id(self) -> None:
        """None: this API has no such field, only the header."""

    @property
    def text_options(self) -> TextOptions:
        if self.truncate == "NONE":
            return TextOptions()
        return TextOptions(
            truncate_prompt_tokens=-1 if self.max_tokens is None else self.max_tokens,
            truncation_side="left" if self.truncate == "START" else "right",
        )

    @property
    def token_limit(self) -> int | None:
        """Maximum length of a text if texts are not truncated."""
        return self.max_tokens if self.truncate == "NONE" else None

    def params(self) -> PoolingParams:
        return PoolingParams(task="embed", dimensions=self.output_dimension)

    def in_own_names(self, error: RequestError) -> RequestError:
        names = {"dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}
        field = names.get(error.field)
        if field is not None:
            error = error.renamed(field, str(error).replace(error.field, field))
        return renamed(error, "inputs" if self.texts is None else "texts")


def _response(request_id: str, body: CohereEmbedRequest, vectors: Sequence[Array], tokens: int) -> dict[str, Any]:
    """Return the response with the vectors in each requested type. Raise RequestError."""
    kinds = dict.fromkeys(body.embedding_types or ["float"])
    response: dict[str, Any] = {
        "response_type": "embeddings_by_type",
        "id": request_id,
        "embeddings": {kind: [_encoded(kind, vector) for vector in vectors] for kind in kinds},
    }
    if body.texts is not None:
        response["texts"] = body.texts
    counts = {"billed_units": {"input_tokens": tokens, "image_tokens": 0}, "tokens": {"input_tokens": tokens}}
    return response | {"meta": {"api_version": {"version": "2"}} | counts}


def _encoded(kind: str, vector: Array) -> Any:
    match kind:
        case "float":
            return vector.tolist()
        case "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        case _:
            if len(vector) % 8:
                raise RequestError("embedding_types", f"{kind} needs a dimension divisible by 8; it is {len(vector)}")
            packed = np.packbits(vector >= 0).astype(np.int16)
            return (packed - _BINARY_OFFSET if kind == "binary" else packed).tolist()


router = APIRouter(tags=["pooling"])


@router.post("/v2/embed", response_model=None)
async def embed(request: Request) -> Response:
    """Embed texts (Cohere Embed API)."""
    body = await read_body(request, CohereEmbedRequest, server_of(request).config)
    call = PoolingCall.of(request, body, "embd")
    texts = body.prefixed_texts(call.inputs.pooling.prompts)

    def prompts() -> list[Prompt]:
        parsed = [call.inputs.parse(text, body.text_options) for text in texts]
        longest = max(len(prompt.token_ids) for prompt in parsed)
        if body.token_limit is not None and longest > body.token_limit:
            raise RequestError(
                "max_tokens", f"a text has {longest} tokens, above max_tokens {body.token_limit}; set truncate to END"
            )
        return parsed

    outputs = await call.run(body.params(), prompts, sum(len(text) for text in texts))
    vectors = [output.outputs.data for output in outputs]
    return call.json(_response(call.id, body, vectors, count_tokens(outputs)))
