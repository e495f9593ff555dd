"""The definition of sampling written out plainly in numpy, and random requests to hold samplers against it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import strategies as st

from pagoda.common.engine.sampling.rules import SamplingRules, gumbel, noise_keys
from pagoda.common.engine.steps.contract import StepPlan

VOCAB = 600


def define(logits: np.ndarray, rules: SamplingRules, history: list[int], num_prompt: int) -> int | None:
    """The definition of common.engine.sampling.rules, one row, no shortcuts."""
    x = logits.astype(np.float64)
    generated = history[num_prompt:]
    for token, bias in rules.logit_bias:
        x[token] += bias
    if rules.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in rules.allowed_token_ids]] = -np.inf
    for word in rules.bad_words:
        head = len(word) - 1
        if head <= len(generated) and tuple(generated[len(generated) - head :]) == word[:-1]:
            x[word[-1]] = -np.inf
    if len(generated) < rules.min_tokens:
        x[list(rules.stop_ids)] = -np.inf
    for token in set(history):
        x[token] = x[token] / rules.repetition_penalty if x[token] > 0 else x[token] * rules.repetition_penalty
    for token, count in Counter(generated).items():
        x[token] -= rules.frequency_penalty * count + rules.presence_penalty
    if not np.isfinite(x).any():
        return None  # the rules exclude every token: anything goes
    if rules.is_greedy:
        return int(x.argmax())
    x = x / rules.temperature
    order = np.argsort(-x, kind="stable")
    keep = np.zeros(len(x), bool)
    keep[order[: rules.top_k or len(x)]] = True
    keep &= x >= x.max() + np.log(max(rules.min_p, 1e-300))
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    inside = before < rules.top_p if rules.top_p < 1 else np.ones(len(x), bool)
    inside[0] = True
    keep[order[~inside]] = False
    key = noise_keys(np.array([rules.seed]), np.array([len(history)]))
    return int(np.where(keep, x + gumbel(key, np.arange(len(x), dtype=np.uint32))[0], -np.inf).argmax())


TOKEN = st.integers(0, VOCAB - 1)
RULES = st.builds(
    SamplingRules,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 5, 300, 599]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.lists(st.tuples(TOKEN, st.floats(-5, 5, width=16)), max_size=3, unique_by=lambda t: t[0]).map(tuple),
    allowed_token_ids=st.none() | st.lists(TOKEN, min_size=1, max_size=400, unique=True).map(tuple),
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    min_tokens=st.sampled_from([0, 3]),
    stop_ids=st.just((1, 2)),
    seed=st.integers(-(2**63), 2**63 - 1),
)
ROWS = st.lists(
    st.tuples(RULES, st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 12)), min_size=1, max_size=5
)


def draw_logits(rows: int, seed: int, spread: float) -> np.ndarray:
    """Random logits [rows, VOCAB]. In every second row the tokens of the histories decide, which edits change."""
    logits = np.random.default_rng(seed).standard_normal((rows, VOCAB)) * spread
    logits[::2, :31] += 4 * spread
    return logits.astype(np.float32)


def decode_step(ends, rows=None, samples=None) -> StepPlan:
    """One token of each of some rows (default 0, 1, ...); `ends`: tokens known of each."""
    count = len(ends)
    return StepPlan(
        step=0,
        starts=(),
        rows=np.arange(count, dtype=np.int32) if rows is None else np.array(rows, np.int32),
        query_start=np.arange(count + 1, dtype=np.int32),
        context=np.array(ends, np.int32) - 1,
        token_ids=np.zeros(count, np.int32),
        block_tables=(),
        samples=np.ones(count, np.bool_) if samples is None else np.array(samples),
    )
