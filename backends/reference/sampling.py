"""Logits -> tokens and logprobs in the order that common.engine.sampling.rules defines: the readable definition.

State and packing are those of every backend (common.engine.sampling.state). Greedy rows without edits cost one argmax.
Random rows with filters sort their best candidates first, and the whole vocabulary only when those do not decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.programs.operators import FoundTokens, row_search
from pagoda.common.engine.sampling.processors import USUAL, SamplerOptions, edit_rows
from pagoda.common.engine.sampling.rules import LARGEST_UNIFORM, MIX_1, MIX_2, TOKEN_STRIDE, LogprobsMode
from pagoda.common.engine.sampling.state import (
    RowTable,
    SampledRows,
    additions,
    banned_words,
    dense_additions,
    penalties,
    sampled_positions,
)
from pagoda.common.engine.steps.contract import (
    EMBEDDED,
    PREVIOUS,
    Int32,
    RowStart,
    StepPlan,
    TokenLogprobs,
    TokenMasks,
    UInt32,
)
from pagoda.common.engine.steps.pending import join_logprobs

CANDIDATES: Final = 256
"""How many of the best tokens decide top-k, top-p and min-p before the whole vocabulary is sorted."""

LEAST_BEST: Final = 64
"""Tokens that a compiled search finds at least for filters, before it is left to sorting."""

RANDOM_ROWS: Final = 16
"""Rows that are sampled at once: several arrays [R, V] then fit a cache, instead of hundreds of megabytes."""


class Sampler:
    """Samples one token per sampling row, and one after each of its drafts.

    `last` int32 [rows]: the newest token of each row. `accepted` and `rejected` int32 [rows]: how many drafts of its
    newest step were right and wrong. `history` int32 [rows, max_len + 1]: the tokens of each row, then anything.
    """

    def __init__(self, vocab: int, max_rows: int, max_len: int, options: SamplerOptions = USUAL) -> None:
        self.vocab = vocab
        self.options = options
        self._has_processors = options.has_processors
        self._batch = options.batch_processor()
        self._search = row_search(vocab)
        self.failed: dict[int, str] = {}
        """Row of logits of the newest step -> why its logits processor failed."""
        self.rows = RowTable(max_rows)
        self.last = np.zeros(max_rows, np.int32)
        self.rejected = np.zeros(max_rows, np.int32)
        self.accepted = np.zeros(max_rows, np.int32)
        # The system maps numpy's zeros on the first write; torch would write all of them here.
        self.history = torch.from_numpy(np.zeros((max_rows, max_len + 1), np.int32))

    def start(self, start: RowStart) -> None:
        """Replace the state of a row that a request takes."""
        self.rows.start(start, self.vocab)
        self.accepted[start.row] = 0
        self.history[start.row, : len(start.token_ids)] = torch.tensor(start.token_ids)

    def resolve(self, plan: StepPlan) -> StepPlan:
        """Return the plan without PREVIOUS and rejected drafts: true tokens, at true positions."""
        pending = np.flatnonzero(plan.token_ids == PREVIOUS)
        if not len(pending):
            return plan
        owners = np.searchsorted(plan.query_start, pending, side="right") - 1
        token_ids = plan.token_ids.copy()
        context = plan.context.copy()
        token_ids[pending] = self.last[plan.rows[owners]]
        context[owners] -= self.rejected[plan.rows[owners]]
        return replace(plan, token_ids=token_ids, context=context)

    def sample(
        self, logits: Tensor, plan: StepPlan, masks: TokenMasks | None = None
    ) -> tuple[Tensor, dict[int, TokenLogprobs]]:
        """Return tokens int64 [R] and logprobs by row of logits, for the R sequences and drafts that are sampled from.

        logits float32 [R, V], of each sequence in order; edited in place. masks: of sequences in `plan.masked`.
        """
        sampled = SampledRows.compact(plan, self.rows)
        if plan.num_drafts is not None:
            drafts = drafts_of(plan)
            sequences, columns = np.nonzero(drafts >= 0)
            self.history.numpy()[plan.rows[sequences], plan.context[sequences] + 1 + columns] = drafts[drafts >= 0]
        needs_edit = masks is not None or self._has_processors or sampled.columns["needs_edit"].any()
        shown = self._edit(logits, sampled, masks and _by_row_of_logits(masks, plan)) if needs_edit else {}
        # numpy's argmax and indexing of a few rows are several times faster than torch's.
        tokens = torch.from_numpy(logits.numpy().argmax(-1))
        if sampled.kind != "greedy":
            self._draw(logits, RowRules.unpack(torch.from_numpy(sampled.pack(len(logits), 0))), tokens)
        self.history.numpy()[sampled.rows, sampled.ends] = tokens.numpy()
        mode = self.options.logprobs_mode
        return tokens, {
            index: token_logprobs(row[None], tokens[index : index + 1], best, mode)
            for index, (best, row) in shown.items()
        }

    def _draw(self, logits: Tensor, rules: RowRules, tokens: Tensor) -> None:
        """Write the tokens of random rows."""
        filtered = (rules.top_k > 0) | (rules.top_p < 1.0) | (rules.min_p > 0.0)
        random = rules.temperature > 0
        whole, filtered = (each.nonzero()[:, 0] for each in (random & ~filtered, random & filtered))
        if len(whole) and self._search is not None:
            own = rules.take(whole)
            found = self._search.candidates(logits, whole, own.temperature, own.keys)
            tokens[whole], decided = draw_among(logits, whole, own, found)
            whole = whole[~decided]
        if len(filtered) and self._search is not None:
            own = rules.take(filtered)
            least = torch.where(own.top_k < logits.shape[1] // 8, own.top_k + 1, 0).clamp(min=LEAST_BEST).long()
            found = self._search.best(logits, filtered, own.temperature, least)
            tokens[filtered], decided = draw_filtered_among(logits, filtered, own, found)
            filtered = filtered[~decided]
        for rows in whole.split(RANDOM_ROWS):
            tokens[rows] = draw(logits[rows], rules.take(rows))
        for rows in filtered.split(RANDOM_ROWS):
            tokens[rows] = draw_filtered(logits[rows], rules.take(rows))

    def accept(
        self, plan: StepPlan, tokens: Tensor, logprobs: Mapping[int, TokenLogprobs]
    ) -> tuple[Int32, dict[int, TokenLogprobs]]:
        """Return the fields of StepResult from what `sample` returned."""
        sequences, after = sampled_positions(plan)
        width = 1 if plan.num_drafts is None else 1 + int(plan.num_drafts.max())
        token_ids = np.full((plan.num_seqs, width), -1, np.int32)
        token_ids[sequences, after] = tokens.numpy()
        rejected = np.zeros(plan.num_seqs, np.int32)
        accepted = np.zeros(plan.num_seqs, np.int32)
        if plan.num_drafts is not None:
            right = token_ids[:, :-1] == drafts_of(plan)
            accepted = np.logical_and.accumulate(right, axis=1).sum(1)
            token_ids[np.arange(width) > accepted[:, None]] = -1
            rejected = plan.num_drafts - accepted
        sampling = np.flatnonzero(plan.samples)
        self.last[plan.rows[sampling]] = token_ids[sampling, accepted[sampling]]
        self.rejected[plan.rows[sampling]] = rejected[sampling]
        self.accepted[plan.rows[sampling]] = accepted[sampling]
        blocks: dict[int, list[TokenLogprobs]] = {}
        for index, block in logprobs.items():
            if after[index] <= accepted[sequences[index]]:
                blocks.setdefault(int(sequences[index]), []).append(block)
        joined = {sequence: join_logprobs(own) for sequence, own in blocks.items()}
        return token_ids[:, 0] if plan.num_drafts is None else token_ids, joined

    def _edit(self, logits: Tensor, sampled: SampledRows, masks: TokenMasks | None) -> dict[int, tuple[int, Tensor]]:
        """Edit the logits in place. `masks`: by row of logits.

        Returns, by row of logits, how many logprobs a sequence reports and the logits [V] that they are taken of.
        """
        best = {row.index: row.state.rules.logprobs or 0 for row in sampled.where("logprobs")}
        if self.options.logprobs_mode.startswith("processed"):
            self._apply_rules(logits, sampled, masks)
            rules = RowRules.unpack(torch.from_numpy(sampled.pack(len(logits), 0)))
            return {index: (count, drawn_from(logits[index], rules.take([index]))) for index, count in best.items()}
        raw = {index: (count, logits[index].clone()) for index, count in best.items()}
        self._apply_rules(logits, sampled, masks)
        return raw

    def _apply_rules(self, logits: Tensor, sampled: SampledRows, masks: TokenMasks | None) -> None:
        """Apply the rows' rules, the masks and the logits processors, in place."""
        seqs = len(logits)
        if edited := sampled.where("edited"):
            for entries in additions(edited, seqs):
                add(logits, torch.from_numpy(entries))
            for edits, indices in dense_additions(edited):
                assert edits.dense is not None, "that is what they are selected by"
                add_dense(logits, indices, torch.from_numpy(edits.dense))
            for words, heads in banned_words(edited, seqs):
                ban_words(logits, self.history, torch.from_numpy(words), torch.from_numpy(heads))
        if masked := sampled.where("masked"):
            for row in masked:
                bits = row.state.edits.allowed
                assert bits is not None, "its column says so"
                mask_row(logits[row.index], bits)
        if masks is not None and len(masks.sequences):
            mask(logits, torch.from_numpy(masks.sequences), torch.from_numpy(masks.bits.view(np.int32)))
        if self._has_processors:
            self._process(logits, sampled)
        if penalised := sampled.where("penalised"):
            penalise(logits, self.history, torch.from_numpy(penalties(penalised, len(penalised))))
        if self._batch is not None and self._batch.edits_scaled:
            temperatures = torch.from_numpy(np.ascontiguousarray(sampled.columns["temperature"]))[:, None]
            scaled, failed = self._batch.apply_scaled(logits, torch.where(temperatures > 0, temperatures, 1.0))
            self._take_edited(logits, scaled, failed)

    def _process(self, logits: Tensor, sampled: SampledRows) -> None:
        """Run the logits processors: those of single rows, which numpy sees without a copy, then those of the batch."""
        sequences = [
            (self.rows[row], self.history[row, :known].tolist())
            for row, known in zip(sampled.rows.tolist(), sampled.ends.tolist())
        ]
        self.failed = edit_rows(self.options.processors, logits.numpy(), sequences)
        if self._batch is not None:
            edited, failed = self._batch.apply(logits, sequences)
            self._take_edited(logits, edited, failed)

    def _take_edited(self, logits: Tensor, edited: Tensor, failed: Mapping[int, str]) -> None:
        """Write what processors of the batch made of the logits; `failed`: see `BatchProcessor.apply`."""
        self.failed |= failed
        if edited is not logits:
            logits.copy_(edited)


