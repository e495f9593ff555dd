"""The line between two processes over gloo; rank 0 is this one.

Rank 1 is this file as a program: `test_distributed.py PORT leave|die` answers rank 0's collectives, and ends as told.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from support.servers.served import environment

from pagoda.backends.torch_cuda.parallel.tensor_parallel import TorchComm, join
from pagoda.common.distributed.messages import RankInfo
from pagoda.common.errors import ConfigError

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def place(rank: int, port: int) -> RankInfo:
    return RankInfo(rank=rank, size=2, device=rank, host="127.0.0.1", port=port)


def own(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings to the sum, [5, 7]: sums of it round."""
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(rank)).to(dtype)


def exchange(comm: TorchComm) -> list[torch.Tensor]:
    """Return for each dtype the parts of both ranks side by side and their sum, then these results of both ranks."""
    found = []
    for dtype in DTYPES:
        found += [comm.gather_last(own(comm.rank, dtype)[:, :3]), comm.all_reduce(own(comm.rank, dtype))]
    return [*found, comm.gather_last(torch.cat([each.double().flatten() for each in found])[None])]


@contextmanager
def met(end: str) -> Iterator[TorchComm]:
    """Rank 0's line to rank 1, which ends as told after an exchange."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    words = [sys.executable, "-P", __file__, str(port), end]
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        yield join(place(0, port), listener, CPU)
        assert process.communicate(timeout=60)[1] == ""
    finally:
        process.kill()
        process.wait()


def test_every_rank_gets_the_same_bits() -> None:
    with met("leave") as comm:
        *arrays, both = exchange(comm)
        with pytest.raises(ConfigError, match="is in use in this process already"):
            join(place(0, 1), None, CPU)
        comm.leave()
    comm.release()
    for index, dtype in enumerate(DTYPES):
        first, second = own(0, dtype), own(1, dtype)
        gathered, total = arrays[2 * index : 2 * index + 2]
        assert gathered.is_contiguous()
        assert torch.equal(gathered, torch.cat([first[:, :3], second[:, :3]], dim=1))
        torch.testing.assert_close(total, first + second)
    here, there = both.flatten().chunk(2)
    assert torch.equal(here, there)
    assert not dist.is_initialized()


def test_a_rank_that_is_gone_ends_a_collective() -> None:
    with met("die") as comm:
        exchange(comm)
        with pytest.raises(RuntimeError):
            comm.all_reduce(torch.ones(3))
        comm.abandon()
    comm.release()
    comm.release()
    assert not dist.is_initialized()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_collectives_are_captured() -> None:
    gpu, listener = torch.device("cuda", 0), socket.create_server(("127.0.0.1", 0))
    alone = RankInfo(rank=0, size=1, device=0, host="127.0.0.1", port=listener.getsockname()[1])
    comm = join(alone, listener, gpu)
    x, stream = torch.ones(8, 16, device=gpu), torch.cuda.Stream(gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        comm.gather_last(comm.all_reduce(x))
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            gathered = comm.gather_last(comm.all_reduce(x))
        x.fill_(3)
        graph.replay()
    torch.cuda.synchronize(gpu)
    assert torch.equal(gathered, torch.full_like(x, 3))
    graph.reset()
    comm.leave()
    comm.release()


if __name__ == "__main__":
    comm = join(place(1, int(sys.argv[1])), None, CPU)
    exchange(comm)
    if sys.argv[2] == "die":
        os._exit(1)
    comm.leave()
    comm.release()
