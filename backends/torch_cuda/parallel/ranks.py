"""This backend's tensor-parallel ranks: processes with a GPU each. Importing this module imports no torch."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.distributed.messages import RankInfo
from pagoda.common.errors import ConfigError
from pagoda.common.models.drafters import DrafterSpec, mixers_of, model_of
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.spec import Ffn, Layer, Mlp, ModelSpec

if TYPE_CHECKING:
    from pagoda.backends.torch_cuda.parallel.tensor_parallel import TorchComm


def check(spec: ModelSpec, size: int, drafter: DrafterSpec | None = None) -> None:
    """Raise ConfigError if heads and widths of the model and its drafter do not divide evenly over `size` ranks.

    `check_mixers` must have passed.
    """
    if (indivisible := _indivisible(spec, size, drafter)) is None:
        return
    most = min(mixer.max_ranks for mixer in (*spec.mixers, *mixers_of(drafter)))
    fitting = [str(fewer) for fewer in range(1, most + 1) if _indivisible(spec, fewer, drafter) is None]
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
    from pagoda.backends.torch_cuda.parallel.tensor_parallel import join as join_group

    return join_group(rank_info, listener, use_device(rank_info.device).torch)


def _indivisible(spec: ModelSpec, size: int, drafter: DrafterSpec | None) -> str | None:
    if (part := _part(spec.mixers, spec.layers, size)) is not None:
        return part
    model = model_of(drafter)
    part = _part(mixers_of(drafter), () if model is None else model.layers, size)
    return None if part is None else f"{part} of the drafter"


def _part(mixers: Sequence[Mixer], layers: Sequence[Layer], size: int) -> str | None:
    """Return what `size` ranks cannot share evenly of mixers, or of the feed-forward blocks of layers."""
    for mixer in mixers:
        if (heads := mixer.indivisible(size)) is not None:
            return heads
    for layer in dict.fromkeys(layers):
        blocks = [] if layer.block is None else [layer.block.ffn]
        for mlp in (mlp for ffn in (*layer.ffns.values(), *blocks) for mlp in _mlps(ffn)):
            if mlp.width % size:
                return f"the ffn width of {mlp.width}"
    return None


def _mlps(ffn: Ffn) -> list[Mlp]:
    if isinstance(ffn, Mlp):
        return [ffn]
    return [ffn.expert] if ffn.shared is None else [ffn.expert, ffn.shared]


def _either(sizes: list[str]) -> str:
    return " or ".join([", ".join(sizes[:-1]), sizes[-1]] if len(sizes) > 1 else sizes)
