"""The start of an engine on a GPU that nobody has: it works, and nothing is compiled after it."""

from __future__ import annotations

import pytest
import torch
from support.reference_driver import random_weights, tiny_spec
from support.warm_launches import compiled

from pagoda.backends.torch_cuda import backend as backend_module
from pagoda.backends.torch_cuda.backend import create
from pagoda.backends.torch_cuda.cpu_stream import CpuStream
from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.memory import GIB
from pagoda.common.config.cache import CacheConfig
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_spec import kv_layout


@pytest.mark.parametrize("model", ["windows", "experts, int8", "full norms, int4"])
def test_serving_compiles_nothing(model: str) -> None:
    before, after = compiled(model)
    assert len(before) > 15
    assert not after


class Gpu(Device):
    """A CPU that starts as a GPU does: memory is measured by steps over a tiny cache, then everything is run."""

    is_gpu = True
    use_kernels = False


@pytest.mark.parametrize("seqs", [1, 3, 64, 192])
def test_a_whole_start(monkeypatch: pytest.MonkeyPatch, seqs: int) -> None:
    """Nothing is read or written where it should not be: a CPU's indexing complains."""
    monkeypatch.setattr(backend_module, "GpuStream", CpuStream)
    for name, fake in {
        "mem_get_info": lambda device: (60 * GIB, 80 * GIB),
        "memory_reserved": lambda device: GIB,
        "max_memory_reserved": lambda device: 2 * GIB,
        "reset_peak_memory_stats": lambda device: None,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    limits = Limits(max_model_len=48, max_num_batched_tokens=256, max_num_seqs=seqs, block_size=4)
    spec = tiny_spec(window=6, moe=seqs == 3)
    layout = kv_layout(spec, limits.block_size)
    device = Gpu(CPU.torch, CPU.chip, "NVIDIA H100")
    backend = create(spec, limits=limits, layout=layout, cache=CacheConfig(), dtype="float32", device=device)
    backend.load(random_weights(spec))
    backend.init_cache(backend.plan_memory().num_blocks)
    backend.warmup()
    captured = backend._stream.captures
    assert captured == 2 * (len(backend.setup.ladder.captured) + (2 if seqs > 1 else 1))
    assert not backend.execute(backend._plans.decode(seqs)).result().recompiles
