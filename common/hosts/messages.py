"""What hosts say to each other: tagged msgpack, decoded against these types, no pickle. Knows no socket."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from pagoda.common.engine.step import StepPlan
from pagoda.common.hosts.facts import HostFacts

WIRE_VERSION: Final = 4
"""Of these messages. It goes up with every change to them."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A host introduces itself to host 0. The first field is first in every version."""

    wire: int
    facts: HostFacts


class Verdict(msgspec.Struct, tag="verdict", frozen=True):
    """Host 0's answer: go on, or the reason why nobody can, with the remedy."""

    reason: str = ""


class Room(msgspec.Struct, tag="room", frozen=True):
    """The weights are loaded, and so many KV blocks fit beside them."""

    num_blocks: int


class Agreed(msgspec.Struct, tag="agreed", frozen=True):
    """Host 0's answer: so many KV blocks fit everywhere."""

    num_blocks: int


class Warm(msgspec.Struct, tag="warm", frozen=True):
    """Every program is compiled."""


class Execute(msgspec.Struct, tag="step", frozen=True):
    """Host 0 starts a step: a plan for each copy of the model, None where there is nothing to compute."""

    plans: tuple[StepPlan | None, ...]


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """Host 0 gives its device's memory back, and so shall the others; answered by Changed."""

    level: int


class WakeUp(msgspec.Struct, tag="wake", frozen=True):
    """Host 0 has these parts of its memory again; answered by Changed."""

    tags: tuple[str, ...]


class Changed(msgspec.Struct, tag="changed", frozen=True):
    """A host sleeps or is awake as it was told. `error`: why it is not."""

    error: str = ""


class End(msgspec.Struct, tag="end", frozen=True):
    """The sender stops. `reason`: what it failed with; empty when it was asked to."""

    reason: str = ""


Message = Hello | Verdict | Room | Agreed | Warm | Execute | Sleep | WakeUp | Changed | End


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
