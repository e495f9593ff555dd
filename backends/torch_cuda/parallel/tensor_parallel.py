"""Tensor parallelism: a rank's share of the parameters, and collectives over torch.distributed.

NCCL connects GPUs, gloo CPUs. Every collective gives all ranks the same bits, so gathered logits are bitwise equal and
all ranks sample the same tokens.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from pagoda.common.backend import RankLink
from pagoda.common.distributed.messages import RankInfo
from pagoda.common.errors import ConfigError, EngineDeadError

SPLIT: Final = frozenset("NKFV")
"""Sharded logical axes: query heads, KV heads, ffn width, vocabulary. All others are replicated."""

VOCAB_MULTIPLE: Final = 64
"""A rank's rows of the vocabulary are padded to a multiple, for efficient matrix products."""

_JOIN_TIMEOUT: Final = timedelta(seconds=300)
"""Every rank's process is running; the slowest may still be importing torch."""

_gather: Final = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
"""Renamed in torch 2.13."""

_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankShard:
    """Rank number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank adds what must be added once."""
        return self.rank == 0

    def share(self, total: int) -> int:
        """Return how many of `total` heads or channels a rank has; with fewer heads than ranks 1, replicated."""
        return max(total // self.size, 1)

    def copies(self, total: int) -> int:
        """Return how many ranks have the same head."""
        return max(self.size // total, 1)

    def vocab(self, vocab: int) -> int:
        """Return a rank's rows of the embedding and the head, padding included."""
        multiple = VOCAB_MULTIPLE * self.size
        return -(-vocab // multiple) * VOCAB_MULTIPLE

    def cut(self, axis: str, extent: int, kv_heads: int = 1) -> slice:
        """Return this rank's part of a parameter's axis; of "V" without padding, so possibly empty.

        `kv_heads`: heads that an axis "K" of `extent` channels consists of.
        """
        if axis not in SPLIT:
            return slice(0, extent)
        if axis == "V":
            rows = self.vocab(extent)
            return slice(min(self.rank * rows, extent), min((self.rank + 1) * rows, extent))
        parts = min(self.size, kv_heads) if axis == "K" else self.size
        part = self.rank * parts // self.size
        return slice(extent * part // parts, extent * (part + 1) // parts)


@runtime_checkable
class Comm(Protocol):
    """One rank's communicator. Every rank makes the same calls in the same order.

    Both collectives can be captured in a CUDA graph.
    """

    @property
    def rank(self) -> int:
        """This rank's index, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x, same shape and dtype. May overwrite x."""
        ...

    def gather_last(self, x: Tensor) -> Tensor:
        """Return every rank's x [.., n] concatenated in rank order: [.., n*size], contiguous."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """The communicator of one rank: both collectives return x."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_last(self, x: Tensor) -> Tensor:
        return x


SINGLE_RANK: Final = SingleRank()


def comm_of(rank: RankLink) -> Comm:
    """Return a rank's connection as the one that this backend's `join` made."""
    assert isinstance(rank.comm, Comm), "made by ranks.join"
    return rank.comm


class TorchComm:
    """Implements Comm, and RankComm of common.backend, over this process's default torch.distributed group."""

    def __init__(self, rank_info: RankInfo, store: object) -> None:
        self.rank = rank_info.rank
        self.size = rank_info.size
        self._store: object | None = store
        self._group = dist.group.WORLD

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def gather_last(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size * x.numel())
        _gather(parts, x.reshape(-1), group=self._group)
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def leave(self) -> None:
        """Destroy the group, on all ranks together, after the CUDA graphs that use it are freed."""
        if self._group is not None:
            self._group = None
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Make NCCL collectives that wait for a dead rank fail; gloo connections fail by themselves."""
        group = self._group
        if group is not None and dist.get_backend(group) == "nccl":
            group.abort()

    def release(self) -> None:
        """Drop the group and, on rank 0, the store, which the other ranks' groups use until they end."""
        self.leave()
        self._store = None


def join(rank_info: RankInfo, listener: socket.socket | None, device: torch.device) -> TorchComm:
    """Form the group of all ranks at `rank_info.host`, where rank 0 has a `listener`.

    Raise ConfigError if this process already has a group, EngineDeadError if the ranks cannot connect.
    """
    if dist.is_initialized():
        raise ConfigError(
            "--tensor-parallel-size",
            "torch.distributed is in use in this process already; shut that engine down first, or give each a process",
        )
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            rank_info.host,
            rank_info.port,
            rank_info.size,
            is_master=listener is not None,
            timeout=_JOIN_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        if device.type == "cuda":
            _init_group("nccl", store, rank_info, device)
        else:
            with _gloo_on_loopback(rank_info.host):
                _init_group("gloo", store, rank_info, None)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EngineDeadError(
            f"rank {rank_info.rank} could not connect to the other ranks at {rank_info.host}:{rank_info.port}: {reason}"
        ) from None
    return TorchComm(rank_info, store)


def _init_group(name: str, store: Any, rank_info: RankInfo, device: torch.device | None) -> None:
    rank = rank_info.rank
    size = rank_info.size
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=_JOIN_TIMEOUT, device_id=device)


@contextlib.contextmanager
def _gloo_on_loopback(host: str) -> Iterator[None]:
    """Bind gloo to the loopback interface: the host name may resolve to an address of another machine."""
    if host != _LOOPBACK or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
