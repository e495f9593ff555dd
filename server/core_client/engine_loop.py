"""The engine's loop: receive commands, run a step, send its outputs. Independent of sockets and processes."""

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
    """A queue of commands."""

    def receive(self, wait: bool) -> list[ToEngine]:
        """Return all queued commands; with `wait`, block until there is one."""
        ...


class Progress:
    """The loop's progress, read by the heartbeat."""

    def __init__(self) -> None:
        self.steps = 0
        self.busy = False


def run_engine(core: EngineCore, inbox: Inbox, send: Send, progress: Progress, sleeper: Sleeper | None = None) -> None:
    """Serve until Shutdown: handle all commands, run one step, send its outputs; block while there is no work.

    `sleeper`: with --enable-sleep-mode; without it no Sleep or WakeUp may arrive.
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
                    send(_change_sleep(sleeper, command))
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


def _change_sleep(sleeper: Sleeper | None, command: Sleep | WakeUp) -> SleepState:
    assert sleeper is not None, "--enable-sleep-mode was checked by the client"
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
