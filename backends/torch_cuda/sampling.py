"""Sampling: logits -> tokens and logprobs, in the order defined by common.engine.sampling.rules.

Sampling is one program for all rows; edits and logprobs run beside it for the rows that need them. Nothing synchronizes
with the device except logits processors, which run Python on the host: the next step waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.sampling import RowRules, mix
from pagoda.backends.torch_cuda.device import Device, on_wsl
from pagoda.backends.torch_cuda.execution.step_input import RowTokens
from pagoda.backends.torch_cuda.execution.stream import DeviceStream
from pagoda.backends.torch_cuda.kernels.sampling import edit_logits
from pagoda.backends.torch_cuda.kernels.sampling.gumbel_max import gumbel_max, store_history, store_last
from pagoda.backends.torch_cuda.kernels.sampling.logprobs import logprobs
from pagoda.backends.torch_cuda.kernels.sampling.top_k_top_p import top_k_top_p
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, Comm
from pagoda.common.config.memory import available_bytes
from pagoda.common.engine.sampling.logit_edits import LogitEdits
from pagoda.common.engine.sampling.processors import USUAL, BatchProcessor, SamplerOptions, edit_rows
from pagoda.common.engine.sampling.rules import NO_HISTORY
from pagoda.common.engine.sampling.state import (
    RowTable,
    SampledRows,
    additions,
    allowed,
    banned_words,
    by_sequence,
    dense_additions,
    grammar_masks,
    penalties,
)
from pagoda.common.engine.steps.contract import Int32, RowStart, StepPlan, TokenLogprobs, TokenMasks
from pagoda.common.engine.steps.pending import FetchLogprobs

logger = logging.getLogger(__name__)


class TokenHistory:
    """Device memory for the tokens of all rows, allocated when a row reads them. Outside the plan of the memory."""

    def __init__(self, max_rows: int, max_len: int, device: Device, comm: Comm, *, always: bool) -> None:
        """`always`: allocate it now. `comm`: ranks that allocate it together or not at all."""
        self.always = always
        self.none = torch.zeros((1, max_len + 1), dtype=torch.int32, device=device.torch)  # as wide, for kernels' sake
        self.tokens: Tensor | None = None  # int32 [rows + 1, max_len + 1]
        self._shape = (max_rows + 1, max_len + 1)
        self._device = device
        self._comm = comm
        if always:
            self.tokens = self.none.new_zeros(self._shape)

    @property
    def num_bytes(self) -> int:
        rows, length = self._shape
        return rows * length * self.none.itemsize

    def allocate(self) -> str | None:
        """Allocate the memory, unless it is. Return why there is none.

        It must be free beside what torch has reserved, which the largest steps need.
        """
        if self.tokens is not None:
            return None
        free = self._free_bytes()
        fits = free >= self.num_bytes
        if self._comm.size > 1:
            without = torch.tensor([not fits], dtype=torch.int32, device=self.none.device)
            fits = not self._comm.all_reduce(without).item()
        if not fits:
            rows, length = self._shape
            reason = (
                f"the earlier tokens of {rows - 1} requests of {length - 1} tokens take {self.num_bytes >> 20} MiB, "
                f"{free >> 20} MiB are free on {self._device.name}; start with a lower --gpu-memory-utilization, "
                "--max-num-seqs or --max-model-len"
            )
            logger.warning("No memory for requests that read earlier tokens: %s", reason)
            return reason
        self.tokens = self.none.new_zeros(self._shape)
        return None

    def release(self) -> None:
        """Give the memory back, unless it is needed always."""
        if self.always or self.tokens is None:
            return
        self.tokens = None
        if self._device.is_gpu:
            torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        """Return the bytes of the device that no process has."""
        if not self._device.is_gpu:
            return available_bytes()
        free, _ = torch.cuda.mem_get_info(self._device.torch)
        return int(free)


class CudaSampler:
    """Samples a token per row of logits. Each sequence has `width` rows of a step's logits."""

    def __init__(
        self,
        vocab: int,
        max_rows: int,
        max_len: int,
        device: Device,
        options: SamplerOptions = USUAL,
        max_drafts: int = 0,
        comm: Comm = SINGLE_RANK,
        *,
        guesses: bool = False,
        replays: bool = False,
    ) -> None:
        """`guesses`: a drafter on the device guesses the drafts. `comm`: of the ranks that sample the same tokens.

        `replays`: recurrent mixers run accepted drafts again.
        """
        self.vocab = vocab
        self.device = device
        self.options = options
        self.max_drafts = max_drafts
        self.rows = RowTable(max_rows)
        self._dense: WeakKeyDictionary[LogitEdits, Tensor] = WeakKeyDictionary()
        self._batch = options.batch_processor()
        self.failed: dict[int, str] = {}  # sequence of the newest step -> why its logits processor failed
        self._refused: dict[int, str] = {}  # row -> why its tokens cannot be kept
        last, rejected = torch.zeros((2, max_rows + 1), dtype=torch.int32, device=device.torch)
        accepted = torch.zeros_like(last) if replays else None
        kept = torch.zeros((max_rows + 1, max_drafts), dtype=torch.int32, device=device.torch) if guesses else None
        self.newest = RowTokens(last, rejected, kept, accepted)
        self.kept = TokenHistory(max_rows, max_len, device, comm, always=options.has_processors or guesses)
        self._reads_history = np.full(max_rows, self.kept.always)

    def width(self, plan: StepPlan) -> int:
        """Return the rows of logits per sequence."""
        return 1 if plan.num_drafts is None else 1 + self.max_drafts

    @property
    def history(self) -> Tensor:
        """Return int32 [rows + 1, max_len + 1]: the tokens of rows that read them; the last row is padding's.

        One row of zeros if no row reads them.
        """
        return self.kept.none if self.kept.tokens is None else self.kept.tokens

    def start(self, start: RowStart) -> None:
        """Start a row. Its tokens are copied to the device only if an edit or a drafter reads them there.

        Without memory for them the row samples without edits, and `refused` has its sequence in every step.
        """
        self._refused.pop(start.row, None)
        reads = self.kept.always or start.rules.reads_history
        if reads and (reason := self.kept.allocate()) is not None:
            self._refused[start.row] = reason
            start = replace(start, rules=replace(start.rules, **NO_HISTORY))
            reads = False
        self.rows.start(start, self.vocab)
        self._reads_history[start.row] = reads
        if reads:
            self.history[start.row, : len(start.token_ids)] = self._send(start.token_ids)

    def refused(self, plan: StepPlan) -> dict[int, str]:
        """Return StepResult.refused."""
        if not self._refused:
            return {}
        refused = ((index, self._refused.get(row)) for index, row in enumerate(plan.rows.tolist()))
        return {index: reason for index, reason in refused if reason is not None}

    def recorder(self, plan: StepPlan, packed: Tensor) -> Callable[[Tensor], None]:
        """Return a function that writes the tokens [R] of a step to the history, before `sample` changes `newest`.

        Not part of `sample`, which is captured: the history may be allocated later. It does nothing if no row of the
        step reads the history. packed: the input of `sample`.
        """
        if not self._reads_history[plan.rows].any():
            return lambda tokens: None
        rules = shifted_rules(packed, self.newest.rejected) if self.max_drafts else CudaSamplingRules.unpack(packed)

        def record(tokens: Tensor) -> None:
            if self.max_drafts:
                tokens = tokens.clamp(min=0)  # a drafter reads those after a rejected draft, too
            store_history(tokens, rules.rows, rules.positions, self.history, use_kernel=self.device.use_kernels)

        return record

    def pack(self, plan: StepPlan, seqs: int) -> Int32:
        """Return int32 [7, R] or, with drafts, [9, R], the input of `sample`. `seqs`: R, the rows of logits."""
        sampled = self._sampled_rows(plan)
        if self.max_drafts:
            return sampled.pack_with_drafts({0: plan}, seqs, len(self.rows))
        return sampled.pack(seqs, len(self.rows))

    def sample(self, logits: Tensor, packed: Tensor, width: int = 1) -> Tensor:
        """Return tokens int32 [R] from logits float32 [R, V] and packed parameters; records them. May be captured.

        Tokens after the first rejected draft of a sequence are -1.
        """
        use_kernel = self.device.use_kernels
        if not self.max_drafts:
            return sample_tokens(logits, packed, self.newest.last, use_kernel=use_kernel)
        rules = shifted_rules(packed, self.newest.rejected)
        tokens = sample_by_rules(logits, rules, self.newest.last, use_kernel=use_kernel)
        return accept_drafts(tokens, packed, self._drafts(packed), self.newest, width)

    def _drafts(self, packed: Tensor) -> Tensor:
        """Return the draft of each row of logits [R], -1 where there is none."""
        return self.newest.resolved(packed[8], packed[0])

    def edit(
        self, logits: Tensor, plan: StepPlan, masks: TokenMasks | None = None, packed: Tensor | None = None
    ) -> Tensor | None:
        """Apply the rows' logit edits to logits float32 [R, V], before temperature, in place.

        masks: of sequences in `plan.masked`. packed: the input of `sample`, for an engine with drafts. Return the
        logits [n, V] that logprobs are taken of, a row per token with logprobs; None if there are none.
        """
        needs_edit = self.rows.columns["needs_edit"][plan.rows].any() or masks is not None
        if not (self.options.has_processors or needs_edit):
            return None
        sampled = self._sampled_rows(plan)
        indices = [row.index for row in sampled.where("logprobs")]
        processed = self.options.logprobs_mode.startswith("processed")
        selected = logits[self._send(indices)] if indices and not processed else None
        self._edit(logits, sampled, {} if masks is None else {0: masks}, self.width(plan), packed)
        if indices and processed:
            rules = CudaSamplingRules.unpack(self._send(sampled.pack(len(logits), len(self.rows))[:, indices]))
            selected = rules.drawn_from(logits[self._send(indices)], use_kernel=self.device.use_kernels)
        return selected

    def logprobs(
        self, selected: Tensor | None, tokens: Tensor, plan: StepPlan, stream: DeviceStream
    ) -> Callable[[], dict[int, TokenLogprobs]]:
        """Return a function that waits for the logprobs of each sequence with logprobs: its tokens and the best few.

        selected: from `edit`; tokens int32 [R]: from `sample`. Logprobs of tokens -1 have no meaning.
        """
        if selected is None:
            return dict
        rows = self._sampled_rows(plan).where("logprobs")
        sampled_tokens = tokens[self._send([row.index for row in rows])]
        if self.max_drafts:
            sampled_tokens = sampled_tokens.clamp(min=0)
        counts = [
            (sequence, len(own), self._best(own[0].state.rules.logprobs))
            for sequence, own in by_sequence(rows, self.width(plan))
        ]
        fetch = self._fetch(selected, sampled_tokens, max(best for _, _, best in counts), stream)

        def wait() -> dict[int, TokenLogprobs]:
            every = fetch()
            at = 0
            blocks = {}
            for sequence, count, best in counts:
                own = slice(at, at + count)
                columns = slice(1 + best)
                blocks[sequence] = TokenLogprobs(
                    every.token_ids[own, columns], every.logprobs[own, columns], every.ranks[own]
                )
                at += count
            return blocks

        return wait

    def score(self, logits: Tensor, targets: Int32, best: int, stream: DeviceStream) -> FetchLogprobs:
        """Return a function that waits for the logprobs of prompt tokens int32 [n] in logits [n, V]; `best` -1: all."""
        return self._fetch(logits, self._send(targets), self._best(best), stream)

    def _fetch(self, logits: Tensor, tokens: Tensor, best: int, stream: DeviceStream) -> FetchLogprobs:
        normalise = not self.options.logprobs_mode.endswith("logits")
        on_device = logprobs(logits, tokens, best, normalise=normalise, use_kernel=self.device.use_kernels)
        ids, values, ranks = map(stream.fetch, on_device)
        return lambda: TokenLogprobs(ids.array(), values.array(), ranks.array())

    def _best(self, requested: int | None) -> int:
        """Return the number of best tokens; -1 asks for the whole vocabulary."""
        return self.vocab if requested is not None and requested < 0 else requested or 0

    def _sampled_rows(self, plan: StepPlan) -> SampledRows:
        return SampledRows.of({0: plan}, plan.num_seqs, self.rows, self.width(plan))

    def _edit(
        self,
        logits: Tensor,
        sampled: SampledRows,
        grammar: Mapping[int, TokenMasks],
        width: int,
        packed: Tensor | None,
    ) -> None:
        seqs = len(logits)
        use_kernel = self.device.use_kernels
        penalised = sampled.where("penalised")
        edited = sampled.where("edited")
        shift: Tensor | None = None
        if self.max_drafts and (penalised or edited):
            assert packed is not None, "for an engine with drafts"
            shift = self.newest.rejected[packed[7].long()]
            if width > 1 and self._reads_history[sampled.rows].any():
                record_drafts(shifted_rules(packed, self.newest.rejected), self._drafts(packed), self.history)
        if edited:
            for entries in additions(edited, seqs):
                edit_logits.add(logits, self._send(entries), use_kernel=use_kernel)
            for edits, indices in dense_additions(edited):
                logits[self._send(indices)] += self._dense_values(edits, logits.shape[1])
            for words, heads in banned_words(edited, seqs):
                packed_words = self._send(words)
                packed_heads = self._send(heads)
                if shift is not None:
                    packed_heads[2] -= _shift_of_heads(shift, packed_words, packed_heads)
                edit_logits.ban_words(logits, self.history, packed_words, packed_heads, use_kernel=use_kernel)
        if masks := allowed(sampled.where("masked"), grammar_masks(grammar, seqs, width)):
            sequences = self._send(np.array(list(masks), np.int32))
            bits = self._send(np.stack(list(masks.values())).view(np.int32))
            edit_logits.mask(logits, sequences, bits, use_kernel=use_kernel)
        if self.options.has_processors:
            self._process(logits, sampled)
        if penalised:
            columns = self._send(penalties(penalised, len(penalised)))
            if shift is not None:
                columns[3] -= shift[columns[0].long()]
            edit_logits.penalise(logits, self.history, columns, use_kernel=use_kernel)
        if self._batch is not None and self._batch.edits_scaled:
            self._process_scaled(self._batch, logits, sampled)

    def _dense_values(self, edits: LogitEdits, vocab: int) -> Tensor:
        """Return the dense additions [V] on the device, where they are kept while a sequence has them."""
        values = self._dense.get(edits)
        if values is None:
            assert edits.dense is not None, "of dense_additions"
            padded = np.zeros(vocab, np.float32)
            padded[: len(edits.dense)] = edits.dense
            values = self._dense[edits] = self._send(padded)
        return values

    def _process(self, logits: Tensor, sampled: SampledRows) -> None:
        """Run logits processors: those of single rows on a copy in host memory, those of the batch on the device."""
        indices = self._send(sampled.indices)
        tokens = self.history[self._send(sampled.rows), : int(sampled.ends.max())].cpu()
        sequences = [
            (self.rows[row], row_tokens[:known].tolist())
            for row, row_tokens, known in zip(sampled.rows.tolist(), tokens, sampled.ends.tolist())
        ]
        edited = logits[indices]
        failed = dict[int, str]()
        if self.options.processors:
            on_host = edited.cpu()
            failed = edit_rows(self.options.processors, on_host.numpy(), sequences)
            edited = on_host.to(logits.device)
        if self._batch is not None:
            edited, of_batch = self._batch.apply(edited, sequences)
            failed |= of_batch
        logits[indices] = edited
        self.failed = {int(sampled.indices[row]): why for row, why in failed.items()}

    def _process_scaled(self, batch: BatchProcessor, logits: Tensor, sampled: SampledRows) -> None:
        """Run those processors of the batch that keep the best token, after the penalties."""
        indices = self._send(sampled.indices)
        temperatures = self._send(self.rows.columns["temperature"][sampled.rows])[:, None]
        logits[indices], failed = batch.apply_scaled(logits[indices], torch.where(temperatures > 0, temperatures, 1.0))
        self.failed |= {int(sampled.indices[row]): why for row, why in failed.items()}

    def _send(self, numbers: npt.ArrayLike) -> Tensor:
        """Copy to the device without blocking."""
        array = torch.from_numpy(np.array(numbers, order="C"))
        if self.device.torch.type == "cuda":
            return (array if on_wsl() else array.pin_memory()).to(self.device.torch, non_blocking=True)
        return array


