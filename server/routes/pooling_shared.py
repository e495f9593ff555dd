"""What the routes of pooling models share: the request's place in the server, its run, the responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.server.http.pooling_work import BaseOutput, PoolingWork
from pagoda.server.http.state import ServerState
from pagoda.server.http.stream import encode_json, until_left
from pagoda.server.protocol.head import id_header
from pagoda.server.protocol.pooling_answer import PoolingHead
from pagoda.server.requests.pooling_inputs import PooledPrompt, PoolingInputs
from pagoda.server.routes.shared import Identified, answer_id, server_of


class PoolingBody(Identified, Protocol):
    """What the bodies have in common."""

    model: str | None
    priority: int | None

    def in_own_names(self, error: RequestError) -> RequestError:
        """An error under the name that the field has in this request."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that a pooling model can answer."""

    request: Request
    body: PoolingBody
    state: ServerState
    id: str
    model: str
    inputs: PoolingInputs

    @classmethod
    def of(cls, request: Request, body: PoolingBody, prefix: str) -> Asked:
        """Raises ModelNotFoundError, UnavailableError, or RequestError when the model generates."""
        state = server_of(request)
        model = state.model_name(body.model)
        return cls(request, body, state, answer_id(request, body, prefix), model, state.llm().pooling_inputs)

    async def run(
        self, params: PoolingParams, make: Callable[[], list[PooledPrompt]], characters: int
    ) -> list[BaseOutput]:
        """The outputs of the prompts that `make` makes of so many characters. Raises what PoolingWork.run raises."""
        body = self.body
        work = PoolingWork(self.state, self.id, params, priority=body.priority or 0, user=getattr(body, "user", None))
        try:
            running = work.run(make, characters)
            return await until_left(self.request.receive, self.state.stopping, running)
        except RequestError as error:
            raise body.in_own_names(error) from None

    def head(self, outputs: Sequence[BaseOutput]) -> PoolingHead:
        """What the answer begins and ends with."""
        return PoolingHead(self.id, int(time.time()), self.model, count_tokens(outputs))

    def json(self, answer: dict[str, Any]) -> Response:
        """The response."""
        return Response(encode_json(answer), media_type="application/json", headers=self.headers)

    @property
    def headers(self) -> dict[str, str]:
        """Of every response."""
        return id_header(self.id) if self.state.config.enable_request_id_headers else {}


def count_tokens(outputs: Sequence[BaseOutput]) -> int:
    """Tokens of all prompts."""
    return sum(len(output.prompt_token_ids) for output in outputs)
