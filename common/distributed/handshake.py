"""The handshake of several hosts: they connect to host 0, which compares their fingerprints and tells all the verdict.

Runs on plain sockets before any device or weight is touched, so that a mismatch is one line on every host and not a
hang in the first collective. Steps use the same connections afterwards. With a token hosts prove to each other that
they know it, and only one that does can join or end the start. Nothing is encrypted: restrict the port to the hosts.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.distributed.messages import (
    HANDSHAKE_BYTES,
    WIRE_VERSION,
    Challenge,
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
from pagoda.common.distributed.proof import Nonces, is_proof, new_nonce, proof
from pagoda.common.errors import ConfigError

WAIT_SECONDS: Final = 300.0  # Time limit for all hosts to connect, in seconds.
RUNTIME_PORT: Final = 1  # The backend's own rendezvous uses the port after the master port.

_HANDSHAKE_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 0.2
_CONNECT_SECONDS: Final = 5.0
_MAX_VERDICT_CHARACTERS: Final = 4000
_SAME_FLAGS: Final = "give every host the same flags"
_TOKEN_FLAG: Final = "--cluster-token-file"
_SAME_TOKEN: Final = f"give every host the same PAGODA_CLUSTER_TOKEN or {_TOKEN_FLAG}"

SIDE_BY_SIDE: Final = 64
"""Clients that are heard at a time."""

MessageT = TypeVar("MessageT")

Check = Callable[[Sequence[Host]], str]
"""Returns why these hosts cannot work together, with the remedy; "" if they can."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoiningHost:
    """A host that has sent its Hello."""

    connection: socket.socket
    host: Host
    nonces: Nonces
    has_token: bool

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

    `token`: what they must prove to know; empty: nothing. Leaving the context closes their connections, unless they
    were taken with `detach`.
    """

    def __init__(self, listener: socket.socket, nodes: int, deadline: float, token: str = "") -> None:
        self._listener = listener
        self._nodes = nodes
        self._deadline = deadline
        self._token = token
        self._hosts: list[JoiningHost] = []
        self._greeted: dict[Future[JoiningHost | str], socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connection in (*(host.connection for host in self._hosts), *self._greeted.values()):
            _close(connection)

    def __iter__(self) -> Iterator[JoiningHost]:
        """Iterate in rank order."""
        return iter(sorted(self._hosts, key=lambda host: host.rank))

    def detach(self) -> tuple[JoiningHost, ...]:
        """Return the hosts and leave their connections open."""
        hosts = tuple(self)
        self._hosts.clear()
        return hosts

    def send(self, reason: str) -> None:
        """Send the verdict to all hosts, skipping those that have disconnected."""
        for host in self._hosts:
            shown = proof(token=self._token, role="host 0", nonces=host.nonces, content=reason.encode())
            with contextlib.suppress(OSError):
                send_frame(host.connection, encode(Verdict(reason, shown)))

    def admit(self) -> str:
        """Accept hosts until all have connected, rejecting other clients.

        Clients are heard side by side: one that says nothing delays no other. Returns why the set cannot be completed,
        or "".
        """
        pool = ThreadPoolExecutor(SIDE_BY_SIDE, "pagoda-join")
        ringing, bell = socket.socketpair()
        try:
            with ringing, bell:
                return self._admit(pool, ringing, bell)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _admit(self, pool: ThreadPoolExecutor, ringing: socket.socket, bell: socket.socket) -> str:
        """`ringing`: becomes readable when a client was heard, by `bell`."""
        while len(self._hosts) < self._nodes - 1:
            left = self._deadline - time.monotonic()
            if left <= 0:
                return self._missing()
            watched = [ringing, self._listener] if len(self._greeted) < SIDE_BY_SIDE else [ringing]
            ready, _, _ = select.select(watched, [], [], left)
            if self._listener in ready:
                self._start_greeting(pool, bell)
            if ringing in ready:
                ringing.recv(SIDE_BY_SIDE)
                if fault := self._take_heard():
                    return fault
        return ""

    def _start_greeting(self, pool: ThreadPoolExecutor, bell: socket.socket) -> None:
        self._listener.settimeout(0)
        try:
            connection, address = self._listener.accept()
        except OSError:  # The host has left.
            return
        greeted = pool.submit(self._greet, connection, address[0])
        self._greeted[greeted] = connection
        greeted.add_done_callback(lambda _: _ring(bell))

    def _take_heard(self) -> str:
        """Take in those who were heard. Returns why one of them ends the start, or ""."""
        for greeted in [future for future in self._greeted if future.done()]:
            connection = self._greeted.pop(greeted)
            if (error := greeted.exception()) is not None:
                address = _address(connection)
                logger.warning("rejected %s on the port for hosts: %s", address, error)
                connection.close()
                continue
            joining = greeted.result()
            if isinstance(joining, str):
                return joining
            self._hosts = [host for host in self._hosts if not host.disconnected]
            if joining.disconnected:  # The host may connect again.
                connection.close()
                continue
            fault = self._rank_error(joining)
            self._hosts.append(joining)
            if fault:
                return fault
        return ""

    def _greet(self, connection: socket.socket, address: str) -> JoiningHost | str:
        """Return the host, or why it ends the start. Runs in a thread.

        Raises EOFError, OSError or ValueError if the client is no host that may join.
        """
        prepare(connection)
        connection.settimeout(_HANDSHAKE_SECONDS)
        nonce = new_nonce()
        send_frame(connection, encode(Challenge(WIRE_VERSION, nonce, wants_proof=bool(self._token))))
        data = receive_frame(connection, HANDSHAKE_BYTES, _HANDSHAKE_SECONDS)
        version = wire_version(data)
        if version != WIRE_VERSION:
            fault = (
                f"the host at {address} runs another version of pagoda: its message version is {version}, host 0's "
                f"{WIRE_VERSION}; install the same version everywhere"
            )
            send_frame(connection, encode(Verdict(fault)))
            if self._token:  # The host has proved nothing yet.
                raise ValueError(fault)
            connection.close()
            return fault
        hello = decode(data)
        if not isinstance(hello, Hello):
            raise ValueError(f"expected Hello, received {type(hello).__name__}")
        nonces = Nonces(host_0=nonce, joining=hello.nonce)
        content = encode(hello.fingerprint)
        if self._token and not is_proof(hello.proof, token=self._token, role="joining", nonces=nonces, content=content):
            raise ValueError("it does not prove that it knows the cluster's token")
        return JoiningHost(connection, Host(hello.fingerprint, address), nonces, bool(hello.proof))

    def _rank_error(self, joining: JoiningHost) -> str:
        if joining.host.fingerprint.nodes != self._nodes:
            return (
                f"{joining.host} has --nnodes {joining.host.fingerprint.nodes} instead of {self._nodes}; {_SAME_FLAGS}"
            )
        if joining.has_token and not self._token:
            return f"{joining.host} has a cluster token, host 0 has none; {_SAME_TOKEN}"
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
    parallel: ParallelConfig,
    fingerprint: HostFingerprint,
    check: Check,
    wait: float = WAIT_SECONDS,
    *,
    token: str = "",
) -> tuple[Peer, ...]:
    """Return the other hosts in rank order on host 0, host 0 on the others.

    `wait`: time limit in seconds; `token`: what hosts prove to each other to know, empty for nothing. Raises
    ConfigError if a host differs, is missing, connects twice or knows another token, or if the port is taken or
    unreachable.
    """
    if parallel.node_rank:
        return (_join(parallel, fingerprint, wait, token),)
    return _gather(parallel, fingerprint, check, wait, token)


def _gather(
    parallel: ParallelConfig, fingerprint: HostFingerprint, check: Check, wait: float, token: str
) -> tuple[Peer, ...]:
    deadline = time.monotonic() + wait
    with _listen(parallel) as listener, JoiningHosts(listener, parallel.nnodes, deadline, token) as joining:
        place = "{}:{}".format(*listener.getsockname()[:2])
        logger.info("waiting for %d other hosts at %s", parallel.nnodes - 1, place)
        if not token:
            logger.warning("whoever reaches %s can join and read every prompt: %s", place, _SAME_TOKEN)
        reason = joining.admit()
        if not reason:
            hosts = [Host(fingerprint, parallel.master_addr), *(peer.host for peer in joining)]
            reason = differences(hosts) or check(hosts)
        reason = reason[:_MAX_VERDICT_CHARACTERS]
        joining.send(reason)
        _raise(reason)
        return tuple(Peer(peer.connection, str(peer.host)) for peer in joining.detach())


def _join(parallel: ParallelConfig, fingerprint: HostFingerprint, wait: float, token: str) -> Peer:
    name = host_name(0, parallel.master_addr)
    address = f"{parallel.master_addr}:{parallel.master_port}"
    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(_connect(parallel, wait))
        try:
            verdict = _send_hello(connection, fingerprint, wait, token)
        except ConfigError:
            raise
        except (EOFError, OSError, ValueError) as error:
            raise ConfigError(
                "--master-port",
                f"the process listening at {address} does not answer as {name} ({describe(error)}); check its log, and "
                "give every host the same --master-port, one that no other program uses",
            ) from None
        _raise(verdict.reason)
        opened.pop_all()
    return Peer(connection, name)


def _send_hello(connection: socket.socket, fingerprint: HostFingerprint, wait: float, token: str) -> Verdict:
    """Return host 0's verdict.

    Raises EOFError, OSError or ValueError if it sends none, ConfigError if it does not prove that it knows the token.
    """
    challenge = _received(connection, Challenge, wait)
    if challenge.wants_proof and not token:
        raise ConfigError(_TOKEN_FLAG, f"host 0 has a cluster token, this host has none; {_SAME_TOKEN}")
    nonces = Nonces(host_0=challenge.nonce, joining=new_nonce())
    shown = proof(token=token, role="joining", nonces=nonces, content=encode(fingerprint))
    send_frame(connection, encode(Hello(WIRE_VERSION, fingerprint, nonce=nonces.joining, proof=shown)))
    verdict = _received(connection, Verdict, 2 * wait)  # Host 0 may have only begun to wait for the other hosts.
    reason = verdict.reason.encode()
    if token and not is_proof(verdict.proof, token=token, role="host 0", nonces=nonces, content=reason):
        raise ConfigError(_TOKEN_FLAG, f"host 0 does not prove that it knows the cluster's token; {_SAME_TOKEN}")
    return verdict


def _received(connection: socket.socket, kind: type[MessageT], seconds: float) -> MessageT:
    message = decode(receive_frame(connection, HANDSHAKE_BYTES, seconds))
    if not isinstance(message, kind):
        raise ValueError(f"expected {kind.__name__}, received {type(message).__name__}")
    return message


def _connect(parallel: ParallelConfig, wait: float) -> socket.socket:
    """Return a connection to host 0, which may start later than this host."""
    address = f"{parallel.master_addr}:{parallel.master_port}"
    deadline = time.monotonic() + wait
    logged = ""
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


def _raise(reason: str) -> None:
    if reason:
        raise ConfigError("--nnodes", reason)


def _ring(bell: socket.socket) -> None:
    with contextlib.suppress(OSError):  # Nobody waits any more.
        bell.send(b"\0")


def _close(connection: socket.socket) -> None:
    """Close a connection that a thread may be reading."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _address(connection: socket.socket) -> str:
    """Return the address of a client, which may have left."""
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "a client"


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
