"""The handshake of several hosts: they connect to host 0, which compares their fingerprints and tells all the verdict.

Runs on plain sockets before any device or weight is touched, so that a mismatch is one line on every host and not a
hang in the first collective. Steps use the same connections afterwards. The port is neither authenticated nor
encrypted: restrict it to the hosts.
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
    HANDSHAKE_BYTES,
    WIRE_VERSION,
    Hello,
    Host,
    HostFingerprint,
    Peer,
    Verdict,
    decode,
    describe,
    differences,
    encode,
    host_name,
    prepare,
    receive_frame,
    send_frame,
    wire_version,
)
from pagoda.common.errors import ConfigError

WAIT_SECONDS: Final = 300.0  # time limit for all hosts to connect
RUNTIME_PORT: Final = 1  # the backend's own rendezvous uses the master port plus this

_HANDSHAKE_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 0.2
_CONNECT_SECONDS: Final = 5.0
_MAX_VERDICT_CHARACTERS: Final = 4000
_SAME_FLAGS: Final = "give every host the same flags"

Check = Callable[[Sequence[Host]], str]
"""Returns why these hosts cannot work together, with the remedy; "" if they can."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoiningHost:
    """A host that has sent its Hello."""

    connection: socket.socket
    host: Host

    @property
    def rank(self) -> int:
        """The host's --node-rank."""
        return self.host.fingerprint.rank

    @property
    def disconnected(self) -> bool:
        """True on EOF: hosts send nothing while they wait, so readable means closed."""
        return bool(select.select([self.connection], [], [], 0)[0])


class JoiningHosts:
    """The hosts that have connected to `listener`, of `nodes` including host 0, until `deadline` (monotonic clock).

    Leaving the context closes their connections, unless they were taken with `detach`.
    """

    def __init__(self, listener: socket.socket, nodes: int, deadline: float) -> None:
        self._listener, self._nodes, self._deadline = listener, nodes, deadline
        self._hosts: list[JoiningHost] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for host in self._hosts:
            host.connection.close()

    def __iter__(self) -> Iterator[JoiningHost]:
        """Iterate in rank order."""
        return iter(sorted(self._hosts, key=lambda host: host.rank))

    def detach(self) -> tuple[JoiningHost, ...]:
        """Return the hosts and leave their connections open."""
        hosts = tuple(self)
        self._hosts.clear()
        return hosts

    def send(self, verdict: Verdict) -> None:
        """Send the verdict to all hosts, skipping those that have disconnected."""
        for host in self._hosts:
            try:
                send_frame(host.connection, encode(verdict))
            except OSError:
                continue

    def admit(self) -> str:
        """Accept hosts until all have connected, rejecting other clients.

        Returns why the set cannot be completed, or "".
        """
        while len(self._hosts) < self._nodes - 1:
            try:
                self._listener.settimeout(max(0.0, self._deadline - time.monotonic()))
                connection, address = self._listener.accept()
            except (TimeoutError, BlockingIOError):
                return self._missing()
            self._hosts = [host for host in self._hosts if not host.disconnected]
            try:
                fault = self._receive_hello(connection, address[0])
            except (EOFError, OSError, ValueError) as error:
                logger.warning("rejected %s on the port for hosts: %s", address[0], error)
                connection.close()
                continue
            if fault:
                return fault
        return ""

    def _receive_hello(self, connection: socket.socket, address: str) -> str:
        """Return why the host cannot join, or "".

        Raises EOFError, OSError or ValueError if the client is not a host.
        """
        prepare(connection)
        data = receive_frame(connection, HANDSHAKE_BYTES, _HANDSHAKE_SECONDS)
        version = wire_version(data)
        if version != WIRE_VERSION:
            fault = (
                f"the host at {address} runs another version of pagoda: its message version is {version}, host 0's "
                f"{WIRE_VERSION}; install the same version everywhere"
            )
            send_frame(connection, encode(Verdict(fault)))
            connection.close()
            return fault
        hello = decode(data)
        if not isinstance(hello, Hello):
            raise ValueError(f"expected Hello, received {type(hello).__name__}")
        host = JoiningHost(connection, Host(hello.fingerprint, address))
        fault = self._rank_error(host)
        self._hosts.append(host)
        return fault

    def _rank_error(self, joining: JoiningHost) -> str:
        if joining.host.fingerprint.nodes != self._nodes:
            return (
                f"{joining.host} has --nnodes {joining.host.fingerprint.nodes} instead of {self._nodes}; {_SAME_FLAGS}"
            )
        ranks = f"give each host a --node-rank of its own, 0 to {self._nodes - 1}"
        if not 0 < joining.rank < self._nodes:
            return f"{joining.host} has a rank out of range; {ranks}"
        for other in self._hosts:
            if other.rank == joining.rank:
                return f"{joining.host} connected twice, also from {other.host.address}; {ranks}"
        return ""

    def _missing(self) -> str:
        present = {host.rank for host in self._hosts}
        absent = [str(rank) for rank in range(1, self._nodes) if rank not in present]
        host, port = self._listener.getsockname()[:2]
        return (
            f"host {' and host '.join(absent)} of {self._nodes} did not connect to {host}:{port} in time; check their "
            "logs, start them with host 0's --master-addr and --master-port, and open that port in the network"
        )


