"""What hosts say to each other: tagged msgpack, decoded against these types, no pickle. Knows no socket."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from pagoda.common.engine.step import StepPlan

# Messages as bytes on a TCP connection between hosts: a length, then so many bytes.

GREETING_BYTES: Final = 1 << 16
"""Largest message of somebody whom nobody knows yet."""

STEP_BYTES: Final = 1 << 30
"""Largest message between hosts that have met."""

_LENGTH_BYTES: Final = 8
_LEAST_SECONDS: Final = 0.001
_QUIET_SECONDS: Final = 5
_PROBES: Final = 3
_GONE_MS: Final = 20_000


def prepare(connection: socket.socket) -> None:
    """Send at once, and let the kernel notice within 20 s a host that vanished without a word (power, network)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _QUIET_SECONDS),
        ("TCP_KEEPINTVL", _QUIET_SECONDS),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", _GONE_MS),
    ):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send_frame(connection: socket.socket, data: bytes) -> None:
    """Raises OSError."""
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def receive_frame(connection: socket.socket, limit: int, seconds: float | None = None) -> bytes:
    """The next frame, within so many seconds; None: whenever it comes.

    Raises EOFError at the end of the connection, OSError, or ValueError beyond `limit` bytes.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    size = int.from_bytes(_exactly(connection, _LENGTH_BYTES, deadline), "big")
    if size > limit:
        raise ValueError(f"a message of {size} bytes, more than {limit}")
    return bytes(_exactly(connection, size, deadline))


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            connection.settimeout(max(_LEAST_SECONDS, deadline - time.monotonic()))
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection ended")
        view = view[count:]
    return data


# Where one of the processes that share a model stands among them.


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. `rank` counts from 0 to `size` - 1. `device`: its number among the devices that its process sees.

    `host`, `port`: where rank 0 listens for the backend's own meeting.
    """

    rank: int
    size: int
    device: int
    host: str
    port: int


# What every host must have alike before they compute together, and who differs.
#
# Hosts run the same programs on one mesh. One with another version, flag or model would hang all of them in the first
# exchange, or answer nonsense; so each tells what it has before anything is loaded.

_REMEDIES: Final = {
    "versions": "install the same versions everywhere",
    "model": "give every host the same model",
    "settings": "give every host the same flags",
    "environment": "set the variables alike everywhere",
    "devices": "use hosts of one kind",
}
"""Field of HostFacts -> what to do when it differs, in the order of telling."""


class HostFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """One host. What all must have alike stands by name in the mappings; a name that a host does not know is not
    compared for it.

    `versions`: by package. `model`: digests and sizes. `settings`: by flag. `environment`: by variable. `devices`:
    what it has and how many.
    """

    rank: int
    nodes: int
    versions: dict[str, str]
    model: dict[str, str]
    settings: dict[str, str]
    environment: dict[str, str]
    devices: dict[str, str]


@dataclass(frozen=True, slots=True)
class Host:
    """A host that was met. `address`: as the others see it."""

    facts: HostFingerprint
    address: str

    def __str__(self) -> str:
        return host_name(self.facts.rank, self.address)


def host_name(rank: int, address: str) -> str:
    """How messages call a host."""
    return f"host {rank} ({address})"


def differences(hosts: Sequence[Host]) -> str:
    """Who differs from most hosts in what, and the remedy, in one line; empty when nobody does.

    `hosts` in the order of their ranks: where as many have one value as another, that of the first host counts.
    """
    found: dict[str, list[str]] = {}
    remedies = []
    for field, remedy in _REMEDIES.items():
        tables = {str(host): getattr(host.facts, field) for host in hosts}
        for host, text in _odd_ones(tables):
            found.setdefault(host, []).append(text)
            if remedy not in remedies:
                remedies.append(remedy)
    told = "; ".join(f"{host} has {', '.join(texts)}" for host, texts in found.items())
    return f"{told}; {', '.join(remedies)}" if found else ""


def _odd_ones(tables: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """(host, how it differs) for everything that the tables do not have alike."""
    names = dict.fromkeys(name for table in tables.values() for name in table)
    found = []
    for name in names:
        usual = Counter(table[name] for table in tables.values() if name in table).most_common(1)[0][0]
        for host, table in tables.items():
            if table.get(name, usual) != usual:
                found.append((host, f"{name} {_shown(table[name])} instead of {_shown(usual)}"))
    return found


def _shown(value: str) -> str:
    return value[:200] or "nothing"


WIRE_VERSION: Final = 4
"""Of these messages. It goes up with every change to them."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A host introduces itself to host 0. The first field is first in every version."""

    wire: int
    facts: HostFingerprint


class Verdict(msgspec.Struct, tag="verdict", frozen=True):
    """Host 0's answer: go on, or the reason why nobody can, with the remedy."""

    reason: str = ""


class BlockCount(msgspec.Struct, tag="room", frozen=True):
    """The weights are loaded, and so many KV blocks fit beside them."""

    num_blocks: int


class AgreedBlocks(msgspec.Struct, tag="agreed", frozen=True):
    """Host 0's answer: so many KV blocks fit everywhere."""

    num_blocks: int


class WarmedUp(msgspec.Struct, tag="warm", frozen=True):
    """Every program is compiled."""


class Execute(msgspec.Struct, tag="step", frozen=True):
    """Host 0 starts a step: a plan for each copy of the model, None where there is nothing to compute."""

    plans: tuple[StepPlan | None, ...]


class SleepRanks(msgspec.Struct, tag="sleep", frozen=True):
    """Host 0 gives its device's memory back, and so shall the others; answered by Changed."""

    level: int


class WakeUpRanks(msgspec.Struct, tag="wake", frozen=True):
    """Host 0 has these parts of its memory again; answered by Changed."""

    tags: tuple[str, ...]


class SleepResult(msgspec.Struct, tag="changed", frozen=True):
    """A host sleeps or is awake as it was told. `error`: why it is not."""

    error: str = ""


class End(msgspec.Struct, tag="end", frozen=True):
    """The sender stops. `reason`: what it failed with; empty when it was asked to."""

    reason: str = ""


Message = (
    Hello | Verdict | BlockCount | AgreedBlocks | WarmedUp | Execute | SleepRanks | WakeUpRanks | SleepResult | End
)


def _from_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _to_array(kind: Any, value: Any) -> npt.NDArray[Any]:
    dtype, shape, data = value
    if dtype not in _DTYPES:
        raise ValueError(f"no array of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape)


_DTYPES: Final = (np.dtype(np.int32).str, np.dtype(np.uint32).str, np.dtype(np.bool_).str, np.dtype(np.uint8).str)
_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_from_array)
_decoder: Final = msgspec.msgpack.Decoder(Message, dec_hook=_to_array)

encode = _encoder.encode


def decode(data: bytes) -> Message:
    """A message. Raises ValueError when it is none."""
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ValueError(f"not a message of version {WIRE_VERSION}: {error}") from None
    return message


class _Version(msgspec.Struct, frozen=True):
    wire: int


def wire_version(data: bytes) -> int:
    """The version in which a Hello of any version is written. Raises ValueError when it is none."""
    try:
        return msgspec.msgpack.decode(data, type=_Version).wire
    except msgspec.MsgspecError as error:
        raise ValueError(f"no greeting: {error}") from None
