"""The generation backend in JAX: TPUs in production, XLA's CPU client for tests.

A step is packed into one array, its program enqueued and an asynchronous copy of its tokens to the host started. The
host waits only in `result()`, by which time the next step is queued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu.ahead_of_time.bundle import Bundle, open_bundle
from pagoda.backends.jax_tpu.drafters.drafter import build_drafter
from pagoda.backends.jax_tpu.drafters.weights import load_drafter
from pagoda.backends.jax_tpu.execution.program_kind import StepProgramKind
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.programs import CompileCache, CompiledPrograms, JaxCompileReport
from pagoda.backends.jax_tpu.execution.sampler import JaxSampler
from pagoda.backends.jax_tpu.execution.shapes import (
    LastDrafts,
    Plans,
    check_invariant,
    check_tables,
    make_batch,
    step_shapes,
    token_slots,
    with_row_offset,
    writers_first,
)
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.execution.step_programs import (
    SCORE_TOKENS,
    CopyStates,
    Draft,
    Forward,
    ScorePrompt,
    WriteAdapter,
    WriteRows,
)
from pagoda.backends.jax_tpu.hosts import check_start
from pagoda.backends.jax_tpu.memory.kv_scales import with_kv_scales, with_stored_kv_scales
from pagoda.backends.jax_tpu.memory.measure import exact_blocks, recorded_needs
from pagoda.backends.jax_tpu.memory.plan import ProgramMemory, cache_dtype, free_bytes, plan_memory
from pagoda.backends.jax_tpu.model.layers import Caches
from pagoda.backends.jax_tpu.model.model import DraftInputs, HostLeaves, Leaves, Model, StepModel, build_model
from pagoda.backends.jax_tpu.model.parameters import LoraForm
from pagoda.backends.jax_tpu.parallel import chip_of_mesh, make_mesh, platform
from pagoda.backends.jax_tpu.parallel import dtype as dtype_of
from pagoda.backends.jax_tpu.profiler import JaxTracer, start_server
from pagoda.backends.jax_tpu.weights import checkpoint as checkpoints
from pagoda.backends.jax_tpu.weights.adapters import AdapterWriter, adapted_matrices
from pagoda.backends.jax_tpu.weights.formats import matrix_formats
from pagoda.backends.jax_tpu.weights.loading import WeightWriter, load
from pagoda.common.backend import BackendOptions, Capabilities, MemoryPlan, Weight
from pagoda.common.config.defaults import BLOCK_SIZES
from pagoda.common.engine.kv_cache.sizing import stated_blocks
from pagoda.common.engine.steps.contract import Int32, StepPlan, TokenMasks
from pagoda.common.engine.steps.pending import (
    FetchLogprobs,
    PendingShardSteps,
    PendingStep,
    PendingTokens,
    PromptScores,
    score_prompts,
)
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.errors import ConfigError, WeightError
from pagoda.common.models.primitives import Param
from pagoda.common.models.shapes import params
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.lora.weights import AdapterWeights
from pagoda.common.weights.quantization.kv_scales import take_kv_scales
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.kernels_pallas.chips import CHIPS

logger = logging.getLogger(__name__)

PLATFORM = platform()
ON_TPU = PLATFORM == "tpu"
CAPABILITIES = Capabilities(name="jax_tpu", device=PLATFORM, block_size=BLOCK_SIZES["jax_tpu"], prefers_extents=False)


def create(options: BackendOptions) -> JaxBackend:
    """Return a backend for the model replicas (shards), without weights. Raise ConfigError."""
    if options.sampling.has_processors:
        raise ConfigError(
            "--logits-processors",
            "jax_tpu keeps logits on the device; use --backend reference, or logit_bias in requests",
        )
    if options.lora is not None:
        _check_lora(options)
    if options.drafter is not None and options.programs.bundle is not None:
        raise ConfigError(
            "--compiled-bundle", "bundles have no programs for drafter models; drop it, or drop --speculative-config"
        )
    if options.batch_invariant:
        check_invariant(options)
    bundle = None if options.programs.bundle is None else open_bundle(options.programs.bundle)
    return JaxBackend(options, _model(options), bundle)


def _check_lora(options: BackendOptions) -> None:
    """Raise ConfigError for settings that jax_tpu does not have with LoRA adapters."""
    assert options.lora is not None
    if isinstance(options.spec, TransformersSpec):
        raise ConfigError("--enable-lora", "jax_tpu has no adapters for models that transformers computes; drop it")
    if options.programs.bundle is not None:
        raise ConfigError("--compiled-bundle", "bundles have no programs for adapters; drop it, or drop --enable-lora")
    dtype_of(options.lora.dtype, "--lora-dtype")


def _model(options: BackendOptions) -> StepModel:
    limits = options.limits
    if ON_TPU:
        check_tables(limits)
        check_start()
    mesh = make_mesh(options.parallel.tensor, options.parallel.data)
    model_dtype = dtype_of(options.dtype)
    chip = chip_of_mesh(mesh) if ON_TPU else CHIPS["v6e"]
    kv_dtype = cache_dtype(options.cache, model_dtype, chip if ON_TPU else None)
    kernel = KernelChoice(
        limits.block_size, kv_dtype, use_kernel=ON_TPU, chip=chip, batch_invariant=options.batch_invariant
    )
    spec = options.spec
    if isinstance(spec, TransformersSpec):
        from pagoda.backends.jax_tpu.model.transformers_decoder import build_transformers_model

        return build_transformers_model(
            spec, options.layout, mesh, model_dtype, limits.max_model_len, kernel, options.drafter
        )
    formats = matrix_formats(options.quantization, spec, chip, options.schemes, options.parallel.tensor)
    lora = None
    if options.lora is not None:
        dtype = dtype_of(options.lora.dtype, "--lora-dtype").name
        lora = LoraForm(
            slots=options.lora.slots,
            rank=options.lora.max_rank,
            dtype=dtype,
            copies=options.lora.copies,
            fully_sharded=options.lora.fully_sharded,
        )
    return build_model(
        spec,
        options.layout,
        mesh=mesh,
        dtype=model_dtype,
        max_len=limits.max_model_len,
        kernel=kernel,
        formats=formats,
        lora=lora,
        drafter=options.drafter,
    )


def check(options: BackendOptions) -> None:
    """Raise ConfigError where `create` would. The number of KV blocks depends on the device's memory."""
    create(options).close()