def meet(
    parallel: ParallelConfig, fingerprint: HostFingerprint, check: Check, wait: float = WAIT_SECONDS
) -> tuple[Peer, ...]:
    """Return the other hosts in rank order on host 0, host 0 on the others. `wait`: time limit in seconds.

    Raises ConfigError if a host differs, is missing or connects twice, or if the port is taken or unreachable.
    """
    if parallel.node_rank:
        return (_join(parallel, fingerprint, wait),)
    return _gather(parallel, fingerprint, check, wait)


def _gather(parallel: ParallelConfig, fingerprint: HostFingerprint, check: Check, wait: float) -> tuple[Peer, ...]:
    with _listen(parallel) as listener, JoiningHosts(listener, parallel.nnodes, time.monotonic() + wait) as joining:
        logger.info("waiting for %d other hosts at %s:%d", parallel.nnodes - 1, *listener.getsockname()[:2])
        reason = joining.admit()
        if not reason:
            hosts = [Host(fingerprint, parallel.master_addr), *(each.host for each in joining)]
            reason = differences(hosts) or check(hosts)
        verdict = Verdict(reason[:_MAX_VERDICT_CHARACTERS])
        joining.send(verdict)
        _raise(verdict)
        return tuple(Peer(each.connection, str(each.host)) for each in joining.detach())


def _join(parallel: ParallelConfig, fingerprint: HostFingerprint, wait: float) -> Peer:
    name, address = host_name(0, parallel.master_addr), f"{parallel.master_addr}:{parallel.master_port}"
    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(_connect(parallel, wait))
        try:
            verdict = _send_hello(connection, fingerprint, wait)
        except (EOFError, OSError, ValueError) as error:
            raise ConfigError(
                "--master-port",
                f"the process listening at {address} does not answer as {name} ({describe(error)}); check its log, and "
                "give every host the same --master-port, one that no other program uses",
            ) from None
        _raise(verdict)
        opened.pop_all()
    return Peer(connection, name)


def _send_hello(connection: socket.socket, fingerprint: HostFingerprint, wait: float) -> Verdict:
    """Return host 0's verdict. Raises EOFError, OSError or ValueError if it sends none."""
    send_frame(connection, encode(Hello(WIRE_VERSION, fingerprint)))
    timeout = 2 * wait  # host 0 may just have begun to wait for the other hosts
    verdict = decode(receive_frame(connection, HANDSHAKE_BYTES, timeout))
    if not isinstance(verdict, Verdict):
        raise ValueError(f"expected Verdict, received {type(verdict).__name__}")
    return verdict


def _connect(parallel: ParallelConfig, wait: float) -> socket.socket:
    """Return a connection to host 0, which may start later than this host."""
    address, deadline, logged = f"{parallel.master_addr}:{parallel.master_port}", time.monotonic() + wait, ""
    while True:
        try:
            connection = socket.create_connection((parallel.master_addr, parallel.master_port), _CONNECT_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    "--master-addr",
                    f"host {parallel.node_rank} cannot reach host 0 at {address} ({describe(error)}); start host 0, "
                    "give every host its address and the same --master-port, and open that port in the network",
                ) from None
            if describe(error) != logged:
                logged = describe(error)
                logger.info("waiting for host 0 at %s: %s", address, logged)
            time.sleep(_RETRY_SECONDS)
        else:
            prepare(connection)
            return connection


def _raise(verdict: Verdict) -> None:
    if verdict.reason:
        raise ConfigError("--nnodes", verdict.reason)


def _listen(parallel: ParallelConfig) -> socket.socket:
    """Return a listener at the master port, if the port of the backend's own rendezvous is free too."""
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
        raise ConfigError(
            "--master-addr", f"{parallel.master_addr}: {describe(error)}; give host 0's address"
        ) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                "--master-addr",
                f"{parallel.master_addr} is not an address of this host, which is host 0 by its --node-rank; give host "
                "0's own address, and each other host its --node-rank",
            ) from None
        raise ConfigError(
            "--master-port",
            f"host 0 cannot listen at {parallel.master_addr}:{port}: {describe(error)}; choose another port; the next "
            "higher one must be free too",
        ) from None
    return bound
