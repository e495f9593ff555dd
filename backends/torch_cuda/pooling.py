"""Pooling models on an NVIDIA GPU; on CPU tensors, for tests, the same with the kernels' references."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.execution import make_packed
from pagoda.backends.reference.model.pooler import ReferencePooler
from pagoda.backends.torch_cuda.backend import CAPABILITIES, DTYPES
from pagoda.backends.torch_cuda.device import Device, find_device
from pagoda.backends.torch_cuda.execution.gpu_stream import GpuStream
from pagoda.backends.torch_cuda.execution.stream import CpuStream, DeviceStream, DeviceToHost
from pagoda.backends.torch_cuda.execution.warmup import CompileCount
from pagoda.backends.torch_cuda.memory.plan import GIB
from pagoda.backends.torch_cuda.model.encoder import CudaEncoder
from pagoda.backends.torch_cuda.parallel.sharding import RankShard
from pagoda.backends.torch_cuda.weights import Loader
from pagoda.common.backend import Capabilities, PoolingOptions, Weight
from pagoda.common.config.engine import Limits
from pagoda.common.engine.pooling import Float32, PoolingRules, PoolPlan
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import ModelSpec


def create(options: PoolingOptions) -> TorchCudaPooling:
    """Return a backend without weights. Raises ConfigError."""
    if options.dtype not in DTYPES:
        raise ConfigError("--dtype", f"{options.dtype} is not one of auto, {', '.join(DTYPES)}")
    return TorchCudaPooling(options.spec, options.limits, DTYPES[options.dtype], find_device())


@dataclass(frozen=True, slots=True)
class CudaPendingVectors:
    """Implements common.backend.PendingVectors. `flat`: all answers' numbers, one after another."""

    flat: DeviceToHost
    shapes: tuple[tuple[int, ...], ...]

    def result(self) -> tuple[Float32, ...]:
        """Wait for the step."""
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        parts = np.split(self.flat.array(), np.cumsum(sizes)[:-1])
        return tuple(part.reshape(shape) for part, shape in zip(parts, self.shapes))


class TorchCudaPooling:
    """Implements common.backend.PoolingBackend."""

    def __init__(self, spec: ModelSpec, limits: Limits, dtype: torch.dtype, device: Device) -> None:
        self.spec, self.limits, self.dtype, self.device = spec, limits, dtype, device
        self._stream: DeviceStream = GpuStream(device) if device.is_gpu else CpuStream(device)
        self._parts: tuple[CudaEncoder, ReferencePooler] | None = None
        self.num_bytes = 0
        self._compiles, self._warm = CompileCount(), 0
        self._compiles.watch()

    @property
    def recompiles(self) -> int:
        """Kernels that were compiled while serving; more than none is a fault."""
        return self._compiles.count - self._warm

    @property
    def capabilities(self) -> Capabilities:
        """Facts that do not depend on the model."""
        return CAPABILITIES

    def load(self, weights: Iterable[Weight]) -> None:
        """Take every parameter. Raises WeightError, or ConfigError when they do not fit the device."""
        spec, device = self.spec, self.device
        assert spec.pooler is not None, "the model pools"
        with self._stream.running():
            try:
                loader = Loader(spec, RankShard(0, 1), self.dtype, self._empty)
            except (torch.OutOfMemoryError, MemoryError):
                raise ConfigError("--dtype", f"the weights in {self.dtype} do not fit {device.name}") from None
            loader.fill(weights)
            params = loader.params
            exact = {name: held.float() for name, held in params.tensors().items() if name.startswith("pooler.")}
            self._parts = (
                CudaEncoder(spec, params, device, self.limits.max_model_len),
                ReferencePooler(spec.pooler, exact),
            )
        self.num_bytes = params.num_bytes

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device.torch)

    def warmup(self) -> None:
        """Run the smallest step and the largest, so that kernels are compiled and memory is known to suffice.

        Raises ConfigError when it does not.
        """
        limits = self.limits
        longest = limits.max_model_len
        prompts = max(min(limits.max_num_batched_tokens // longest, limits.max_num_seqs), 1)
        steps = [(1, 1), (min(longest, 8), 2)] + ([(longest, prompts)] if self.device.is_gpu else [])
        try:
            for length, count in steps:
                self.pool(_plan(length, count)).result()
        except torch.OutOfMemoryError:
            free, _ = torch.cuda.mem_get_info(self.device.torch)
            raise ConfigError(
                "--max-num-batched-tokens",
                f"{self.device.name} has too little memory for {prompts} prompts of {longest} tokens in a step, "
                f"{free / GIB:.1f} GiB are left; lower it, or --max-model-len",
            ) from None
        self._compiles.loud, self._warm = True, self._compiles.count

    def pool(self, plan: PoolPlan) -> CudaPendingVectors:
        """Queue a step."""
        assert self._parts is not None, "load comes before pool"
        encoder, pooler = self._parts
        with self._stream.running():
            hidden = encoder.hidden(make_packed(plan, self.device.torch))
            answers = pooler(hidden, plan.query_start.tolist(), plan.rules)
            flat = self._stream.fetch(torch.cat([answer.flatten() for answer in answers]))
        return CudaPendingVectors(flat, tuple(tuple(answer.shape) for answer in answers))

    def close(self) -> None:
        """Let go of the device's memory."""
        self._stream.synchronize()
        self._parts = None
        self._stream.close()
        self._compiles.unwatch()


def _plan(length: int, count: int) -> PoolPlan:
    """So many prompts of one length."""
    rules = PoolingRules(task="token_embed", use_activation=True)
    starts = np.arange(0, length * count + 1, length, dtype=np.int32)
    return PoolPlan(np.zeros(length * count, np.int32), starts, None, (rules,) * count)
