"""Rank 1 of two, for tests of the line between them: it answers rank 0's collectives, and ends as it is told.

python second_rank.py PORT leave | die
"""

from __future__ import annotations

import os
import sys

import torch

from pagoda.backends.torch_cuda.parallel import TorchComm, join
from pagoda.common.distributed.messages import RankInfo

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def place(rank: int, port: int) -> RankInfo:
    return RankInfo(rank=rank, size=2, device=rank, host="127.0.0.1", port=port)


def own(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings to the sum, [5, 7]: sums of it round."""
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(rank)).to(dtype)


def exchange(comm: TorchComm) -> list[torch.Tensor]:
    """Every rank's part side by side, then their sum, of each dtype; at last rank 1's sums as rank 0 hears of them."""
    found = []
    for dtype in DTYPES:
        found += [comm.gather_last(own(comm.rank, dtype)[:, :3]), comm.all_reduce(own(comm.rank, dtype))]
    return [*found, comm.gather_last(torch.cat([each.double().flatten() for each in found])[None])]


if __name__ == "__main__":
    comm = join(place(1, int(sys.argv[1])), None, torch.device("cpu"))
    exchange(comm)
    if sys.argv[2] == "die":
        os._exit(1)
    comm.leave()
    comm.release()
