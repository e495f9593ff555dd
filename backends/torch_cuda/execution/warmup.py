"""Warm-up steps that cover every program serving can need, and a counter of kernel compilations."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.sampling.rules import EVERY_KIND, MOST_MEMORY, SamplingRules
from pagoda.common.engine.steps.contract import RowStart, StepPlan
from pagoda.common.models.mixers.caches import LatentCache

logger = logging.getLogger(__name__)

_BATCHES: Final = (1, 2, 16)
"""Row counts that compilers may specialize for."""

_ALIGNMENT: Final = 16
"""Triton specializes kernels for multiples of this."""


class WarmupPlans:
    """Makes plans that write to the null block. All tokens are 0; a step ends at its sequences' last known tokens."""

    def __init__(self, limits: Limits, layout: KvLayout, *, adapters: bool = False) -> None:
        """`adapters`: sequences may have LoRA adapters."""
        self._limits = limits
        self._layout = layout
        self._adapters = adapters

    def plan(
        self, lengths: Sequence[int], context: int = 0, rules: SamplingRules = EVERY_KIND[0], *, drafts: bool = False
    ) -> StepPlan:
        """Return a step of sequences with `lengths` new tokens after `context` computed ones, shortest first.

        `drafts`: all but the first of each are drafts.
        """
        size = np.sort(np.asarray(lengths, np.int32))
        known = size + context
        guesses = self._limits.max_drafts if self._limits.device_drafts else 0
        pages = -(-(int(known.max()) + guesses) // self._layout.block_size)
        starts = tuple(RowStart(row, np.zeros(n, np.int32), max(1, n - context), rules) for row, n in enumerate(known))
        return StepPlan(
            step=-1,
            starts=starts,
            rows=np.arange(len(size), dtype=np.int32),
            query_start=np.concatenate([[0], np.cumsum(size)]).astype(np.int32),
            context=np.full(len(size), context, np.int32),
            token_ids=np.zeros(int(size.sum()), np.int32),
            block_tables=tuple(np.zeros((len(size), pages), np.int32) for _ in self._layout.groups),
            samples=np.ones(len(size), np.bool_),
            num_drafts=size - 1 if drafts else None,
            num_guesses=np.full(len(size), guesses, np.int32) if guesses else None,
        )

    def decode(self, seqs: int, rules: SamplingRules = EVERY_KIND[0]) -> StepPlan:
        """Return a step with one token for each of `seqs` sequences."""
        return self.plan([1] * seqs, min(3, self._limits.max_model_len - 1), rules)

    def drafts(self, seqs: int, rules: SamplingRules = EVERY_KIND[0]) -> Iterator[StepPlan]:
        """Yield a step of `seqs` sequences with as many drafts as fit, or nothing if none do."""
        of_each = min(self._limits.max_drafts, self._limits.max_model_len - 1)
        most = min(seqs * of_each, self._max_step_tokens - seqs)
        if most > 0:
            lengths = [1 + min(of_each, max(most - row * of_each, 0)) for row in range(seqs)]
            yield self.plan(lengths, min(3, self._limits.max_model_len - max(lengths)), rules, drafts=True)

    def prefill(self, tokens: int, seqs: int = 1, decodes: int = 0, rules: SamplingRules = EVERY_KIND[0]) -> StepPlan:
        """Return a step of `seqs` prompts with `tokens` in all, and `decodes` decode tokens."""
        each = np.full(seqs, tokens // seqs)
        each[: tokens % seqs] += 1
        return self.plan([1] * decodes + each.tolist(), 0, rules)

    def _largest(self) -> Iterator[StepPlan]:
        seqs = self._limits.max_num_seqs
        tokens = self._max_step_tokens
        min_seqs = -(-tokens // self._limits.max_model_len)
        yield self.prefill(tokens, min_seqs, rules=MOST_MEMORY)
        yield self.prefill(tokens, seqs, rules=MOST_MEMORY)
        latents = any(isinstance(group.spec, LatentCache) for group in self._layout.groups)
        if latents and (context := self._limits.max_model_len - tokens) > 0:  # its expansion takes several rounds
            yield self.plan([tokens], context, MOST_MEMORY)
        yield self.decode(seqs, MOST_MEMORY)
        yield from self.drafts(seqs, MOST_MEMORY)

    def largest(self) -> Iterator[StepPlan]:
        """Yield the steps that need the most memory: with the most tokens, with the most rows."""
        return self._adapted(self._largest())

    def minimal(self) -> Iterator[StepPlan]:
        """Yield a short prefill and a decode: enough where nothing is compiled."""
        return self._adapted(self._minimal())

    def all(self, sizes: Sequence[int]) -> Iterator[StepPlan]:
        """Yield decode steps of every size, prefills of every relevant size, and every kind of sampling parameters."""
        return self._adapted(self._all(sizes))

    def _adapted(self, plans: Iterator[StepPlan]) -> Iterator[StepPlan]:
        """Yield each plan, and if sequences may have adapters the same with the one in the first slot for all."""
        for plan in plans:
            yield plan
            if self._adapters:
                yield replace(plan, adapter_slots=np.zeros(plan.num_seqs, np.int32))

    def _minimal(self) -> Iterator[StepPlan]:
        yield self.prefill(min(8, self._max_step_tokens))
        yield self.decode(1)
        yield from self.drafts(1)

    def _all(self, sizes: Sequence[int]) -> Iterator[StepPlan]:
        limits = self._limits
        max_tokens = self._max_step_tokens
        for size in sizes:
            yield self.decode(size)
            yield from self.drafts(size)
            if size < limits.max_num_seqs and size + 2 <= max_tokens and limits.max_model_len > 1:
                yield self.prefill(2, decodes=size)
        for tokens in _prefill_sizes(max_tokens):
            yield self.prefill(tokens, -(-tokens // limits.max_model_len))
        yield from self._largest()
        for rules in EVERY_KIND:
            for seqs in (seqs for seqs in _BATCHES if seqs <= limits.max_num_seqs):
                yield self.decode(seqs, rules)
                yield from self.drafts(seqs, rules)
            yield self.prefill(min(5, max_tokens, limits.max_model_len), rules=rules)

    @property
    def _max_step_tokens(self) -> int:
        return min(self._limits.max_num_batched_tokens, self._limits.max_num_seqs * self._limits.max_model_len)


def _prefill_sizes(largest: int) -> Iterator[int]:
    """Yield 2, 4, 8, 16, 17, 33, 65, 129, ... up to `largest`.

    Kernels for packed weights and for experts have tiles of several sizes, each for at least twice as many rows as the
    previous one. Padded to a multiple of 16 these sizes grow by at most a factor of 2, so every tile is used. From 17
    on they are odd: Triton specializes for multiples of 16.
    """
    for power in (1 << exponent for exponent in range(1, largest.bit_length())):
        if power <= _ALIGNMENT:
            yield power
        if _ALIGNMENT <= power < largest:
            yield power + 1


class CompileCounter:
    """Counts the kernels that Triton compiles in this process."""

    def __init__(self) -> None:
        self.count = 0
        self.log_each = False  # log each compilation as an error: the engine is serving
        self._previous_hook: Any = None
        self._watching = False

    def watch(self) -> None:
        """Start counting; a hook installed before is still called."""
        if self._watching or importlib.util.find_spec("triton") is None:
            return
        import triton

        self._watching = True
        self._previous_hook = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._compiled

    def unwatch(self) -> None:
        """Stop counting, unless another hook was installed since."""
        if not self._watching:
            return
        import triton

        if triton.knobs.runtime.jit_post_compile_hook == self._compiled:
            triton.knobs.runtime.jit_post_compile_hook = self._previous_hook
            self._watching = False

    def _compiled(self, *, repr: str, **about: Any) -> Any:
        self.count += 1
        if self.log_each:
            logger.error("compiled while serving, which takes seconds; please report it: %s", repr)
        return None if self._previous_hook is None else self._previous_hook(repr=repr, **about)