def _by_row_of_logits(masks: TokenMasks, plan: StepPlan) -> TokenMasks:
    """Return the masks by row of logits, of which sequences that sample have one, and one more for each draft."""
    first = np.searchsorted(sampled_positions(plan)[0], masks.sequences)
    return TokenMasks((first + masks.after).astype(np.int32), masks.after, masks.bits)


def drafts_of(plan: StepPlan) -> Int32:
    """Return the drafts of each sequence int32 [S, most drafts], then -1."""
    assert plan.num_drafts is not None
    columns = np.arange(plan.num_drafts.max())
    counts = plan.num_drafts[:, None]
    drafts = np.full((plan.num_seqs, len(columns)), -1, np.int32)
    used = columns < counts
    drafts[used] = plan.token_ids[(plan.query_start[1:, None] - counts + columns)[used]]
    return drafts


# Edits of logits [R, V], in place. The packed arguments are those of common.engine.sampling.state.


def penalise(logits: Tensor, history: Tensor, packed: Tensor) -> None:
    """Repetition penalty over prompt and answer, frequency and presence penalty over the answer.

    history int32 [rows, length]; packed int32 [8, n] of `penalties`, every column in use.
    """
    columns = packed[:4].T.tolist()
    factors = packed[4:7].view(torch.float32).T.tolist()
    for (index, row, prompt, known), (repetition, frequency, presence) in zip(columns, factors):
        if repetition != 1.0:
            seen = history[row, :known].unique().long()
            seen = seen[seen != EMBEDDED]
            values = logits[index, seen]
            logits[index, seen] = torch.where(values > 0, values / repetition, values * repetition)
        if known > prompt and (frequency or presence):
            seen, counts = history[row, prompt:known].unique(return_counts=True)
            logits[index, seen.long()] -= frequency * counts + presence


