"""Logits -> tokens and logprobs, by the order that common.engine.sampling defines.

Keeps per row what the order needs: the rules, the tokens so far, the last sampled token. Greedy rows without rules
cost one argmax. Random rows look at the best candidates only, and at the whole vocabulary when those do not decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pagoda.common.engine.sampling import (
    MIX_1,
    MIX_2,
    TOKEN_STRIDE,
    USUAL,
    LogitsProcessor,
    LogprobsMode,
    SamplerOptions,
    SamplingRules,
    noise_keys,
)
from pagoda.common.engine.step import EMBEDDED, RowStart, TokenLogprobs, UInt32

# The design's sampling noise in torch: the same integers as `common.engine.sampling`, tested for equality.
#
# torch has no uint32 arithmetic on CPU; int32 wraps the same way, and a logical shift is an arithmetic one plus a mask.


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """lowbias32 of int32 values (as bits of uint32)."""
    x = (x ^ _shift(x, 16)) * _signed(MIX_1)
    x = (x ^ _shift(x, 15)) * _signed(MIX_2)
    return x ^ _shift(x, 16)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [R, n]: noise of tokens int32 [R, n] or [n] under row keys int32 [R] (bits of uint32)."""
    bits = mix(keys[:, None] ^ (token_ids * _signed(TOKEN_STRIDE)))
    uniform = (_shift(bits, 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


CANDIDATES: Final = 256
"""How many of the best tokens decide top-k, top-p and min-p before the whole vocabulary is sorted."""


@dataclass(slots=True)
class ReferenceRowState:
    """What sampling remembers of one row. `history`: every token, prompt first."""

    rules: SamplingRules
    history: list[int]
    num_prompt: int

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.history) - self.num_prompt

    @property
    def edits_logits(self) -> bool:
        """True when something changes this row's logits before temperature."""
        rules = self.rules
        return bool(
            rules.has_penalties
            or rules.logit_bias
            or rules.allowed_token_ids is not None
            or rules.bad_words
            or self.num_generated < rules.min_tokens
        )


class Sampler:
    """Chooses one token per sampling row. `options`: what holds for all of them."""

    def __init__(self, max_rows: int, options: SamplerOptions = USUAL) -> None:
        self.options = options
        self._rows: dict[int, ReferenceRowState] = {}
        self.last = torch.zeros(max_rows, dtype=torch.int64)  # [rows] the token each row sampled last

    def start(self, start: RowStart) -> None:
        """A row begins anew."""
        self._rows[start.row] = ReferenceRowState(start.rules, start.token_ids.tolist(), start.num_prompt)

    def rules(self, row: int) -> SamplingRules:
        """The rules of a row."""
        return self._rows[row].rules

    def prompt_after(self, row: int, position: int, count: int) -> Tensor:
        """int64: the prompt tokens at position+1 .. position+count, as far as the prompt goes."""
        state = self._rows[row]
        return torch.tensor(
            state.history[position + 1 : min(position + 1 + count, state.num_prompt)], dtype=torch.int64
        )

    def sample(
        self, logits: Tensor, rows: Sequence[int], masks: Sequence[UInt32 | None] = ()
    ) -> tuple[Tensor, dict[int, TokenLogprobs]]:
        """logits float32 [R, V], one row number each -> tokens int64 [R], logprobs by position in `rows`.

        `masks`: of each row the tokens it may sample, None: any. Overwrites `logits` where a row's rules edit them.
        """
        states = [self._rows[row] for row in rows]
        asked = [i for i, state in enumerate(states) if state.rules.logprobs is not None]
        processed = self.options.logprobs_mode.startswith("processed")
        shown = {} if processed else {i: logits[i].clone() for i in asked}
        for i, state in enumerate(states):
            if state.edits_logits:
                edit_logits(logits[i], state)
            if masks and (bits := masks[i]) is not None:
                _mask(logits[i], bits)
            if self.options.processors:
                _run_processors(self.options.processors, logits[i], state)
        if processed:
            shown = {i: drawn_from(logits[i], states[i].rules) for i in asked}
        tokens = logits.argmax(-1)
        random = [i for i, state in enumerate(states) if not state.rules.is_greedy]
        if random:
            tokens[random] = sample_random(logits[random], [states[i] for i in random])
        self.last[torch.tensor(rows)] = tokens
        chosen = tokens.tolist()
        for state, token in zip(states, chosen):
            state.history.append(token)
        mode = self.options.logprobs_mode
        logprobs = {
            i: token_logprobs(row[None], tokens[i : i + 1], states[i].rules.logprobs or 0, mode)
            for i, row in shown.items()
        }
        return tokens, logprobs


def _mask(logits: Tensor, bits: UInt32) -> None:
    """Minus infinity where a bit is 0, in place, on one row [V]."""
    allowed = np.unpackbits(bits.view(np.uint8), count=len(logits), bitorder="little")
    logits.masked_fill_(torch.from_numpy(allowed) == 0, -torch.inf)


def _run_processors(processors: Sequence[LogitsProcessor], logits: Tensor, state: ReferenceRowState) -> None:
    """The operator's edits, in place, on one row [V], which numpy sees without a copy."""
    row = logits.numpy()
    for processor in processors:
        processor.apply(row, state.history, state.num_prompt, state.rules.extra_args or {})


def drawn_from(logits: Tensor, rules: SamplingRules) -> Tensor:
    """Edited logits [V] -> those that the token is drawn from: over temperature, filtered ones minus infinity."""
    if rules.is_greedy:
        return logits.clone()
    scaled = logits / rules.temperature
    values, ids = scaled.sort(descending=True, stable=True)
    keep, _ = _keep(values[None], scaled.logsumexp(-1, keepdim=True)[None], [rules], whole=True)
    return torch.full_like(scaled, -torch.inf).scatter(0, ids[keep[0]], values[keep[0]])


def edit_logits(logits: Tensor, state: ReferenceRowState) -> None:
    """Penalties, bias and masks, in place, on one row [V]."""
    rules = state.rules
    if rules.has_penalties:
        _penalise(logits, state)
    if rules.logit_bias:
        ids, values = zip(*rules.logit_bias)
        logits.index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=logits.dtype))
    if rules.allowed_token_ids is not None:
        allowed = torch.tensor(rules.allowed_token_ids)
        kept = logits[allowed]
        logits.fill_(-torch.inf)[allowed] = kept
    for word in rules.bad_words:
        head = len(word) - 1
        if head <= state.num_generated and (head == 0 or tuple(state.history[-head:]) == word[:-1]):
            logits[word[-1]] = -torch.inf
    if state.num_generated < rules.min_tokens and rules.stop_ids:
        logits[list(rules.stop_ids)] = -torch.inf


