"""The page of troubleshooting: what each class of errors means, and what helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pagoda.common import errors
from pagoda.common.errors import MEMORY_REMEDY, PagodaError
from pagoda.server.cli.batch.files import OutputError
from pagoda.server.cli.client.http_client import ApiError
from pagoda.server.core_client.client import NeverFitsError, OverLimitError
from pagoda.server.http import errors as http_errors
from pagoda.server.http.errors import http_error


@dataclass(frozen=True, slots=True)
class Advice:
    """What stands in an entry of the page beside the class's own description."""

    text: str  # how the error begins or what it looks like
    cause: str
    remedy: str


START: Final[dict[type[PagodaError], Advice]] = {
    errors.ConfigError: Advice(
        "`pagoda: error: --flag: ...`, exit status 2",
        "A flag, key, variable or keyword has a value that this machine, backend or model does not support, or two of "
        "them exclude each other.",
        "The line names the flag and the value to use. `pagoda serve ... --explain-config` shows every setting with "
        "its source without starting; `pagoda doctor` checks the machine; `--log-error-stack` adds the traceback.",
    ),
    errors.ModelError: Advice(
        "`pagoda: error: ...`, exit status 2, with the path of a folder or file",
        "The path or Hub id is wrong, the architecture is not known, or a file such as the tokenizer is missing or "
        "invalid.",
        "Compare the architecture with [models](models.md); `--model-impl transformers` runs many others. Download the "
        "whole repository; `HF_HUB_OFFLINE=1` uses only what is there.",
    ),
    errors.WeightError: Advice(
        "`pagoda: error: ...`, exit status 2, with the name of a tensor",
        "A weight file is truncated, damaged, incomplete, or belongs to another configuration.",
        "Download the named file again. A tensor that is left over or missing means that `config.json` and the weights "
        "are of different models.",
    ),
}
"""Errors that end the start of a command."""

REQUESTS: Final[dict[type[PagodaError], Advice]] = {
    errors.RequestError: Advice(
        "`... is not supported: ...; leave it out`, `unknown field ...; did you mean ...?`, or the field and its bound",
        "A field of the request is invalid, out of bounds, or would change the answer and is not implemented.",
        "`param` names the field. [HTTP API](api.md) lists the fields, [bounds](bounds.md) their limits. Errors about "
        "unknown fields come from `--strict-requests` only.",
    ),
    errors.PromptTooLongError: Advice(
        "`... maximum context length ...`, `context_length_exceeded`; `prompt is too long: ...` of `/v1/messages`",
        "The prompt has more tokens than the model's context, or than `--max-model-len`.",
        "Shorten the conversation, raise `--max-model-len`, or send `truncate_prompt_tokens`.",
    ),
    http_errors.ModelNotFoundError: Advice(
        "404 with `param` `model`",
        "The request names a model, or a LoRA adapter, that this server does not serve.",
        "`GET /v1/models` lists the names; `--served-model-name` sets them.",
    ),
    http_errors.ResponseNotFoundError: Advice(
        "404 with `param` `response_id`",
        "The response was not stored (`store: false`), made room for newer ones, or belongs to another API key.",
        "Raise `--max-stored-responses`, or send the conversation with the request.",
    ),
    errors.QueueFullError: Advice(
        "429 with `Retry-After`",
        "More requests are in flight than `--max-num-queued-reqs` and the other limits allow, or the server is "
        "overloaded.",
        "Send it again after `Retry-After` seconds. [Limits](../guides/requests.md#limits-of-a-request) lists what is "
        "counted; `vllm:admission_rejections_total` says which limit it was.",
    ),
    OverLimitError: Advice(
        "429 with `Retry-After`",
        "One API key uses its whole share of the server (`--max-key-share`).",
        "Let this key send fewer requests at a time, or raise the share.",
    ),
    NeverFitsError: Advice(
        "400: `... are above the limit of ...; send fewer`",
        "The prompts of one request have more tokens, or more sequences, than a limit of the queue allows.",
        "Send them in several requests, or raise the limit that the message names.",
    ),
    errors.RequestTimeoutError: Advice(
        "504, or an error event in a stream",
        "The request took longer than `--request-timeout`.",
        "Raise it, lower `max_tokens`, or look at `vllm:request_queue_time_seconds` for time spent waiting.",
    ),
    errors.AbortedError: Advice(
        "503",
        "The server aborted the request: it drains, sleeps, or an operator ended its requests.",
        "Send it again; `/ready` says when the server takes requests.",
    ),
    errors.SleepError: Advice(
        "503 with the remedy",
        "The engine sleeps, or has not enough memory to wake up or to go to sleep.",
        "`POST /wake_up`, or free the memory that the message names.",
    ),
    http_errors.UnavailableError: Advice(
        "503",
        "The model is still loading, or the server is ending.",
        "Wait for `GET /ready` to be 200.",
    ),
    errors.AnswerError: Advice(
        "500, or an error event in a stream",
        "A finished answer violates its JSON schema in a keyword that the grammar does not enforce (`uniqueItems` over "
        "items that are no enumeration).",
        "Send it again, or list the items in an `enum` ([structured output](../guides/structured-outputs.md)).",
    ),
    errors.PluginError: Advice(
        "500 with the plugin's name and error",
        "Code that a flag names (a parser, a logits processor) raised an exception.",
        "The traceback is in the server's log. The server goes on.",
    ),
}
"""Errors of one request, which leave the server as it was."""

