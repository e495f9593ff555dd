"""One engine process with several clients: what the engine sends is divided among API server processes.

The process that started the engine gets what concerns all (ready, failed, heartbeats) on its own socket. Each client
has an output socket, and puts its number in front of its commands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec
import zmq

from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.messages import EngineOutput, StepOutputs
from pagoda.common.errors import EngineDeadError
from pagoda.server.core_client.client import Load, QueueUse, Supervisor
from pagoda.server.core_client.ipc_messages import (
    NO_OTHERS,
    Abort,
    AddRequest,
    Command,
    FromEngine,
    OtherUse,
    Ready,
    Refused,
    Rejoin,
    Reply,
    StepReply,
    ToEngine,
    encode,
)
from pagoda.server.core_client.process_client import ProcessClient

STATS_SECONDS: Final = 0.5
"""Interval at which a client without outputs gets the engine's statistics while it is busy."""

OTHERS_SECONDS: Final = 0.1
"""Interval at which the use of the other clients is sent: with hundreds of keys that takes part of a millisecond."""


def output_address(address: str, client: int) -> str:
    """Return the address of a client's output socket."""
    return f"{address}.out{client}"


class ClientRouter:
    """Divides an engine's messages among `count` clients. `send`: called with the number of a client and a message;
    `broadcast`: with a message for all clients and the process that started the engine.

    Client 0 gets the statistics of every step, whether or not it has outputs.
    """

    def __init__(
        self, count: int, send: Callable[[int, FromEngine], None], broadcast: Callable[[FromEngine], None]
    ) -> None:
        self._count = count
        self._send = send
        self._broadcast = broadcast
        self._clients: dict[str, int] = {}  # Unfinished sequence -> its client.
        self._uses = [QueueUse() for _ in range(count)]  # The use of those sequences, by client.
        self._reported = [0.0] * count  # Times at which each client last got statistics.
        self._told = [0.0] * count  # Times at which each client last got the use of the others.
        self._ready: Ready | None = None  # The message, once it was sent.

    def note(self, client: int, command: ToEngine) -> ToEngine:
        """Record a client's command and return it with a ticket that is unique among all clients."""
        match command:
            case AddRequest(request, others):
                group = request.group or request.request_id
                load = Load(1, len(request.prompt_token_ids) + len(request.encoder_token_ids or ()))
                for request_id in (request.request_id, *(request_id for request_id, _ in others)):
                    self._forget(request_id)
                    self._clients[request_id] = client
                    self._uses[client].add(request_id, load, request.owner, group)
            case Abort(request_ids):
                for request_id in request_ids:
                    self._forget(request_id)
            case _:
                if isinstance(command, Command):
                    return msgspec.structs.replace(command, ticket=command.ticket * self._count + client)
        return command

    def send(self, message: FromEngine) -> None:
        """Send a message to the client or clients that it concerns."""
        match message:
            case StepReply(step):
                self._divide(step)
            case Refused(request_id):
                client = self._forget(request_id)
                if client is not None:
                    self._send(client, message)
            case _ if isinstance(message, Reply):
                ticket, client = divmod(message.ticket, self._count)
                self._send(client, msgspec.structs.replace(message, ticket=ticket))
            case _:
                if isinstance(message, Ready):
                    self._ready = message
                self._broadcast(message)

    def rejoin(self, client: int) -> Abort:
        """Let another process be a client: tell it Ready, and return the command that drops the requests before."""
        if self._ready is not None:
            self._send(client, self._ready)
        lost = [request_id for request_id, owner in self._clients.items() if owner == client]
        for request_id in lost:
            self._forget(request_id)
        return Abort(lost)

    def _divide(self, step: StepOutputs) -> None:
        outputs: list[list[EngineOutput]] = [[] for _ in range(self._count)]
        for output in step.outputs:
            client = self._clients.get(output.request_id)
            if client is not None:  # A request without a client was aborted.
                outputs[client].append(output)
            if output.finish_reason is not None:
                self._forget(output.request_id)
        now = time.monotonic()
        for client, outputs_of_client in enumerate(outputs):
            idle = not step.outputs
            if client and not outputs_of_client and not idle and now - self._reported[client] < STATS_SECONDS:
                continue
            self._reported[client] = now
            step_outputs = StepOutputs(outputs=outputs_of_client, stats=step.stats, earlier=step.earlier)
            self._send(client, StepReply(step_outputs, self._others(client, now)))

    def _others(self, client: int, now: float) -> OtherUse | None:
        """Return what all clients but one use; None if that is not zero and was sent less than OTHERS_SECONDS ago."""
        uses = [use for number, use in enumerate(self._uses) if number != client and use.callers]
        if not uses:
            self._told[client] = 0.0
            return NO_OTHERS
        if now - self._told[client] < OTHERS_SECONDS:
            return None
        self._told[client] = now
        total = Load()
        owners = dict[str, Load]()
        for use in uses:
            total += use.total
            for owner, load in use.owners.items():
                owners[owner] = owners.get(owner, Load()) + load
        callers = sum(use.callers for use in uses)
        by_owner = {owner: (load.sequences, load.tokens) for owner, load in owners.items()}
        return OtherUse(total.sequences, total.tokens, callers, by_owner)

    def _forget(self, request_id: str) -> int | None:
        client = self._clients.pop(request_id, None)
        if client is not None:
            self._uses[client].remove((request_id,))
        return client


class SharedClient(ProcessClient):
    """Implements EngineClient for client `index` of an engine that another process started with its sockets at
    `address`. That process reports the engine's exit.
    """

    def __init__(self, config: EngineConfig, address: str, index: int) -> None:
        self._connect(Supervisor(config.runtime), output_address(address, index), f"{address}.in")
        self._index = str(index).encode()

    def send(self, command: ToEngine) -> None:
        if self._closed or self._supervisor.failed is not None:
            failed = self._supervisor.failed
            raise EngineDeadError(failed.message if failed is not None else "the engine was shut down")
        self._in.send_multipart((self._index, encode(command)))

    def close(self, timeout: float = 2.0) -> None:
        """Disconnect from the engine, which goes on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._out.FD)
        self._in.close(linger=int(timeout * 1000))
        self._out.close(linger=0)
        self._context.term()


class SharedInbox:
    """Implements Inbox with the commands of all clients."""

    def __init__(self, socket: zmq.Socket[bytes], router: ClientRouter, decode: Callable[[bytes], ToEngine]) -> None:
        self._socket = socket
        self._router = router
        self._decode = decode

    def receive(self, wait: bool) -> list[ToEngine]:
        commands = [self._command(self._socket.recv_multipart())] if wait else []
        while True:
            try:
                commands.append(self._command(self._socket.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                return commands

    def _command(self, frames: list[bytes]) -> ToEngine:
        """Return the command of a client, or of the process that started the engine, which has no number."""
        command = self._decode(frames[-1])
        if isinstance(command, Rejoin):
            return self._router.rejoin(command.client)
        return command if len(frames) == 1 else self._router.note(int(frames[0]), command)
