"""The pre-flight of several hosts: they meet at host 0, which compares them and tells all whether to go on.

Plain sockets, before any device or weight is touched: what would else be a hang in the first exchange is one line on
every host. The connections stay: steps go over them. Host 0 listens at its address and port only, and believes whoever
comes there; so that port belongs on a network of the hosts' own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from pagoda.common.config.parallel import ParallelConfig
from pagoda.common.errors import ConfigError
from pagoda.common.hosts.facts import Host, HostFacts, differences, host_name
from pagoda.common.hosts.frames import GREETING_BYTES, prepare, receive_frame, send_frame
from pagoda.common.hosts.guests import Guests
from pagoda.common.hosts.messages import WIRE_VERSION, Hello, Verdict, decode, encode
from pagoda.common.hosts.peer import Peer, told

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


def meet(parallel: ParallelConfig, facts: HostFacts, check: Check, wait: float = WAIT_SECONDS) -> tuple[Peer, ...]:
    """The other hosts: host 0 gets all of them in order, the others get host 0. `wait`: seconds, for each other.

    Raises ConfigError: a host that differs, is missing or came twice, a port that is taken or cannot be reached.
    """
    if parallel.node_rank:
        return (_join(parallel, facts, wait),)
    return _gather(parallel, facts, check, wait)


def _gather(parallel: ParallelConfig, facts: HostFacts, check: Check, wait: float) -> tuple[Peer, ...]:
    """Host 0's side."""
    with _listen(parallel) as listener, Guests(listener, parallel.nnodes, time.monotonic() + wait) as guests:
        logger.info("waiting for %d more hosts at %s:%d", parallel.nnodes - 1, *listener.getsockname()[:2])
        reason = guests.admit()
        if not reason:
            hosts = [Host(facts, parallel.master_addr), *(guest.host for guest in guests)]
            reason = differences(hosts) or check(hosts)
        verdict = Verdict(reason[:_MOST_WORDS])
        guests.tell(verdict)
        _raise(verdict)
        return tuple(Peer(guest.connection, str(guest.host)) for guest in guests.keep())


def _join(parallel: ParallelConfig, facts: HostFacts, wait: float) -> Peer:
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


def _introduced(connection: socket.socket, facts: HostFacts, wait: float) -> Verdict:
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
