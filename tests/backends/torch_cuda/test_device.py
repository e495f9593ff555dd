"""Device selection and its error messages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pagoda.backends.torch_cuda import device
from pagoda.backends.torch_cuda.device import find_device
from pagoda.backends.torch_cuda.execution.stream import GpuStream
from pagoda.common.config.env import ALLOCATOR
from pagoda.common.errors import ConfigError


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs of which torch knows."""
    monkeypatch.delenv("PAGODA_TORCH_CUDA_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties(9, 0))


def properties(major: int, minor: int):
    gpu = SimpleNamespace(major=major, minor=minor, name="NVIDIA H100", multi_processor_count=114)
    return lambda rank: gpu


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings of torch's allocator, as they are set."""
    allocator_settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", allocator_settings.append)
    for name in ALLOCATOR.names:
        monkeypatch.delenv(name, raising=False)
    return allocator_settings


@pytest.mark.variable("PYTORCH_ALLOC_CONF")
def test_segments_of_memory_grow_unless_a_variable_says_how(
    configured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_device()
    assert configured == ["expandable_segments:True"]
    for name in ALLOCATOR.names:
        monkeypatch.setenv(name, "backend:cudaMallocAsync")
        find_device()
        monkeypatch.delenv(name)
    assert len(configured) == 1


def test_wsl_is_recognised(configured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There segments do not grow, and host buffers are not pinned."""
    pinned: list[bool] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, pin_memory: pinned.append(pin_memory))
    for release in ("5.15.153.1-microsoft-standard-WSL2", "6.8.0-45-generic"):
        monkeypatch.setattr(device.platform, "uname", lambda release=release: SimpleNamespace(release=release))
        GpuStream(find_device()).host_buffer(8)
    assert pinned == [False, True]
    assert configured == ["expandable_segments:True"]


def test_each_rank_has_its_gpu() -> None:
    gpu = find_device(1)
    assert (gpu.torch, gpu.use_kernels) == (torch.device("cuda", 1), True)
    assert (gpu.chip.name, gpu.chip.sms, gpu.name) == ("sm_90", 114, "NVIDIA H100")


def test_no_cuda_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"torch .* is built without CUDA; pip install .*--backend reference$"):
        find_device()


@pytest.mark.variable("CUDA_VISIBLE_DEVICES")
def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"no GPU or no NVIDIA driver found; install the driver, or use --backend"):
        find_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES= leaves no GPU visible; unset it, or use --backend"):
        find_device()


def test_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties(7, 5))
    with pytest.raises(ConfigError, match=r"H100 has compute capability 7\.5, the minimum is 8\.0; select another GPU"):
        find_device()


def test_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(rank: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    with pytest.raises(ConfigError, match=r"is too old; update the NVIDIA driver, or use --backend reference$"):
        find_device()


def test_more_ranks_than_gpus() -> None:
    with pytest.raises(ConfigError, match="rank 2 has no GPU, 2 are visible; use at most 2"):
        find_device(2)


@pytest.mark.variable("PAGODA_TORCH_CUDA_DEVICE")
def test_a_variable_runs_it_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    assert (find_device().torch.type, find_device().use_kernels) == ("cpu", False)
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "tpu")
    with pytest.raises(ConfigError, match="PAGODA_TORCH_CUDA_DEVICE: tpu is unknown; use cpu, or unset it"):
        find_device()
