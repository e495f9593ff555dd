"""The pooling backend in JAX: TPUs in production, XLA's CPU client for tests.

Programs have static shapes from a ladder compiled before serving. The device computes raw pooled outputs; per-request
post-processing (dimensions, normalisation, activation) happens on the host.
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
from pagoda.backends.jax_tpu.execution.program_sets import PoolProgramSet
from pagoda.backends.jax_tpu.execution.programs import CompileCache, CompiledPrograms, JaxCompileReport
from pagoda.backends.jax_tpu.execution.shapes import check_tables
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, pack_pool
from pagoda.backends.jax_tpu.execution.step_programs import Pool
from pagoda.backends.jax_tpu.hosts import check_start
from pagoda.backends.jax_tpu.memory.plan import fit_pooling, pooling_room
from pagoda.backends.jax_tpu.model.model import Leaves, Model, build_model
from pagoda.backends.jax_tpu.parallel import chip_of_mesh, make_mesh
from pagoda.backends.jax_tpu.parallel import dtype as dtype_of
from pagoda.backends.jax_tpu.profiler import JaxTracer
from pagoda.backends.jax_tpu.weights.loading import load
from pagoda.common.backend import Capabilities, PoolingOptions, Weight
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.nested.profiler import ProfilerConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.pooling.values import EMBEDS, OF_TOKENS, PoolingRules, PoolPlan, PoolResult
from pagoda.common.engine.steps.contract import Float32
from pagoda.common.models.spec import Pooler
from pagoda.common.models.transformers_spec import own_spec
from pagoda.kernels_pallas.chips import CHIPS

logger = logging.getLogger(__name__)

_EMPTY: Final[Float32] = np.zeros((0, 0), np.float32)


def create(options: PoolingOptions) -> JaxPooling:
    """Return a backend on one copy of the model, without weights. Raise ConfigError."""
    spec = own_spec(options.spec, "pooling on jax_tpu")
    limits = options.limits
    programs = options.programs
    bundle = None if programs.bundle is None else open_bundle(programs.bundle)
    if ON_TPU and any(mixer.causal for mixer in spec.mixers):
        check_tables(limits)
    if ON_TPU:
        check_start()
    mesh = make_mesh(options.parallel.tensor)
    model_dtype = dtype_of(options.dtype)
    chip = chip_of_mesh(mesh) if ON_TPU else CHIPS["v6e"]
    kernel = KernelChoice(limits.block_size, model_dtype.name, use_kernel=ON_TPU, chip=chip)
    model = build_model(spec, kv_layout(spec, limits.block_size), mesh, model_dtype, limits.max_model_len, kernel)
    limits = fit_pooling(model, limits, pooling_room(model, options.memory_share), stated=options.batch_stated)
    cache = None if programs.compile_cache is None else CompileCache(programs.compile_cache)
    return JaxPooling(model, limits, programs.strict, bundle, cache, options.profiler)


@dataclass(frozen=True, slots=True)
class JaxPendingVectors:
    """Implements common.backend.PendingPooling."""

    per_prompt: jax.Array | None  # float32 [S, n]; None if no prompt needs it
    per_token: jax.Array | None  # float32 [T, n]; None if no prompt needs it
    plan: PoolPlan
    pooler: Pooler
    recompiles: int

    def result(self) -> PoolResult:
        """Wait for the step."""
        per_prompt, per_token = (
            _EMPTY if raw is None else np.asarray(raw) for raw in (self.per_prompt, self.per_token)
        )
        starts = self.plan.query_start.tolist()
        outputs = list[Float32]()
        for index, rules in enumerate(self.plan.rules):
            of_tokens = _of_tokens(rules, self.pooler)
            rows = per_token[starts[index] : starts[index + 1]] if of_tokens else per_prompt[index : index + 1]
            outputs.append(_postprocess(rows, rules, self.pooler))
        return PoolResult(tuple(outputs), self.recompiles)


class JaxPooling:
    """Implements common.backend.PoolingBackend."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        strict: bool = False,
        bundle: Bundle | None = None,
        compile_cache: CompileCache | None = None,
        profiler: ProfilerConfig | None = None,
    ) -> None:
        assert model.spec.pooler is not None, "the model pools"
        self.model = model
        self.limits = limits
        self.pooler = model.spec.pooler
        self.program_set = PoolProgramSet(model, limits)
        self.programs: CompiledPrograms[PoolProgramSet, Pool] = CompiledPrograms(
            self.program_set, strict=strict, cache=compile_cache
        )
        self._bundle = bundle
        self._leaves = Leaves()
        self.tracer = None if profiler is None else JaxTracer(profiler, lambda: self._latest)
        self._latest: jax.Array | None = None  # of the newest step, with a tracer
        if bundle is not None:
            bundle.check(self.program_set, limits)

    @property
    def capabilities(self) -> Capabilities:
        """Return the backend's capabilities; they do not depend on the model."""
        return CAPABILITIES

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the loaded weights."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def load(self, weights: Iterable[Weight]) -> None:
        """Load every parameter directly to its devices. Raise WeightError."""
        self._leaves = load(self.model, weights)

    def warmup(self) -> None:
        """Compile every program and run one."""
        logger.info("%s", self.prepare())
        rules = PoolingRules(task="token_embed", use_activation=False)
        self.execute(PoolPlan(np.zeros(1, np.int32), np.array([0, 1], np.int32), None, (rules,))).result()

    def prepare(self) -> JaxCompileReport:
        """Compile all programs, or load them from the bundle; report the cost."""
        if self._bundle is not None:
            return self.programs.adopt(self._bundle.load(self.program_set))
        return self.programs.prepare()

    def execute(self, plan: PoolPlan) -> JaxPendingVectors:
        """Enqueue a step. It runs twice if some prompts need outputs per prompt and others per token."""
        before = self.programs.recompiles
        kinds = {_of_tokens(rules, self.pooler) for rules in plan.rules}
        per_prompt, per_token = (self._run(plan, kind) if kind in kinds else None for kind in (False, True))
        return JaxPendingVectors(per_prompt, per_token, plan, self.pooler, self.programs.recompiles - before)

    def _run(self, plan: PoolPlan, of_tokens: bool) -> jax.Array:
        shape = self.program_set.shape_for(plan.num_tokens, of_tokens)
        raw: jax.Array = self.programs[Pool(shape)](self._leaves, pack_pool(shape, plan))
        raw.copy_to_host_async()
        if self.tracer is not None:
            self._latest = raw
        return raw

    def close(self) -> None:
        """Release the device memory."""
        self._leaves = ()
        self.programs.clear()