def _penalise(logits: Tensor, state: ReferenceRowState) -> None:
    """Repetition over prompt and answer; frequency and presence over the answer alone."""
    rules = state.rules
    if rules.repetition_penalty != 1.0:
        seen = torch.tensor(state.history).unique()
        seen = seen[seen != EMBEDDED]
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / rules.repetition_penalty, values * rules.repetition_penalty)
    generated = state.history[state.num_prompt :]
    if generated and (rules.frequency_penalty or rules.presence_penalty):
        seen, counts = torch.tensor(generated).unique(return_counts=True)
        logits[seen] -= rules.frequency_penalty * counts + rules.presence_penalty


def sample_random(logits: Tensor, states: Sequence[ReferenceRowState]) -> Tensor:
    """Gumbel-max over the tokens that top-k, top-p and min-p leave. logits [R, V] -> int64 [R]."""
    rules = [state.rules for state in states]
    seeds = np.array([r.seed for r in rules], dtype=np.int64)
    positions = np.array([len(state.history) for state in states], dtype=np.int64)
    keys = torch.from_numpy(noise_keys(seeds, positions).view(np.int32))
    temperature = torch.tensor([r.temperature for r in rules], dtype=torch.float32)
    scaled = logits / temperature[:, None]
    filtered = [r.top_k > 0 or r.top_p < 1.0 or r.min_p > 0.0 for r in rules]
    tokens = torch.empty(len(rules), dtype=torch.int64)
    rest = [i for i, some in enumerate(filtered) if not some]
    some = [i for i, some in enumerate(filtered) if some]
    if rest:
        ids = torch.arange(logits.shape[1], dtype=torch.int32)
        tokens[rest] = (scaled[rest] + gumbel(keys[rest], ids)).argmax(-1)
    if some:
        tokens[some] = _sample_filtered(scaled[some], keys[some], [rules[i] for i in some])
    return tokens


