"""POST /inference/v1/generate: token ids in, token ids out, with SamplingParams as a JSON object."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from pagoda.server.http.body import Ignored, Int64, RequestBody, hint, unsupported
from pagoda.server.http.fields import (
    LOWEST,
    StreamOptions,
    TokenNames,
    chat_logprobs,
    ignored_stream_options,
    prompt_logprobs,
)
from pagoda.server.http.generation import Generation
from pagoda.server.http.response import ResponseBuilder, Usage, respond
from pagoda.server.http.state import ServerState, read_for_model, request_id_of
from pagoda.server.outputs import CompletionOutput, LogprobsOnePosition, RequestOutput
from pagoda.server.processing.inputs import PromptType

_SET_BY_STREAM: Final = ("output_kind", "skip_clone")
_OBJECTS: Final = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {*_SET_BY_STREAM}


class GenerateRequest(RequestBody):
    """A prompt of token ids, as the render routes return it, and how to continue it."""

    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    sampling_params: dict[str, Any] = Field(description="Fields of SamplingParams; default max_tokens: the context.")
    model: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    output_mode: Literal["tokens", "text"] = Field("tokens", description="text: also return the text.")
    return_token_ids: bool | None = Field(None, description="Also return the prompt's token ids.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Int64 = 0

    token_offsets: Any = hint(why="they describe the text, which this route does not read")
    reasoning_ended: Any = hint(why="the prompt's reasoning is read from its tokens")
    reasoning_parser_kwargs: Any = hint(why="the prompt's reasoning is read from its tokens")
    features: Any = unsupported(why="this version serves text only")
    content_parts: Any = unsupported(why="this version serves text only")
    kv_transfer_params: Any = unsupported(why="KV blocks are not transferred between servers", idle=True)
    ec_transfer_params: Any = unsupported(why="this version serves text only")

    def check(self) -> None:
        """Raise RequestError for an unknown field of sampling_params."""
        unknown = next((name for name in self.sampling_params if name not in {*_FIELDS, *_SET_BY_STREAM}), None)
        if unknown is not None:
            field = f"sampling_params.{unknown[:100]}"
            raise RequestError(field, f"{field} is not a field of SamplingParams")

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the ignored parts, stream options without effect among them."""
        yield from super().ignored(path)
        yield from ignored_stream_options(self.stream, self.stream_options)

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the SamplingParams. `defaults`: the model's generation config. Raise RequestError."""
        values = {name: value for name, value in self.sampling_params.items() if name not in _SET_BY_STREAM}
        values = {"max_tokens": defaults.get("max_tokens")} | values
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        try:
            for name in _OBJECTS.keys() & values.keys():
                values[name] = _object(name, values[name])
            params = SamplingParams.from_optional(**values, output_kind=kind)
        except RequestError as error:
            raise self.in_own_names(error) from None
        if self.output_mode == "text" and not params.detokenize:
            raise RequestError("output_mode", "output_mode text needs sampling_params.detokenize true")
        if self.stream and params.prompt_logprobs is not None:
            field = "sampling_params.prompt_logprobs"
            raise RequestError(field, f"{field} cannot be streamed; drop it")
        return params

    def own_name(self, field: str) -> str:
        """Return the path of a SamplingParams field, or of the prompt, in this request."""
        if field in ("prompt", "prompt_token_ids"):
            return "token_ids"
        return f"sampling_params.{field}" if field in _FIELDS else field


def _object(name: str, value: Any) -> Any:
    """Return the params object of a JSON object; None and objects of that type stay. Raise RequestError."""
    if value is None:
        return None
    kind = _OBJECTS[name]
    known_keys = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        raise RequestError(name, f"{name} must be an object")
    if unknown := sorted(value.keys() - known_keys):
        field = f"{name}.{unknown[0][:100]}"
        raise RequestError(field, f"{field} is unknown")
    return kind(**value)


