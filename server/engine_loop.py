"""The engine's loop: take commands, run a step, send what it brought. Knows no socket and no process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pagoda.common.engine.messages import EngineRequest, StepOutputs
from pagoda.common.engine.sharded import Engine
from pagoda.common.errors import RequestError
from pagoda.server.wire import (
    Abort,
    AddRequest,
    FromEngine,
    Refused,
    ResetDone,
    ResetPrefixCache,
    Shutdown,
    Step,
    ToEngine,
)

Send = Callable[[FromEngine], None]


class Inbox(Protocol):
    """Where commands come from."""

    def receive(self, wait: bool) -> list[ToEngine]:
        """All commands that have come; with `wait`, at least one."""
        ...


class Progress:
    """How far the loop has come; written by it, read by the heartbeat."""

    def __init__(self) -> None:
        self.steps = 0
        self.busy = False


def run_engine(core: Engine, inbox: Inbox, send: Send, progress: Progress) -> None:
    """Serve until Shutdown: take all commands, run one step, send what it brought; sleep when there is no work."""
    while True:
        progress.busy = core.has_work
        for command in inbox.receive(wait=not progress.busy):
            match command:
                case AddRequest(request):
                    _add(core, request, send)
                case Abort(request_ids):
                    core.abort(request_ids)
                case ResetPrefixCache(ticket):
                    core.reset_prefix_cache()
                    send(ResetDone(ticket))
                case Shutdown():
                    return
        if core.has_work:
            progress.busy = True
            send(Step(core.step()))
            progress.steps += 1
        else:
            send(Step(StepOutputs(stats=core.stats)))


def _add(core: Engine, request: EngineRequest, send: Send) -> None:
    try:
        core.add_request(request)
    except RequestError as error:
        send(Refused(request.request_id, error.field, str(error)))
