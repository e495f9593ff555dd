"""Profiles of an engine's steps: which steps are traced, and when a trace is written."""

from __future__ import annotations

import logging
import os
import time
from typing import Final

from pagoda.common.backend import StepTracer
from pagoda.common.config.groups.nested.profiler import ProfileRequest
from pagoda.common.errors import RequestError

logger = logging.getLogger(__name__)

_DEFAULT_PREFIX: Final = "pagoda"


class StepProfiler:
    """Starts and stops the tracer of one engine. Not thread-safe; EngineCore calls `before_step` and `on_idle`."""

    def __init__(self, tracer: StepTracer) -> None:
        self._tracer = tracer
        self._request: ProfileRequest | None = None  # request of the running profile
        self._steps = 0  # steps started since the profile began
        self._is_tracing = False
        self._ended: str | RequestError | None = None  # path or failure of a profile that ended by itself
        self._count = 0  # number of traces so far

    def start(self, request: ProfileRequest) -> None:
        """Trace the steps that begin from now on, after `delay_iterations` others. Raises RequestError, with nothing
        changed, if a profile runs or tracing fails.
        """
        if self._request is not None:
            raise RequestError("", "a profile is being taken; stop it first (POST /stop_profile, or stop_profile())")
        if not request.delay_iterations:
            self._begin(request)
        self._request = request
        self._steps = 0
        self._ended = None

    def stop(self) -> str:
        """Return the path of the trace: written now, or when `max_iterations` ended the profile.

        Raises RequestError if none was started, no step was traced, or the trace could not be written; the profile has
        ended then, too.
        """
        if self._request is not None:
            if not self._is_tracing:
                delay = self._request.delay_iterations
                self._request = None
                raise RequestError(
                    "delay_iterations",
                    f"no trace was written: {self._steps} steps ran, of which the first {delay} are not traced; send "
                    "more requests before the stop, or lower delay_iterations",
                )
            self._end(self._request)
        ended = self._ended
        self._ended = None
        if ended is None:
            raise RequestError("", "no profile was started; start one first (POST /start_profile, or start_profile())")
        if isinstance(ended, RequestError):
            raise ended
        return ended

    def before_step(self) -> None:
        """Begin or end tracing if a step that is about to be executed is the first, or the first after the last."""
        if (request := self._request) is None:
            return
        if self._has_all_steps(request):
            self._end(request)
            return
        if not self._is_tracing and self._steps >= request.delay_iterations:
            try:
                self._begin(request)
            except RequestError as error:
                logger.error("%s", error)
                self._request = None
                self._ended = error
                return
        self._steps += 1

    def on_idle(self) -> None:
        """End tracing after the last step that it should have, when no other follows."""
        if (request := self._request) is not None and self._has_all_steps(request):
            self._end(request)

    def _has_all_steps(self, request: ProfileRequest) -> bool:
        last = request.delay_iterations + request.max_iterations
        return self._is_tracing and bool(request.max_iterations) and self._steps >= last

    def _begin(self, request: ProfileRequest) -> None:
        self._count += 1
        stamp = time.strftime("%Y%m%d-%H%M%S")
        try:
            self._tracer.start(f"{request.prefix or _DEFAULT_PREFIX}_{stamp}_{os.getpid()}_{self._count}")
        except Exception as error:  # The framework's profiler failed: the engine goes on without a trace.
            raise RequestError("", f"the profiler cannot start: {_cause(error)}") from error
        self._is_tracing = True

    def _end(self, request: ProfileRequest) -> None:
        """Write the trace and keep its path, or the failure, for `stop`."""
        self._request = None
        self._is_tracing = False
        try:
            self._ended = str(self._tracer.stop())
            logger.info("trace of %d steps: %s", self._steps - request.delay_iterations, self._ended)
        except Exception as error:  # the engine goes on
            self._ended = RequestError("", f"the trace could not be written: {_cause(error)}")
            logger.error("%s", self._ended)


def _cause(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {str(error)[:500]}"
