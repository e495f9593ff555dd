"""The CPU backend in plain PyTorch. One worker thread runs the steps in order while the engine plans the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.execution import Embedded, make_batch
from pagoda.backends.reference.memory import LayerCache, allocate, copy_states, plan_memory
from pagoda.backends.reference.model.decoder import Decoder
from pagoda.backends.reference.model.numerics import numerics, thread_count
from pagoda.backends.reference.sampling import Sampler, token_logprobs
from pagoda.backends.reference.weights import Packer
from pagoda.common.backend import BackendOptions, Capabilities, MemoryPlan, Weight
from pagoda.common.config.defaults import BLOCK_SIZES
from pagoda.common.engine.pending import unbound_masks
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.sampling_state import prompt_targets, sampled_indices
from pagoda.common.engine.step import RowStart, StepPlan, StepResult, TokenLogprobs, TokenMasks
from pagoda.common.errors import ConfigError

ResultT = TypeVar("ResultT")

CAPABILITIES = Capabilities(name="reference", device="cpu", block_size=BLOCK_SIZES["reference"], prefers_extents=True)


def create(options: BackendOptions) -> ReferenceBackend:
    """Return a backend without weights.

    Raises ConfigError for a KV cache of another dtype than the activations.
    """
    options.cache.check_scales()
    if options.cache.cache_dtype != "auto":
        raise ConfigError(
            "--kv-cache-dtype",
            "the reference backend's cache has the activations' dtype; use auto, or --backend jax_tpu",
        )
    return ReferenceBackend(options)


def check(options: BackendOptions) -> tuple[int, ...] | None:
    """Return the KV blocks of each pool, None unless settings state them. Raises ConfigError where `create` would."""
    backend = create(options)
    backend.close()
    return backend.plan_memory(weights=0).num_blocks if backend.cache_config.has_explicit_size else None


class ReferenceBackend:
    """Implements common.backend.Backend."""

    def __init__(self, options: BackendOptions) -> None:
        self.spec, self.limits, self.layout = options.spec, options.limits, options.layout
        self.cache_config, self.numerics = options.cache, numerics(options.dtype)
        self._worker = ThreadPoolExecutor(1, "pagoda-step", initializer=prepare_thread)
        self._sampler = Sampler(
            options.spec.vocab, options.limits.max_num_seqs, options.limits.max_model_len, options.sampling
        )
        self._decoder: Decoder | None = None
        self._caches: dict[int, LayerCache] = {}

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def load(self, weights: Iterable[Weight]) -> None:
        """Load and prepack every parameter. Raises WeightError."""
        self._worker.submit(self._load, weights).result()

    @torch.inference_mode()
    def _load(self, weights: Iterable[Weight]) -> None:
        params = Packer(self.spec, self.numerics).pack(weights)
        self._decoder = Decoder(self.spec, params, self.numerics, self.limits.max_model_len)

    def update_weights(self, weights: Iterable[Weight]) -> None:
        """Replace parameters; the layers before stay in memory meanwhile. Raises WeightError, without a change."""
        self._worker.submit(self._update, weights).result()

    @torch.inference_mode()
    def _update(self, weights: Iterable[Weight]) -> None:
        assert self._decoder is not None, "load comes before update_weights"
        params = Packer(self.spec, self.numerics).pack(weights, self._decoder.params)
        self._decoder = Decoder(self.spec, params, self.numerics, self.limits.max_model_len)

    def plan_memory(self, weights: int | None = None) -> MemoryPlan:
        """Return the KV blocks that fit. `weights`: bytes, before load. Raises ConfigError with the missing bytes."""
        if weights is None:
            assert self._decoder is not None, "load comes before plan_memory"
            weights = self._decoder.params.num_bytes
        return plan_memory(self.spec, self.limits, self.layout, self.cache_config, self.numerics, weights)

    def init_cache(self, num_blocks: tuple[int, ...]) -> None:
        self._caches = allocate(self.layout, num_blocks, self.numerics.compute)

    def warmup(self) -> None:
        """Run a short prefill and a decode step on the null block, so that first-call costs are paid."""
        start = RowStart(0, np.zeros(1, np.int32), 1, SamplingRules())
        tables = tuple(np.zeros((1, 1), np.int32) for _ in self.layout.groups)
        for tokens in (min(8, self.layout.block_size, self.limits.max_model_len), 1):
            self.execute(
                StepPlan(
                    step=-1,
                    starts=(start,),
                    rows=np.zeros(1, np.int32),
                    query_start=np.array([0, tokens], np.int32),
                    context=np.zeros(1, np.int32),
                    token_ids=np.zeros(tokens, np.int32),
                    block_tables=tables,
                    samples=np.ones(1, np.bool_),
                )
            ).result()

    def execute(self, plan: StepPlan) -> WorkerStep:
        """Submit a step; if the plan has `masked`, only its forward pass, and its sampling in `bind_masks`."""
        return WorkerStep(self, plan)

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def submit(self, run: Callable[[], ResultT]) -> Future[ResultT]:
        """Run a part of a step on the worker thread, after those before."""
        return self._worker.submit(_run_part, run)

    def forward(self, plan: StepPlan) -> ForwardPass:
        """Compute the logits of the sequences that sample, and the logprobs of prompt tokens."""
        assert self._decoder is not None, "load comes before execute"
        for start in plan.starts:
            self._sampler.start(start)
        copy_states(plan.state_copies, self.layout, self._caches)
        plan = self._sampler.resolve(plan)
        batch = make_batch(plan, self.layout)
        embedded = Embedded.of(plan, self.numerics.weights)
        hidden = self._decoder.hidden(torch.from_numpy(plan.token_ids.astype(np.int64)), batch, self._caches, embedded)
        prompt_logprobs = self._prompt_logprobs(plan, hidden)
        sampled = torch.from_numpy(sampled_indices(plan))
        return ForwardPass(plan, self._decoder.logits(hidden[sampled]) if len(sampled) else None, prompt_logprobs)

    def sample(self, forward: ForwardPass, masks: TokenMasks | None = None) -> StepResult:
        """Sample the step's tokens. `masks`: of sequences in `plan.masked`."""
        plan = forward.plan
        if forward.logits is None:
            return StepResult(plan.step, np.full(plan.num_seqs, -1, np.int32), {}, forward.prompt_logprobs)
        tokens, logprobs = self._sampler.accept(plan, *self._sampler.sample(forward.logits, plan, masks))
        return StepResult(plan.step, tokens, logprobs, forward.prompt_logprobs)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> dict[int, TokenLogprobs]:
        """Return the logprobs of prompt tokens by sequence, for those with prompt logprobs."""
        assert self._decoder is not None
        logprobs = {}
        for scored in prompt_targets(plan, self._sampler.rows):
            logits = self._decoder.logits(hidden[scored.begin : scored.begin + len(scored.targets)])
            targets = torch.from_numpy(scored.targets.astype(np.int64))
            mode = self._sampler.options.logprobs_mode
            logprobs[scored.index] = token_logprobs(logits, targets, scored.best, mode)
        return logprobs


