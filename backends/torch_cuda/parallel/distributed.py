"""The line between ranks over torch.distributed: NCCL between GPUs, gloo between CPUs.

Of each collective all ranks get the same bits: sums are made once and handed round, and parts are gathered as they are.
So logits that were gathered are bitwise equal everywhere, and every rank chooses the same tokens from them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from pagoda.common.distributed.messages import RankInfo
from pagoda.common.errors import ConfigError, EngineDeadError

_MEETING: Final = timedelta(seconds=300)
"""Every rank's process is known to be there; the slowest may still be importing torch."""

_gather: Final = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
"""By its name since torch 2.13, and before."""

_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_LOOPBACK: Final = "127.0.0.1"


class TorchComm:
    """Implements comm.Comm and registry.RankComm over torch's group of this process, of which there is one."""

    def __init__(self, place: RankInfo, store: object) -> None:
        self.rank, self.size = place.rank, place.size
        self._store: object | None = store
        self._group = dist.group.WORLD

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of every rank's x, contiguous, in its place."""
        dist.all_reduce(x, group=self._group)
        return x

    def gather_last(self, x: Tensor) -> Tensor:
        """Every rank's x [.., n] side by side in order of ranks: [.., n*size], contiguous."""
        parts = x.new_empty(self.size * x.numel())
        _gather(parts, x.reshape(-1), group=self._group)
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def leave(self) -> None:
        """End the group, which all ranks do together, after the graphs that reduce in it."""
        if self._group is not None:
            self._group = None
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Let collectives that wait for a dead rank fail. Connections between CPUs end by themselves."""
        group = self._group
        if group is not None and dist.get_backend(group) == "nccl":
            group.abort()

    def release(self) -> None:
        """Forget the group, and on rank 0 end the store, which the others' groups ask to their end."""
        self.leave()
        self._store = None


def join(place: RankInfo, listener: socket.socket | None, device: torch.device) -> TorchComm:
    """Meet the other ranks at the place's address, where rank 0 has a `listener`.

    Raises ConfigError when this process has met others already, EngineDeadError when they cannot be reached.
    """
    if dist.is_initialized():
        raise ConfigError(
            "--tensor-parallel-size",
            "torch.distributed is in use in this process already; shut that engine down first, or give each a process",
        )
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            place.host,
            place.port,
            place.size,
            is_master=listener is not None,
            timeout=_MEETING,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        if device.type == "cuda":
            dist.init_process_group(
                "nccl", store=store, rank=place.rank, world_size=place.size, timeout=_MEETING, device_id=device
            )
        else:
            with _gloo_on_loopback(place.host):
                dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=_MEETING)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EngineDeadError(
            f"rank {place.rank} did not meet the others at {place.host}:{place.port}: {reason}"
        ) from None
    return TorchComm(place, store)


@contextlib.contextmanager
def _gloo_on_loopback(host: str) -> Iterator[None]:
    """Ranks of one machine meet on its loopback interface: its name may stand for an address that is not its own."""
    if host != _LOOPBACK or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
