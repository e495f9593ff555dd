"""The backend without a device: it says how long each step would take and answers with made-up tokens.

A step begins when the device is free and the host has planned it, and takes the time that the model of step times says.
The clock is virtual (`pagoda simulate`), or the machine's, for a server that behaves like one with a device.

Output tokens are a function of the prompt, the seed and the position, or those that the request prescribes. They come
from the middle half of the vocabulary, where no model has its end-of-sequence tokens, so a sequence ends at its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from pagoda.backends.modules import CalibrationTarget
from pagoda.backends.simulated.accelerator import Accelerator
from pagoda.backends.simulated.calibration import Calibration, read_calibration
from pagoda.backends.simulated.device import PAUSE, SimulatedDevice
from pagoda.backends.simulated.hardware import find_chip
from pagoda.backends.simulated.measure import calibrate as calibrated
from pagoda.backends.simulated.step_time import StepLoad
from pagoda.common.backend import BackendOptions, Capabilities, MemoryPlan, Weight
from pagoda.common.config.defaults import BLOCK_SIZES
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.simulation import SimulationConfig
from pagoda.common.engine.kv_cache.sizing import max_blocks, min_blocks, split_bytes, stated_blocks
from pagoda.common.engine.kv_cache.spec import per_pool
from pagoda.common.engine.sampling.rules import OUTPUT_TOKENS, TOKEN_STRIDE, mix
from pagoda.common.engine.steps.contract import Int32, RowStart, StepPlan, StepResult, TokenLogprobs, TokenMasks
from pagoda.common.engine.steps.pending import unbound_masks
from pagoda.common.engine.workload.drive import Clock, RealClock
from pagoda.common.errors import ConfigError

UInt32 = npt.NDArray[np.uint32]

CAPABILITIES: Final = Capabilities(
    name="simulated", device="simulated", block_size=BLOCK_SIZES["simulated"], prefers_extents=False
)


def open_device(config: SimulationConfig) -> SimulatedDevice:
    """Return the device of the settings. Raises ConfigError if none is named, or its file cannot be read."""
    if config.hardware is not None:
        report = None if config.compile_report is None else Path(config.compile_report)
        return Accelerator(find_chip(config.hardware), report)
    if config.compile_report is not None:
        raise ConfigError("--compile-report", "names no chip; add --hardware, such as v6e")
    if config.calibration is None:
        raise ConfigError(
            "--hardware",
            "required with --backend simulated: name an accelerator, such as h100, or with --calibration the file of "
            "step times that `pagoda calibrate MODEL` writes",
        )
    return read_calibration(Path(config.calibration))


def calibrate(
    target: CalibrationTarget, repeats: int, max_seconds: float, report_progress: Callable[[int, int], None]
) -> Calibration:
    """Measure the steps of a backend; see `SimulatorModule.calibrate`."""
    return calibrated(target, repeats, max_seconds, report_progress)


def create(options: BackendOptions, clock: Clock | None = None) -> SimulatedBackend:
    """Return a backend. `clock`: of its steps; None: the machine's. Raises ConfigError for options it lacks."""
    for flag, given in (
        ("--enable-lora", options.lora is not None),
        ("--logits-processors", options.sampling.has_processors),
        ("--profiler-config", options.profiler is not None),
        ("--enable-prompt-embeds", options.limits.media_rows > 0),
        ("--data-parallel-size", options.parallel.data > 1),
    ):
        if given:
            raise ConfigError(flag, "is not simulated; drop it")
    return SimulatedBackend(options, open_device(options.simulation), clock)


def check(options: BackendOptions) -> tuple[int, ...] | None:
    """Return the number of KV blocks of each pool. Raises ConfigError where `create` would."""
    return create(options).plan_memory().num_blocks