class CudaSamplingRules(RowRules):
    """Sampling parameters per row of logits, and the filters they mean."""

    __slots__ = ()

    def lowest_kept(self, logits: Tensor, *, use_kernel: bool) -> Tensor:
        """Return float32 [R]: the smallest of the logits [R, V] within top-k, top-p and min-p; -inf for greedy rows."""
        return top_k_top_p(logits, self.temperature, self.top_k, self.top_p, self.min_p, use_kernel=use_kernel)

    def drawn_from(self, logits: Tensor, *, use_kernel: bool) -> Tensor:
        """Return edited logits [R, V] divided by temperature, with filtered ones -inf."""
        floor = self.lowest_kept(logits, use_kernel=use_kernel)
        scaled = logits / torch.where(self.temperature > 0, self.temperature, 1.0)[:, None]
        return torch.where(logits >= floor[:, None], scaled, -torch.inf)


def sample_tokens(logits: Tensor, packed: Tensor, last: Tensor, *, use_kernel: bool) -> Tensor:
    """Return tokens int32 [R] of logits float32 [R, V]; also writes them to `last`. Does not synchronize.

    packed int32 [7, R] of `SampledRows.pack`; last int32 [rows + 1].
    """
    return sample_by_rules(logits, CudaSamplingRules.unpack(packed), last, use_kernel=use_kernel)


