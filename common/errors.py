"""Errors that are shown to users. Any other exception is a bug and keeps its traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MEMORY_REMEDY: Final = (
    "lower --max-model-len, --max-num-seqs or --kv-cache-memory-bytes, use --quantization, "
    "or give the process more memory"
)
"""What to do when memory is short, for the end of a message."""


class PagodaError(Exception):
    """Base class of pagoda's errors."""


class RequestError(PagodaError, ValueError):
    """An invalid request: HTTP 400.

    `field`: the innermost value of the request that is wrong, such as `messages[2].content[0].text`; "": no single one.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def renamed(self, field: str, message: str) -> RequestError:
        """Return this error as one about another field."""
        return RequestError(field, message)


class PromptTooLongError(RequestError):
    """A prompt that exceeds the context. `num_tokens`: its length, which is estimated if it was not tokenised whole;
    `limit`: how many tokens it may have."""

    def __init__(self, field: str, message: str, *, num_tokens: int, limit: int) -> None:
        super().__init__(field, message)
        self.num_tokens = num_tokens
        self.limit = limit

    def renamed(self, field: str, message: str) -> RequestError:
        return PromptTooLongError(field, message, num_tokens=self.num_tokens, limit=self.limit)


class ConfigError(PagodaError, ValueError):
    """An invalid setting. `setting` names the flag or config field."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{setting}: {message}")
        self.setting = setting


_MAX_LINE: Final = 1_000
_LINE_ENDS: Final = (_MAX_LINE * 2 // 3, _MAX_LINE // 3)


def _line(text: str) -> str:
    """Return a text as one printable line; a long one without its middle."""
    if len(text) > _MAX_LINE:
        first, last = _LINE_ENDS
        text = f"{text[:first]} ... {text[-last:]}"
    return "".join(char if char.isprintable() else " " for char in text)


class ModelError(PagodaError, ValueError):
    """A model folder or file that cannot be served: wrong path, unknown architecture, missing tokenizer.

    The message is one line of at most about 1,000 characters, whatever it quotes of a file.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_line(message))


@contextmanager
def reading(file: object, remedy: str) -> Iterator[None]:
    """Turn what Python or a library raises at the content of an untrusted file into a ModelError that names it.

    For readers of nested values, of which any may have any type; what a value should be is said where it is checked.
    """
    try:
        yield
    except (PagodaError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ModelError(f"{file}: its values are invalid ({reason}); {remedy}") from error


class WeightError(ModelError):
    """A checkpoint that is truncated, corrupt, incomplete or has unexpected tensors."""


class PluginError(PagodaError):
    """A plugin failed at a request: HTTP 500. The message names the plugin and its error."""


class QueueFullError(PagodaError):
    """Too many requests in flight: HTTP 429. The same request may be accepted later."""


class RequestTimeoutError(PagodaError):
    """A request took longer than --request-timeout and was aborted: HTTP 504."""


class AbortedError(PagodaError):
    """A request that the server aborted: HTTP 503. The same request may be accepted later."""


class AnswerError(PagodaError):
    """A finished answer that violates its JSON schema where the grammar could not enforce it: HTTP 500. The same
    request may succeed when it is sent again."""


class SleepError(PagodaError):
    """The engine sleeps, or cannot sleep or wake up: HTTP 503. Its state is unchanged; the message has a remedy."""


class EngineDeadError(PagodaError, RuntimeError):
    """The engine stopped. The message has the cause and what the operator may do; clients read `client_message`."""

    client_message = "the engine has ended; the server's log says why"


class EngineUnavailableError(EngineDeadError):
    """The engine is stuck, or is being restarted: HTTP 503. The same request may be accepted later."""

    client_message = "the engine does not answer at present; try again later"


class EngineRestartingError(EngineUnavailableError):
    """The engine is being restarted within the limits of --restart-engine: the server is to be left alone."""

    client_message = "the engine is being restarted; try again shortly"


class RequestLostError(EngineUnavailableError):
    """The engine ended while it ran the request, and is being restarted: HTTP 503. It does not run again by itself."""

    client_message = "the engine ended while it ran this request and is being restarted; send it again"
