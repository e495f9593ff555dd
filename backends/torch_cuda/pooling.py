"""Pooling models on an NVIDIA GPU; on CPU tensors, for tests, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.reference.model.pooler import PoolPrompts, ReferencePooler
from pagoda.backends.reference.profiler import TorchTracer
from pagoda.backends.torch_cuda.attention_backends.triton import own_kernels
from pagoda.backends.torch_cuda.backend import CAPABILITIES, DTYPES
from pagoda.backends.torch_cuda.device import Device, find_device
from pagoda.backends.torch_cuda.execution.stream import DeviceStream, DeviceToHost, make_stream
from pagoda.backends.torch_cuda.execution.warmup import CompileCounter
from pagoda.backends.torch_cuda.memory.plan import GIB
from pagoda.backends.torch_cuda.model.feed_forward import block_makers
from pagoda.backends.torch_cuda.model.mixers.registry import MIXERS, ops_of
from pagoda.backends.torch_cuda.model.parameters import RankParams
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext, rotary_tables
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, RankShard
from pagoda.backends.torch_cuda.weights.load import Loader
from pagoda.backends.torch_decoder.decoder import TorchModel, packed_mixers
from pagoda.backends.torch_decoder.mixers.packed_attention import SharedCaches
from pagoda.backends.torch_decoder.ops import MixerStep
from pagoda.backends.torch_decoder.packed import PackedPrompts, make_packed
from pagoda.common.backend import Capabilities, PoolingOptions, Weight
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.nested.profiler import ProfilerConfig
from pagoda.common.engine.pooling.values import PoolingRules, PoolPlan, PoolResult
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.supported import check_mixers
from pagoda.common.models.transformers_spec import AnySpec, TransformersSpec
from pagoda.common.weights.quantization.tensors import dequantized


def create(options: PoolingOptions) -> TorchCudaPooling:
    """Return a backend without weights. Raises ConfigError."""
    if options.dtype not in DTYPES:
        raise ConfigError("--dtype", f"{options.dtype} is not one of auto, {', '.join(DTYPES)}")
    if isinstance(options.spec, ModelSpec):
        check_mixers(options.spec, MIXERS, "torch_cuda")
    return TorchCudaPooling(options.spec, options.limits, DTYPES[options.dtype], find_device(), options.profiler)


@dataclass(frozen=True, slots=True)
class CudaPendingVectors:
    """Implements common.backend.PendingPooling."""

    flat: DeviceToHost  # all outputs, concatenated
    shapes: tuple[tuple[int, ...], ...]  # of each output
    recompiles: int

    def result(self) -> PoolResult:
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        parts = np.split(self.flat.array(), np.cumsum(sizes)[:-1])
        return PoolResult(tuple(part.reshape(shape) for part, shape in zip(parts, self.shapes)), self.recompiles)


class TorchCudaPooling:
    """Implements common.backend.PoolingBackend."""

    def __init__(
        self,
        spec: AnySpec,
        limits: Limits,
        dtype: torch.dtype,
        device: Device,
        profiler: ProfilerConfig | None = None,
    ) -> None:
        self.spec = spec
        self.limits = limits
        self.dtype = dtype
        self.device = device
        self._stream: DeviceStream = make_stream(device)
        self.tracer: TorchTracer | None = None
        if profiler is not None:
            self.tracer = TorchTracer(profiler, self._run_in_order, is_gpu=device.is_gpu)
        self._pool: PoolPrompts | None = None
        self.num_bytes = 0
        self._compiles = CompileCounter()
        self._compiles.watch()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def load(self, weights: Iterable[Weight]) -> None:
        """Load every parameter. Raise WeightError, or ConfigError if they do not fit the device."""
        with self._stream.running():
            try:
                self._pool, self.num_bytes = self._loaded(weights)
            except (torch.OutOfMemoryError, MemoryError):
                words = f"the weights in {self.dtype} do not fit {self.device.name}"
                raise ConfigError("--dtype", words) from None

    def _loaded(self, weights: Iterable[Weight]) -> tuple[PoolPrompts, int]:
        """Return the model and its bytes."""
        spec = self.spec
        device = self.device
        max_len = self.limits.max_model_len
        assert spec.pooler is not None, "the model must have a pooler"
        if isinstance(spec, TransformersSpec):
            from pagoda.backends.reference.model.transformers.pooling import TransformersPooler

            tensors = ((name, to_torch(array)) for name, array in dequantized(weights, "torch_cuda"))
            model = TransformersPooler(spec, tensors, self.dtype, max_len, device.torch)
            return model, model.num_bytes
        loader = Loader(spec, RankShard(0, 1), self.dtype, self._empty)
        loader.fill(weights)
        params = loader.params
        encoder = CudaEncoder(spec, params, device, max_len)
        pooler = ReferencePooler(
            spec.pooler,
            {name: tensor.float() for name, tensor in params.tensors().items() if name.startswith("pooler.")},
        )
        return lambda prompts, bounds, rules: pooler(encoder.hidden(prompts), bounds, rules), params.num_bytes

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device.torch)

    def warmup(self) -> None:
        """Run the smallest and the largest step: compiles the kernels and checks that memory suffices.

        Raise ConfigError if it does not.
        """
        limits = self.limits
        longest = limits.max_model_len
        prompts = max(min(limits.max_num_batched_tokens // longest, limits.max_num_seqs), 1)
        steps = [(1, 1), (min(longest, 8), 2)] + ([(longest, prompts)] if self.device.is_gpu else [])
        try:
            for length, count in steps:
                self.execute(_plan(length, count)).result()
        except torch.OutOfMemoryError:
            free, _ = torch.cuda.mem_get_info(self.device.torch)
            raise ConfigError(
                "--max-num-batched-tokens",
                f"{self.device.name} has too little memory for {prompts} prompts of {longest} tokens in a step, "
                f"{free / GIB:.1f} GiB are left; lower it, or --max-model-len",
            ) from None
        self._compiles.log_each = True

    def execute(self, plan: PoolPlan) -> CudaPendingVectors:
        """Queue a step."""
        assert self._pool is not None, "load comes before execute"
        before = self._compiles.count
        with self._stream.running():
            outputs = self._pool(make_packed(plan, self.device.torch), plan.query_start.tolist(), plan.rules)
            flat = self._stream.fetch(torch.cat([output.flatten() for output in outputs]))
        shapes = tuple(tuple(output.shape) for output in outputs)
        return CudaPendingVectors(flat, shapes, self._compiles.count - before)

    def _run_in_order(self, work: Callable[[], Any]) -> Any:
        self._stream.synchronize()
        return work()

    def close(self) -> None:
        """Release the device's memory."""
        self._stream.synchronize()
        self._pool = None
        self._stream.close()
        self._compiles.unwatch()


