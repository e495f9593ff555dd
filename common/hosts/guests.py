"""Host 0's side of the pre-flight: who comes, and whether it may stay."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from pagoda.common.hosts.facts import Host
from pagoda.common.hosts.frames import GREETING_BYTES, prepare, receive_frame, send_frame
from pagoda.common.hosts.messages import WIRE_VERSION, Hello, Verdict, decode, encode, wire_version

_GREETING_SECONDS: Final = 5.0
_SAME: Final = "give every host the same flags"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Guest:
    """A host that has introduced itself."""

    connection: socket.socket
    host: Host

    @property
    def rank(self) -> int:
        """Its --node-rank."""
        return self.host.facts.rank

    @property
    def gone(self) -> bool:
        """It hung up: nobody says anything while waiting, so all there can be to read is the end."""
        return bool(select.select([self.connection], [], [], 0)[0])


class Guests:
    """The hosts that have come to `listener`, out of `nodes` with host 0, up to `deadline` on the monotonic clock.

    Leaving the context hangs up on them, unless they were taken with `keep`.
    """

    def __init__(self, listener: socket.socket, nodes: int, deadline: float) -> None:
        self._listener, self._nodes, self._deadline = listener, nodes, deadline
        self._guests: list[Guest] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for guest in self._guests:
            guest.connection.close()

    def __iter__(self) -> Iterator[Guest]:
        """In the order of their ranks."""
        return iter(sorted(self._guests, key=lambda guest: guest.rank))

    def keep(self) -> tuple[Guest, ...]:
        """Leave them to the caller."""
        kept = tuple(self)
        self._guests.clear()
        return kept

    def tell(self, verdict: Verdict) -> None:
        """Tell all of them; one that is gone hears nothing."""
        for guest in self._guests:
            try:
                send_frame(guest.connection, encode(verdict))
            except OSError:
                continue

    def admit(self) -> str:
        """Let hosts in until all are there; whoever is no host is sent away. Returns why they cannot be complete."""
        while len(self._guests) < self._nodes - 1:
            try:
                self._listener.settimeout(max(0.0, self._deadline - time.monotonic()))
                connection, address = self._listener.accept()
            except (TimeoutError, BlockingIOError):
                return self._missing()
            self._guests = [guest for guest in self._guests if not guest.gone]
            try:
                fault = self._greet(connection, address[0])
            except (EOFError, OSError, ValueError) as error:
                logger.warning("%s came to the port of the hosts and is none: %s", address[0], error)
                connection.close()
                continue
            if fault:
                return fault
        return ""

    def _greet(self, connection: socket.socket, address: str) -> str:
        """Hear who it is. Returns why it cannot be let in. Raises EOFError, OSError or ValueError for a stranger."""
        prepare(connection)
        data = receive_frame(connection, GREETING_BYTES, _GREETING_SECONDS)
        version = wire_version(data)
        if version != WIRE_VERSION:
            fault = (
                f"the host at {address} runs another pagoda: it speaks version {version} of the messages, host 0 "
                f"{WIRE_VERSION}; install the same version everywhere"
            )
            send_frame(connection, encode(Verdict(fault)))
            connection.close()
            return fault
        hello = decode(data)
        if not isinstance(hello, Hello):
            raise ValueError(f"{type(hello).__name__} is no greeting")
        guest = Guest(connection, Host(hello.facts, address))
        fault = self._misplaced(guest)
        self._guests.append(guest)
        return fault

    def _misplaced(self, guest: Guest) -> str:
        """What is wrong with its rank."""
        if guest.host.facts.nodes != self._nodes:
            return f"{guest.host} has --nnodes {guest.host.facts.nodes} instead of {self._nodes}; {_SAME}"
        ranks = f"give each host a --node-rank of its own, 0 to {self._nodes - 1}"
        if not 0 < guest.rank < self._nodes:
            return f"{guest.host} has a rank that is not there; {ranks}"
        for other in self._guests:
            if other.rank == guest.rank:
                return f"{guest.host} came twice, also from {other.host.address}; {ranks}"
        return ""

    def _missing(self) -> str:
        present = {guest.rank for guest in self._guests}
        absent = [str(rank) for rank in range(1, self._nodes) if rank not in present]
        host, port = self._listener.getsockname()[:2]
        return (
            f"host {' and host '.join(absent)} of {self._nodes} did not come to {host}:{port} in time; see what they "
            "say, start them with host 0's --master-addr and --master-port, and let the network pass that port"
        )
