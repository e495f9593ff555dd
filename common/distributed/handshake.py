"""The pre-flight of several hosts: they meet at host 0, which compares them and tells all whether to go on.

Plain sockets, before any device or weight is touched: what would else be a hang in the first exchange is one line on
every host. The connections stay: steps go over them. Host 0 listens at its address and port only, and believes whoever
comes there; so that port belongs on a network of the hosts' own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.distributed.messages import (
    GREETING_BYTES,
    WIRE_VERSION,
    Hello,
    Host,
    HostFingerprint,
    Verdict,
    decode,
    differences,
    encode,
    host_name,
    prepare,
    receive_frame,
    send_frame,
    wire_version,
)
from pagoda.common.distributed.peer import Peer, told
from pagoda.common.errors import ConfigError

# Host 0's side of the pre-flight: who comes, and whether it may stay.

_GREETING_SECONDS: Final = 5.0
_SAME: Final = "give every host the same flags"


@dataclass(frozen=True, slots=True)
class JoiningHost:
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


class JoiningHosts:
    """The hosts that have come to `listener`, out of `nodes` with host 0, up to `deadline` on the monotonic clock.

    Leaving the context hangs up on them, unless they were taken with `keep`.
    """

    def __init__(self, listener: socket.socket, nodes: int, deadline: float) -> None:
        self._listener, self._nodes, self._deadline = listener, nodes, deadline
        self._guests: list[JoiningHost] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for guest in self._guests:
            guest.connection.close()

    def __iter__(self) -> Iterator[JoiningHost]:
        """In the order of their ranks."""
        return iter(sorted(self._guests, key=lambda guest: guest.rank))

    def keep(self) -> tuple[JoiningHost, ...]:
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
        guest = JoiningHost(connection, Host(hello.facts, address))
        fault = self._misplaced(guest)
        self._guests.append(guest)
        return fault

    def _misplaced(self, guest: JoiningHost) -> str:
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


WAIT_SECONDS: Final = 300.0
"""How long hosts wait for each other."""

RUNTIME_PORT: Final = 1
"""The backend's own meeting has the port so many after the master port."""

_RETRY_SECONDS: Final = 0.2
_CONNECT_SECONDS: Final = 5.0
_MOST_WORDS: Final = 4000
"""Characters of a verdict: many hosts may differ in much."""

Check = Callable[[Sequence[Host]], str]
"""What is wrong with these hosts taken together, and the remedy; empty: nothing."""

logger = logging.getLogger(__name__)


def meet(
    parallel: ParallelConfig, facts: HostFingerprint, check: Check, wait: float = WAIT_SECONDS
) -> tuple[Peer, ...]:
    """The other hosts: host 0 gets all of them in order, the others get host 0. `wait`: seconds, for each other.

    Raises ConfigError: a host that differs, is missing or came twice, a port that is taken or cannot be reached.
    """
    if parallel.node_rank:
        return (_join(parallel, facts, wait),)
    return _gather(parallel, facts, check, wait)


def _gather(parallel: ParallelConfig, facts: HostFingerprint, check: Check, wait: float) -> tuple[Peer, ...]:
    """Host 0's side."""
    with _listen(parallel) as listener, JoiningHosts(listener, parallel.nnodes, time.monotonic() + wait) as guests:
        logger.info("waiting for %d more hosts at %s:%d", parallel.nnodes - 1, *listener.getsockname()[:2])
        reason = guests.admit()
        if not reason:
            hosts = [Host(facts, parallel.master_addr), *(guest.host for guest in guests)]
            reason = differences(hosts) or check(hosts)
        verdict = Verdict(reason[:_MOST_WORDS])
        guests.tell(verdict)
        _raise(verdict)
        return tuple(Peer(guest.connection, str(guest.host)) for guest in guests.keep())


def _join(parallel: ParallelConfig, facts: HostFingerprint, wait: float) -> Peer:
    """The side of every other host."""
    name, place = host_name(0, parallel.master_addr), f"{parallel.master_addr}:{parallel.master_port}"
    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(_connect(parallel, wait))
        try:
            verdict = _introduced(connection, facts, wait)
        except (EOFError, OSError, ValueError) as error:
            raise ConfigError(
                "--master-port",
                f"who listens at {place} does not answer as {name} ({told(error)}); see what that host says, and give "
                "every host the same --master-port, one that nothing else there uses",
            ) from None
        _raise(verdict)
        opened.pop_all()
    return Peer(connection, name)


def _introduced(connection: socket.socket, facts: HostFingerprint, wait: float) -> Verdict:
    """What host 0 answers. Raises EOFError, OSError or ValueError when it does not."""
    send_frame(connection, encode(Hello(WIRE_VERSION, facts)))
    patience = 2 * wait  # host 0 may only just have begun to wait for the rest
    verdict = decode(receive_frame(connection, GREETING_BYTES, patience))
    if not isinstance(verdict, Verdict):
        raise ValueError(f"{type(verdict).__name__} is no verdict")
    return verdict


def _connect(parallel: ParallelConfig, wait: float) -> socket.socket:
    """A connection to host 0, which may start later than this host."""
    place, deadline, said = f"{parallel.master_addr}:{parallel.master_port}", time.monotonic() + wait, ""
    while True:
        try:
            connection = socket.create_connection((parallel.master_addr, parallel.master_port), _CONNECT_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    "--master-addr",
                    f"host {parallel.node_rank} cannot reach host 0 at {place} ({told(error)}); start host 0, give "
                    "every host its address and the same --master-port, and let the network pass that port",
                ) from None
            if told(error) != said:
                said = told(error)
                logger.info("waiting for host 0 at %s: %s", place, said)
            time.sleep(_RETRY_SECONDS)
        else:
            prepare(connection)
            return connection


def _raise(verdict: Verdict) -> None:
    if verdict.reason:
        raise ConfigError("--nnodes", verdict.reason)


def _listen(parallel: ParallelConfig) -> socket.socket:
    """A listener at the master port, when the port for the backend's own meeting is free too."""
    with _bound(parallel, RUNTIME_PORT):
        listener = _bound(parallel, 0)
    listener.listen()
    return listener


def _bound(parallel: ParallelConfig, offset: int) -> socket.socket:
    port = parallel.master_port + offset
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(parallel.master_addr, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("--master-addr", f"{parallel.master_addr}: {told(error)}; give host 0's address") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                "--master-addr",
                f"{parallel.master_addr} is no address of this host, which --node-rank calls host 0; give host 0's own "
                "address, and each of the other hosts its --node-rank",
            ) from None
        raise ConfigError(
            "--master-port",
            f"host 0 cannot listen at {parallel.master_addr}:{port}: {told(error)}; choose another port, the one after "
            "which is free too",
        ) from None
    return bound