class CudaEncoder(TorchModel):
    """A batch of whole prompts in, hidden states out, in one pass and without synchronizing with the host."""

    def __init__(self, spec: ModelSpec, params: RankParams, device: Device, max_len: int) -> None:
        params = params.with_shared_blocks(spec.shared_blocks)
        build = CudaBuildContext(params, device, SINGLE_RANK, own_kernels(device), spec.width)
        tables = rotary_tables(spec.ropes, max_len, device.torch)

        def make(mixer: Mixer, prefix: str, number: int | None) -> MixerStep:
            return ops_of(mixer).packed(mixer, tables, build, prefix, number)

        super().__init__(spec, build, block_makers(build, packed_mixers(spec, make)))

    def hidden(self, batch: PackedPrompts) -> Tensor:
        """Return hidden states [T, D] after the last norm."""
        kept: SharedCaches = {}
        return self.encoded(batch.token_ids, batch.positions, batch.token_types, batch, kept)


def _plan(length: int, count: int) -> PoolPlan:
    """Return a step of `count` prompts of `length` tokens."""
    rules = PoolingRules(task="token_embed", use_activation=True)
    starts = np.arange(0, length * count + 1, length, dtype=np.int32)
    return PoolPlan(np.zeros(length * count, np.int32), starts, None, (rules,) * count)