def _sample_filtered(scaled: Tensor, keys: Tensor, rules: Sequence[SamplingRules]) -> Tensor:
    """Rows with a filter: sort the best candidates; rows they do not decide sort everything."""
    vocab = scaled.shape[1]
    total = scaled.logsumexp(-1, keepdim=True)
    wanted = min(vocab, max(CANDIDATES, 1 + max((r.top_k for r in rules if r.top_k < vocab // 8), default=0)))
    values, ids = scaled.topk(wanted, dim=-1)
    keep, decided = _keep(values, total, rules, whole=wanted == vocab)
    tokens = _pick(values, ids, keep, keys)
    undecided = (~decided).nonzero()[:, 0]
    if len(undecided):
        values, ids = scaled[undecided].sort(dim=-1, descending=True, stable=True)
        keep, _ = _keep(values, total[undecided], [rules[i] for i in undecided.tolist()], whole=True)
        tokens[undecided] = _pick(values, ids, keep, keys[undecided])
    return tokens


def _keep(values: Tensor, total: Tensor, rules: Sequence[SamplingRules], whole: bool) -> tuple[Tensor, Tensor]:
    """Which of the descending values [R, n] stay, bool [R, n], and which rows that decides for good, bool [R].

    top-k keeps ties of the k-th value; top-p keeps the fewest tokens whose mass within top-k reaches p, and ties of
    the last; min-p compares with the best token. `total`: logsumexp over the vocabulary [R, 1].
    """
    n = values.shape[1]
    top_k = torch.tensor([min(r.top_k, n) if r.top_k > 0 else n for r in rules])
    unlimited = torch.tensor([r.top_k <= 0 for r in rules])
    floor = values.gather(1, top_k[:, None] - 1)
    keep = (values >= floor) | unlimited[:, None]
    inside = torch.where(keep, values, -torch.inf)
    mass = torch.where(unlimited[:, None], total, inside.logsumexp(-1, keepdim=True))
    probability = (inside - mass).exp()
    before = probability.cumsum(-1) - probability
    top_p = torch.tensor([r.top_p for r in rules])[:, None]
    reaches = (before < top_p) | (top_p >= 1.0)
    reaches[:, 0] = True
    last = torch.where(keep & reaches, values, torch.inf).amin(-1, keepdim=True)
    keep &= values >= last
    min_p = torch.tensor([r.min_p for r in rules])[:, None]
    keep &= values >= values[:, :1] + min_p.log()
    complete = torch.tensor([r.top_k <= n for r in rules])  # a larger k needs candidates that are not here
    decided = (~keep[:, -1] & complete) | whole
    return keep, decided


def _pick(values: Tensor, ids: Tensor, keep: Tensor, keys: Tensor) -> Tensor:
    """Gumbel-max among the kept candidates: int64 [R]."""
    noisy = torch.where(keep, values + gumbel(keys, ids.to(torch.int32)), -torch.inf)
    return ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]


def token_logprobs(logits: Tensor, chosen: Tensor, best: int, mode: LogprobsMode = "raw_logprobs") -> TokenLogprobs:
    """Logits [n, V], chosen tokens int64 [n] -> their logprobs and the best `best` (-1: all), most likely first.

    `mode`: the logits themselves in place of logprobs where it says logits.
    """
    logprobs = logits if mode.endswith("logits") else logits.log_softmax(-1)
    own = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    values, ids = logprobs.topk(logits.shape[1] if best < 0 else best, dim=-1)
    return TokenLogprobs(
        torch.cat([chosen[:, None], ids], 1).to(torch.int32).numpy(),
        torch.cat([own, values], 1).numpy(),
        ranks.to(torch.int32).numpy(),
    )