def add(logits: Tensor, packed: Tensor) -> None:
    """Add values to some logits. packed int32 [3, n] of `additions`."""
    index, token = packed[:2].long().unbind()
    used = index < len(logits)
    values = packed[2].view(torch.float32)[used]
    logits.index_put_((index[used], token[used]), values, accumulate=True)


def ban_words(logits: Tensor, history: Tensor, words: Tensor, heads: Tensor) -> None:
    """Minus infinity for the last token of every word whose earlier tokens are the newest of its sequence.

    history int32 [rows, length]; words int32 [2, w] and heads int32 [4, h] of `banned_words`.
    """
    word, row, position, token = heads.long().unbind()
    wrong = history[row, position] != token
    missed = torch.zeros(words.shape[1] + 1, dtype=torch.int32, device=logits.device)
    missed.index_add_(0, word.clamp(max=words.shape[1]), wrong.int())
    index, last = words.long().unbind()
    complete = (missed[:-1] == 0) & (index < len(logits))
    logits[index[complete], last[complete]] = -torch.inf


def add_dense(logits: Tensor, indices: Sequence[int], values: Tensor) -> None:
    """Add values [V] to some rows of the logits."""
    for index in indices:
        logits[index, : len(values)] += values


def mask_row(logits: Tensor, bits: UInt32) -> None:
    """Set logits [V] to minus infinity where a bit is 0. bits uint32 [ceil(V/32)] of `allowed_bits`."""
    forbidden = np.unpackbits((~bits).view(np.uint8), count=len(logits), bitorder="little").view(np.bool_)
    logits.masked_fill_(torch.from_numpy(forbidden), -torch.inf)


