"""The errors a person may see. Everything else is a bug and keeps its traceback."""

from __future__ import annotations


class PagodaError(Exception):
    """Base of all errors that pagoda raises on purpose."""


class RequestError(PagodaError, ValueError):
    """A request that cannot be served as asked: HTTP 400. `field` names the offending request field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(RequestError):
    """A prompt of surely more tokens than the context has, which was not tokenised whole."""


class ConfigError(PagodaError, ValueError):
    """A setting that cannot be used. `setting` names the flag or config field."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{setting}: {message}")
        self.setting = setting


class ModelError(PagodaError, ValueError):
    """A model folder or file that cannot be served: wrong path, unknown architecture, missing tokenizer."""


class WeightError(ModelError):
    """A checkpoint that is truncated, corrupt, incomplete or has tensors nobody asked for."""


class QueueFullError(PagodaError):
    """More work than the engine may have in hand: HTTP 429. The same request may be taken later."""


class AbortedError(PagodaError):
    """A request that the server ended before its answer was there: HTTP 503. The same request may be taken later."""


class SleepError(PagodaError):
    """The engine sleeps, or cannot fall asleep or wake up: HTTP 503. It goes on as it is; the message has a remedy."""


class EngineDeadError(PagodaError, RuntimeError):
    """The engine stopped; the message carries the cause."""
