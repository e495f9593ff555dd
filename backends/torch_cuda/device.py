"""The device that a rank runs on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Final

import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, MIN_CAPABILITY, Chip, find_chip
from pagoda.common.config.env import ALLOCATOR, TORCH_CUDA_DEVICE
from pagoda.common.errors import ConfigError

_ALTERNATIVE: Final = "or use --backend reference"


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device and the chip that kernels are tuned for."""

    torch: torch.device
    chip: Chip  # on a CPU: the GPU that it simulates
    name: str

    @property
    def is_gpu(self) -> bool:
        return self.torch.type == "cuda"

    @property
    def use_kernels(self) -> bool:
        """True: Triton kernels; False: their plain torch definitions."""
        return self.is_gpu


CPU: Final = Device(torch.device("cpu"), CHIPS["sm_90"], "CPU")
"""For tests: plain torch in place of kernels."""


def find_device(rank: int = 0) -> Device:
    """Return visible GPU number `rank`, or the CPU if the environment variable selects it. Raise ConfigError."""
    chosen = TORCH_CUDA_DEVICE.read()
    if chosen is not None:
        if chosen != "cpu":
            raise ConfigError(TORCH_CUDA_DEVICE.name, f"{chosen} is unknown; use cpu, or unset it to run on a GPU")
        return CPU
    count = _visible_gpus()
    if rank >= count:
        raise ConfigError(
            "--tensor-parallel-size",
            f"rank {rank} has no GPU, {count} are visible; use at most {count}, {_ALTERNATIVE}",
        )
    try:
        properties = torch.cuda.get_device_properties(rank)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("--backend", f"torch_cuda: {reason}; update the NVIDIA driver, {_ALTERNATIVE}") from None
    capability = properties.major, properties.minor
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            "--backend",
            f"torch_cuda: {properties.name} has compute capability {'.'.join(map(str, capability))}, the minimum is "
            f"{'.'.join(map(str, MIN_CAPABILITY))}; select another GPU with CUDA_VISIBLE_DEVICES, {_ALTERNATIVE}",
        )
    _configure_allocator()
    return Device(torch.device("cuda", rank), find_chip(capability, properties.multi_processor_count), properties.name)


def on_wsl() -> bool:
    """Return whether this is Linux under Windows (WSL), where little host memory can be pinned."""
    return "microsoft" in platform.uname().release.lower()


def _configure_allocator() -> None:
    """Let segments of torch's memory grow, so that it is not fragmented, unless a variable says how it allocates.

    Under WSL the driver does not map memory into them.
    """
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is not None and ALLOCATOR.read() is None and not on_wsl():
        configure("expandable_segments:True")


def _visible_gpus() -> int:
    """Return the number of GPUs, at least 1. Raise ConfigError if there are none."""
    if torch.version.cuda is None:
        raise ConfigError(
            "--backend",
            f"torch_cuda: torch {torch.__version__} is built without CUDA; "
            f"pip install --force-reinstall torch triton, {_ALTERNATIVE}",
        )
    count = torch.cuda.device_count()
    if count:
        return count
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        raise ConfigError(
            "--backend", f"torch_cuda: CUDA_VISIBLE_DEVICES={visible} leaves no GPU visible; unset it, {_ALTERNATIVE}"
        )
    raise ConfigError("--backend", f"torch_cuda: no GPU or no NVIDIA driver found; install the driver, {_ALTERNATIVE}")


def use_device(index: int) -> Device:
    """Return the GPU with that index and make it this thread's current device. Raise ConfigError."""
    device = find_device(index)
    if device.use_kernels:
        torch.cuda.set_device(device.torch)  # otherwise pinned memory would create a context on GPU 0
    return device
