"""Requests on their way to a scheduler: those with a grammar come in once it is compiled, the others at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Final

from pagoda.common.engine.guide import Guide
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.structured import Structured
from pagoda.common.errors import RequestError
from pagoda.common.structured.refusal import no_tokenizer, refused

PAUSE_SECONDS: Final = 0.005
"""How long an engine without any other work waits for a grammar before it looks for commands again."""

Add = Callable[[EngineRequest, Guide | None], None]
"""Puts a request in line. Raises RequestError."""


class Intake:
    """`structured`: makes guides; None: requests that need one are refused."""

    def __init__(self, add: Add, structured: Structured | None) -> None:
        self._add = add
        self._structured = structured
        self._coming: dict[str, tuple[EngineRequest, Future[Guide]]] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def add(self, request: EngineRequest) -> None:
        """Take a request in. Raises RequestError naming the field when it can never run."""
        if request.request_id in self._coming:
            raise RequestError("request_id", f"request {request.request_id} is already in the engine")
        if request.grammar is None and request.thinking is None:
            self._add(request, None)
            return
        if self._structured is None:
            raise no_tokenizer()
        self._coming[request.request_id] = request, self._structured.begin(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are skipped."""
        for request_id in request_ids:
            if (coming := self._coming.pop(request_id, None)) is not None:
                coming[1].cancel()

    def admit(self) -> list[EngineOutput]:
        """Put in line those that are ready; the outputs of those that cannot run."""
        outputs: list[EngineOutput] = []
        for request_id in [each for each, (_, guide) in self._coming.items() if guide.done()]:
            request, guide = self._coming.pop(request_id)
            fault = guide.exception()
            if fault is not None and not isinstance(fault, RequestError):
                # A library's own fault, a panic of its native code included, is its request's end, not the engine's.
                fault = refused(repr(fault))
            try:
                if fault is not None:
                    raise fault
                self._add(request, guide.result())
            except RequestError as error:
                outputs.append(failed(request_id, error))
        return outputs

    def pause(self) -> None:
        """Wait a moment for one to be ready."""
        wait([guide for _, guide in self._coming.values()], PAUSE_SECONDS, FIRST_COMPLETED)


def failed(request_id: str, error: RequestError) -> EngineOutput:
    """The only output of a request that could not run."""
    return EngineOutput(request_id=request_id, new_token_ids=[], finish_reason="error", error=(error.field, str(error)))
