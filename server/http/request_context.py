"""What the completion routes share: the server behind a request, ids, and the head of an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Protocol

from fastapi import Request

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.http.answer import OutputSource, ResponseBuilder
from pagoda.server.http.candidates import BeamGeneration, BestOf
from pagoda.server.http.fields.logprobs import TokenNames
from pagoda.server.http.fields.sampling import SamplingFields
from pagoda.server.http.fields.usage import REQUEST_ID_HEADER, ResponseMeta, Usage
from pagoda.server.http.generation import Generation
from pagoda.server.http.request_log import LONGEST_ID
from pagoda.server.http.state import ServerState
from pagoda.server.processing.beams import BeamText
from pagoda.server.processing.inputs import PromptType


def server_of(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state


class Identified(Protocol):
    """A body that may name its request."""

    @property
    def request_id(self) -> str | None:
        """Its name, if it has one."""
        ...


class ToModel(Protocol):
    """The body of a request that a model answers."""

    @property
    def model(self) -> str | None:
        """The model's name; None: the one that is served."""
        ...

    def check(self) -> None:
        """Raise RequestError for what no single field shows."""
        ...


def model_of(state: ServerState, body: ToModel) -> str:
    """The name of the model that answers. Raises ModelNotFoundError, UnavailableError, or RequestError as `check`."""
    model = state.model_name(body.model)
    state.llm()
    body.check()
    return model


def answer_id(request: Request, body: Identified, prefix: str) -> str:
    """`prefix` and the id that the body, the X-Request-Id header, or chance gives. Raises RequestError."""
    header = request.headers.get(REQUEST_ID_HEADER, "")
    if len(header) > LONGEST_ID:
        raise RequestError("request_id", f"the X-Request-Id header is longer than {LONGEST_ID} characters")
    return f"{prefix}-{body.request_id or header or uuid.uuid4().hex}"


def answer_head(state: ServerState, body: SamplingFields, answer_id: str, model: str) -> ResponseMeta:
    """What the answer begins with."""
    config = state.config
    as_ids = config.return_tokens_as_token_ids if body.return_tokens_as_token_ids is None else None
    return ResponseMeta(
        id=answer_id,
        created=int(time.time()),
        model=model,
        usage=Usage(details=config.enable_prompt_tokens_details),
        names=TokenNames(state.tokenizer(), as_ids=bool(body.return_tokens_as_token_ids if as_ids is None else as_ids)),
        stream_options=body.stream_options,
        force_usage=config.enable_force_include_usage,
    )


def work_of(
    state: ServerState, body: SamplingFields, request_id: str, prompts: Sequence[PromptType], params: SamplingParams
) -> OutputSource:
    """What answers a request: samples, or a beam search. Raises RequestError."""
    body.check_answered()
    priority, llm = body.priority or 0, state.llm()
    if not body.use_beam_search:
        return Generation(state, request_id, prompts, params, priority=priority, user=body.user)
    search = body.beam_search_params(params, llm.max_model_len)
    text = BeamText(
        state.tokenizer(),
        params.skip_special_tokens,
        params.spaces_between_special_tokens,
        search.include_stop_str_in_output,
    )
    return BeamGeneration(
        state, request_id, prompts, search, text, cache_salt=body.cache_salt, priority=priority, user=body.user
    )


def best_of(answer: ResponseBuilder, body: SamplingFields, head: ResponseMeta) -> ResponseBuilder:
    """The answer, of more than were asked for when the request says so."""
    return answer if body.best_of is None else BestOf(answer, body.n or 1, head.usage)
