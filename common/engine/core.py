"""The step loop of an engine: requests in, outputs out, with the next step planned while one runs on the device.

    plan 1, start 1, plan 2, start 2 | wait for 1, report 1, masks of 2 | plan 3, start 3 | wait for 2, ...

The token masks of a step depend on the result of the step before. They are handed over while the step runs, before
its logits are sampled, and before the next step is started.

Generation, pooling and data parallelism share this loop. They differ in the scheduler, which plans steps and turns
results into outputs, and in the backend method that executes its plans. `Sleeper` offloads an idle engine's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec

from pagoda.common.backend import Backend, LoraBackend, Pending, PendingSample, SleepingBackend, Weight
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.engine.incident.journal import Journal, why_not_replayable
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.lora.adapter import LORA_FIELD, Adapter
from pagoda.common.engine.lora.slots import SchedulerAdapters
from pagoda.common.engine.lora.store import AdapterLoader, AdapterScheduler, AdapterStore
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, StepOutputs
from pagoda.common.engine.scheduling.scheduler import Scheduler, failed_output
from pagoda.common.engine.steps.contract import StepPlan, StepResult, TokenMasks
from pagoda.common.engine.steps.profiling import StepProfiler
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.grammar import no_tokenizer, refused
from pagoda.common.engine.structured_output.token_mask import TokenMaskState
from pagoda.common.errors import ConfigError, ModelError, RequestError, SleepError

PlanT = TypeVar("PlanT")
ResultT_contra = TypeVar("ResultT_contra", contravariant=True)
MasksT_co = TypeVar("MasksT_co", covariant=True)

GRAMMAR_WAIT_SECONDS: Final = 0.005
"""How long a step waits for a grammar when there is nothing else to do, so that commands are still read."""

CHECK_INTERVAL: Final = 256
"""Steps between two integrity checks under load. A check costs about 1 ns per KV block."""


class StepScheduler(Protocol[PlanT, ResultT_contra, MasksT_co]):
    """Plans steps and takes their results, in the same order. Plug-in schedulers implement this interface; most
    subclass scheduler.Scheduler.
    """

    def add(self, request: EngineRequest, mask_state: TokenMaskState | None = None, /) -> None:
        """Queue a request. `mask_state`: its token masks. Raises RequestError naming the field if it can never run."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests and free their blocks; unknown ids are skipped."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting requests."""
        ...

    def schedule(self) -> PlanT | None:
        """Return the next step; None if nothing can be computed until a result or a request arrives."""
        ...

    def token_masks(self, plan: PlanT) -> MasksT_co | None:
        """Return the token masks of the oldest step in flight; None if no sequence samples under a grammar."""
        ...

    def update(self, plan: PlanT, result: ResultT_contra) -> StepOutputs:
        """Apply the result of the oldest step in flight and return its outputs."""
        ...

    def stats(self) -> EngineStats:
        """Return a snapshot between steps."""
        ...

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every slot and block is accounted for."""
        ...


GenerationScheduler = StepScheduler[StepPlan, StepResult, TokenMasks]
MakeScheduler = Callable[[Limits, KvManager], GenerationScheduler]