def sample_by_rules(logits: Tensor, rules: CudaSamplingRules, last: Tensor, *, use_kernel: bool) -> Tensor:
    """As `sample_tokens`, with parameters that are unpacked."""
    floor = rules.lowest_kept(logits, use_kernel=use_kernel)
    tokens = gumbel_max(logits, rules.keys, rules.temperature, floor, use_kernel=use_kernel)
    store_last(tokens, rules.rows, last, use_kernel=use_kernel)
    return tokens


# Drafts. The device corrects positions by the drafts that the row's previous step rejected, and accepts new ones.


def shifted_rules(packed: Tensor, rejected: Tensor) -> CudaSamplingRules:
    """Return the parameters, int32 [9, R] of `pack_with_drafts`, with corrected positions and complete noise keys.

    Positions of padding that a graph is captured with may be below 0 and become 0.
    """
    rules = CudaSamplingRules.unpack(packed)
    shift = rejected.index_select(0, packed[7])
    return replace(rules, positions=(rules.positions - shift).clamp_(min=0), keys=mix(rules.keys - shift))


def record_drafts(rules: CudaSamplingRules, drafts: Tensor, history: Tensor) -> None:
    """Write the drafts [R], -1 where there is none, to the history [rows + 1, length], which edits of rows read."""
    rows = torch.where(drafts >= 0, rules.rows, len(history) - 1)
    history[rows.long(), rules.positions.long()] = drafts


