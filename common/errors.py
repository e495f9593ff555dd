"""Errors that are shown to users. Any other exception is a bug and keeps its traceback."""

from __future__ import annotations


class PagodaError(Exception):
    """Base class of pagoda's errors."""


class RequestError(PagodaError, ValueError):
    """An invalid request: HTTP 400. `field` names the request field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(RequestError):
    """A prompt that exceeds the context; it was not tokenised completely."""


class ConfigError(PagodaError, ValueError):
    """An invalid setting. `setting` names the flag or config field."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{setting}: {message}")
        self.setting = setting


class ModelError(PagodaError, ValueError):
    """A model folder or file that cannot be served: wrong path, unknown architecture, missing tokenizer."""


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


class SleepError(PagodaError):
    """The engine sleeps, or cannot sleep or wake up: HTTP 503. Its state is unchanged; the message has a remedy."""


class EngineDeadError(PagodaError, RuntimeError):
    """The engine stopped; the message carries the cause."""
