"""Messages between hosts, or ranks, their framing on a TCP connection, and the connection after the handshake (`Peer`).

Tagged msgpack, decoded against these types, never pickle; each message is preceded by its length.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from pagoda.common.engine.steps.contract import StepPlan, TokenMasks
from pagoda.common.errors import EngineDeadError
from pagoda.common.weights.lora.weights import AdapterWeights

HANDSHAKE_BYTES: Final = 1 << 16  # Maximum size in bytes of a message before the handshake is complete.
STEP_BYTES: Final = 1 << 30  # Maximum size in bytes of a message after the handshake.

_LENGTH_BYTES: Final = 8
_MIN_TIMEOUT_SECONDS: Final = 0.001
_KEEPALIVE_SECONDS: Final = 5
_KEEPALIVE_PROBES: Final = 3
_UNACKNOWLEDGED_MS: Final = 20_000


def prepare(connection: socket.socket) -> None:
    """Disable send delays, and let the kernel detect a vanished host (power, network) within 20 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_SECONDS),
        ("TCP_KEEPINTVL", _KEEPALIVE_SECONDS),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
    ):
        if hasattr(socket, name):  # Linux has these options.
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send_frame(connection: socket.socket, data: bytes) -> None:
    """Send `data` preceded by its length. Raises OSError."""
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def receive_frame(connection: socket.socket, limit: int, seconds: float | None = None) -> bytes:
    """Return the next frame, waiting at most `seconds` (None: without limit).

    Raises EOFError if the connection ended, OSError, or ValueError if the frame is larger than `limit` bytes.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    size = int.from_bytes(_exactly(connection, _LENGTH_BYTES, deadline), "big")
    if size > limit:
        raise ValueError(f"message of {size} bytes exceeds the limit of {limit}")
    return bytes(_exactly(connection, size, deadline))


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            connection.settimeout(max(_MIN_TIMEOUT_SECONDS, deadline - time.monotonic()))
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection ended")
        view = view[count:]
    return data


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One of the processes that share a model."""

    rank: int  # Rank, from 0 to size - 1.
    size: int
    device: int  # Index among the devices visible to the process.
    host: str  # Address at which rank 0 listens for the backend's own rendezvous.
    port: int


# Hosts run the same programs on one mesh. A host with another version, flag or model would hang all of them in the
# first collective, or compute nonsense, so they compare fingerprints before anything is loaded.
_REMEDIES: Final = {
    "versions": "install the same versions everywhere",
    "model": "give every host the same model",
    "settings": "give every host the same flags",
    "environment": "set the variables alike everywhere",
    "devices": "use hosts of one kind",
}
"""Field of HostFingerprint -> remedy when it differs, in reporting order."""


class HostFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on all hosts. A key missing on a host is not compared for that host."""

    rank: int
    nodes: int
    versions: dict[str, str]  # Package -> version.
    model: dict[str, str]  # Digests and sizes of the model.
    settings: dict[str, str]  # Flag -> value.
    environment: dict[str, str]  # Variable -> value.
    devices: dict[str, str]  # Kind and number of the devices.


@dataclass(frozen=True, slots=True)
class Host:
    """A host and its address as the other hosts see it."""

    fingerprint: HostFingerprint
    address: str

    def __str__(self) -> str:
        return host_name(self.fingerprint.rank, self.address)


def host_name(rank: int, address: str) -> str:
    """Return the host's name in log and error messages."""
    return f"host {rank} ({address})"


def differences(hosts: Sequence[Host]) -> str:
    """Return in one line which hosts differ from the majority, in what, and the remedy; "" if none differs.

    `hosts` are in rank order. In a tie the value of the lowest rank counts as the majority's.
    """
    by_host: dict[str, list[str]] = {}
    remedies = []
    for field, remedy in _REMEDIES.items():
        tables = {str(host): getattr(host.fingerprint, field) for host in hosts}
        for host, text in _deviations(tables):
            by_host.setdefault(host, []).append(text)
            if remedy not in remedies:
                remedies.append(remedy)
    text = "; ".join(f"{host} has {', '.join(texts)}" for host, texts in by_host.items())
    return f"{text}; {', '.join(remedies)}" if by_host else ""


