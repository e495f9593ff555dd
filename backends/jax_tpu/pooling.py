"""Pooling models in JAX: TPUs in service, XLA's CPU client for tests.

Programs have static shapes, a ladder of them compiled before serving; a step takes the smallest that holds it. The
device makes raw answers; what differs from request to request is done to them on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import jax
import numpy as np

from pagoda.backends.jax_tpu.ahead_of_time.bundle import Bundle, open_bundle
from pagoda.backends.jax_tpu.backend import CAPABILITIES, ON_TPU
from pagoda.backends.jax_tpu.execution.compile_cache import CompileCache
from pagoda.backends.jax_tpu.execution.packed_input import PackedShape, pack_prompts
from pagoda.backends.jax_tpu.execution.pool_program_keys import PoolCatalogue
from pagoda.backends.jax_tpu.execution.programs import CompiledPrograms, JaxCompileReport
from pagoda.backends.jax_tpu.execution.shapes import check_tables
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.memory.plan import fit_pooling, pooling_room
from pagoda.backends.jax_tpu.model.model import Leaves, Model, build_model
from pagoda.backends.jax_tpu.parallel.platform import dtype as dtype_of
from pagoda.backends.jax_tpu.parallel.sharding import make_mesh
from pagoda.backends.jax_tpu.weights.loading import load
from pagoda.common.backend import Capabilities, PoolingOptions, Weight
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.pooling import EMBEDS, OF_TOKENS, Float32, PoolingRules, PoolPlan
from pagoda.common.models.spec import Pooler
from pagoda.kernels_pallas.chips import CHIPS, chip_of

logger = logging.getLogger(__name__)

_NO_ROWS: Final[Float32] = np.zeros((0, 0), np.float32)


def create(options: PoolingOptions) -> JaxPooling:
    """Return a backend on one copy of the model, without weights. Raises ConfigError."""
    spec, limits, programs = options.spec, options.limits, options.programs
    compiled = None if programs.bundle is None else open_bundle(programs.bundle)
    if ON_TPU and any(layer.mixer.causal for layer in spec.layers):
        check_tables(limits)
    mesh, number = make_mesh(options.parallel.tensor), dtype_of(options.dtype)
    chip = chip_of(mesh.devices.flat[0].device_kind) if ON_TPU else CHIPS["v6e"]
    kernel = KernelChoice(limits.block_size, number.name, use_kernel=ON_TPU, chip=chip)
    model = build_model(spec, kv_layout(spec, limits.block_size), mesh, number, limits.max_model_len, kernel)
    limits = fit_pooling(model, limits, pooling_room(model, options.memory_share), stated=options.batch_stated)
    cache = None if programs.compile_cache is None else CompileCache(programs.compile_cache)
    return JaxPooling(model, limits, programs.strict, compiled, cache)


@dataclass(frozen=True, slots=True)
class JaxPendingVectors:
    """Implements common.backend.PendingVectors. `whole` float32 [S, n]: an answer a prompt, `each` [T, n]: one a token;
    None where no prompt asks for it.
    """

    whole: jax.Array | None
    each: jax.Array | None
    plan: PoolPlan
    pooler: Pooler

    def result(self) -> tuple[Float32, ...]:
        """Wait for the step."""
        whole, each = (_NO_ROWS if raw is None else np.asarray(raw) for raw in (self.whole, self.each))
        starts = self.plan.query_start.tolist()
        answers = list[Float32]()
        for index, rules in enumerate(self.plan.rules):
            rows = (
                each[starts[index] : starts[index + 1]] if _of_tokens(rules, self.pooler) else whole[index : index + 1]
            )
            answers.append(_finished(rows, rules, self.pooler))
        return tuple(answers)


class JaxPooling:
    """Implements common.backend.PoolingBackend."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        strict: bool = False,
        bundle: Bundle | None = None,
        compile_cache: CompileCache | None = None,
    ) -> None:
        assert model.spec.pooler is not None, "the model pools"
        self.model, self.limits, self.pooler = model, limits, model.spec.pooler
        self.catalogue = PoolCatalogue(model, limits)
        self.programs: CompiledPrograms[PoolCatalogue, PackedShape] = CompiledPrograms(
            self.catalogue, strict=strict, cache=compile_cache
        )
        self._bundle, self._leaves = bundle, Leaves()
        if bundle is not None:
            bundle.check(self.catalogue, limits)

    @property
    def capabilities(self) -> Capabilities:
        """Facts that do not depend on the model."""
        return CAPABILITIES

    @property
    def num_bytes(self) -> int:
        """Bytes of the loaded weights."""
        return sum(leaf.nbytes for leaf in self._leaves)

    @property
    def recompiles(self) -> int:
        """Programs that were compiled while serving; more than none is a fault."""
        return self.programs.recompiles

    def load(self, weights: Iterable[Weight]) -> None:
        """Take every parameter, each straight to its devices. Raises WeightError."""
        self._leaves = load(self.model, weights)

    def warmup(self) -> None:
        """Compile every program there is, so that none is compiled while serving, and run one."""
        logger.info("%s", self.prepare())
        rules = PoolingRules(task="token_embed", use_activation=False)
        self.pool(PoolPlan(np.zeros(1, np.int32), np.array([0, 1], np.int32), None, (rules,))).result()

    def prepare(self) -> JaxCompileReport:
        """Compile all programs, or load them from the bundle; what that cost."""
        if self._bundle is not None:
            return self.programs.adopt(self._bundle.load(self.catalogue))
        return self.programs.prepare()

    def pool(self, plan: PoolPlan) -> JaxPendingVectors:
        """Queue a step. One whose prompts ask for answers of both kinds is computed twice."""
        kinds = {_of_tokens(rules, self.pooler) for rules in plan.rules}
        whole, each = (self._run(plan, kind) if kind in kinds else None for kind in (False, True))
        return JaxPendingVectors(whole, each, plan, self.pooler)

    def _run(self, plan: PoolPlan, of_tokens: bool) -> jax.Array:
        shape = self.catalogue.shape_for(plan.num_tokens, of_tokens)
        raw: jax.Array = self.programs[shape](self._leaves, pack_prompts(shape, plan))
        raw.copy_to_host_async()
        return raw

    def close(self) -> None:
        """Let go of the device's memory."""
        self._leaves = ()
        self.programs.clear()


def _of_tokens(rules: PoolingRules, pooler: Pooler) -> bool:
    """Whether the prompt has an answer for each of its tokens."""
    return rules.task in OF_TOKENS or pooler.kind == "all"


def _finished(rows: Float32, rules: PoolingRules, pooler: Pooler) -> Float32:
    """[1 or length, n] -> [n] or [length, n]."""
    if rules.task in EMBEDS:
        rows = rows[:, : rules.dimensions]
        if rules.use_activation:
            rows = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    elif rules.use_activation and pooler.classifier is not None:
        rows = _activated(rows, pooler.classifier.activation)
    return rows if rules.task in OF_TOKENS else rows[0]


def _activated(rows: Float32, name: str | None) -> Float32:
    if name == "sigmoid":
        rows = np.reciprocal(1 + np.exp(-rows))
    elif name == "softmax":
        powers = np.exp(rows - rows.max(-1, keepdims=True))
        rows = powers / powers.sum(-1, keepdims=True)
    return rows
