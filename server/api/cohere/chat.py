"""POST /v2/chat and /cohere/v2/chat (Cohere Chat API): request body, response builder, route."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagoda.server.api.chat_prompt import ChatPrompt, Conversation, prepare
from pagoda.server.api.openai.chat import check_messages, ignored_of_tools, offered_tools
from pagoda.server.http.body import Ignored, Int64, RequestBody, hint, note_ignored, unsupported
from pagoda.server.http.errors import LOST, UnavailableError, http_error
from pagoda.server.http.fields import LOWEST, TokenNames, check_template_kwargs
from pagoda.server.http.generation import Generation, num_prompt_tokens
from pagoda.server.http.preview import PreviewOptions, preview
from pagoda.server.http.response import DONE, EventStyle, event, respond
from pagoda.server.http.state import ServerState, read_for_model
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.parsers.output_parser import DeltaParser
from pagoda.server.parsers.parser import BlockBuilder, BlockDelta, BlockEvent, BlockStart, BlockStop, OutputBlock

MAX_STOPS: Final = 64

# Request body.


class CohereThinking(RequestBody):
    """Whether and how long the model thinks."""

    type: Literal["enabled", "disabled"]
    token_budget: Annotated[int, Field(ge=1)] | None = None


class CohereFormat(RequestBody):
    """Format of the answer. `schema` is the older name of `json_schema`."""

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class CohereChatRequest(RequestBody):
    """A conversation to continue. Omitted sampling fields take the model's default."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    stream: bool | None = False
    tools: list[dict[str, Any]] | None = None
    strict_tools: bool | None = Field(None, description="Arguments of calls match their schemas.")
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: list[str | dict[str, Any]] | None = Field(None, description="Passed to the chat template.")
    response_format: CohereFormat | None = None
    safety_mode: Literal["CONTEXTUAL", "STRICT", "OFF", "NONE"] | None = Field(
        None, description="Passed to the chat template."
    )
    max_tokens: Int64 | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    seed: Int64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: Int64 | None = None
    p: float | None = None
    logprobs: bool | None = None
    thinking: CohereThinking | None = None
    priority: Int64 | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    citation_options: Any = hint(why="answers have no citations")
    watermarking: Any = unsupported()
    kv_transfer_params: Any = unsupported()

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the ignored parts, unsupported tools and unknown fields of tools among them."""
        yield from super().ignored(path)
        if self.tools:
            yield from ignored_of_tools(self.tools)

    def check(self) -> None:
        """Raise RequestError for an invalid combination of fields or an invalid message."""
        check_template_kwargs(self.chat_template_kwargs)
        if self.stream and self.logprobs:
            raise RequestError("logprobs", "logprobs cannot be streamed; leave one of them out")
        if self.tool_choice == "REQUIRED" and not self.tools:
            raise RequestError("tool_choice", "tool_choice REQUIRED needs tools")

    def conversation(self) -> Conversation:
        """Return the conversation in common form. Raise RequestError."""
        messages = [chat_message(index, message) for index, message in enumerate(self.messages)]
        check_messages("messages", messages)
        tools = offered_tools(self.tools or ())
        for tool in tools if self.strict_tools else ():
            tool["function"] = {**tool["function"], "strict": True}
        choice: Literal["auto", "none", "required"] = "auto" if tools else "none"
        if self.tool_choice is not None:
            choice = "required" if self.tool_choice == "REQUIRED" else "none"
        return Conversation(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            reasoning_effort="none" if self._thinks is False else None,
            documents=None if self.documents is None else list(map(_document, self.documents)),
            keywords=self._keywords(),
        )

    def params(self, defaults: Mapping[str, Any], *, thinks: bool) -> SamplingParams:
        """Return the SamplingParams. `defaults`: the model's. `thinks`: a thinking budget can be kept."""
        request_values: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "top_k": self.k,
            "top_p": self.p,
        }
        applicable = {name: value for name, value in defaults.items() if request_values.get(name) is None}
        return SamplingParams.from_optional(
            **request_values | applicable,
            stop=self.stop_sequences,
            logprobs=0 if self.logprobs else None,
            structured_outputs=self._structure(),
            thinking_token_budget=self.thinking.token_budget if thinks and self.thinking is not None else None,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
        )

    def own_name(self, field: str) -> str:
        """Return this request's name for a field of SamplingParams or chat completions."""
        names = {
            "top_k": "k",
            "top_p": "p",
            "stop": "stop_sequences",
            "prompt": "messages",
            "structured_outputs": "tools" if self.response_format is None else "response_format",
            "thinking_token_budget": "thinking.token_budget",
            "reasoning_effort": "thinking",
        }
        return names.get(field, field)

    @property
    def _thinks(self) -> bool | None:
        return None if self.thinking is None else self.thinking.type == "enabled"

    def _keywords(self) -> dict[str, Any]:
        keywords: dict[str, Any] = {"enable_thinking": True, "thinking": True} if self._thinks else {}
        if self.safety_mode is not None:
            keywords["safety_mode"] = self.safety_mode
        return keywords | (self.chat_template_kwargs or {})

    def _structure(self) -> StructuredOutputsParams | None:
        form = self.response_format
        if form is None or form.type == "text":
            return None
        schema = form.json_schema if form.json_schema is not None else form.schema_
        return StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)


