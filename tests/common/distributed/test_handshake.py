"""The handshake over real sockets, each host in a thread: hosts that differ, are missing or connect twice."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from support.suite.own_address import OWN_ADDRESS, own_port
from support.suite.rows import each_row

from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.distributed.handshake import SIDE_BY_SIDE, meet
from pagoda.common.distributed.messages import (
    HANDSHAKE_BYTES,
    WIRE_VERSION,
    AgreedBlocks,
    BlockCount,
    Challenge,
    Hello,
    Host,
    HostFingerprint,
    Peer,
    Verdict,
    decode,
    encode,
    receive_frame,
    send_frame,
)
from pagoda.common.distributed.proof import Nonces, proof
from pagoda.common.errors import ConfigError

HERE = OWN_ADDRESS  # of host 0; the others connect from 127.0.0.1
PATIENT = 60.0


def fingerprint(rank: int, nodes: int = 2, **changed: Any) -> HostFingerprint:
    usual = {
        "versions": {"pagoda": "1.0", "jax": "0.10.2"},
        "model": {"config": "abc"},
        "settings": {"--tensor-parallel-size": "2", "--max-num-seqs": "256"},
        "environment": {"XLA_FLAGS": ""},
        "devices": {"devices": "1", "devices of kind": "cpu"},
    }
    return HostFingerprint(rank=rank, nodes=nodes, **usual | changed)


def nothing(hosts: Sequence[Host]) -> str:
    return ""


class Handshake:
    """The outcome on each host: its peers, or the error message."""

    def __init__(
        self,
        *hosts: HostFingerprint,
        nodes: int = 2,
        wait: float = PATIENT,
        check: Any = nothing,
        tokens: Sequence[str] = ("", "", ""),
    ) -> None:
        self.port = own_port()
        with ThreadPoolExecutor(len(hosts)) as pool:
            waiting = [pool.submit(self._meet, host, nodes, wait, check, token) for host, token in zip(hosts, tokens)]
            self.ends = [each.result() for each in waiting]

    def _meet(self, host: HostFingerprint, nodes: int, wait: float, check: Any, token: str) -> tuple[Peer, ...] | str:
        nodes = max(nodes, host.rank + 1)
        parallel = ParallelConfig(nnodes=nodes, node_rank=host.rank, master_addr=HERE, master_port=self.port)
        try:
            return meet(parallel, host, check, wait, token=token)
        except ConfigError as error:
            return str(error)

    @property
    def line(self) -> str:
        """The error message, the same on all hosts."""
        (line,) = set(map(str, self.ends))
        return line

    def close(self) -> None:
        for peers in self.ends:
            for peer in peers:
                assert isinstance(peer, Peer)
                peer.end()


def test_matching_hosts_connect() -> None:
    meeting = Handshake(fingerprint(0, 3), fingerprint(2, 3), fingerprint(1, 3), nodes=3)
    first, third, second = meeting.ends
    assert [peer.name for peer in first] == ["host 1 (127.0.0.1)", "host 2 (127.0.0.1)"]
    second[0].send(BlockCount((7,)))
    third[0].send(BlockCount((8,)))
    assert [peer.expect(BlockCount).num_blocks for peer in first] == [(7,), (8,)]
    first[1].send(AgreedBlocks((7,)))
    assert third[0].expect(AgreedBlocks) == AgreedBlocks((7,))
    for peers in meeting.ends:  # a host without power is noticed by the kernel
        for peer in peers:
            assert peer._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert peer._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 20_000
    meeting.close()


@each_row(
    ("changed", "difference", "remedy"),
    [
        ({"versions": {"pagoda": "1.0", "jax": "0.10.1"}}, "jax 0.10.1 instead of 0.10.2", "install the same versions"),
        (
            {"settings": {"--tensor-parallel-size": "4", "--max-num-seqs": "256"}},
            "--tensor-parallel-size 4 instead of 2",
            "give every host the same flags",
        ),
        ({"model": {"config": "xyz"}}, "config xyz instead of abc", "give every host the same model"),
        ({"environment": {"XLA_FLAGS": "--x"}}, "XLA_FLAGS --x instead of nothing", "set the variables alike"),
        ({"devices": {"devices": "8", "devices of kind": "cpu"}}, "devices 8 instead of 1", "use hosts of one kind"),
    ],
)
def test_every_host_reports_the_one_that_differs(changed: Any, difference: str, remedy: str) -> None:
    line = Handshake(fingerprint(0), fingerprint(1, **changed)).line
    assert line.startswith(f"--nnodes: host 1 (127.0.0.1) has {difference}; {remedy}")


def test_the_majority_is_taken_as_correct() -> None:
    old = {"versions": {"pagoda": "0.9", "jax": "0.10.2"}}
    line = Handshake(fingerprint(0, 3, **old), fingerprint(1, 3), fingerprint(2, 3), nodes=3).line
    assert line == f"--nnodes: host 0 ({HERE}) has pagoda 0.9 instead of 1.0; install the same versions everywhere"


def test_the_backends_check_is_reported_on_all_hosts() -> None:
    line = Handshake(fingerprint(0), fingerprint(1), check=lambda hosts: f"{hosts[1]} is too warm; open a window").line
    assert line == "--nnodes: host 1 (127.0.0.1) is too warm; open a window"


def test_a_rank_that_connects_twice() -> None:
    lines = list(map(str, Handshake(fingerprint(0, 3), fingerprint(1, 3), fingerprint(1, 3), nodes=3).ends))
    assert len(set(lines)) == 1
    assert (
        "host 1 (127.0.0.1) connected twice, also from 127.0.0.1; give each host a --node-rank of its own" in lines[0]
    )


@pytest.mark.parametrize(
    ("joining", "words"),
    [
        (
            fingerprint(2, 2),
            "host 2 (127.0.0.1) has a rank out of range; give each host a --node-rank of its own, 0 to 1",
        ),
        (fingerprint(1, 3), "host 1 (127.0.0.1) has --nnodes 3 instead of 2; give every host the same flags"),
    ],
)
def test_a_host_with_another_nnodes_or_rank(joining: HostFingerprint, words: str) -> None:
    assert words in Handshake(fingerprint(0), joining).line


def test_a_missing_host_is_reported_to_the_others() -> None:
    line = Handshake(fingerprint(0, 4), fingerprint(2, 4), nodes=4, wait=1.0).line
    assert line.startswith(f"--nnodes: host 1 and host 3 of 4 did not connect to {HERE}:")


def test_an_unreachable_host_0() -> None:
    port = own_port()
    parallel = ParallelConfig(nnodes=2, node_rank=1, master_addr=HERE, master_port=port)
    with pytest.raises(ConfigError, match=f"^--master-addr: host 1 cannot reach host 0 at {HERE}:{port} .*refused"):
        meet(parallel, fingerprint(1), nothing, wait=0.0)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use(offset: int) -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        parallel = ParallelConfig(nnodes=2, master_addr=HERE, master_port=port - offset)
        with pytest.raises(ConfigError, match=f"^--master-port: host 0 cannot listen at {HERE}:{port}: .*in use"):
            meet(parallel, fingerprint(0), nothing, wait=0.0)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("192.0.2.1", "is not an address of this host"),
        ("nowhere.invalid", "nowhere.invalid: .*; give host 0's address"),
    ],
)
def test_an_address_that_is_not_host_0s(address: str, words: str) -> None:
    parallel = ParallelConfig(nnodes=2, master_addr=address, master_port=own_port())
    with pytest.raises(ConfigError, match=f"^--master-addr: .*{words}"):
        meet(parallel, fingerprint(0), nothing, wait=0.0)


def test_another_program_listens_at_the_port() -> None:
    with socket.create_server((HERE, 0)) as other, ThreadPoolExecutor(1) as pool:
        parallel = ParallelConfig(nnodes=2, node_rank=1, master_addr=HERE, master_port=other.getsockname()[1])
        waiting = pool.submit(meet, parallel, fingerprint(1), nothing, PATIENT)
        connection, _ = other.accept()
        connection.sendall(b"220 mail.example.org ready\r\n")
        with pytest.raises(ConfigError, match=r"^--master-port: the process listening .* does not answer as host 0"):
            waiting.result()
        connection.close()


class WaitingHost0:
    """Host 0 waiting for the others, and connections to its port."""

    def __init__(self, pool: ThreadPoolExecutor, nodes: int = 2, token: str = "") -> None:
        self.nodes, self.port, self.token = nodes, own_port(), token
        parallel = ParallelConfig(nnodes=nodes, master_addr=HERE, master_port=self.port)
        self.waiting = pool.submit(meet, parallel, fingerprint(0, nodes), nothing, PATIENT, token=token)

    def connect(self, data: bytes = b"") -> socket.socket:
        while True:
            try:
                connection = socket.create_connection((HERE, self.port), PATIENT)
            except ConnectionRefusedError:
                assert not self.waiting.done(), self.waiting.result()
            else:
                connection.sendall(data)
                return connection

    def join(self, rank: int) -> tuple[Peer, ...]:
        """Run the handshake of another host."""
        parallel = ParallelConfig(nnodes=self.nodes, node_rank=rank, master_addr=HERE, master_port=self.port)
        return meet(parallel, fingerprint(rank, self.nodes), nothing, PATIENT, token=self.token)


@each_row(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        (HANDSHAKE_BYTES + 1).to_bytes(8, "big"),
        (4).to_bytes(8, "big") + b"\xc1\xc1\xc1\xc1",
        len(encode(BlockCount((3,)))).to_bytes(8, "big") + encode(BlockCount((3,))),
    ],
    ids=["http", "too large", "no message", "no greeting"],
)
def test_other_clients_are_disconnected(data: bytes) -> None:
    with ThreadPoolExecutor(1) as pool:
        host0 = WaitingHost0(pool)
        with host0.connect(data) as stranger, contextlib.suppress(ConnectionResetError):
            assert isinstance(decode(receive_frame(stranger, HANDSHAKE_BYTES)), Challenge)
            assert stranger.recv(1) == b""
        (leader,) = host0.join(1)
        (follower,) = host0.waiting.result()
        follower.send(AgreedBlocks((3,)))
        assert leader.expect(AgreedBlocks) == AgreedBlocks((3,))
        leader.end()


def test_a_host_that_disconnected_may_connect_again() -> None:
    with ThreadPoolExecutor(3) as pool:
        host0 = WaitingHost0(pool, nodes=3)
        with host0.connect() as early:
            send_frame(early, encode(Hello(WIRE_VERSION, fingerprint(1, 3))))
        others = [pool.submit(host0.join, rank) for rank in (1, 2)]
        assert [peer.name for peer in host0.waiting.result()] == ["host 1 (127.0.0.1)", "host 2 (127.0.0.1)"]
        for joining in others:
            joining.result()[0].end()


def test_another_version_of_the_messages() -> None:
    with ThreadPoolExecutor(1) as pool:
        host0 = WaitingHost0(pool)
        with host0.connect() as old:
            receive_frame(old, HANDSHAKE_BYTES)
            send_frame(old, msgspec.msgpack.encode({"type": "hello", "wire": 99, "name": "whatever it was then"}))
            verdict = decode(receive_frame(old, HANDSHAKE_BYTES))
        line = str(host0.waiting.exception())
        assert isinstance(verdict, Verdict)
        assert line == f"--nnodes: {verdict.reason}"
        assert "the host at 127.0.0.1 runs another version of pagoda: its message version is 99" in line


TOKEN = "a secret of many characters"


def test_hosts_with_one_token_connect() -> None:
    meeting = Handshake(fingerprint(0), fingerprint(1), tokens=(TOKEN, TOKEN))
    assert all(len(peers) == 1 for peers in meeting.ends)
    meeting.close()


@pytest.mark.parametrize(
    ("tokens", "first", "second"),
    [
        (
            (TOKEN, ""),
            "host 1 of 2 did not connect",
            "host 0 has a cluster token, this host has none",
        ),
        ((TOKEN, TOKEN[::-1]), "host 1 of 2 did not connect", "does not answer as host 0"),
        (("", TOKEN), "host 1 (127.0.0.1) has a cluster token, host 0 has none", "host 0 does not prove that it knows"),
    ],
)
def test_hosts_with_different_tokens(tokens: tuple[str, str], first: str, second: str) -> None:
    ends = list(map(str, Handshake(fingerprint(0), fingerprint(1), wait=2.0, tokens=tokens).ends))
    assert first in ends[0]
    assert second in ends[1]


def test_only_who_proves_the_token_joins_or_ends_the_start() -> None:
    """A stranger knows everything but the token, and has recorded the proof of a host that joined before."""
    with ThreadPoolExecutor(2) as pool:
        host0 = WaitingHost0(pool, token=TOKEN)
        nonces = Nonces(host_0=bytes(32), joining=bytes(32))
        recorded = proof(token=TOKEN, role="joining", nonces=nonces, content=encode(fingerprint(1)))
        for hello in (
            Hello(WIRE_VERSION, fingerprint(1)),
            Hello(WIRE_VERSION, fingerprint(1), bytes(32), recorded),
            Hello(WIRE_VERSION, fingerprint(1, 7), bytes(32), b"x" * 32),
            Hello(99, fingerprint(1), bytes(32), recorded),
        ):
            with host0.connect() as stranger, contextlib.suppress(ConnectionResetError):
                assert isinstance(decode(receive_frame(stranger, HANDSHAKE_BYTES)), Challenge)
                send_frame(stranger, encode(hello))
                while stranger.recv(1 << 16):
                    pass
            assert not host0.waiting.done()
        (leader,) = host0.join(1)
        assert len(host0.waiting.result()) == 1
        leader.end()


@pytest.mark.parametrize("wants_proof", [True, False])
def test_a_false_host_0_gets_no_host(wants_proof: bool) -> None:
    """It has the port and repeats what a host says, but cannot prove that it knows the token."""
    with socket.create_server((HERE, 0)) as false, ThreadPoolExecutor(1) as pool:
        parallel = ParallelConfig(nnodes=2, node_rank=1, master_addr=HERE, master_port=false.getsockname()[1])
        joining = pool.submit(meet, parallel, fingerprint(1), nothing, PATIENT, token=TOKEN)
        connection, _ = false.accept()
        with connection:
            send_frame(connection, encode(Challenge(WIRE_VERSION, bytes(32), wants_proof)))
            hello = decode(receive_frame(connection, HANDSHAKE_BYTES))
            assert isinstance(hello, Hello)
            send_frame(connection, encode(Verdict("", hello.proof)))
            with pytest.raises(ConfigError, match=r"^--cluster-token-file: host 0 does not prove that it knows"):
                joining.result()


def test_silent_clients_delay_no_host() -> None:
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as strangers:
        host0 = WaitingHost0(pool)
        for _ in range(SIDE_BY_SIDE // 2):
            strangers.enter_context(host0.connect())
        (leader,) = host0.join(1)
        assert len(host0.waiting.result()) == 1
        leader.end()