def mask(logits: Tensor, sequences: Tensor, bits: Tensor) -> None:
    """Minus infinity where a bit is 0. sequences [n]: rows of logits; bits int32 [n, ceil(V/32)] of `allowed_bits`."""
    for index, row in zip(sequences.tolist(), ~bits.cpu().numpy()):
        forbidden = np.unpackbits(row.view(np.uint8), count=logits.shape[1], bitorder="little").view(np.bool_)
        logits[index].masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)


# Edited logits -> tokens.


@dataclass(frozen=True, slots=True)
class RowRules:
    """Sampling parameters per row of logits, each [R], as `SampledRows.pack` makes them."""

    rows: Tensor
    positions: Tensor  # of the token to be sampled
    keys: Tensor  # int32, bits of uint32
    temperature: Tensor  # 0: greedy
    top_k: Tensor  # 0: unlimited
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def unpack(cls, packed: Tensor) -> Self:
        """Return views of int32 [7, R]."""
        real = packed.view(torch.float32)
        return cls(
            rows=packed[0],
            positions=packed[1],
            keys=packed[2],
            temperature=real[3],
            top_k=packed[4],
            top_p=real[5],
            min_p=real[6],
        )

    def take(self, rows: Tensor | Sequence[int]) -> RowRules:
        """Return the parameters of some rows of logits."""
        return RowRules(
            rows=self.rows[rows],
            positions=self.positions[rows],
            keys=self.keys[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
        )


def drawn_from(logits: Tensor, rules: RowRules) -> Tensor:
    """Edited logits [V] of one row -> those its token is drawn from: over temperature, filtered ones minus infinity."""
    temperature = rules.temperature.item()
    if not temperature:
        return logits.clone()
    scaled = logits / temperature
    values, ids = scaled.sort(descending=True, stable=True)
    keep, _ = _keep(values[None], scaled.logsumexp(-1, keepdim=True)[None], rules)
    return torch.full_like(scaled, -torch.inf).scatter(0, ids[keep[0]], values[keep[0]])


def draw(logits: Tensor, rules: RowRules) -> Tensor:
    """Gumbel-max over the whole vocabulary. logits [R, V] -> int64 [R]."""
    ids = torch.arange(logits.shape[1], dtype=torch.int32)
    return (logits / rules.temperature[:, None] + gumbel(rules.keys, ids)).argmax(-1)


def draw_among(logits: Tensor, rows: Tensor, rules: RowRules, found: FoundTokens) -> tuple[Tensor, Tensor]:
    """Return `draw` of some rows of logits [R, V] among the tokens found, int64 [n], and which rows they decide."""
    ids, scaled = _scaled_of(logits, rows, rules, found, max(1, int(found.counts.max())))
    noisy = scaled + gumbel(rules.keys, ids)
    best = noisy.argmax(-1, keepdim=True)
    decided = (noisy.gather(1, best)[:, 0] >= found.floors) & (found.counts <= found.tokens.shape[1])
    return ids.gather(1, best)[:, 0].long(), decided


def draw_filtered_among(logits: Tensor, rows: Tensor, rules: RowRules, found: FoundTokens) -> tuple[Tensor, Tensor]:
    """The same of `draw_filtered`, among the best tokens. Sums are of one length, whatever rows are beside."""
    ids, scaled = _scaled_of(logits, rows, rules, found, found.tokens.shape[1])
    values, order = torch.where(scaled >= found.floors[:, None], scaled, -torch.inf).sort(
        stable=True, dim=-1, descending=True
    )
    total = found.totals[:, None]
    others = logits[rows, found.searched :] / rules.temperature[:, None]
    if others.shape[1]:
        total = torch.logaddexp(total, others.logsumexp(-1, keepdim=True))
    ids = ids.gather(1, order)
    keep, decided = _keep(values, total, rules, known=(values > -torch.inf).sum(-1))
    decided &= (found.counts <= found.tokens.shape[1]) & total[:, 0].isfinite()
    return _pick(values, ids.long(), keep, rules.keys), decided


def _scaled_of(logits: Tensor, rows: Tensor, rules: RowRules, found: FoundTokens, most: int) -> tuple[Tensor, Tensor]:
    """Return up to `most` tokens found in rows of logits and those that were not searched, int32 [n, m], and their
    logits over temperature; minus infinity where there is no token.
    """
    count = len(found.tokens)
    most = min(most, found.tokens.shape[1])
    others = torch.arange(found.searched, logits.shape[1], dtype=torch.int32).expand(count, -1)
    real = torch.cat((torch.arange(most) < found.counts[:, None], torch.ones_like(others, dtype=torch.bool)), 1)
    ids = torch.where(real, torch.cat((found.tokens[:, :most], others), 1), 0)
    scaled = logits[rows[:, None], ids.long()] / rules.temperature[:, None]
    return ids, torch.where(real, scaled, -torch.inf)


def draw_filtered(logits: Tensor, rules: RowRules) -> Tensor:
    """Gumbel-max over the tokens that top-k, top-p and min-p leave. logits [R, V] -> int64 [R].

    The best candidates are sorted; rows they do not decide sort everything.
    """
    scaled = logits / rules.temperature[:, None]
    vocab = logits.shape[1]
    total = scaled.logsumexp(-1, keepdim=True)
    wanted = min(vocab, max(CANDIDATES, 1 + max((k for k in rules.top_k.tolist() if k < vocab // 8), default=0)))
    values, ids = scaled.topk(wanted, dim=-1)
    known = None if wanted == vocab else torch.full((len(logits),), wanted)
    keep, decided = _keep(values, total, rules, known)
    tokens = _pick(values, ids, keep, rules.keys)
    undecided = (~decided).nonzero()[:, 0]
    if len(undecided):
        values, ids = scaled[undecided].sort(dim=-1, descending=True, stable=True)
        keep, _ = _keep(values, total[undecided], rules.take(undecided))
        tokens[undecided] = _pick(values, ids, keep, rules.keys[undecided])
    return tokens


def _keep(values: Tensor, total: Tensor, rules: RowRules, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Which of the descending values [R, n] stay, bool [R, n], and which rows that decides for good, bool [R].

    known int64 [R]: how many of them are the vocabulary's best, minus infinity follows; None: they are all of it.

    min-p compares with the best token; top-k keeps ties of the k-th value; top-p keeps the fewest tokens whose mass
    within both reaches p, and ties of the last. `total`: logsumexp over the vocabulary [R, 1].
    """
    n = values.shape[1]
    top_k = torch.where(rules.top_k > 0, rules.top_k.clamp(max=n), n).long()
    kth = values.gather(1, top_k[:, None] - 1)
    keep = ((values >= kth) | (rules.top_k <= 0)[:, None]) & (values >= values[:, :1] + rules.min_p[:, None].log())
    inside = torch.where(keep, values, -torch.inf)
    all_inside = (rules.top_k <= 0) & (rules.min_p <= 0)
    mass = torch.where(all_inside[:, None], total, inside.logsumexp(-1, keepdim=True))
    probability = (inside - mass).exp()
    before = probability.cumsum(-1) - probability
    top_p = rules.top_p[:, None]
    reaches = (before < top_p) | (top_p >= 1.0)
    reaches[:, 0] = True
    last = torch.where(keep & reaches, values, torch.inf).amin(-1, keepdim=True)
    keep &= values >= last
    if known is None:
        return keep, torch.ones(len(values), dtype=torch.bool)
    # Tokens that were not searched may stay, too, or belong to the mass that top-p is a part of.
    newest = (known - 1).clamp(min=0)[:, None]
    goes_on = torch.where(all_inside[:, None], keep, inside > -torch.inf).gather(1, newest)[:, 0]
    return keep, ~goes_on & (rules.top_k <= known)


def _pick(values: Tensor, ids: Tensor, keep: Tensor, keys: Tensor) -> Tensor:
    """Gumbel-max among the kept candidates: int64 [R]."""
    noisy = torch.where(keep, values + gumbel(keys, ids.to(torch.int32)), -torch.inf)
    return ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]


# Sampling noise: the same integers as common.engine.sampling.rules, tested for equality.
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
    v = ((bits.long() & 0xFFFFFFFF).to(torch.float32) + 0.5) * 2.0**-32
    u = 1.0 - v.clamp(max=LARGEST_UNIFORM)
    exponential = torch.where(u == 1.0, v, -torch.log(u) * v / torch.where(u == 1.0, 1.0, 1.0 - u))
    return -torch.log(exponential)


def token_logprobs(logits: Tensor, chosen: Tensor, best: int, mode: LogprobsMode = "raw_logprobs") -> TokenLogprobs:
    """Logits [n, V], chosen tokens int64 [n] -> their logprobs and the best `best` (-1: all), most likely first.

    `mode`: one that ends in "logits" reports logits instead of logprobs.
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
