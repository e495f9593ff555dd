"""The GPU that a rank runs on, or one line on why there is none."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import torch

from pagoda.backends.torch_cuda.kernels.launch import CHIPS, LEAST, Chip, chip_of
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.errors import ConfigError

ELSEWHERE: Final = "or use --backend reference"


@dataclass(frozen=True, slots=True)
class Device:
    """Where tensors live. `chip`: what kernels are tuned for; on a CPU the one whose programs it stands in for."""

    torch: torch.device
    chip: Chip
    name: str

    @property
    def is_gpu(self) -> bool:
        """Streams, graphs and memory are a GPU's."""
        return self.torch.type == "cuda"

    @property
    def use_kernels(self) -> bool:
        """Triton kernels on a GPU; on a CPU the references that define them."""
        return self.is_gpu


CPU: Final = Device(torch.device("cpu"), CHIPS["sm_90"], "CPU")
"""Runs everything but the kernels, for tests."""


def find_device(rank: int = 0) -> Device:
    """The GPU number `rank` of those that are visible. Raises ConfigError: one line, cause and remedy."""
    stated = TORCH_CUDA_DEVICE.read()
    if stated is not None:
        if stated != "cpu":
            raise ConfigError(TORCH_CUDA_DEVICE.name, f"{stated} is unknown; use cpu, or unset it to run on a GPU")
        return CPU
    count = _visible()
    if rank >= count:
        raise ConfigError(
            "--tensor-parallel-size", f"rank {rank} has no GPU, {count} are visible; use at most {count}, {ELSEWHERE}"
        )
    try:
        properties = torch.cuda.get_device_properties(rank)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("--backend", f"torch_cuda: {reason}; update the NVIDIA driver, {ELSEWHERE}") from None
    capability = properties.major, properties.minor
    if capability < LEAST:
        raise ConfigError(
            "--backend",
            f"torch_cuda: {properties.name} has compute capability {capability[0]}.{capability[1]}, "
            f"{LEAST[0]}.{LEAST[1]} is the least; choose another GPU by CUDA_VISIBLE_DEVICES, {ELSEWHERE}",
        )
    return Device(torch.device("cuda", rank), chip_of(capability, properties.multi_processor_count), properties.name)


def _visible() -> int:
    """How many GPUs torch sees, one or more. Raises ConfigError."""
    if torch.version.cuda is None:
        raise ConfigError(
            "--backend",
            f"torch_cuda: torch {torch.__version__} is built without CUDA; "
            f"pip install --force-reinstall torch triton, {ELSEWHERE}",
        )
    count = torch.cuda.device_count()
    if count:
        return count
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        raise ConfigError(
            "--backend", f"torch_cuda: CUDA_VISIBLE_DEVICES={chosen} leaves no GPU visible; unset it, {ELSEWHERE}"
        )
    raise ConfigError("--backend", f"torch_cuda: no GPU or no NVIDIA driver found; install the driver, {ELSEWHERE}")


def use_device(index: int) -> Device:
    """Return the GPU with that index and make it this thread's current one. Raises ConfigError."""
    device = find_device(index)
    if device.use_kernels:
        torch.cuda.set_device(device.torch)  # else pinned memory would belong to GPU 0, and create a context there
    return device
