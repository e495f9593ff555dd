"""What a worker is told before it starts: one message, msgpack."""

from __future__ import annotations

import socket
from typing import Final

import msgspec

from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig
from pagoda.common.hosts.frames import STEP_BYTES, receive_frame
from pagoda.common.hosts.messages import End
from pagoda.common.hosts.place import RankPlace


class Job(msgspec.Struct, tag="job", frozen=True, kw_only=True):
    """The engine to build, which names its model by a path, and the place of this rank in it."""

    config: EngineConfig
    usage: Usage
    place: RankPlace


_decoder: Final = msgspec.msgpack.Decoder(Job | End)
encode: Final = msgspec.msgpack.Encoder().encode


def receive_job(connection: socket.socket) -> Job:
    """Wait for it. Raises EOFError or OSError when rank 0 is gone, or has no job to give."""
    found: Job | End = _decoder.decode(receive_frame(connection, STEP_BYTES))
    if isinstance(found, End):
        raise EOFError(found.reason)
    return found
