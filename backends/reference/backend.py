"""The CPU backend in plain PyTorch. One worker thread runs the steps in order while the engine plans the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.drafting import DraftRunner, resolve_guesses
from pagoda.backends.reference.execution import TokenSlots, make_batch, single_tokens
from pagoda.backends.reference.memory import (
    LayerCache,
    allocate,
    copy_states,
    keep_freed_memory,
    map_scratch,
    plan_memory,
)
from pagoda.backends.reference.model.adapters import AdapterMatrices
from pagoda.backends.reference.model.decoder import Decoder
from pagoda.backends.reference.model.drafters import load_drafter
from pagoda.backends.reference.model.numerics import numerics, thread_count
from pagoda.backends.reference.profiler import TorchTracer
from pagoda.backends.reference.sampling import Sampler, token_logprobs
from pagoda.backends.reference.state_replay import StateReplay
from pagoda.backends.reference.threads import ComputeThreads, divide, part_of
from pagoda.backends.reference.weights.load import Packer
from pagoda.backends.torch_decoder.media_rows import MediaRows
from pagoda.common.backend import BackendOptions, Capabilities, MemoryPlan, Weight
from pagoda.common.config.defaults import BLOCK_SIZES
from pagoda.common.config.env import TRANSFORMERS_DEVICE
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.sampling.state import by_sequence_of, prompt_targets, sampled_indices
from pagoda.common.engine.steps.contract import Int32, RowStart, StepPlan, StepResult, TokenLogprobs, TokenMasks
from pagoda.common.engine.steps.pending import unbound_masks
from pagoda.common.errors import ConfigError, WeightError
from pagoda.common.models.drafters import LanguageDrafter, captured_layers
from pagoda.common.models.primitives import Param
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.lora.weights import AdapterWeights, adaptable

if TYPE_CHECKING:
    from pagoda.backends.reference.model.transformers.decoder import EncoderDecoder, TransformersDecoder

ResultT = TypeVar("ResultT")

CAPABILITIES = Capabilities(name="reference", device="cpu", block_size=BLOCK_SIZES["reference"], prefers_extents=True)

_CPU: Final = torch.device("cpu")
_WARMUP_TOKENS: Final = 8


def create(options: BackendOptions) -> ReferenceBackend:
    """Return a backend without weights.

    Raises ConfigError for a KV cache of another dtype than the activations.
    """
    options.cache.check_scales()
    if options.cache.cache_dtype != "auto":
        raise ConfigError(
            "--kv-cache-dtype",
            "the reference backend's cache has the activations' dtype; use auto, or --backend torch_cuda or jax_tpu",
        )
    return ReferenceBackend(options, _layer_device(options))


def _layer_device(options: BackendOptions) -> torch.device:
    """Return the device of the layers that transformers computes. Raises ConfigError if there is none such."""
    chosen = TRANSFORMERS_DEVICE.read()
    if chosen is None or not isinstance(options.spec, TransformersSpec):
        return _CPU
    if options.spec.encoder is not None:
        raise ConfigError(TRANSFORMERS_DEVICE.name, "encoder-decoder models run on the CPU; unset it")
    if chosen != "xla":
        raise ConfigError(TRANSFORMERS_DEVICE.name, f"{chosen} is unknown; use xla, or unset it to run on the CPU")
    try:
        import torch_xla
    except ImportError as error:  # also where it was built for another torch
        words = str(error).partition("\n")[0]
        raise ConfigError(
            TRANSFORMERS_DEVICE.name,
            f"torch_xla cannot be imported ({words}); pip install 'pagoda[torch-xla]' in an environment of its own, or "
            "use --backend jax_tpu with 'pagoda[torchax]'",
        ) from None
    device: torch.device = torch_xla.device()
    return device


def check(options: BackendOptions) -> tuple[int, ...] | None:
    """Return the KV blocks of each pool, None unless settings state them. Raises ConfigError where `create` would."""
    backend = create(options)
    backend.close()
    return backend.plan_memory(weights=0).num_blocks if backend.cache_config.has_explicit_size else None


class ReferenceBackend:
    """Implements common.backend.Backend."""

    def __init__(self, options: BackendOptions, layer_device: torch.device = _CPU) -> None:
        """`layer_device`: of the layers that transformers computes."""
        self._layer_device = layer_device
        self.spec = options.spec
        self.limits = options.limits
        self.layout = options.layout
        self.cache_config = options.cache
        self._engines = options.parallel.engines
        self.numerics = numerics(options.dtype, batch_invariant=options.batch_invariant)
        self._head_scheme = options.schemes.get("head")
        self._adapters: AdapterMatrices | None = None
        if options.lora is not None:
            if isinstance(options.spec, TransformersSpec):
                raise ConfigError(
                    "--enable-lora", "models that transformers computes have no LoRA adapters; use another model"
                )
            self._adapters = AdapterMatrices(options.lora, adaptable(options.spec), self.numerics)
        keep_freed_memory()
        self._worker = ThreadPoolExecutor(1, "pagoda-step", initializer=prepare_thread)
        self._sampler = Sampler(
            options.spec.vocab, options.limits.max_num_seqs, options.limits.max_model_len, options.sampling
        )
        self._threads = ComputeThreads(thread_count())
        self._decoder: Decoder | TransformersDecoder | EncoderDecoder | None = None
        self._encoder: EncoderDecoder | None = None  # the decoder again, if it has an encoder
        self._weight_bytes = 0
        self._media: MediaRows | None = None
        if options.limits.media_rows:
            self._media = MediaRows(options.limits.media_rows, options.spec.hidden_width, self.numerics.weights)
        self._caches: dict[int, LayerCache] = {}
        self._drafter_spec = options.drafter
        self._captured = captured_layers(options.drafter)
        self._drafts: DraftRunner | None = None
        self._guesses = np.full((options.limits.max_num_seqs, options.limits.max_drafts), -1, np.int32)  # of each row
        self.tracer: TorchTracer | None = None
        if options.profiler is not None:
            self.tracer = TorchTracer(options.profiler, lambda work: self._worker.submit(work).result())
        self.filled: Future[None] | None = None  # the last slot for an adapter that was filled, or is to be

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def model(self) -> Decoder | TransformersDecoder | EncoderDecoder | None:
        """The loaded model; None before `load`."""
        return self._decoder

    def load(self, weights: Iterable[Weight]) -> None:
        """Load and prepack every parameter. Raises WeightError."""
        self._worker.submit(self._load, weights).result()

    @torch.inference_mode()
    def _load(self, weights: Iterable[Weight]) -> None:
        if isinstance(self.spec, TransformersSpec):
            self._decoder = decoder = self._load_transformers(self.spec, weights)
            self._weight_bytes = decoder.num_bytes
            return
        params = Packer(self.spec, self.numerics, self._head_scheme, self._adapters).pack(weights)
        self._decoder = Decoder(self.spec, params, self.numerics, self.limits.max_model_len, self._adapters)
        self._weight_bytes = params.num_bytes

    def _load_transformers(
        self, spec: TransformersSpec, weights: Iterable[Weight]
    ) -> TransformersDecoder | EncoderDecoder:
        from pagoda.backends.reference.model.transformers.decoder import EncoderDecoder, TransformersDecoder

        max_len = self.limits.max_model_len
        if spec.encoder is None:
            return TransformersDecoder(spec, weights, self.numerics, max_len, self._layer_device)
        self._encoder = EncoderDecoder(spec, weights, self.numerics, max_len)
        return self._encoder

    def load_drafter(self, weights: Iterable[Weight]) -> None:
        """Load and prepack every parameter of the drafter. Raises WeightError."""
        self._worker.submit(self._load_drafter, weights).result()

    @torch.inference_mode()
    def _load_drafter(self, weights: Iterable[Weight]) -> None:
        spec = self._drafter_spec
        max_len = self.limits.max_model_len
        assert spec is not None, "it has a drafter"
        target = self._decoder if isinstance(self._decoder, Decoder) else None
        drafter = load_drafter(spec, weights, target, self.numerics, max_len)
        self._drafts = DraftRunner(spec, drafter, self.layout, len(self.spec.caches), self.limits.max_drafts)
        self._weight_bytes += drafter.num_bytes

    def update_weights(self, weights: Iterable[Weight]) -> None:
        """Replace parameters; the layers before stay in memory meanwhile. Raises WeightError, without a change."""
        self._worker.submit(self._update, weights).result()

    @torch.inference_mode()
    def _update(self, weights: Iterable[Weight]) -> None:
        if isinstance(self.spec, TransformersSpec):
            raise WeightError("--model-impl transformers: weights cannot be replaced; start the server again")
        assert isinstance(self._decoder, Decoder), "load comes before update_weights"
        if self._drafts is not None and not isinstance(self._drafter_spec, LanguageDrafter):
            raise WeightError("the drafter shares weights of the model: start the server again with the new ones")
        packer = Packer(self.spec, self.numerics, self._head_scheme, self._adapters)
        params = packer.pack(weights, self._decoder.params)
        self._decoder = Decoder(self.spec, params, self.numerics, self.limits.max_model_len, self._adapters)

    def plan_memory(self, weights: int | None = None) -> MemoryPlan:
        """Return the KV blocks that fit. `weights`: bytes, before load. Raises ConfigError with the missing bytes."""
        if weights is None:
            assert self._decoder is not None, "load comes before plan_memory"
            weights = self._weight_bytes
        slots = 0 if self._adapters is None else self._adapters.num_bytes
        return plan_memory(
            self.spec,
            self.limits,
            self.layout,
            self.cache_config,
            self.numerics,
            weights=weights,
            adapters=slots,
            engines=self._engines,
        )

    def init_cache(self, num_blocks: tuple[int, ...]) -> None:
        stated = self.cache_config.kv_cache_memory_bytes is not None
        self._caches = allocate(self.layout, num_blocks, self.numerics.compute, map_pages=stated)
        if self._drafts is not None:
            self._drafts.set_caches(self._caches)

    def warmup(self) -> None:
        """Run a short prefill and a decode step on the null block, so that first-call costs are paid.

        Memory is taken for the logits of two steps of all sequences: one is sampled while the next is computed.
        """
        self._worker.submit(map_scratch, 2 * self.limits.max_num_seqs * self.spec.vocab * 4).result()
        encoder = None if self._encoder is None else np.zeros(_WARMUP_TOKENS, np.int32)
        start = RowStart(0, np.zeros(1, np.int32), 1, SamplingRules(), encoder)
        tables = tuple(np.zeros((1, 1), np.int32) for _ in self.layout.groups)
        for tokens in (min(_WARMUP_TOKENS, self.layout.block_size, self.limits.max_model_len), 1):
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

    def adaptable(self) -> Mapping[str, Param]:
        return self._slots.adaptable

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Copy an adapter to a slot, on the worker thread: after the steps before, before those after."""
        self.filled = self._worker.submit(_run_part, lambda: self._slots.fill(slot, weights))

    @property
    def _slots(self) -> AdapterMatrices:
        assert self._adapters is not None, "the backend is created with slots for adapters"
        return self._adapters

    def execute(self, plan: StepPlan) -> WorkerStep:
        """Submit a step; if the plan has `masked`, only its forward pass, and its sampling in `bind_masks`."""
        return WorkerStep(self, plan)

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._threads.close()

    def submit(self, run: Callable[[], ResultT]) -> Future[ResultT]:
        """Run a part of a step on the worker thread, after those before."""
        return self._worker.submit(_run_part, run)

    def forward(self, plan: StepPlan, filled: Future[None] | None = None) -> ForwardPass:
        """Compute the logits of the sequences that sample, and the logprobs of prompt tokens.

        `filled`: the last slot that was to be filled when the step was submitted.
        """
        assert self._decoder is not None, "load comes before execute"
        if filled is not None:
            filled.result()  # it ran before, and may have failed
        for start in plan.starts:
            self._sampler.start(start)
            if self._encoder is not None:
                self._encoder.start(start)
        copy_states(plan.state_copies, self.layout, self._caches)
        if self._media is not None:
            self._media.write(plan.encodes)
        plan = resolve_guesses(self._sampler.resolve(plan), self._guesses)
        self._threads.together()
        computed = self._divided(plan) or self._compute(plan)
        features = None
        if self._drafts is not None:
            features = computed.hidden if computed.captured is None else computed.captured
        return ForwardPass(plan, computed.logits, self._prompt_logprobs(plan, computed.hidden), features)

    def _compute(self, plan: StepPlan) -> Computed:
        """Run the layers, and the head on the tokens to be sampled."""
        assert self._decoder is not None
        records = isinstance(self._decoder, Decoder) and not self._captured and self._decoder.records(plan.num_tokens)
        replay = StateReplay.of(plan, self._sampler.accepted[plan.rows]) if self.layout.has_states else None
        batch = make_batch(single_tokens(plan) if records and replay is None else plan, self.layout, replay=replay)
        media = self._media if self._media is not None and len(plan.media_tokens) else None
        token_ids = torch.from_numpy(plan.token_ids.astype(np.int64))
        captured = None
        if self._captured:
            assert isinstance(self._decoder, Decoder), "layers are captured of a decoder"
            hidden, captured = self._decoder.hidden_and_captured(token_ids, batch, self._caches, self._captured, media)
        else:
            hidden = self._decoder.hidden(token_ids, batch, self._caches, media)
        sampled = torch.from_numpy(sampled_indices(plan))
        if not len(sampled):
            return Computed(hidden, None, captured)
        if isinstance(self._decoder, Decoder) and batch.adapters is not None:
            return Computed(hidden, self._decoder.logits(hidden[sampled], batch.adapters.at(sampled)), captured)
        return Computed(hidden, self._decoder.logits(hidden[sampled]), captured)

    def _divided(self, plan: StepPlan) -> Computed | None:
        """Return the same, of parts computed by a thread each; None if that gains nothing."""
        threads = self._threads
        decoder = self._decoder
        if self._captured or not threads.load.contended or not isinstance(decoder, Decoder) or not decoder.is_row_wise:
            return None
        sequences = divide(plan, threads.parts, self.layout)
        if len(sequences) < 2:
            return None
        plans, tokens = zip(*(part_of(plan, part) for part in sequences))
        parts = threads.map(lambda part: _run_part(lambda: self._compute(part)), plans)
        whole = parts[0].hidden.new_empty(plan.num_tokens, parts[0].hidden.shape[1])
        for indices, own in zip(tokens, parts):
            whole[torch.from_numpy(indices)] = own.hidden
        sampled = sampled_indices(plan)
        if not len(sampled):
            return Computed(whole, None)
        logits = torch.empty(len(sampled), self.spec.vocab)
        for part, indices, own in zip(plans, tokens, parts):
            if own.logits is not None:
                logits[torch.from_numpy(np.searchsorted(sampled, indices[sampled_indices(part)]))] = own.logits
        return Computed(whole, logits)

    def sample(self, forward: ForwardPass, masks: TokenMasks | None = None) -> StepResult:
        """Sample the step's tokens. `masks`: of sequences in `plan.masked`."""
        plan = forward.plan
        if forward.logits is None:
            tokens = np.full(plan.num_seqs, -1, np.int32)
            return StepResult(plan.step, tokens, {}, forward.prompt_logprobs, guesses=self._guess(forward, tokens))
        tokens, logprobs = self._sampler.accept(plan, *self._sampler.sample(forward.logits, plan, masks))
        failed = by_sequence_of(plan, self._sampler.failed)
        guesses = self._guess(forward, tokens)
        return StepResult(plan.step, tokens, logprobs, forward.prompt_logprobs, failed=failed, guesses=guesses)

    def _guess(self, forward: ForwardPass, token_ids: Int32) -> Int32 | None:
        """Run the drafter, if any, after a step that sampled `token_ids`; keep and return its guesses."""
        if self._drafts is None or forward.features is None:
            return None
        plan = forward.plan
        guesses = self._drafts.guess(plan, token_ids, forward.features, self._sampler.history.numpy())
        if guesses is not None:
            self._guesses[plan.rows, : guesses.shape[1]] = guesses
        return guesses

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> dict[int, TokenLogprobs]:
        """Return the logprobs of prompt tokens by sequence, for those with prompt logprobs."""
        assert self._decoder is not None
        logprobs = {}
        adapters = TokenSlots.of(plan)
        for scored in prompt_targets(plan, self._sampler.rows):
            rows = slice(scored.begin, scored.begin + len(scored.targets))
            if isinstance(self._decoder, Decoder) and adapters is not None:
                logits = self._decoder.logits(hidden[rows], adapters.at(rows))
            else:
                logits = self._decoder.logits(hidden[rows])
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
class Computed:
    """What the layers and the head return for a step."""

    hidden: Tensor  # [T, D] after the final norm
    logits: Tensor | None  # float32 [R, V] of the R tokens to be sampled
    captured: Tensor | None = None  # [T, C*D] inputs of C layers side by side, if a drafter reads them


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The part of a step before sampling."""

    plan: StepPlan  # without PREVIOUS, at the true positions
    logits: Tensor | None  # float32 [R, V] of the R tokens to be sampled
    prompt_logprobs: dict[int, TokenLogprobs]
    features: Tensor | None = None  # [T, W] what a drafter reads


class WorkerStep:
    """A step on the worker thread. Implements common.backend.PendingResult."""

    def __init__(self, backend: ReferenceBackend, plan: StepPlan) -> None:
        self._backend = backend
        self._plan = plan
        self._forward: Future[ForwardPass] | None = None
        self._result: Future[StepResult] | None = None
        filled = backend.filled  # while this step waits, the next one's slots are filled
        if plan.masked is None:
            self._result = backend.submit(lambda: backend.sample(backend.forward(plan, filled)))
        else:
            self._forward = backend.submit(lambda: backend.forward(plan, filled))

    def bind_masks(self, masks: TokenMasks) -> None:
        """Submit the sampling."""
        backend = self._backend
        forward = self._forward
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