class GenerateBuilder(ResponseBuilder):
    """Builds one response."""

    def __init__(
        self, request: GenerateRequest, params: SamplingParams, request_id: str, model: str, config: ServerConfig
    ) -> None:
        self.usage = Usage(details=config.enable_prompt_tokens_details)
        self._request = request
        self._params = params
        self._id = request_id
        self._model = model
        self._force_usage = config.enable_force_include_usage
        self._choices: dict[int, dict[str, Any]] = {}
        self._prompt: RequestOutput | None = None
        self.names: TokenNames | None = None  # Names for the log-probabilities of output_mode text.

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        is_first = self._prompt is None
        self._note(prompt_index, output)
        options = self._request.stream_options
        for completion in output.outputs:
            if not (completion.token_ids or completion.text or completion.finish_reason):
                continue
            chunk = self._frame([self._choice(completion)])
            if is_first and self._request.return_token_ids:
                chunk["prompt_token_ids"] = output.prompt_token_ids
            is_first = False
            counts = options is not None and options.include_usage and options.continuous_usage_stats
            yield chunk | {"usage": self.usage.as_dict() if counts else None}

    def usage_chunk(self) -> dict[str, Any] | None:
        options = self._request.stream_options
        if not (self._force_usage or (options is not None and options.include_usage)):
            return None
        return self._frame([]) | {"usage": self.usage.as_dict()}

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self._note(prompt_index, output)
        self._choices |= {completion.index: self._choice(completion) for completion in output.outputs}

    def whole(self) -> dict[str, Any]:
        prompt = self._prompt
        assert prompt is not None, "there was an output"
        positions = prompt.prompt_logprobs
        unset = ("prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params")
        return self._frame([self._choices[index] for index in sorted(self._choices)]) | {
            "model": self._model,
            "created": int(time.time()),
            "usage": self.usage.as_dict(),
            "prompt_logprobs": None if positions is None else prompt_logprobs(positions),
            "prompt_token_ids": prompt.prompt_token_ids if self._request.return_token_ids else None,
            **dict.fromkeys(unset),
        }

    def _note(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.count(prompt_index, output)
        self._prompt = output

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"request_id": self._id, "output_mode": self._request.output_mode, "choices": choices}

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        choice = {
            "index": completion.index,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids,
            "logprobs": self._logprobs(completion.logprobs),
            **dict.fromkeys(("routed_experts", "sampling_mask", "weight_versions")),
        }
        return choice | {"text": completion.text} if self._request.output_mode == "text" else choice

    def _logprobs(self, positions: list[LogprobsOnePosition] | None) -> dict[str, Any] | None:
        """Return the log-probabilities; without text, tokens are named by their ids."""
        if self._params.logprobs is None or positions is None:
            return None
        if self.names is not None:
            return {"content": chat_logprobs(positions, self._params.logprobs, self.names)}
        return {"content": [_token_logprobs(position) for position in positions]}


def _token_logprobs(position: LogprobsOnePosition) -> dict[str, Any]:
    """Return one token's entry: the sampled token, then all reported ones, of which it is the first."""
    entries = [
        {"token_id": token, "logprob": max(logprob.logprob, LOWEST), "rank": logprob.rank or None}
        for token, logprob in position.items()
    ]
    return entries[0] | {"top_logprobs": entries}


router = APIRouter(tags=["generate"])


@router.post("/inference/v1/generate", response_model=None)
async def generate(request: Request) -> Response:
    """Continue token ids, streamed or whole."""
    state, body, model = await read_for_model(request, GenerateRequest)
    params = body.params(state.llm().info.sampling_defaults)
    prompt: PromptType = {"prompt_token_ids": body.token_ids, "cache_salt": body.cache_salt}
    request_id = request_id_of(request, body, "generate-tokens")
    try:
        source = Generation(
            state,
            request_id,
            [prompt],
            params,
            model=model,
            priority=body.priority,
            extra_args_name="sampling_params.extra_args",
        )
        builder = GenerateBuilder(body, params, request_id, model, state.config)
        if body.output_mode == "text":
            builder.names = _names(state)
        return await respond(request, state, source, builder, stream=bool(body.stream))
    except RequestError as error:
        raise body.in_own_names(error) from None


def _names(state: ServerState) -> TokenNames:
    """Return the names of tokens. Raise RequestError without a tokenizer."""
    tokenizer = state.tokenizer()
    if tokenizer is None:
        raise RequestError("output_mode", "output_mode text needs a tokenizer (--skip-tokenizer-init); use tokens")
    return TokenNames(tokenizer, as_ids=state.config.return_tokens_as_token_ids)