def chat_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the format of chat completions. Raise RequestError."""
    where = f"messages[{index}].content"
    role = message.get("role")
    content = message.get("content")
    converted = {name: value for name, value in message.items() if name not in ("citations", "tool_plan")}
    if role == "developer":
        converted["role"] = "system"
    elif role == "tool":
        converted["content"] = "\n".join(_texts(where, content, ("text", "document")))
    elif role == "assistant":
        parts = _parts(where, content)
        thinking = [str(part.get("thinking", "")) for part in parts if part.get("type") == "thinking"]
        spoken = [part for part in parts if part.get("type") != "thinking"]
        converted["content"] = "\n".join(_texts(where, spoken, ("text",)))
        if thinking or message.get("tool_plan"):
            converted["reasoning_content"] = "\n".join([*thinking, *filter(None, [message.get("tool_plan")])])
    return converted


def _parts(where: str, content: Any) -> list[dict[str, Any]]:
    """Return the content as a list of parts. Raise RequestError."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RequestError(where, f"{where} must be a string or a list of objects")
    return content


def _texts(where: str, content: Any, kinds: Sequence[str]) -> Iterator[str]:
    """Yield the text of each part; of a document its data as JSON. Raise RequestError."""
    for number, part in enumerate(_parts(where, content)):
        kind = part.get("type")
        if kind not in kinds:
            message = f"{where}[{number}].type must be {' or '.join(kinds)}, not {str(kind)[:60]!r}"
            raise RequestError(f"{where}[{number}]", message)
        if kind == "text":
            yield str(part.get("text", ""))
        else:
            yield json.dumps(_document(part.get("document") or {}), ensure_ascii=False)


def _document(document: str | dict[str, Any]) -> dict[str, Any]:
    """Return a document as chat templates read it: its data and its id in one object."""
    if isinstance(document, str):
        return {"text": document}
    data = document.get("data", {})
    fields = {"text": data} if isinstance(data, str) else dict(data) if isinstance(data, dict) else {}
    return fields | ({"id": document["id"]} if "id" in document else {})


# Response builder.