def _deviations(tables: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return (host, difference) for each entry that differs from the most common value."""
    names = dict.fromkeys(name for table in tables.values() for name in table)
    deviations = []
    for name in names:
        usual = Counter(table[name] for table in tables.values() if name in table).most_common(1)[0][0]
        for host, table in tables.items():
            if table.get(name, usual) != usual:
                deviations.append((host, f"{name} {_shown(table[name])} instead of {_shown(usual)}"))
    return deviations


def _shown(value: str) -> str:
    return value[:200] or "nothing"


WIRE_VERSION: Final = 8  # Increment this with every change to the messages below.


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    """First message of host 0 to whoever connects, see `proof`."""

    wire: int  # This stays the first field in every version.
    nonce: bytes
    wants_proof: bool


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First message of a host to host 0."""

    wire: int  # This stays the first field in every version.
    fingerprint: HostFingerprint
    nonce: bytes = b""
    proof: bytes = b""  # Digest of both nonces and the fingerprint; empty without a token.


class Verdict(msgspec.Struct, tag="verdict", frozen=True):
    """Host 0's answer: continue if `reason` is empty, else why not, with the remedy."""

    reason: str = ""
    proof: bytes = b""  # Digest of both nonces and the reason; empty without a token.


class BlockCount(msgspec.Struct, tag="room", frozen=True):
    """Number of KV blocks that fit on a host beside its loaded weights."""

    num_blocks: tuple[int, ...]  # Number of blocks of each pool.


class AgreedBlocks(msgspec.Struct, tag="agreed", frozen=True):
    """Host 0's answer: number of KV blocks that fit on every host."""

    num_blocks: tuple[int, ...]  # Number of blocks of each pool.


class WarmedUp(msgspec.Struct, tag="warm", frozen=True):
    """A host has compiled all programs."""


class Execute(msgspec.Struct, tag="step", frozen=True):
    """Start a step: one plan per data-parallel replica, None for an idle replica."""

    plans: tuple[StepPlan | None, ...]


class BindMasks(msgspec.Struct, tag="masks", frozen=True):
    """Hand the token masks to the step that was started last: one per data-parallel replica, None without any."""

    masks: tuple[TokenMasks | None, ...]


class AdapterPart(msgspec.Struct, tag="adapter", frozen=True):
    """Some matrices of the LoRA adapter for a slot; with the `last` ones it replaces the slot's."""

    slot: int
    weights: AdapterWeights
    last: bool


class SleepRanks(msgspec.Struct, tag="sleep", frozen=True):
    """Release device memory at this sleep level. Answered by SleepResult."""

    level: int


class WakeUpRanks(msgspec.Struct, tag="wake", frozen=True):
    """Restore these parts of device memory. Answered by SleepResult."""

    tags: tuple[str, ...]


class SleepResult(msgspec.Struct, tag="changed", frozen=True):
    """Outcome of SleepRanks or WakeUpRanks on a host."""

    error: str = ""  # The error; empty on success.


class End(msgspec.Struct, tag="end", frozen=True):
    """The sender stops; its last message."""

    reason: str = ""  # The error that it failed with; empty on an orderly shutdown.


Message = (
    Challenge
    | Hello
    | Verdict
    | BlockCount
    | AgreedBlocks
    | WarmedUp
    | Execute
    | BindMasks
    | AdapterPart
    | SleepRanks
    | WakeUpRanks
    | SleepResult
    | End
)


def _from_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _to_array(kind: Any, value: Any) -> npt.NDArray[Any]:
    dtype, shape, data = value
    if dtype not in _DTYPES:
        raise ValueError(f"no array of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape)


_DTYPES: Final = tuple(np.dtype(dtype).str for dtype in (np.int32, np.uint32, np.bool_, np.uint8, np.float32))
_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_from_array)
_decoder: Final = msgspec.msgpack.Decoder(Message, dec_hook=_to_array)

encode = _encoder.encode


def decode(data: bytes) -> Message:
    """Return the decoded message. Raises ValueError if `data` is not one."""
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ValueError(f"not a message of version {WIRE_VERSION}: {error}") from None
    return message


class _Version(msgspec.Struct, frozen=True):
    wire: int


def wire_version(data: bytes) -> int:
    """Return the wire version of an encoded Hello of any version. Raises ValueError if it is not a Hello."""
    try:
        return msgspec.msgpack.decode(data, type=_Version).wire
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a handshake message: {error}") from None


OnLoss = Callable[[EngineDeadError], None]
MessageT = TypeVar("MessageT", bound=Message)

GRACE_SECONDS: Final = 2.0
"""Time for a failure notification to arrive after its local symptom."""


class Peer:
    """A connection to another host or rank. A thread reads it, so a failure is noticed while this process waits.

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
        self.name = name
        self.grace = grace
        self._exit_status = exit_status
        self.ending = False  # True once this side has sent End.
        self._connection = connection
        self._sending = threading.Lock()
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
            self._connection.shutdown(socket.SHUT_RDWR)  # A mere close() would wait for the reading thread.
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
