"""Another host after the pre-flight, or another rank: messages to and fro, and whether it is still there."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from pagoda.common.distributed.messages import STEP_BYTES, End, Message, decode, encode, receive_frame, send_frame
from pagoda.common.errors import EngineDeadError

OnLoss = Callable[[EngineDeadError], None]
MessageT = TypeVar("MessageT", bound=Message)

PATIENCE_SECONDS: Final = 2.0
"""Longer than the news of a host's death takes, when what it did is felt here already."""


class Peer:
    """One connection. A thread reads it, so that a host's death is known while this one waits for its devices.

    `name`: how messages call the host. `patience`: seconds for what a host that is ending may still have to say.
    `fate`: what became of it once the connection has ended, such as "was killed by SIGKILL"; empty when unknown.
    `parting`: this side has said goodbye.
    """

    def __init__(
        self,
        connection: socket.socket,
        name: str,
        patience: float = PATIENCE_SECONDS,
        fate: Callable[[], str] = lambda: "",
    ) -> None:
        self.name, self.patience, self._fate = name, patience, fate
        self.parting = False
        self._connection, self._sending = connection, threading.Lock()
        self._inbox: queue.SimpleQueue[Message | EngineDeadError] = queue.SimpleQueue()
        self._listening = threading.Lock()
        self._on_loss: OnLoss | None = None
        self._lost: EngineDeadError | None = None
        self._ended = threading.Event()
        connection.settimeout(None)
        threading.Thread(target=self._read, name="pagoda-peer", daemon=True).start()

    def watch(self, on_loss: OnLoss) -> None:
        """Call back, from another thread, when the host fails or is gone; at once if it is already."""
        with self._listening:
            self._on_loss = on_loss
            lost = self._lost
        if lost is not None:
            on_loss(lost)

    def send(self, message: Message) -> None:
        """Raises EngineDeadError with the reason when the host is gone."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """As `send`, of a message that is encoded already."""
        try:
            with self._sending:
                send_frame(self._connection, data)
        except OSError as error:
            raise self.death(self.patience) or EngineDeadError(f"{self.name} is gone: {told(error)}") from None

    def receive(self) -> Message:
        """The next message. Raises EngineDeadError when the host failed or is gone."""
        found = self._inbox.get()
        if isinstance(found, EngineDeadError):
            self._inbox.put(found)
            raise found
        return found

    def expect(self, kind: type[MessageT]) -> MessageT:
        """The next message, which is of that kind. Raises EngineDeadError."""
        found = self.receive()
        if not isinstance(found, kind):
            raise EngineDeadError(f"{self.name} sent {type(found).__name__} instead of {kind.__name__}")
        return found

    def death(self, patience: float = 0.0) -> EngineDeadError | None:
        """What the host died of, None while it lives. `patience`: seconds to wait for that news."""
        self._ended.wait(patience)
        return self._lost

    def end(self, reason: str = "") -> None:
        """Say goodbye, from any thread. Never raises."""
        self.parting = True
        with self._sending, contextlib.suppress(OSError):
            send_frame(self._connection, encode(End(reason)))
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hang up, once the host has or a moment has passed: hosts that hear a goodbye shall hear it first."""
        self._ended.wait(self.patience)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # a close alone waits for the thread that reads
        self._connection.close()

    def _read(self) -> None:
        ended = False
        while True:
            try:
                message = decode(receive_frame(self._connection, STEP_BYTES))
            except (EOFError, OSError, ValueError) as error:
                if not ended:
                    self._lose(EngineDeadError(f"{self.name} {self._fate() or f'is gone: {told(error)}'}"))
                self._ended.set()
                return
            if isinstance(message, End):
                ended = True
                if message.reason:
                    self._lose(EngineDeadError(f"{self.name}: {message.reason}"))
                    continue
            self._inbox.put(message)

    def _lose(self, death: EngineDeadError) -> None:
        with self._listening:
            self._lost = death
            on_loss = self._on_loss
        self._ended.set()
        self._inbox.put(death)
        if on_loss is not None:
            on_loss(death)


def told(error: Exception) -> str:
    """The system's words about an error of a connection."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
