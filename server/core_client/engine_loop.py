"""The engine's loop: take commands, run a step, send what it brought. Knows no socket and no process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.messages import EngineRequest, StepOutputs
from pagoda.common.engine.sleep import Sleeper
from pagoda.common.errors import RequestError, SleepError
from pagoda.server.ipc_messages import (
    Abort,
    AddRequest,
    FromEngine,
    Refused,
    ResetDone,
    ResetPrefixCache,
    Shutdown,
    Sleep,
    SleepState,
    StepReply,
    ToEngine,
    WakeUp,
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


def run_engine(core: EngineCore, inbox: Inbox, send: Send, progress: Progress, sleeper: Sleeper | None = None) -> None:
    """Serve until Shutdown: take all commands, run one step, send what it brought; wait when there is no work.

    `sleeper`: of an engine that can be put to sleep; only such a one is asked to.
    """
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
                case Sleep() | WakeUp():
                    while core.has_work:
                        _step(core, send, progress)
                    progress.busy = False
                    send(_changed(sleeper, command))
                case Shutdown():
                    return
        if core.has_work:
            progress.busy = True
            _step(core, send, progress)
        else:
            send(StepReply(StepOutputs(stats=core.stats)))


def _step(core: EngineCore, send: Send, progress: Progress) -> None:
    send(StepReply(core.step()))
    progress.steps += 1


def _changed(sleeper: Sleeper | None, command: Sleep | WakeUp) -> SleepState:
    """Fall asleep or wake up; how it went."""
    assert sleeper is not None, "only an engine that can is asked to"
    error = ""
    try:
        if isinstance(command, Sleep):
            sleeper.sleep(command.level)
        else:
            sleeper.wake_up(command.tags)
    except SleepError as failure:
        error = str(failure)
    return SleepState(command.ticket, sleeper.asleep, error)


def _add(core: EngineCore, request: EngineRequest, send: Send) -> None:
    try:
        core.add_request(request)
    except RequestError as error:
        send(Refused(request.request_id, error.field, str(error)))