def _of_tokens(rules: PoolingRules, pooler: Pooler) -> bool:
    return rules.task in OF_TOKENS or pooler.kind == "all"


def _postprocess(rows: Float32, rules: PoolingRules, pooler: Pooler) -> Float32:
    """Truncate, normalise or activate: [1 or length, n] -> [n] or [length, n]."""
    if rules.task in OF_TOKENS and pooler.token_heads:
        ends = np.cumsum([head.width for head in pooler.token_heads])
        tasks: list[str] = [head.task for head in pooler.token_heads]
        rows = np.split(rows, ends[:-1], axis=-1)[tasks.index(rules.task)]
    if rules.task in EMBEDS:
        rows = rows[:, : rules.dimensions]
        if rules.use_activation:
            rows = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    elif rules.use_activation:
        rows = _activate(rows, pooler.activation(rules.task))
    return rows if rules.task in OF_TOKENS else rows[0]


def _activate(rows: Float32, name: str | None) -> Float32:
    if name == "sigmoid":
        rows = np.reciprocal(1 + np.exp(-rows))
    elif name == "softmax":
        powers = np.exp(rows - rows.max(-1, keepdims=True))
        rows = powers / powers.sum(-1, keepdims=True)
    elif name == "relu":
        rows = np.maximum(rows, 0)
    return rows
