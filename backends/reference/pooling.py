"""Pooling models on a CPU. One worker thread runs the steps in order while the engine plans the next one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.backend import CAPABILITIES, prepare_thread
from pagoda.backends.reference.execution import PackedPrompts, attend, make_packed
from pagoda.backends.reference.model.attention import Projection, RotaryTables, Rotations
from pagoda.backends.reference.model.decoder import DecoderLayer, MixerStep, TokenEmbedding, make_norm
from pagoda.backends.reference.model.gated_delta import PackedGatedDelta
from pagoda.backends.reference.model.latent_attention import PackedLatentAttention
from pagoda.backends.reference.model.numerics import Numerics, numerics
from pagoda.backends.reference.model.pooler import ReferencePooler
from pagoda.backends.reference.weights import (
    AttentionParams,
    GatedDeltaParams,
    LatentAttentionParams,
    MixerParams,
    ModelParams,
    Packer,
)
from pagoda.common.backend import Capabilities, PoolingOptions, Weight
from pagoda.common.config.engine import Limits
from pagoda.common.engine.pooling import PoolingRules, PoolPlan, PoolResult
from pagoda.common.models.mixers import Attention, GatedDelta, LatentAttention, Mixer
from pagoda.common.models.spec import ModelSpec


def create(options: PoolingOptions) -> ReferencePooling:
    """Return a backend without weights."""
    return ReferencePooling(options.spec, options.limits, numerics(options.dtype))


class ReferencePooling:
    """Implements common.backend.PoolingBackend."""

    def __init__(self, spec: ModelSpec, limits: Limits, numerics: Numerics) -> None:
        assert spec.pooler is not None, "the model pools"
        self.spec, self.limits, self.numerics = spec, limits, numerics
        self._worker = ThreadPoolExecutor(1, "pagoda-step", initializer=prepare_thread)
        self._parts: tuple[Encoder, ReferencePooler] | None = None
        self.num_bytes = 0

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def load(self, weights: Iterable[Weight]) -> None:
        self._worker.submit(self._load, weights).result()

    @torch.inference_mode()
    def _load(self, weights: Iterable[Weight]) -> None:
        assert self.spec.pooler is not None, "the model pools"
        params = Packer(self.spec, self.numerics).pack(weights)
        self.num_bytes = params.num_bytes
        encoder = Encoder(self.spec, params, self.numerics, self.limits.max_model_len)
        self._parts = encoder, ReferencePooler(self.spec.pooler, params.pooler)

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
        assert self._parts is not None, "load comes before execute"
        encoder, pooler = self._parts
        with torch._C.DisableTorchFunctionSubclass():  # see ReferenceBackend
            hidden = encoder.hidden(make_packed(plan))
            answers = pooler(hidden, plan.query_start.tolist(), plan.rules)
        return PoolResult(tuple(answer.numpy() for answer in answers))


class Encoder:
    """Maps a batch of prompts to hidden states."""

    def __init__(self, spec: ModelSpec, params: ModelParams, numerics: Numerics, max_len: int) -> None:
        self.params = params
        self.embed = TokenEmbedding(spec, params, numerics)
        readers = Counter(number for layer in spec.cache_numbers for mixer in layer for number in mixer)
        shared = frozenset(number for number, count in readers.items() if count > 1)
        self.layers = tuple(
            DecoderLayer(layer, p, [make_mixer(m, q, c, shared) for m, q, c in zip(layer.mixers, p.mixers, caches)])
            for layer, p, caches in zip(spec.layers, params.layers, spec.cache_numbers)
        )
        self.final_norm = make_norm(spec.final_norm, params.final_norm)
        self.rotary = RotaryTables(spec, max_len, numerics.compute)

    def hidden(self, batch: PackedPrompts) -> Tensor:
        """Return hidden states [T, D] after the last norm, the input of a head or a pooler."""
        x = self.embed(batch.token_ids, batch.positions, batch.token_types)
        rotations = self.rotary.at(batch.positions)
        shared: SharedCaches = {}
        for layer in self.layers:
            x = layer(x, batch, rotations, shared)
        x = self.final_norm(x)
        return x if self.params.embed_out is None else self.params.embed_out(x)


SharedCaches = dict[int, tuple[Tensor, Tensor]]
"""K and V [T, K, H] of one step that later layers read, by the number of the cache (see ModelSpec.cache_numbers)."""


def make_mixer(spec: Mixer, params: MixerParams, caches: tuple[int, ...], shared: frozenset[int]) -> MixerStep:
    """Return the mixer within each prompt. `caches`: those that it reads; `shared`: those that several mixers read."""
    match spec:
        case Attention():
            assert isinstance(params, AttentionParams)
            (number,) = caches
            return PackedAttention(spec, params, number if number in shared else None)
        case LatentAttention():
            assert isinstance(params, LatentAttentionParams)
            return PackedLatentAttention(spec, params)
        case GatedDelta():
            assert isinstance(params, GatedDeltaParams)
            return PackedGatedDelta(spec, params)
        case _:
            assert_never(spec)


class PackedAttention:
    """One layer's attention within each prompt."""

    def __init__(self, spec: Attention, params: AttentionParams, shared: int | None) -> None:
        """`shared`: the number of its cache if several layers read it."""
        self.spec, self.project, self.shared = spec, Projection(spec, params), shared

    def __call__(self, x: Tensor, batch: PackedPrompts, rotations: Rotations, shared: SharedCaches) -> Tensor:
        """X [T, D] -> [T, D]."""
        rotation = rotations[self.spec.rope]
        if self.spec.shares_cache_of is not None:
            assert self.shared is not None, "two layers read the cache"
            queries, (keys, values) = self.project.queries(x, rotation), shared[self.shared]
        else:
            queries, keys, values = self.project(x, rotation)
            if self.shared is not None:
                shared[self.shared] = keys, values
        return self.project.out(attend(queries, keys, values, batch, self.spec), x)
