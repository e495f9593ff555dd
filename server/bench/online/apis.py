"""The APIs that `bench serve` drives: a request's body, and what each event of its answer says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagoda.server.bench.datasets.samples import DatasetSample
from pagoda.server.bench.online.client import Piece, ReadPiece
from pagoda.server.cli.client.http_client import ApiError


@dataclass(frozen=True, slots=True)
class EarlierTurns:
    """The earlier messages of a conversation: each user message with the server's answer."""

    turns: tuple[tuple[str, str], ...] = ()

    def then(self, message: str, answer: str) -> EarlierTurns:
        """Return the conversation with another turn."""
        return EarlierTurns((*self.turns, (message, answer)))

    def messages(self, message: str) -> list[dict[str, str]]:
        """Return it as chat messages that end with a new one."""
        earlier = [
            {"role": role, "content": text} for turn in self.turns for role, text in zip(("user", "assistant"), turn)
        ]
        return [*earlier, {"role": "user", "content": message}]

    def text(self, message: str) -> str:
        """Return it as one text that ends with a new message."""
        return "".join(user + answer for user, answer in self.turns) + message


@dataclass(frozen=True, slots=True)
class Api:
    """An API. `body`: the fields for a prompt behind a conversation; `limit`: the field of the output length."""

    body: Callable[[DatasetSample, EarlierTurns], dict[str, Any]]
    read: ReadPiece
    limit: str = ""  # Field of the token limit; empty if nothing is generated.
    logprobs: Callable[[int], Mapping[str, Any]] = lambda count: {}
    usage: bool = False  # The stream reports usage only if it is requested.


def _completion(sample: DatasetSample, before: EarlierTurns) -> dict[str, Any]:
    return {"prompt": before.text(sample.text) if sample.text else list(sample.token_ids)}


def _chat(sample: DatasetSample, before: EarlierTurns) -> dict[str, Any]:
    return {"messages": before.messages(sample.text)}


def _responses(sample: DatasetSample, before: EarlierTurns) -> dict[str, Any]:
    return {"input": before.messages(sample.text) if before.turns else sample.text, "store": False}


def _embeddings(sample: DatasetSample, before: EarlierTurns) -> dict[str, Any]:
    return {"input": [sample.text, *sample.more] if sample.more else sample.text, "encoding_format": "float"}


def _pooling(sample: DatasetSample, before: EarlierTurns) -> dict[str, Any]:
    return {"input": [sample.text, *sample.more] if sample.more else sample.text}


def _rerank(sample: DatasetSample, before: EarlierTurns) -> dict[str, Any]:
    return {"query": sample.text, "documents": list(sample.more)}


def read_completion(event: Mapping[str, Any]) -> Piece:
    """Each event with choices has output, whether or not it is visible."""
    choices = event.get("choices") or ()
    text = (choices[0].get("text") or "") if choices else ""
    return _with_usage(event, bool(choices), text)


def read_chat(event: Mapping[str, Any]) -> Piece:
    """The first event has only a role, the last may have only a finish reason."""
    deltas = [(choice.get("delta") or {}, choice) for choice in event.get("choices") or ()]
    counts = any(_has_output(delta) or not ("role" in delta or choice.get("finish_reason")) for delta, choice in deltas)
    text = (deltas[0][0].get("content") or "") if deltas else ""
    return _with_usage(event, counts, text)


def read_responses(event: Mapping[str, Any]) -> Piece:
    """Deltas are output; the last event has the usage. Raises ApiError for a failure."""
    kind = str(event.get("type", ""))
    if kind in ("response.failed", "error"):
        error = (event.get("response") or {}).get("error") or event
        raise ApiError(str(error.get("message", error)))
    if kind.endswith(".delta"):
        return Piece(counts=True, text=str(event.get("delta", "")) if kind == "response.output_text.delta" else "")
    if kind in ("response.completed", "response.incomplete"):
        usage = (event.get("response") or {}).get("usage") or {}
        return Piece(prompt_tokens=usage.get("input_tokens"), output_tokens=usage.get("output_tokens"), is_last=True)
    return Piece()


def read_vectors(answer: Mapping[str, Any]) -> Piece:
    """Return the usage of a whole answer."""
    usage = answer.get("usage") or {}
    return Piece(counts=True, prompt_tokens=usage.get("prompt_tokens") or usage.get("total_tokens"), output_tokens=0)


def _has_output(delta: Mapping[str, Any]) -> bool:
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal"))


def _with_usage(event: Mapping[str, Any], counts: bool, text: str) -> Piece:
    usage = event.get("usage") or {}
    return Piece(counts, text, usage.get("prompt_tokens"), usage.get("completion_tokens"))


COMPLETIONS: Final = Api(_completion, read_completion, "max_tokens", lambda count: {"logprobs": count}, True)

APIS: Final[Mapping[str, Api]] = {
    "openai": COMPLETIONS,
    "vllm": COMPLETIONS,
    "openai-chat": Api(
        _chat, read_chat, "max_completion_tokens", lambda count: {"logprobs": True, "top_logprobs": count}, True
    ),
    "openai-responses": Api(
        _responses,
        read_responses,
        "max_output_tokens",
        lambda count: {"top_logprobs": count, "include": ["message.output_text.logprobs"]},
    ),
    "openai-embeddings": Api(_embeddings, read_vectors),
    "openai-embeddings-chat": Api(_chat, read_vectors),
    "vllm-pooling": Api(_pooling, read_vectors),
    "vllm-rerank": Api(_rerank, read_vectors),
}
"""--backend -> its API."""


def request_body(
    api: Api,
    sample: DatasetSample,
    before: EarlierTurns,
    *,
    model: str,
    fields: Mapping[str, Any],
    logprobs: int | None,
) -> dict[str, Any]:
    """Return the body of a request. `fields` are added as they are and take precedence."""
    body: dict[str, Any] = {"model": model, **api.body(sample, before)}
    if api.limit:
        body |= {api.limit: sample.output_len, "stream": True}
    if api.usage:
        body["stream_options"] = {"include_usage": True}
    if logprobs is not None:
        body.update(api.logprobs(logprobs))
    return {**body, **fields}


def lora_names(modules: Sequence[str], assignment: str, count: int, choose: Callable[[int], int]) -> list[str]:
    """Return an adapter for each request, in turn or at random. `choose(n)` returns a random index below n."""
    if assignment == "round-robin":
        return [modules[index % len(modules)] for index in range(count)]
    return [modules[choose(len(modules))] for _ in range(count)]