class CohereChatBuilder:
    """Builds one response and its stream events. Implements ResponseBuilder."""

    def __init__(self, response_id: str, parser: DeltaParser, names: TokenNames | None) -> None:
        self._id = response_id
        self._parser = parser
        self._names = names  # None: the response has no log-probabilities.
        self._blocks = BlockBuilder()
        self._content: list[OutputBlock] = []
        self._calls: list[tuple[str, OutputBlock]] = []  # Tool calls with their ids.
        self._logprobs: list[dict[str, Any]] = []
        self._finish_reason = "ERROR"
        self._input = self._cached = self._output = 0
        self._started = False

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Yield the events for an output. Raise UnavailableError if the server aborted the generation."""
        self._input = num_prompt_tokens(output)
        self._cached = output.num_cached_tokens or 0
        if not self._started:
            self._started = True
            empty: dict[str, Any] = {"content": [], "tool_plan": "", "tool_calls": [], "citations": []}
            yield {"id": self._id, "type": "message-start", "delta": {"message": {"role": "assistant"} | empty}}
        for completion in output.outputs:
            self._output += len(completion.token_ids)
            self._note_logprobs(completion)
            for delta in self._parser.feed(completion):
                yield from self._block_events(self._blocks.feed(delta.events))
            if completion.finish_reason is not None:
                yield from self._block_events(self._blocks.finish())
                self._finish_reason = self._reason(completion)

    def usage_chunk(self) -> dict[str, Any]:
        delta = {"finish_reason": self._finish_reason, "usage": self._usage()}
        return {"type": "message-end", "id": self._id, "delta": delta}

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        for _ in self.chunks(prompt_index, output):
            pass

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        if self._content or not self._calls:
            message["content"] = [_content(block, block.text) for block in self._content]
        if self._calls:
            message["tool_calls"] = [_call(call_id, block, block.text) for call_id, block in self._calls]
        answer = {"id": self._id, "finish_reason": self._finish_reason, "message": message, "usage": self._usage()}
        return answer | ({"logprobs": self._logprobs} if self._names is not None else {})

    def _usage(self) -> dict[str, Any]:
        tokens = {"input_tokens": self._input, "output_tokens": self._output}
        return {"billed_units": tokens, "tokens": tokens, "cached_tokens": self._cached}

    def _reason(self, completion: CompletionOutput) -> str:
        if completion.finish_reason == "length":
            return "MAX_TOKENS"
        if completion.finish_reason != "stop":
            raise UnavailableError("the server ended the response before it was complete")
        if isinstance(completion.stop_reason, str):
            return "STOP_SEQUENCE"
        return "TOOL_CALL" if self._calls else "COMPLETE"

    def _note_logprobs(self, completion: CompletionOutput) -> None:
        if self._names is None:
            return
        for position in completion.logprobs or ():
            token, sampled = next(iter(position.items()))
            text = self._names.text(token, sampled)
            logprob = max(sampled.logprob, LOWEST)
            self._logprobs.append({"text": text, "token_ids": [token], "logprobs": [logprob]})

    def _block_events(self, events: Iterable[BlockEvent]) -> Iterator[dict[str, Any]]:
        for block_event in events:
            block = block_event.block
            is_call = block.kind == "call"
            name = "tool-call" if is_call else "content"
            if isinstance(block_event, BlockStart):
                if is_call:
                    self._calls.append((block.call_id or f"call_{uuid.uuid4().hex}", block))
                else:
                    self._content.append(block)
            index = len(self._calls if is_call else self._content) - 1
            match block_event:
                case BlockStart() if is_call:
                    yield _event(f"{name}-start", index, {"tool_calls": _call(*self._calls[-1], "")})
                case BlockStart():
                    yield _event(f"{name}-start", index, {"content": _content(block, "")})
                case BlockDelta(_, text) if is_call:
                    yield _event(f"{name}-delta", index, {"tool_calls": {"function": {"arguments": text}}})
                case BlockDelta(_, text):
                    field = "thinking" if block.kind == "reasoning" else "text"
                    yield _event(f"{name}-delta", index, {"content": {field: text}})
                case BlockStop():
                    yield {"type": f"{name}-end", "index": index}


def _event(kind: str, index: int, message: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "index": index, "delta": {"message": message}}


def _content(block: OutputBlock, text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text} if block.kind == "reasoning" else {"type": "text", "text": text}


def _call(call_id: str, block: OutputBlock, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _failure(error: BaseException) -> bytes:
    """Return the events that end a failed stream."""
    delta = {"error": http_error(error).message, "finish_reason": "ERROR"}
    return event({"type": "message-end", "delta": delta}) + DONE


_STYLE: Final = EventStyle(failure=_failure, lost=_failure(LOST))


router = APIRouter(tags=["chat"])


async def _prepared(request: Request, state: ServerState, body: CohereChatRequest) -> ChatPrompt:
    """Return the prompt, with its ignored parts noted. Raise RequestError."""
    params = body.params(state.llm().info.sampling_defaults, thinks=state.formats.reasoning is not None)
    chat = await prepare(state, body.conversation(), params)
    note_ignored(request, chat.ignored, body.own_name)
    return chat


@router.post("/v2/chat", response_model=None)
@router.post("/cohere/v2/chat", response_model=None, include_in_schema=False)
async def cohere_chat(request: Request) -> Response:
    """Continue a conversation, streamed or whole (Cohere Chat API)."""
    state, body, model = await read_for_model(request, CohereChatRequest)
    try:
        chat = await _prepared(request, state, body)
        response_id = f"chat-{uuid.uuid4().hex}"
        generation = Generation(state, response_id, [chat], chat.params, model=model, priority=body.priority or 0)
        parser = DeltaParser(chat.reader(), None, skip_special_tokens=chat.params.skip_special_tokens)
        names = TokenNames(state.tokenizer(), as_ids=state.config.return_tokens_as_token_ids) if body.logprobs else None
        builder = CohereChatBuilder(response_id, parser, names)
        return await respond(request, state, generation, builder, stream=bool(body.stream), style=_STYLE)
    except RequestError as error:
        raise body.in_own_names(error) from None


@router.post("/v2/chat/render", response_model=None)
@router.post("/cohere/v2/chat/render", response_model=None, include_in_schema=False)
async def render_cohere_chat(request: Request) -> dict[str, Any]:
    """Return the token ids and sampling parameters of a conversation without running it."""
    state, body, model = await read_for_model(request, CohereChatRequest)
    options = PreviewOptions(stream=bool(body.stream), priority=body.priority or 0, special_tokens=False)
    try:
        chat = await _prepared(request, state, body)
        return await preview(state, f"chat-{uuid.uuid4().hex}", model, chat, chat.params, options)
    except RequestError as error:
        raise body.in_own_names(error) from None