@dataclass(frozen=True, slots=True)
class EnqueuedStep:
    """A step whose forward pass is enqueued, and what its sampling and the drafter read."""

    plans: Plans
    shape: StepShape
    packed: Int32  # [shards, packed_size(shape)]
    logits: jax.Array  # float32 [S * width, V]
    draft_inputs: DraftInputs[jax.Array] | None = None  # with a drafter model


def _fetch_rows(guesses: jax.Array, first: int, seqs: int) -> Int32:
    rows: Int32 = np.asarray(guesses)[first : first + seqs]
    return rows


@dataclass(frozen=True, slots=True)
class Serving:
    """What steps run with; it belongs to a number of KV blocks."""

    programs: CompiledPrograms[StepProgramSet, StepProgramKind]
    sampler: JaxSampler
    last_drafts: LastDrafts


class JaxBackend:
    """Implements common.backend.ShardedBackend (a shard is a model replica), CheckpointBackend and DraftingBackend."""

    def __init__(self, options: BackendOptions, model: StepModel, bundle: Bundle | None = None) -> None:
        programs = options.programs
        limits = options.limits
        cache = options.cache
        self.model = model
        self.limits = limits
        self.cache_config = cache
        self.tracer = None if options.profiler is None else JaxTracer(options.profiler, self._latest)
        self.mode = options.sampling.logprobs_mode
        self.strict = programs.strict
        self._compile_cache = None if programs.compile_cache is None else CompileCache(programs.compile_cache)
        self._profiler_port = programs.profiler_port
        self._profiler_server = cast(Any, None)
        self._bundle = bundle
        self.drafter = None if options.drafter is None else build_drafter(options.drafter, model)
        if bundle is not None:
            stated = cache.num_gpu_blocks_override
            blocks = bundle.num_blocks if stated is None else stated_blocks(model.layout, limits, stated)
            bundle.check(self._program_set(blocks), limits)
        self._leaves: Leaves = ()
        self._asleep: HostLeaves | None = None  # of an engine whose weights sleep
        self._drafter_leaves: Leaves = ()
        self._caches: Caches = ()
        self._media: jax.Array | None = None  # rows of media items, of an engine with media
        self._initialised: Serving | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Return the backend's capabilities; they do not depend on the model."""
        return CAPABILITIES

    @property
    def recompiles(self) -> int:
        """Return the number of programs compiled while serving; should be 0."""
        return 0 if self._initialised is None else self._initialised.programs.recompiles

    @property
    def _serving(self) -> Serving:
        """What `init_cache` made, which the engine calls before anything that needs it."""
        assert self._initialised is not None, "init_cache comes first"
        return self._initialised

    def load(self, weights: Iterable[Weight]) -> None:
        """Load every parameter directly to its devices. Raise WeightError."""
        if isinstance(self.model, Model):
            scales: dict[str, float] = {}
            leaves = load(self.model, take_kv_scales(weights, scales))
            self._leaves = self._calibrated(self.model, with_stored_kv_scales(self.model, leaves, scales))
        else:
            from pagoda.backends.jax_tpu.model.transformers_decoder import TorchaxModel, load_transformers

            assert isinstance(self.model, TorchaxModel)
            self._leaves = load_transformers(self.model, weights)

    def load_drafter(self, weights: Iterable[Weight]) -> None:
        """Load every parameter of the drafter's own directly to its devices. Raise WeightError."""
        assert self.drafter is not None, "there is a drafter"
        self._drafter_leaves = load_drafter(self.drafter, weights)

    def load_checkpoint(self, folder: Path) -> None:
        """Load the arrays of `convert`; each device reads its piece. Raise ConfigError or WeightError."""
        model = self.model
        assert isinstance(model, Model), "pagoda convert takes no other"
        self._leaves = self._calibrated(model, checkpoints.load(model, ShardedCheckpoint(folder)))

    def update_weights(self, weights: Iterable[Weight]) -> None:
        """Replace parameters in the arrays on the devices. Raise WeightError."""
        if not isinstance(self.model, Model):
            raise WeightError("--model-impl transformers: weights cannot be replaced; start the server again")
        writer = WeightWriter.of(self.model, self._leaves)
        try:
            writer.write(weights, params(self.model.spec))
        finally:
            self._leaves = writer.leaves()

    def sleep(self, level: int) -> None:
        """Release the memory of weights and KV cache; level 1 keeps all weights on the host, 2 those of adapters.

        Raise MemoryError, with nothing released, if host memory is insufficient.
        """
        jax.block_until_ready(self._latest())
        if self._asleep is None:
            adapters = self.model.adapter_leaves if isinstance(self.model, Model) else ()
            self._asleep = HostLeaves.of(self._leaves, range(len(self._leaves)) if level == 1 else adapters)
            for leaf in self._leaves:
                leaf.delete()
            self._leaves = ()
        for cache in self._caches:
            cache.delete()
        self._caches = ()

    def wake_weights(self, read: Callable[[], Iterable[Weight]]) -> None:
        """Restore the weights; after level 2 from `read`. Raise MemoryError or WeightError."""
        assert self._asleep is not None, "the weights sleep"
        with device_memory_errors():
            if not self._asleep.is_complete:
                self.load(read())
            self._leaves = self._asleep.restored(self._leaves)
        self._asleep = None

    def wake_kv_cache(self) -> None:
        """Allocate the KV cache again. Raise MemoryError."""
        with device_memory_errors():
            self._caches = self._empty_caches(self._serving.programs.program_set.num_blocks)

    def _empty_caches(self, num_blocks: tuple[int, ...]) -> Caches:
        return tuple(jnp.zeros(c.shape, c.dtype, device=c.sharding) for c in self.model.caches(num_blocks))

    def adaptable(self) -> Mapping[str, Param]:
        """Return the matrices that adapters may change: those of attention, MLPs, the embeddings and the head."""
        assert isinstance(self.model, Model), "no other has adapters"
        return adapted_matrices(self.model)

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Enqueue the replacement of the adapter in a slot, in place: steps that are enqueued use the one before."""
        model = self.model
        programs = self._serving.programs
        assert isinstance(model, Model), "no other has adapters"
        arrays = tuple(self._leaves[index] for index in model.adapter_leaves)
        written = programs[WriteAdapter()](arrays, AdapterWriter(model).parts(weights), np.int32(slot))
        leaves = list(self._leaves)
        for index, array in zip(model.adapter_leaves, written):
            leaves[index] = array
        self._leaves = tuple(leaves)

    def _calibrated(self, model: Model, leaves: Leaves) -> Leaves:
        return with_kv_scales(model, leaves) if self.cache_config.calculate_kv_scales else leaves

    def plan_memory(self) -> MemoryPlan:
        """Return how many KV blocks fit in each shard. Raise ConfigError if there are too few."""
        compiled_for = None if self._bundle is None else self._bundle.num_blocks
        cache = self.cache_config
        plan = plan_memory(self.model, self.limits, cache, num_blocks=compiled_for, drafter=self.drafter)
        stated = (compiled_for, cache.num_gpu_blocks_override, cache.kv_cache_memory_bytes)
        if not ON_TPU or any(each is not None for each in stated):
            return plan
        return self._exact_plan(plan, free_bytes(self.model, cache, 0))

    def _exact_plan(self, plan: MemoryPlan, room: int) -> MemoryPlan:
        """Return the plan for `room` bytes beside the weights, with what programs need in place of its estimate."""
        program_set = self._program_set(plan.num_blocks)
        programs: CompiledPrograms[StepProgramSet, StepProgramKind] = CompiledPrograms(
            program_set, cache=self._compile_cache
        )

        def measure(keys: Sequence[Any]) -> list[ProgramMemory]:
            programs.prepare(keys)
            return [ProgramMemory.of(programs[key]) for key in keys]

        folder = None if self._compile_cache is None else self._compile_cache.folder
        needs = recorded_needs(program_set, folder, measure)
        return replace(plan, activations=needs.total, num_blocks=exact_blocks(program_set, self.limits, room, needs))

    def init_cache(self, num_blocks: tuple[int, ...]) -> None:
        """Allocate the KV cache of `num_blocks` blocks of each pool per shard on the devices."""
        programs: CompiledPrograms[StepProgramSet, StepProgramKind] = CompiledPrograms(
            self._program_set(num_blocks), strict=self.strict, cache=self._compile_cache
        )
        rows = self.model.shards * self.limits.max_num_seqs
        self._initialised = Serving(programs, JaxSampler(programs, rows), LastDrafts(rows))
        self._caches = self._empty_caches(num_blocks)
        if self.limits.media_rows:
            media = programs.program_set.media
            self._media = jnp.zeros(media.shape, media.dtype, device=media.sharding)

    def _program_set(self, num_blocks: tuple[int, ...]) -> StepProgramSet:
        shapes = step_shapes(self.model, self.limits, factor=2 if ON_TPU else 4)
        return StepProgramSet(
            model=self.model,
            shapes=shapes,
            num_blocks=num_blocks,
            rows=self.limits.max_num_seqs,
            mode=self.mode,
            media_rows=self.limits.media_rows,
            drafter=self.drafter,
        )

    def warmup(self) -> None:
        """Compile every program, so that none is compiled while serving."""
        if untuned := self.model.untuned_attention:
            logger.info(
                "attention kernel: block sizes not tuned for these heads (make tpu-tune): %s", ", ".join(untuned)
            )
        logger.info("%s", self.prepare())
        if self._profiler_port is not None and self._profiler_server is None:
            self._profiler_server = start_server(self._profiler_port)

    def prepare(self) -> JaxCompileReport:
        """Compile all programs, or load them from the bundle; report the cost."""
        programs = self._serving.programs
        if self._bundle is not None:
            return programs.adopt(self._bundle.load(programs.program_set))
        return programs.prepare()

    def execute(self, plan: StepPlan) -> PendingStep:
        """Enqueue a step of the only shard."""
        pending = self.execute_shards((plan,))
        (step,) = pending.steps
        assert step is not None, "it has a plan"
        if (sample := pending.sample) is not None:
            step.sample = lambda masks: sample({0: masks})[0]
        return step

    def execute_shards(self, plans: tuple[StepPlan | None, ...]) -> PendingShardSteps:
        """Enqueue a step of every shard; its sampling follows in `bind_masks` if a plan has `masked`."""
        serving = self._serving
        programs = serving.programs
        sampler = serving.sampler
        before = programs.recompiles
        size = self.limits.max_num_seqs
        shards = self.model.shards
        parts = {
            shard: writers_first(with_row_offset(plan, shard * size))
            for shard, plan in enumerate(plans)
            if plan is not None
        }
        active = {shard: plan for shard, (plan, _) in parts.items()}
        for plan in active.values():
            for start in plan.starts:
                sampler.start(start)
        self._copy_states(active, programs)
        shape, packed = make_batch(active, shards, programs.program_set.shapes, shards * size, serving.last_drafts)
        self._write_rows(active, programs)
        forward = programs[Forward(shape)]
        if self._media is None:
            outputs = forward(self._leaves, self._caches, sampler.history, packed)
        else:
            outputs = forward(self._leaves, self._caches, sampler.history, packed, self._media)
        self._caches, hidden, logits, *left = outputs
        step = EnqueuedStep(
            plans=active, shape=shape, packed=packed, logits=logits, draft_inputs=left[0] if left else None
        )
        scores = {
            shard: self._score_prompts(shard, plan, hidden, serving, adapted=shape.adapted)
            for shard, plan in active.items()
        }
        recompiles = programs.recompiles - before
        steps: list[PendingStep | None] = [None] * shards
        for shard, (plan, order) in parts.items():
            steps[shard] = PendingStep(plan, prompt_scores=scores[shard], order=order, recompiles=recompiles)
            recompiles = 0  # counted once
        pending = PendingShardSteps(tuple(steps))
        if any(plan.masked is not None for plan in active.values()):
            pending.sample = partial(self._sample, step)
        elif any(plan.samples.any() for plan in active.values()):
            pending.set_tokens(self._sample(step))
        elif step.draft_inputs is not None:
            self._draft(step, np.full(logits.shape[0], -1, np.int32))
        return pending

    def _copy_states(self, plans: Plans, programs: CompiledPrograms[StepProgramSet, StepProgramKind]) -> None:
        """Enqueue the copies of recurrent state that come before the step."""
        for pool in self.model.state_pools:
            pairs = {shard: plan.state_copies[pool] for shard, plan in plans.items() if plan.state_copies}
            count = max(map(len, pairs.values()), default=0)
            if not count:
                continue
            size = next(size for size in programs.program_set.copy_counts if size >= count)
            packed = np.zeros((self.model.shards, 2, size), np.int32)  # the others copy the null block to itself
            for shard, each in pairs.items():
                packed[shard, :, : len(each)] = each.T
            self._caches = programs[CopyStates(pool, size)](self._caches, packed)

    def _write_rows(self, plans: Plans, programs: CompiledPrograms[StepProgramSet, StepProgramKind]) -> None:
        """Enqueue the media items that become rows before the step."""
        count = max(sum(len(encode.rows) for encode in plan.encodes) for plan in plans.values())
        if not count:
            return
        program_set = programs.program_set
        size = next(size for size in program_set.written_rows if size >= count)
        values = np.zeros((self.model.shards, size, program_set.media.shape[1]), self.model.dtype)
        numbers = np.full((self.model.shards, size), program_set.media_rows, np.int32)
        for shard, plan in plans.items():
            start = 0
            for encode in plan.encodes:
                stop = start + len(encode.rows)
                values[shard, start:stop] = np.frombuffer(encode.item.payload, values.dtype).reshape(stop - start, -1)
                numbers[shard, start:stop] = encode.rows
                start = stop
        self._media = programs[WriteRows(size)](self._media, values.reshape(-1, values.shape[2]), numbers)

    def _sample(self, step: EnqueuedStep, masks: Mapping[int, TokenMasks] | None = None) -> dict[int, PendingTokens]:
        """Enqueue the sampling of every shard, then the drafter, if there is one."""
        serving = self._serving
        programs = serving.programs
        sampler = serving.sampler
        before = programs.recompiles
        plans = step.plans
        sampled = sampler.sample(step.logits, plans, masks)
        guesses = None if step.draft_inputs is None else self._draft(step, sampled.tokens)
        recompiles = programs.recompiles - before
        seqs = step.logits.shape[0] // self.model.shards // sampled.width
        tokens: dict[int, PendingTokens] = {}
        for shard, plan in plans.items():
            span = shard * seqs, plan.num_seqs
            fetch = partial(sampled.fetch, *span, plan.num_drafts)
            guessed = None if guesses is None else partial(_fetch_rows, guesses, *span)
            tokens[shard] = PendingTokens(fetch, partial(sampled.logprobs, *span), recompiles, guesses=guessed)
            recompiles = 0  # counted once
        return tokens

    def _latest(self) -> tuple[Any, ...]:
        return self._caches, None if self._initialised is None else self._initialised.sampler.history

    def _draft(self, step: EnqueuedStep, tokens: jax.Array | Int32) -> jax.Array:
        """Enqueue the drafter. Return the guesses int32 [S, K]. `tokens` int32 [S * width]: the sampled ones."""
        serving = self._serving
        programs = serving.programs
        sampler = serving.sampler
        arrays = self._leaves, self._drafter_leaves, self._caches, sampler.history
        program = programs[Draft(step.shape)]
        self._caches, sampler.history, guesses = program(*arrays, step.packed, step.draft_inputs, tokens)
        if any(plan.num_guesses is not None for plan in step.plans.values()):
            guesses.copy_to_host_async()
        return guesses

    def close(self) -> None:
        """Release the device memory, and stop the profiler server."""
        if self._profiler_server is not None:
            jax.profiler.stop_server()
            self._profiler_server = None
        self._drafter_leaves = ()
        self._leaves = ()
        self._caches = ()
        self._initialised = None

    def _score_prompts(
        self,
        shard: int,
        plan: StepPlan,
        hidden: jax.Array,
        serving: Serving,
        *,
        adapted: bool,
    ) -> tuple[PromptScores, ...]:
        """Enqueue the logprobs of a shard's prompt tokens, in fixed-size chunks."""
        shards = self.model.shards
        first = shard * SCORE_TOKENS

        slots = token_slots(plan) if adapted else None

        def score(begin: int, targets: Int32, best: int) -> FetchLogprobs:
            indices, tokens = np.zeros((2, shards * SCORE_TOKENS), np.int32)
            rows = slice(first, first + len(targets))
            indices[rows] = begin + np.arange(len(targets))
            tokens[rows] = targets
            own = () if slots is None else (slots[np.minimum(indices, len(slots) - 1)],)
            program = serving.programs[ScorePrompt(hidden.shape[0] // shards, slots is not None)]
            logits = program(self._leaves, hidden, indices, *own)
            return partial(serving.sampler.score(logits, tokens, SCORE_TOKENS, (best,)).fetch, rows, best)

        return score_prompts(plan, serving.sampler.rows, SCORE_TOKENS, score)


@contextmanager
def device_memory_errors() -> Iterator[None]:
    """Raise MemoryError where a device has no room for an array."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(f"no room in device memory: {str(error).splitlines()[0]}") from None