def accept_drafts(tokens: Tensor, packed: Tensor, drafts: Tensor, newest: RowTokens, width: int) -> Tensor:
    """Return the tokens [R] of a step, -1 after the first that is not the draft at its position, of `drafts` [R].

    Write the last token and the numbers of rejected and accepted drafts of each row. packed int32 [9, R] of
    `pack_with_drafts`.
    """
    sampled = tokens.view(-1, width)
    drafts = drafts.reshape(-1, width)
    accepted = (sampled == drafts)[:, :-1].cumprod(1).sum(1, keepdim=True)
    rows = packed[0, ::width].long()
    newest.last[rows] = sampled.gather(1, accepted)[:, 0]
    newest.rejected[rows] = ((drafts >= 0).sum(1) - accepted[:, 0]).to(torch.int32)
    if newest.accepted is not None:
        newest.accepted[rows] = accepted[:, 0].to(torch.int32)
    after = torch.arange(width, device=tokens.device)
    return torch.where(after <= accepted, sampled, -1).flatten()


def _shift_of_heads(shift: Tensor, words: Tensor, heads: Tensor) -> Tensor:
    """Return by how much the history positions [h] of `banned_words` are shifted. shift [R]: by row of logits."""
    by_word = F.pad(shift, (0, 1))[words[0].long()]
    return F.pad(by_word, (0, 1))[heads[0].long()]