ENGINE: Final[dict[type[PagodaError], Advice]] = {
    errors.EngineDeadError: Advice(
        "500, and the server ends with status 1",
        "The engine's process ended: an exception, a signal, or no memory.",
        "The log has the cause, and `--incident-dir` a snapshot ([when the engine fails]"
        f"(../guides/engine-failures.md)). For memory: {MEMORY_REMEDY}. `--restart-engine N` starts it again.",
    ),
    errors.EngineUnavailableError: Advice(
        "503",
        "No heartbeat for `--rpc-timeout`, or one step longer than `--engine-iteration-timeout-s`.",
        "It ends by itself if the engine continues. `--exit-on-stuck-engine` or `--restart-engine N` end it; `kill "
        "-USR1` to the engine's process writes the stacks of its threads.",
    ),
    errors.EngineRestartingError: Advice(
        "503", "The engine ended and is being started again.", "Send the request again; `/ready` says when."
    ),
    errors.RequestLostError: Advice(
        "503, or an error event in a stream",
        "The engine ended while it ran this request, of which a part was already sent.",
        "Send it again.",
    ),
}
"""Errors of the engine's process."""

COMMANDS: Final[dict[type[PagodaError], Advice]] = {
    ApiError: Advice(
        "`pagoda chat` or `complete`: the server's answer",
        "The server that `--url` names refused the request or cannot be reached.",
        "Check `--url` (with `/v1`) and `--api-key`.",
    ),
    OutputError: Advice(
        "`pagoda run-batch`: the name of the output",
        "The output cannot be written, or it is of another batch.",
        "Name another file with `-o`, or remove the old one.",
    ),
}
"""Errors of client commands."""

SECTIONS: Final = {
    "At the start": START,
    "Requests": REQUESTS,
    "The engine": ENGINE,
    "Client commands": COMMANDS,
}


def page() -> str:
    """Return the page as Markdown."""
    text = (
        "# Troubleshooting\n\nEvery error that pagoda shows is one line with a remedy. This page explains them by "
        "kind: what the error looks like, why it comes, what helps. An exception that is not listed here is a bug; the "
        "server's log has its traceback, and `pagoda collect-env` prints what a report needs.\n"
    )
    for title, table in SECTIONS.items():
        text += f"\n## {title}\n" + "".join(_entry(kind, advice) for kind, advice in table.items())
    return text


def _entry(kind: type[PagodaError], advice: Advice) -> str:
    status = _status(kind)
    told = getattr(kind, "client_message", "")
    shown = f'{advice.text}; clients read "{told}"' if told else advice.text
    return (
        f"\n### `{kind.__name__}`{f', HTTP {status}' if status else ''}\n\n"
        f"{' '.join((kind.__doc__ or '').split())}\n\n"
        f"- **Text:** {shown}\n- **Cause:** {advice.cause}\n- **Remedy:** {advice.remedy}\n"
    )


def _status(kind: type[PagodaError]) -> int | None:
    """Return the HTTP status of a class of errors that requests end with."""
    if kind not in {**REQUESTS, **ENGINE}:
        return None
    blank = kind.__new__(kind)
    blank.args = ("",)
    if isinstance(blank, errors.RequestError):
        blank.field = ""
    return http_error(blank).status


def error_classes(base: type[PagodaError] = PagodaError) -> Iterator[type[PagodaError]]:
    """Yield every class of errors that is shown to users."""
    for kind in base.__subclasses__():
        yield kind
        yield from error_classes(kind)
