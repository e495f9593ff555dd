"""The rank interface of the registry: sharding checks and devices."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pagoda.backends.torch_cuda import device as devices
from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.parallel import ranks
from pagoda.common.errors import ConfigError


@pytest.mark.setting("--tensor-parallel-size")
def test_too_few_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "find_device", lambda index=0: Device(torch.device("cuda", index), CPU.chip, "X"))
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    ranks.check_devices(2)
    devices.use_device(1)
    assert current[-1] == torch.device("cuda", 1)
    with pytest.raises(
        ConfigError, match=r"^--tensor-parallel-size: 4 ranks need 4 GPUs, 2 are visible; use 2 or less"
    ):
        ranks.check_devices(4)


def test_cpus_stand_for_any_number_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.needs_gpu()
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    ranks.check_devices(64)
    assert not ranks.needs_gpu()
    assert devices.use_device(3) == CPU


def test_importing_the_rank_runtime_imports_no_framework() -> None:
    code = "import sys; import pagoda.backends.torch_cuda.parallel.ranks; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
