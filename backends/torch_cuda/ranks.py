"""This backend's tensor-parallel ranks: processes with a GPU each. Importing this module imports no torch."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.distributed.messages import RankInfo
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import Mlp, ModelSpec

if TYPE_CHECKING:
    from pagoda.backends.torch_cuda.parallel import TorchComm


def check(spec: ModelSpec, size: int) -> None:
    """Raise ConfigError if the model's heads and widths do not divide evenly over `size` ranks.

    `check_attention_only` must have passed.
    """
    if (indivisible := _indivisible(spec, size)) is None:
        return
    heads = min(layer.attention.heads for layer in spec.layers)
    fitting = [str(fewer) for fewer in range(1, heads + 1) if _indivisible(spec, fewer) is None]
    raise ConfigError(
        "--tensor-parallel-size", f"{size} ranks cannot share {indivisible} evenly; use {_either(fitting)}"
    )


def check_devices(size: int) -> None:
    """Raise ConfigError if fewer than `size` usable GPUs are visible."""
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
    """Return whether each rank needs a GPU; False if CPUs replace them, in tests."""
    return TORCH_CUDA_DEVICE.read() != "cpu"


def join(rank_info: RankInfo, listener: socket.socket | None) -> TorchComm:
    """Connect to the other ranks. Raise ConfigError or EngineDeadError."""
    from pagoda.backends.torch_cuda.device import use_device
    from pagoda.backends.torch_cuda.parallel import join as join_group

    return join_group(rank_info, listener, use_device(rank_info.device).torch)


def _indivisible(spec: ModelSpec, size: int) -> str | None:
    for layer in dict.fromkeys(spec.layers):
        if (heads := layer.attention.indivisible(size)) is not None:
            return heads
        ffn = layer.feed_forward
        width = ffn.width if isinstance(ffn, Mlp) else ffn.expert.width
        if width % size:
            return f"the ffn width of {width}"
    return None


def _either(sizes: list[str]) -> str:
    return " or ".join([", ".join(sizes[:-1]), sizes[-1]] if len(sizes) > 1 else sizes)
