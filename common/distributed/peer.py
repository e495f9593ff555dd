"""A connection to another host after the handshake, or to another rank: messages, and detection of its failure."""

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

GRACE_SECONDS: Final = 2.0
"""Time for a failure notification to arrive after its local symptom."""


class Peer:
    """One connection. A thread reads it, so a peer's failure is noticed while this process waits for its devices.

    `name` is the peer's name in messages. `grace`: seconds to wait for last messages of a peer that is ending.
    `exit_status` describes how the peer's process ended ("was killed by SIGKILL"), "" if unknown; called after the
    connection ended.
    """

    def __init__(
        self,
        connection: socket.socket,
        name: str,
        grace: float = GRACE_SECONDS,
        exit_status: Callable[[], str] = lambda: "",
    ) -> None:
        self.name, self.grace, self._exit_status = name, grace, exit_status
        self.ending = False  # this side has sent End
        self._connection, self._sending = connection, threading.Lock()
        self._inbox: queue.SimpleQueue[Message | EngineDeadError] = queue.SimpleQueue()
        self._listening = threading.Lock()
        self._on_loss: OnLoss | None = None
        self._lost: EngineDeadError | None = None
        self._ended = threading.Event()
        connection.settimeout(None)
        threading.Thread(target=self._read, name="pagoda-peer", daemon=True).start()

    def watch(self, on_loss: OnLoss) -> None:
        """Call `on_loss` from another thread when the peer fails or disconnects; at once if it already has."""
        with self._listening:
            self._on_loss = on_loss
            lost = self._lost
        if lost is not None:
            on_loss(lost)

    def send(self, message: Message) -> None:
        """Send a message. Raises EngineDeadError with the cause if the peer is gone."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Send an encoded message, as `send`."""
        try:
            with self._sending:
                send_frame(self._connection, data)
        except OSError as error:
            raise self.failure(self.grace) or EngineDeadError(f"{self.name} is gone: {describe(error)}") from None

    def receive(self) -> Message:
        """Return the next message. Raises EngineDeadError if the peer failed or disconnected."""
        message = self._inbox.get()
        if isinstance(message, EngineDeadError):
            self._inbox.put(message)
            raise message
        return message

    def expect(self, kind: type[MessageT]) -> MessageT:
        """Return the next message, which must be of this kind. Raises EngineDeadError."""
        message = self.receive()
        if not isinstance(message, kind):
            raise EngineDeadError(f"{self.name} sent {type(message).__name__} instead of {kind.__name__}")
        return message

    def failure(self, timeout: float = 0.0) -> EngineDeadError | None:
        """Return why the peer failed, None while it is alive, after waiting up to `timeout` s for the notification."""
        self._ended.wait(timeout)
        return self._lost

    def end(self, reason: str = "") -> None:
        """Send End, from any thread. Never raises."""
        self.ending = True
        with self._sending, contextlib.suppress(OSError):
            send_frame(self._connection, encode(End(reason)))
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close after the peer did, or after `grace` s, so that End is delivered first."""
        self._ended.wait(self.grace)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # close() alone would wait for the reading thread
        self._connection.close()

    def _read(self) -> None:
        ended = False
        while True:
            try:
                message = decode(receive_frame(self._connection, STEP_BYTES))
            except (EOFError, OSError, ValueError) as error:
                if not ended:
                    self._lose(EngineDeadError(f"{self.name} {self._exit_status() or f'is gone: {describe(error)}'}"))
                self._ended.set()
                return
            if isinstance(message, End):
                ended = True
                if message.reason:
                    self._lose(EngineDeadError(f"{self.name}: {message.reason}"))
                    continue
            self._inbox.put(message)

    def _lose(self, failure: EngineDeadError) -> None:
        with self._listening:
            self._lost = failure
            on_loss = self._on_loss
        self._ended.set()
        self._inbox.put(failure)
        if on_loss is not None:
            on_loss(failure)


def describe(error: Exception) -> str:
    """Return the system's description of a connection error."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