@torch.inference_mode()
def _run_part(run: Callable[[], ResultT]) -> ResultT:
    # torch looks up `__torch_function__` on every packed weight by an exception: 17 us per linear layer
    with torch._C.DisableTorchFunctionSubclass():
        return run()


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The part of a step before sampling."""

    plan: StepPlan  # without PREVIOUS, at the true positions
    logits: Tensor | None  # float32 [R, V] of the R tokens to be sampled
    prompt_logprobs: dict[int, TokenLogprobs]


class WorkerStep:
    """A step on the worker thread. Implements common.backend.PendingResult."""

    def __init__(self, backend: ReferenceBackend, plan: StepPlan) -> None:
        self._backend, self._plan = backend, plan
        self._forward: Future[ForwardPass] | None = None
        self._result: Future[StepResult] | None = None
        if plan.masked is None:
            self._result = backend.submit(lambda: backend.sample(backend.forward(plan)))
        else:
            self._forward = backend.submit(lambda: backend.forward(plan))

    def bind_masks(self, masks: TokenMasks) -> None:
        """Submit the sampling."""
        backend, forward = self._backend, self._forward
        assert forward is not None, "the plan has masked sequences"
        self._result = backend.submit(lambda: backend.sample(forward.result(), masks))

    def result(self) -> StepResult:
        """Wait for the step. Raises what it raised, RuntimeError without masks for a plan with `masked`."""
        if self._result is None:
            raise unbound_masks(self._plan)
        return self._result.result()


def prepare_thread() -> None:
    """Initialise a worker thread."""
    torch.set_num_threads(thread_count())
