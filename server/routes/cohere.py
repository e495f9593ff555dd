"""POST /v2/embed: vectors, as Cohere has them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.errors import RequestError
from pagoda.server.http.body import read_body
from pagoda.server.protocol.cohere import CohereEmbedRequest, cohere_answer
from pagoda.server.requests.pooling_inputs import PooledPrompt
from pagoda.server.routes.pooling_shared import Asked, count_tokens
from pagoda.server.routes.shared import server_of

router = APIRouter(tags=["pooling"])


@router.post("/v2/embed", response_model=None)
async def embed(request: Request) -> Response:
    """Vectors in the types that are asked for."""
    body = await read_body(request, CohereEmbedRequest, server_of(request).config)
    asked = Asked.of(request, body, "embd")
    texts = body.listed(asked.inputs.pooling.prompts)

    def prompts() -> list[PooledPrompt]:
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