class GrammarQueue:
    """Requests on their way to the scheduler: those with a grammar wait until it is compiled, the others pass.

    `add`: queues a request in the scheduler. `structured`: compiles grammars; None refuses requests that need one.
    """

    def __init__(
        self, add: Callable[[EngineRequest, TokenMaskState | None], None], structured: Structured | None
    ) -> None:
        self._add = add
        self._structured = structured
        self._compiling: dict[str, tuple[EngineRequest, Future[TokenMaskState]]] = {}

    def __len__(self) -> int:
        return len(self._compiling)

    def add(self, request: EngineRequest) -> None:
        """Accept a request. Raises RequestError naming the field if it can never run."""
        if request.request_id in self._compiling:
            raise RequestError("request_id", f"request {request.request_id} is already in the engine")
        if request.grammar is None and request.thinking is None:
            self._add(request, None)
            return
        if self._structured is None:
            raise no_tokenizer()
        self._compiling[request.request_id] = request, self._structured.submit(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are skipped."""
        for request_id in request_ids:
            if (entry := self._compiling.pop(request_id, None)) is not None and not entry[1].cancel():
                entry[1].add_done_callback(_release)

    def admit(self) -> list[EngineOutput]:
        """Pass on requests whose grammar is compiled. Return the outputs of those that cannot run."""
        outputs: list[EngineOutput] = []
        for request_id in [name for name, (_, mask_state) in self._compiling.items() if mask_state.done()]:
            request, mask_state = self._compiling.pop(request_id)
            error = mask_state.exception()
            if error is not None and not isinstance(error, RequestError):
                # A failure of the grammar library, even a panic of its native code, ends the request, not the engine.
                error = refused(repr(error))
            try:
                if error is not None:
                    raise error
                self._add(request, mask_state.result())
            except RequestError as refusal:
                _release(mask_state)
                outputs.append(failed_output(request_id, refusal))
        return outputs

    def wait(self) -> None:
        """Wait briefly for the next grammar."""
        wait([mask_state for _, mask_state in self._compiling.values()], GRAMMAR_WAIT_SECONDS, FIRST_COMPLETED)


def _release(made: Future[TokenMaskState]) -> None:
    """Let go of what a mask state uses, if it was made."""
    if made.exception() is None:
        made.result().release()


def _recorded_add(
    scheduler: StepScheduler[Any, Any, Any], journal: Journal
) -> Callable[[EngineRequest, TokenMaskState | None], None]:
    """Return what queues a request in the scheduler and records it."""

    def add(request: EngineRequest, mask_state: TokenMaskState | None) -> None:
        scheduler.add(request, mask_state)
        journal.added(request)

    return add


class EngineCore:
    """One model's engine over a loaded backend; see generation_core, sharded_core and pooling_core.

    `execute`: starts a step of `scheduler`'s plans. `kv_managers`: one per copy of the model, none for pooling.
    `structured`: compiles grammars. `adapters`: loads LoRA adapters. Not thread-safe. After `step` raised, the engine
    is dead: create a new one.
    """

    def __init__(
        self,
        execute: Callable[[Any], Pending[Any]],
        scheduler: StepScheduler[Any, Any, Any],
        limits: Limits,
        *,
        kv_managers: Sequence[KvManager] = (),
        structured: Structured | None = None,
        adapters: AdapterLoader | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.limits = limits
        self.journal = journal
        self._execute = execute
        self._scheduler = scheduler
        self._kv_managers = tuple(kv_managers)
        self._grammars = GrammarQueue(
            scheduler.add if journal is None else _recorded_add(scheduler, journal), structured
        )
        self._adapters = adapters
        self.profiler: StepProfiler | None = None  # set with --profiler-config
        self._depth = 2 if limits.async_scheduling else 1  # steps in flight
        self._pending: deque[tuple[Any, Pending[Any]]] = deque()
        self._unchecked_steps = 0
        self._suspended = False

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError naming the field if it can never run.

        A request whose grammar does not compile ends with an output that has the error.
        """
        if request.pooling is not None and self._kv_managers:  # a generating model
            raise RequestError("model", "the model generates text, it does not pool; start it with --runner pooling")
        self._grammars.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests and free their blocks at once; they have no further output. Unknown ids are skipped."""
        request_ids = list(request_ids)
        self._grammars.abort(request_ids)
        if self.journal is not None:
            self.journal.aborting(request_ids)
        self._scheduler.abort(request_ids)
        if self._is_idle:
            self._check_kv_cache(idle=True)

    @property
    def has_work(self) -> bool:
        """True while a step is in flight or a request is unfinished; suspended requests do not count."""
        return bool(self._pending) or self._reads or (self.has_requests and not self._suspended)

    @property
    def has_requests(self) -> bool:
        """True while a request is unfinished, suspended or not."""
        return self._scheduler.num_unfinished > 0 or len(self._grammars) > 0

    @property
    def _is_idle(self) -> bool:
        return not (self._pending or self._reads or self.has_requests)

    def suspend(self) -> None:
        """Start no further steps until `resume`; requests keep their tokens and their KV. Idempotent.

        Steps in flight are still to be taken by `step`, while `has_work`.
        """
        self._suspended = True

    def resume(self) -> None:
        """Continue the requests that `suspend` stopped. Idempotent."""
        self._suspended = False

    @property
    def _reads(self) -> bool:
        return self._adapters is not None and self._adapters.is_reading

    def step(self) -> StepOutputs:
        """Start the steps that can start, then wait for the oldest one. Returns no outputs if there is no work."""
        refusals = self._grammars.admit()
        if self._adapters is not None:
            refusals += self._adapters.update()
        depth = 0 if self._suspended else self._depth
        while len(self._pending) < depth and (plan := self._schedule()) is not None:
            if self._adapters is not None:
                self._adapters.fill_slots(plan)
            if self.profiler is not None:
                self.profiler.before_step()
            self._pending.append((plan, self._execute(plan)))
            if len(self._pending) == 1:
                self._bind_masks()
        if not self._pending:
            if self._scheduler.num_unfinished and not (self._reads or self._suspended):
                raise RuntimeError("requests are in the engine, yet none can run and none is in flight")
            if refusals:
                pass
            elif self._adapters is not None and self._reads:
                self._adapters.wait()
            elif len(self._grammars):
                self._grammars.wait()
            return StepOutputs(outputs=refusals, stats=self.stats)
        plan, pending = self._pending.popleft()
        outputs = self._update(plan, pending)
        if self._pending:
            self._bind_masks()
        self._unchecked_steps += 1
        idle = self._is_idle
        if idle or self._unchecked_steps >= CHECK_INTERVAL:
            self._check_kv_cache(idle)
        if idle and self.profiler is not None:
            self.profiler.on_idle()
        if refusals or len(self._grammars):
            return StepOutputs(outputs=refusals + outputs.outputs, stats=self._with_deferred(outputs.stats))
        return outputs

    def _schedule(self) -> Any:
        return self._scheduler.schedule() if self.journal is None else self.journal.schedule(self._scheduler.schedule)

    def _update(self, plan: Any, pending: Pending[Any]) -> StepOutputs:
        if self.journal is None:
            return self._scheduler.update(plan, pending.result())
        return self.journal.update(plan, lambda: self._scheduler.update(plan, pending.result()))

    def load_adapter(self, adapter: Adapter, done: Callable[[RequestError | None], None]) -> None:
        """Read a LoRA adapter to host memory. `done` is called by this call or a later step, with the error if any."""
        if self._adapters is None:
            done(RequestError(LORA_FIELD, "the engine has no LoRA adapters; start it with --enable-lora"))
        else:
            self._adapters.load(adapter, done)

    def load_adapter_now(self, adapter: Adapter) -> None:
        """Read a LoRA adapter to host memory in this thread, unless this call did before. Raises RequestError."""
        if self._adapters is None:
            raise RequestError(LORA_FIELD, "the engine has no LoRA adapters; start it with --enable-lora")
        self._adapters.load_now(adapter)

    def remove_adapter(self, number: int) -> None:
        """Forget the LoRA adapters with that number; requests that name them have theirs read again."""
        if self._adapters is not None:
            self._adapters.remove(number)

    def _bind_masks(self) -> None:
        """Hand the token masks to the oldest step in flight; the result of the step before has been applied."""
        plan, pending = self._pending[0]
        if (masks := self._scheduler.token_masks(plan)) is not None:
            cast("PendingSample[Any, Any]", pending).bind_masks(masks)

    def _check_kv_cache(self, idle: bool) -> None:
        """Raise RuntimeError if KV blocks are not accounted for. Runs when the engine becomes idle, and under load."""
        self._unchecked_steps = 0
        for kv in self._kv_managers:
            kv.check_integrity(idle=idle)

    @property
    def stats(self) -> EngineStats:
        """A snapshot between steps."""
        return self._with_deferred(self._scheduler.stats())

    def _with_deferred(self, stats: EngineStats) -> EngineStats:
        """Return `stats` with the requests whose grammar is not compiled. With replicas, they count as the first's."""
        if not (deferred := len(self._grammars)):
            return stats
        first = tuple(msgspec.structs.replace(replica, deferred=deferred) for replica in stats.replicas[:1])
        return msgspec.structs.replace(stats, deferred=deferred, replicas=first + stats.replicas[1:])

    @property
    def why_no_journal(self) -> str:
        """Why the scheduler is not recorded; empty if it is."""
        return "" if self.journal is not None else why_not_replayable(self._scheduler, self.limits)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; running requests keep their blocks. Always returns True."""
        if self.journal is not None:
            self.journal.clearing()
        for kv in self._kv_managers:
            kv.clear_cache()
        return True

    def update_weights(self, update: Callable[[], None]) -> None:
        """Call `update`, which replaces weights of the backend, and drop all cached prefixes, even if it raises.

        The engine is idle: KV of running requests would enter the prefix cache later.
        """
        assert self._is_idle, "requests end first"
        try:
            update()
        finally:
            self.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block, slot and request is accounted for. Walks the whole pool."""
        self._scheduler.check_integrity()


def generation_core(
    backend: Backend,
    layout: KvLayout,
    limits: Limits,
    num_blocks: tuple[int, ...],
    make_scheduler: MakeScheduler = Scheduler,
    structured: Structured | None = None,
    store: AdapterStore | None = None,
) -> EngineCore:
    """Return the engine of a generating model. `num_blocks`: KV blocks of each pool, the null block included.

    `store`: with `Limits.max_loras`, where its LoRA adapters come from. Raises ConfigError if block sizes differ, or
    for a scheduler without slots for adapters.
    """
    kv = make_kv_manager(backend, layout, limits, num_blocks)
    scheduler = make_scheduler(limits, kv)
    journal = None
    if not why_not_replayable(scheduler, limits):
        journal = Journal(cast(Scheduler, scheduler), layout, num_blocks)
    return EngineCore(
        backend.execute,
        scheduler,
        limits,
        kv_managers=(kv,),
        structured=structured,
        adapters=None if store is None else adapter_loader(backend, scheduler, adapters_of([scheduler]), store),
        journal=journal,
    )


def adapters_of(schedulers: Iterable[GenerationScheduler]) -> tuple[SchedulerAdapters, ...]:
    """Return the LoRA adapters of each scheduler that has them. One of a plugin may wrap ours and show its adapters."""
    parts = (getattr(scheduler, "adapters", None) for scheduler in schedulers)
    return tuple(part for part in parts if isinstance(part, SchedulerAdapters))


def adapter_loader(
    backend: Backend, scheduler: object, parts: Sequence[SchedulerAdapters], store: AdapterStore
) -> AdapterLoader:
    """Return what brings the adapters of a scheduler's requests to their slots.

    `parts`: the scheduler's, or those of its shards. Raises ConfigError without any: the scheduler has no slots.
    """
    if not parts:
        raise ConfigError("--scheduler-cls", "this scheduler has no LoRA adapters; drop it or --enable-lora")
    return AdapterLoader(cast(LoraBackend, backend), cast(AdapterScheduler, scheduler), parts, store)


def make_kv_manager(backend: Backend, layout: KvLayout, limits: Limits, num_blocks: tuple[int, ...]) -> KvManager:
    """Return a manager of `num_blocks` blocks per pool (block 0 is the null block). Raises ConfigError if block sizes
    differ.
    """
    if layout.block_size != limits.block_size:
        raise ConfigError("--block-size", f"{limits.block_size} differs from the cache layout's {layout.block_size}")
    return KvManager(
        layout,
        num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_step_tokens=limits.max_step_tokens,
        prefix_caching=limits.prefix_caching,
        snapshots=limits.snapshots,
        prefers_extents=backend.capabilities.prefers_extents,
    )


# Sleep and wake-up of an idle engine: which parts of its memory are offloaded, and in what order they are restored.

WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"
SLEEP_TAGS: Final = (WEIGHTS, KV_CACHE)
"""The parts of an engine's memory that can be offloaded, in the order of wake-up."""

SLEEP_LEVELS: Final = (1, 2)
"""1: weights are kept in host memory. 2: weights are read again from the checkpoint. Both drop the KV cache."""

SLEEP_MODES: Final = ("abort", "wait")
"""What happens to running requests before the memory is freed: they are aborted, or finish first."""

PAUSE_MODES: Final = (*SLEEP_MODES, "keep")
"""What happens to running requests in a pause: as in SLEEP_MODES, or they are suspended and continue afterwards."""

ASLEEP: Final = "the engine is asleep; wake it up first (POST /wake_up, or wake_up())"


class Sleeper:
    """The sleep state of one engine. `read_weights`: returns every parameter of the model, on each call."""

    def __init__(
        self, backend: SleepingBackend, core: EngineCore, read_weights: Callable[[], Iterable[Weight]]
    ) -> None:
        self._backend = backend
        self._core = core
        self._read_weights = read_weights
        self._asleep: tuple[str, ...] = ()
        self._level = 0

    @property
    def asleep(self) -> tuple[str, ...]:
        """The offloaded parts; empty while the engine is awake."""
        return self._asleep

    @property
    def level(self) -> int:
        """1 or 2 while a part is offloaded, else 0."""
        return self._level if self._asleep else 0

    def sleep(self, level: int) -> None:
        """Offload both parts of an idle engine. Raises SleepError and changes nothing if that fails."""
        if self._core.has_requests:
            raise SleepError("the engine stays awake: its requests are suspended; resume generation or abort them")
        assert not self._core.has_work, "requests end first"
        if WEIGHTS in self._asleep:
            if level != self._level:
                raise SleepError(f"the engine is asleep at level {self._level} already; wake it up first")
        else:
            self._core.reset_prefix_cache()
            try:
                self._backend.sleep(level)
            except MemoryError as error:
                raise SleepError(f"the engine stays awake: {error}") from error
        self._asleep = SLEEP_TAGS
        self._level = level

    def wake_up(self, tags: Iterable[str]) -> None:
        """Restore parts; those that are awake stay so. Raises SleepError if one fails, which stays offloaded."""
        for tag in [tag for tag in SLEEP_TAGS if tag in tags and tag in self._asleep]:
            try:
                if tag == WEIGHTS:
                    self._core.update_weights(lambda: self._backend.wake_weights(self._read_weights))
                else:
                    self._backend.wake_kv_cache()
            except MemoryError as error:
                raise SleepError(f"{tag} cannot wake up: {error}; free device memory and try again") from error
            except ModelError as error:
                raise SleepError(f"{tag} cannot wake up: {error}; restore the checkpoint and try again") from error
            self._asleep = tuple(other for other in self._asleep if other != tag)


def check_sleep(config: ModelConfig, level: int, mode: str) -> None:
    """Raise RequestError for an unknown level or mode, ConfigError for an engine that cannot sleep."""
    _check_enabled(config)
    if level not in SLEEP_LEVELS:
        raise RequestError("level", f"level {level} is not 1 (weights kept in host memory) or 2 (nothing kept)")
    if mode not in SLEEP_MODES:
        raise RequestError(
            "mode", f"mode {mode[:50]} is not {' or '.join(SLEEP_MODES)}: the KV of requests is not kept"
        )


def check_wake_up(config: ModelConfig, tags: Iterable[str] | None) -> tuple[str, ...]:
    """Return the parts to wake up, all if none is named. Raises as check_sleep does."""
    _check_enabled(config)
    checked = tuple(tags or SLEEP_TAGS)
    for tag in checked:
        if tag not in SLEEP_TAGS:
            raise RequestError("tags", f"tag {tag[:50]} is not {' or '.join(SLEEP_TAGS)}")
    return checked


def _check_enabled(config: ModelConfig) -> None:
    if not config.enable_sleep_mode:
        raise ConfigError("--enable-sleep-mode", "the engine cannot sleep; start it with this flag")
