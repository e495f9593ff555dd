"""Pooling models on a CPU. One worker thread runs the steps in order while the engine plans the next one."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.backend import CAPABILITIES, prepare_thread
from pagoda.backends.reference.model.feed_forward import packed_makers
from pagoda.backends.reference.model.mixers.rotary import RotaryTables
from pagoda.backends.reference.model.named_ops import ReferenceOps, named_parts
from pagoda.backends.reference.model.numerics import Numerics, numerics
from pagoda.backends.reference.model.params import ModelParams
from pagoda.backends.reference.model.pooler import PoolPrompts, ReferencePooler
from pagoda.backends.reference.profiler import TorchTracer
from pagoda.backends.reference.weights.load import Packer, rounded_weights
from pagoda.backends.torch_decoder.decoder import TorchModel
from pagoda.backends.torch_decoder.mixers.packed_attention import SharedCaches
from pagoda.backends.torch_decoder.packed import PackedPrompts, make_packed
from pagoda.common.backend import Capabilities, PoolingOptions, Weight
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.nested.profiler import ProfilerConfig
from pagoda.common.engine.pooling.values import PoolingRules, PoolPlan, PoolResult
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.transformers_spec import AnySpec, TransformersSpec


def create(options: PoolingOptions) -> ReferencePooling:
    """Return a backend without weights."""
    return ReferencePooling(options.spec, options.limits, numerics(options.dtype), options.profiler)


class ReferencePooling:
    """Implements common.backend.PoolingBackend."""

    def __init__(
        self, spec: AnySpec, limits: Limits, numerics: Numerics, profiler: ProfilerConfig | None = None
    ) -> None:
        assert spec.pooler is not None, "the model pools"
        self.spec = spec
        self.limits = limits
        self.numerics = numerics
        self._worker = ThreadPoolExecutor(1, "pagoda-step", initializer=prepare_thread)
        self.tracer: TorchTracer | None = None
        if profiler is not None:
            self.tracer = TorchTracer(profiler, lambda work: self._worker.submit(work).result())
        self._pool: PoolPrompts | None = None
        self.num_bytes = 0

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def load(self, weights: Iterable[Weight]) -> None:
        self._worker.submit(self._load, weights).result()

    @torch.inference_mode()
    def _load(self, weights: Iterable[Weight]) -> None:
        assert self.spec.pooler is not None, "the model pools"
        max_len = self.limits.max_model_len
        if isinstance(self.spec, TransformersSpec):
            from pagoda.backends.reference.model.transformers.pooling import TransformersPooler

            rounded = rounded_weights(weights, self.numerics)
            model = TransformersPooler(self.spec, rounded, self.numerics.compute, max_len, torch.device("cpu"))
            self._pool = model
            self.num_bytes = model.num_bytes
            return
        params = Packer(self.spec, self.numerics).pack(weights)
        self.num_bytes = params.num_bytes
        encoder = Encoder(self.spec, params, self.numerics, max_len)
        pooler = ReferencePooler(
            self.spec.pooler, {name: part for name, part in params.parts.items() if name.startswith("pooler.")}
        )
        self._pool = lambda prompts, bounds, rules: pooler(encoder.hidden(prompts), bounds, rules)

    def warmup(self) -> None:
        """Pool a short prompt, so that first-call costs are paid."""
        tokens = min(8, self.limits.max_model_len)
        rules = PoolingRules(task="token_embed", use_activation=False)
        plan = PoolPlan(np.zeros(tokens, np.int32), np.array([0, tokens], np.int32), None, (rules,))
        self.execute(plan).result()

    def execute(self, plan: PoolPlan) -> Future[PoolResult]:
        return self._worker.submit(self._execute, plan)

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    @torch.inference_mode()
    def _execute(self, plan: PoolPlan) -> PoolResult:
        assert self._pool is not None, "load comes before execute"
        with torch._C.DisableTorchFunctionSubclass():  # see ReferenceBackend
            answers = self._pool(make_packed(plan), plan.query_start.tolist(), plan.rules)
        return PoolResult(tuple(answer.numpy() for answer in answers))


class Encoder(TorchModel):
    """Maps a batch of prompts to hidden states."""

    def __init__(self, spec: ModelSpec, params: ModelParams, numerics: Numerics, max_len: int) -> None:
        ops = ReferenceOps(named_parts(spec, params), numerics)
        super().__init__(spec, ops, packed_makers(spec, ops))
        self.rotary = RotaryTables(spec.ropes, max_len, numerics.compute)

    def hidden(self, batch: PackedPrompts) -> Tensor:
        """Return hidden states [T, D] after the last norm, the input of a head or a pooler."""
        rotations = self.rotary.at(batch.positions)
        shared: SharedCaches = {}
        return self.encoded(batch.token_ids, batch.positions, batch.token_types, batch, rotations, shared)
