"""What this backend needs of ranks: processes that share a model, a GPU each. Importing this imports no torch."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from pagoda.backends.torch_cuda.parallel.sharding import check as check_shares
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.distributed.messages import RankInfo
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import ModelSpec

if TYPE_CHECKING:
    from pagoda.backends.torch_cuda.parallel.distributed import TorchComm


def check(spec: ModelSpec, size: int) -> None:
    """Raises ConfigError when so many ranks cannot share the model, naming how many can."""
    check_shares(spec, size)


def check_devices(size: int) -> None:
    """Raises ConfigError when this process sees fewer GPUs, or none that serves."""
    import torch

    from pagoda.backends.torch_cuda.device import use_device

    if use_device(0).torch.type == "cpu":
        return
    count = torch.cuda.device_count()
    if count < size:
        raise ConfigError(
            "--tensor-parallel-size",
            f"{size} ranks need {size} GPUs, {count} are visible; use {count} or less, or show this process more GPUs "
            "(CUDA_VISIBLE_DEVICES)",
        )


def needs_gpu() -> bool:
    """Whether each rank has a GPU for itself; False where CPUs stand for them, in tests."""
    return TORCH_CUDA_DEVICE.read() != "cpu"


def join(place: RankInfo, listener: socket.socket | None) -> TorchComm:
    """Meet the other ranks. Raises ConfigError or EngineDeadError."""
    from pagoda.backends.torch_cuda.device import use_device
    from pagoda.backends.torch_cuda.parallel.distributed import join as meet

    return meet(place, listener, use_device(place.device).torch)