class SimulatedBackend:
    """Implements common.backend.Backend."""

    def __init__(self, options: BackendOptions, device: SimulatedDevice, clock: Clock | None = None) -> None:
        self._options = options
        self._device = device
        self._host = device.host
        self._step_time = device.step_time(options)
        self._clock = clock or RealClock()
        self._takes_time = clock is not None or options.simulation.simulated_time == "real"
        self._free_at = 0.0  # Time at which the device has computed all steps so far.
        self._rows = RowStates(options.limits, options.spec.vocab, options.simulation.acceptance_rate)
        self.busy_seconds = 0.0
        """Time that the device has computed."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            "simulated", self._device.name, self._options.limits.block_size, self._device.prefers_extents
        )

    def load(self, weights: Iterable[Weight]) -> None:
        """Do nothing: there are no weights."""

    def update_weights(self, weights: Iterable[Weight]) -> None:
        """Do nothing."""

    def plan_memory(self) -> MemoryPlan:
        """Return the KV blocks that fit. Raises ConfigError if a request has no room."""
        options = self._options
        layout = options.layout
        limits = options.limits
        cache = options.cache
        memory = self._device.cache_bytes(options)
        if cache.num_gpu_blocks_override is not None:
            num_blocks = stated_blocks(layout, limits, cache.num_gpu_blocks_override)
        elif cache.kv_cache_memory_bytes is not None:
            num_blocks = split_bytes(layout, limits, memory.per_block, cache.kv_cache_memory_bytes)
        else:
            num_blocks = split_bytes(layout, limits, memory.per_block, memory.total)
            if not memory.spare:
                num_blocks = tuple(map(min, max_blocks(layout, limits), num_blocks))
        least = min_blocks(layout)
        if any(number < needed for number, needed in zip(num_blocks, least)):
            raise ConfigError(
                "--kv-cache-memory-bytes",
                f"{per_pool(num_blocks)} KV blocks leave no room for a request; allow at least "
                f"{sum(number * size for number, size in zip(least, memory.per_block))} bytes",
            )
        return MemoryPlan(memory.weights, 0, num_blocks, memory.per_block)

    def init_cache(self, num_blocks: tuple[int, ...]) -> None:
        """Do nothing: the cache has no content."""

    def warmup(self) -> None:
        """Do nothing: nothing is compiled."""

    def close(self) -> None:
        """Do nothing."""

    def execute(self, plan: StepPlan) -> SimulatedStep:
        """Start a step: it begins when it is planned and the device is free."""
        clock = self._clock
        host = self._host
        for start in plan.starts:
            self._rows.start(start)
        load = StepLoad.of(plan, self._rows.rejected(plan))
        planning = host.plan_step + host.plan_sequence * plan.num_seqs + host.start_request * len(plan.starts)
        if self._takes_time:
            clock.wait_until(clock.now + planning)
        seconds = self._step_time.seconds(load)
        now = clock.now
        if now - self._free_at > PAUSE:
            seconds += host.after_pause
        self._free_at = max(self._free_at, now) + seconds
        self.busy_seconds += seconds
        result = None if plan.masked is not None else self._rows.sample(plan, None)
        return SimulatedStep(self, plan, self._free_at, result)

    def sample(self, plan: StepPlan, masks: TokenMasks) -> StepResult:
        """Return the result of a plan with `masked`."""
        return self._rows.sample(plan, masks)

    def wait(self, plan: StepPlan, end: float) -> None:
        """Return when a step has ended and its result is applied."""
        if self._takes_time:
            self._clock.wait_until(end)
            report = self._host.report_step + self._host.report_sequence * plan.num_seqs
            self._clock.wait_until(self._clock.now + report)


class SimulatedStep:
    """A step that ends at a known time. Implements common.backend.PendingResult."""

    def __init__(self, backend: SimulatedBackend, plan: StepPlan, end: float, result: StepResult | None) -> None:
        """`result`: None until masks are bound."""
        self._backend = backend
        self._plan = plan
        self._end = end
        self._result = result

    def bind_masks(self, masks: TokenMasks) -> None:
        """Sample under the masks."""
        self._result = self._backend.sample(self._plan, masks)

    def result(self) -> StepResult:
        """Wait for the step. Raises RuntimeError without masks for a plan with `masked`."""
        if self._result is None:
            raise unbound_masks(self._plan)
        self._backend.wait(self._plan, self._end)
        return self._result


# What a row's next tokens are.

_ACCEPTED: Final = 0x5BD1E995
"""Distinguishes the draws of acceptance from those of tokens."""


class RowStates:
    """The sequences of all rows: lengths, and the tokens that they will sample."""

    def __init__(self, limits: Limits, vocab: int, acceptance_rate: float | None) -> None:
        """`acceptance_rate`: probability that a draft is right; None: it is if it equals the sampled token."""
        self._first = vocab // 4
        self._count = max(1, vocab // 2)
        self._acceptance = acceptance_rate
        self._digest: UInt32 = np.zeros(limits.max_num_seqs, np.uint32)  # Digest of each row's prompt and seed.
        self._known = np.zeros(limits.max_num_seqs, np.int64)  # Tokens of the sequence, prompt included.
        self._prompt = np.zeros(limits.max_num_seqs, np.int64)  # Prompt tokens of the sequence.
        self._prescribed: dict[int, Int32] = {}  # Row -> the output tokens that its request prescribes.
        self._logprobs: dict[int, int] = {}  # Row -> number of best tokens to report.
        # Row -> number of best prompt tokens to report, and the prompt.
        self._prompt_logprobs: dict[int, tuple[int, Int32]] = {}

    def start(self, start: RowStart) -> None:
        """Replace the state of a row that a request takes."""
        row = start.row
        prompt = start.token_ids[: start.num_prompt].astype(np.uint32)
        rules = start.rules
        places = np.arange(len(prompt), dtype=np.uint32)
        seed = 0 if rules.is_greedy else rules.seed & 0xFFFFFFFF
        self._digest[row] = np.bitwise_xor.reduce(mix(prompt * np.uint32(TOKEN_STRIDE) + places)) ^ np.uint32(seed)
        self._known[row] = len(start.token_ids)
        self._prompt[row] = start.num_prompt
        for facts in (self._prescribed, self._logprobs, self._prompt_logprobs):
            facts.pop(row, None)
        if rules.logprobs is not None:
            self._logprobs[row] = rules.logprobs
        if rules.prompt_logprobs is not None:
            self._prompt_logprobs[row] = rules.prompt_logprobs, start.token_ids[: start.num_prompt]
        if rules.extra_args is not None and (tokens := rules.extra_args.get(OUTPUT_TOKENS)):
            self._prescribed[row] = np.array(tokens, np.int32)

    def rejected(self, plan: StepPlan) -> Int32:
        """Return how many rejected drafts `plan.context` counts for each sequence [S]."""
        drafts = 0 if plan.num_drafts is None else plan.num_drafts
        true = self._known[plan.rows] - (np.diff(plan.query_start) - drafts)
        return cast(Int32, np.where(plan.samples, plan.context - true, 0).astype(np.int32))

    def sample(self, plan: StepPlan, masks: TokenMasks | None) -> StepResult:
        """Return the result of a step."""
        width = 1 if plan.num_drafts is None else 1 + int(plan.num_drafts.max(initial=0))
        tokens = self._tokens(plan.rows, width)
        if plan.num_drafts is not None:
            tokens = self._accepted(plan, plan.num_drafts, tokens)
        tokens[~plan.samples] = -1
        if masks is not None:
            _apply_masks(tokens, masks)
        self._known[plan.rows] += np.count_nonzero(tokens >= 0, axis=1)
        ids = tokens[:, 0] if plan.num_drafts is None else tokens
        return StepResult(plan.step, ids, self._report(plan, tokens), self._report_prompts(plan))

    def _tokens(self, rows: Int32, width: int) -> Int32:
        """Return the next tokens [S, width] of each sequence."""
        positions = self._known[rows, None] + np.arange(width)
        drawn = mix(self._digest[rows, None] + mix(positions.astype(np.uint32)))
        tokens = (self._first + drawn % np.uint32(self._count)).astype(np.int32)
        for index, row in enumerate(rows.tolist()) if self._prescribed else ():
            if (prescribed := self._prescribed.get(row)) is not None:
                start = self._known[row] - self._prompt[row]
                chosen = prescribed[start : start + width]
                tokens[index, : len(chosen)] = chosen
        return tokens

    def _accepted(self, plan: StepPlan, num_drafts: Int32, tokens: Int32) -> Int32:
        """Return the accepted drafts of each sequence and the token after them, then -1."""
        width = tokens.shape[1]
        drafts = np.full((plan.num_seqs, width), -1, np.int32)
        for index in np.flatnonzero(num_drafts).tolist():
            end = int(plan.query_start[index + 1])
            count = int(num_drafts[index])
            drafts[index, :count] = plan.token_ids[end - count : end]
        if self._acceptance is None:
            right = drafts == tokens
        else:
            positions = (self._known[plan.rows, None] + np.arange(width)).astype(np.uint32)
            drawn = mix(self._digest[plan.rows, None] ^ np.uint32(_ACCEPTED)) + positions
            right = (mix(drawn) < self._acceptance * 2**32) & (drafts >= 0)
            tokens = np.where(right, drafts, tokens)
        accepted = np.logical_and.accumulate(right, axis=1).sum(axis=1)
        return np.where(np.arange(width) <= accepted[:, None], tokens, -1).astype(np.int32)

    def _report(self, plan: StepPlan, tokens: Int32) -> dict[int, TokenLogprobs]:
        """Return made-up logprobs of the sampled tokens, for rows that report them."""
        if not self._logprobs:
            return {}
        rows = {index: self._logprobs.get(row) for index, row in enumerate(plan.rows.tolist())}
        return {
            index: self._made_up(tokens[index][tokens[index] >= 0], best)
            for index, best in rows.items()
            if best is not None and tokens[index, 0] >= 0
        }

    def _report_prompts(self, plan: StepPlan) -> dict[int, TokenLogprobs]:
        """Return made-up logprobs of the prompt tokens that follow those of the step, for rows that report them."""
        reported = {}
        for index, row in enumerate(plan.rows.tolist()) if self._prompt_logprobs else ():
            if row in self._prompt_logprobs:
                best, prompt = self._prompt_logprobs[row]
                first = int(plan.context[index])
                length = int(plan.query_start[index + 1] - plan.query_start[index])
                targets = prompt[first + 1 : first + 1 + length]
                if len(targets):
                    reported[index] = self._made_up(targets, best)
        return reported

    def _made_up(self, tokens: Int32, best: int) -> TokenLogprobs:
        """Return logprobs as if the chosen token were the best, each other one half as likely as the one before."""
        columns = np.arange(1 + (best if best >= 0 else 2 * self._count))
        ids = np.where(
            columns == 0, tokens[:, None], (tokens[:, None] + np.maximum(columns - 1, 0)) % (2 * self._count)
        )
        values = np.broadcast_to(-np.log(2.0) * np.maximum(columns, 1), ids.shape)
        return TokenLogprobs(ids.astype(np.int32), values.astype(np.float32), np.ones(len(tokens), np.int32))


def _apply_masks(tokens: Int32, masks: TokenMasks) -> None:
    """Replace tokens that their mask excludes by the next allowed one; what follows a replaced one is dropped."""
    for sequence, after, bits in zip(masks.sequences.tolist(), masks.after.tolist(), masks.bits):
        token = int(tokens[sequence, after])
        if token < 0:
            continue
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        chosen = int(allowed[np.searchsorted(allowed, token) % len(allowed)])
        if chosen != token:
            tokens[sequence, after] = chosen
            tokens[sequence, after + 1 :] = -1
