"""Steps through the null block that between them need every program serving can need, and the largest of them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.step import RowStart, StepPlan

FILTERED: Final = SamplingRules(temperature=1.0, top_k=5, top_p=0.9, min_p=0.05)
"""All that choosing a token can take."""

EVERYTHING: Final = SamplingRules(
    temperature=1.0, top_k=5, top_p=0.9, repetition_penalty=1.1, allowed_token_ids=(0, 1), logprobs=5, prompt_logprobs=5
)
"""What takes the most memory besides."""

PENALISED: Final = SamplingRules(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1)

RULES: Final = (
    SamplingRules(),
    SamplingRules(temperature=1.0),
    FILTERED,
    PENALISED,
    SamplingRules(logit_bias=((0, 1.0),), bad_words=((1,), (0, 1)), min_tokens=99, stop_ids=(1,)),
    SamplingRules(allowed_token_ids=(0, 1)),
    *(SamplingRules(logprobs=best, prompt_logprobs=best) for best in (0, 1, 5, -1)),
)
"""Everything that rows can ask for."""

_BATCHES: Final = (1, 2, 16)
"""Numbers of rows that compilers may tell apart."""

_ALIGNED: Final = 16
"""Numbers that Triton compiles apart for are multiples of it."""


class Plans:
    """Makes plans whose K and V nobody reads. Tokens are zeros, of which a step's own are the last known."""

    def __init__(self, limits: Limits, layout: KvLayout) -> None:
        self._limits, self._layout = limits, layout

    def plan(self, lengths: Sequence[int], context: int = 0, rules: SamplingRules = RULES[0]) -> StepPlan:
        """A step of sequences with so many new tokens each, all after `context` others; shortest first."""
        size = np.sort(np.asarray(lengths, np.int32))
        known = size + context
        pages = -(-int(known.max()) // self._layout.block_size)
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
        )

    def decode(self, seqs: int, rules: SamplingRules = RULES[0]) -> StepPlan:
        """A token for each of so many sequences."""
        return self.plan([1] * seqs, min(3, self._limits.max_model_len - 1), rules)

    def prefill(self, tokens: int, seqs: int = 1, decodes: int = 0, rules: SamplingRules = RULES[0]) -> StepPlan:
        """So many tokens in `seqs` prompts, and `decodes` tokens more."""
        each = np.full(seqs, tokens // seqs)
        each[: tokens % seqs] += 1
        return self.plan([1] * decodes + each.tolist(), 0, rules)

    def largest(self) -> Iterator[StepPlan]:
        """The steps that need the most memory: as many tokens as allowed, as many rows as allowed."""
        seqs, tokens = self._limits.max_num_seqs, self._most_tokens
        fewest = -(-tokens // self._limits.max_model_len)
        yield self.prefill(tokens, fewest, rules=EVERYTHING)
        yield self.prefill(tokens, seqs, rules=EVERYTHING)
        yield self.decode(seqs, EVERYTHING)

    def few(self) -> Iterator[StepPlan]:
        """A short prompt and a token: what there is to do where nothing is compiled."""
        yield self.prefill(min(8, self._most_tokens))
        yield self.decode(1)

    def every(self, sizes: Sequence[int]) -> Iterator[StepPlan]:
        """Decode steps of every size, prefill of every number of tokens that matters, and every kind of rules."""
        limits, most = self._limits, self._most_tokens
        for size in sizes:
            yield self.decode(size)
            if size < limits.max_num_seqs and size + 2 <= self._most_tokens and limits.max_model_len > 1:
                yield self.prefill(2, decodes=size)
        for tokens in _prefill_sizes(most):
            yield self.prefill(tokens, -(-tokens // limits.max_model_len))
        yield from self.largest()
        for rules in RULES:
            for seqs in (seqs for seqs in _BATCHES if seqs <= limits.max_num_seqs):
                yield self.decode(seqs, rules)
            yield self.prefill(min(5, most, limits.max_model_len), rules=rules)

    @property
    def _most_tokens(self) -> int:
        """Tokens of the largest step."""
        return min(self._limits.max_num_batched_tokens, self._limits.max_num_seqs * self._limits.max_model_len)


def _prefill_sizes(most: int) -> Iterator[int]:
    """2, 4, 8, 16, 17, 33, 65, 129 and so on up to `most`.

    Kernels for packed weights and for experts have tiles of several sizes, each for at least twice as many rows as the
    one before. Padded to a multiple of 16 these sizes grow by at most the factor 2, so every tile is used. From 17 on
    they are odd: Triton compiles apart for numbers that 16 divides.
    """
    for power in (1 << exponent for exponent in range(1, most.bit_length())):
        if power <= _ALIGNED:
            yield power
        if _ALIGNED <= power < most:
            yield power + 1


# Counts what Triton compiles, so that a compilation while serving does not go unnoticed.

logger = logging.getLogger(__name__)


class CompileCount:
    """`count`: kernels that Triton compiled in this process while watched. `loud`: each one is logged."""

    def __init__(self) -> None:
        self.count, self.loud = 0, False
        self._before: Any = None
        self._watching = False

    def watch(self) -> None:
        """Begin to count. Whoever listened before still does."""
        if self._watching or importlib.util.find_spec("triton") is None:
            return
        import triton

        self._watching, self._before = True, triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._compiled

    def unwatch(self) -> None:
        """Stop, unless somebody else has begun to listen since."""
        if not self._watching:
            return
        import triton

        if triton.knobs.runtime.jit_post_compile_hook == self._compiled:
            triton.knobs.runtime.jit_post_compile_hook, self._watching = self._before, False

    def _compiled(self, *, repr: str, **about: Any) -> Any:
        self.count += 1
        if self.loud:
            logger.error("compiled while serving, which takes seconds; please report it: %s", repr)
        return None if self._before is None else self._before(repr=repr, **about)
