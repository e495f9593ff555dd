"""Sampling: logits -> tokens and logprobs, in the order defined by common.engine.sampling.

Sampling is one program for all rows; edits and logprobs run beside it for the rows that need them. Nothing synchronizes
with the device except logits processors, which run Python on the host: the next step waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.reference.sampling import RowRules
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.stream import DeviceStream
from pagoda.backends.torch_cuda.kernels import edit_logits
from pagoda.backends.torch_cuda.kernels.gumbel_max import gumbel_max, store_tokens
from pagoda.backends.torch_cuda.kernels.logprobs import logprobs
from pagoda.backends.torch_cuda.kernels.top_k_top_p import top_k_top_p
from pagoda.common.engine.pending import FetchLogprobs
from pagoda.common.engine.sampling import USUAL, SamplerOptions
from pagoda.common.engine.sampling_state import (
    RowTable,
    SampledRows,
    additions,
    allowed,
    banned_words,
    grammar_masks,
    penalties,
)
from pagoda.common.engine.step import Int32, RowStart, StepPlan, TokenLogprobs, TokenMasks


class CudaSampler:
    """Samples one token per sampling row; row s of a step's logits belongs to sequence s."""

    def __init__(
        self, vocab: int, max_rows: int, max_len: int, device: Device, options: SamplerOptions = USUAL
    ) -> None:
        self.vocab, self.device, self.options = vocab, device, options
        self.rows = RowTable(max_rows)
        # Each row's last sampled token, and the tokens of rows whose edits read them; the last row is padding's.
        self.last = torch.zeros(max_rows + 1, dtype=torch.int32, device=device.torch)
        self.history = torch.zeros((max_rows + 1, max_len + 1), dtype=torch.int32, device=device.torch)

    def start(self, start: RowStart) -> None:
        """Start a row. Its tokens are copied to the device only if an edit reads them there."""
        self.rows.start(start, self.vocab)
        rules = start.rules
        if rules.reads_history or self.options.processors:
            self.history[start.row, : len(start.token_ids)] = self._send(start.token_ids)

    def pack(self, plan: StepPlan, seqs: int) -> Int32:
        """Return int32 [7, R], the input of `sample`. `seqs`: R, at least the sequences of the plan."""
        return self._sampled_rows(plan).pack(seqs, len(self.rows))

    def sample(self, logits: Tensor, packed: Tensor) -> Tensor:
        """Return tokens int32 [R] from logits float32 [R, V] and packed int32 [7, R]; records them. May be captured."""
        return sample_tokens(logits, packed, self.last, self.history, use_kernel=self.device.use_kernels)

    def edit(self, logits: Tensor, plan: StepPlan, masks: TokenMasks | None = None) -> Tensor | None:
        """Apply the rows' logit edits to logits float32 [R, V], before temperature, in place.

        masks: of sequences in `plan.masked`. Return the logits [n, V] that logprobs are taken of, a row per sequence
        with logprobs; None if there are none.
        """
        needs_edit = self.rows.columns["needs_edit"][plan.rows].any() or masks is not None
        if not (self.options.processors or needs_edit):
            return None
        sampled = self._sampled_rows(plan)
        indices = [row.index for row in sampled.where("logprobs")]
        processed = self.options.logprobs_mode.startswith("processed")
        selected = logits[self._send(indices)] if indices and not processed else None
        self._edit(logits, sampled, {} if masks is None else {0: masks})
        if indices and processed:
            rules = CudaSamplingRules.unpack(self._send(sampled.pack(len(logits), len(self.rows))[:, indices]))
            selected = rules.drawn_from(logits[self._send(indices)], use_kernel=self.device.use_kernels)
        return selected

    def logprobs(
        self, selected: Tensor | None, tokens: Tensor, plan: StepPlan, stream: DeviceStream
    ) -> Callable[[], dict[int, TokenLogprobs]]:
        """Return a function that waits for the logprobs of each sequence with logprobs: its token and the best few.

        selected: from `edit`; tokens int32 [R]: from `sample`.
        """
        if selected is None:
            return dict
        rows = self._sampled_rows(plan).where("logprobs")
        counts = [(row.index, self._best(row.state.rules.logprobs)) for row in rows]
        sampled_tokens = tokens[self._send([index for index, _ in counts])]
        fetch = self._fetch(selected, sampled_tokens, max(best for _, best in counts), stream)

        def wait() -> dict[int, TokenLogprobs]:
            every = fetch()
            return {
                index: TokenLogprobs(
                    every.token_ids[at : at + 1, : 1 + best],
                    every.logprobs[at : at + 1, : 1 + best],
                    every.ranks[at : at + 1],
                )
                for at, (index, best) in enumerate(counts)
            }

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
        return SampledRows.of({0: plan}, plan.num_seqs, self.rows)

    def _edit(self, logits: Tensor, sampled: SampledRows, grammar: Mapping[int, TokenMasks]) -> None:
        seqs, use_kernel = len(logits), self.device.use_kernels
        if penalised := sampled.where("penalised"):
            packed = self._send(penalties(penalised, len(penalised)))
            edit_logits.penalise(logits, self.history, packed, use_kernel=use_kernel)
        if edited := sampled.where("edited"):
            for entries in additions(edited, seqs):
                edit_logits.add(logits, self._send(entries), use_kernel=use_kernel)
            for words, heads in banned_words(edited, seqs):
                packed_words = self._send(words), self._send(heads)
                edit_logits.ban_words(logits, self.history, *packed_words, use_kernel=use_kernel)
        if masks := allowed(sampled.where("masked"), grammar_masks(grammar, seqs), self.vocab):
            sequences = self._send(np.array(list(masks), np.int32))
            bits = self._send(np.stack(list(masks.values())).view(np.int32))
            edit_logits.mask(logits, sequences, bits, use_kernel=use_kernel)
        if self.options.processors:
            self._process(logits, sampled)

    def _process(self, logits: Tensor, sampled: SampledRows) -> None:
        """Run logits processors on a copy in host memory."""
        indices = self._send(sampled.indices)
        edited = logits[indices].cpu()
        tokens = self.history[self._send(sampled.rows), : int(sampled.ends.max())].cpu()
        for row, row_tokens, known, values in zip(sampled.rows.tolist(), tokens, sampled.ends.tolist(), edited.numpy()):
            state = self.rows[row]
            for processor in self.options.processors:
                extra = state.rules.extra_args or {}
                processor.apply(values, row_tokens[:known].tolist(), len(state.prompt), extra)
        logits[indices] = edited.to(logits.device)

    def _send(self, numbers: npt.ArrayLike) -> Tensor:
        """Copy to the device without blocking."""
        array = torch.from_numpy(np.array(numbers, order="C"))
        if self.device.torch.type == "cuda":
            return array.pin_memory().to(self.device.torch, non_blocking=True)
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


def sample_tokens(logits: Tensor, packed: Tensor, last: Tensor, history: Tensor, *, use_kernel: bool) -> Tensor:
    """Return tokens int32 [R] of logits float32 [R, V]; also writes them to `last` and `history`. Does not synchronize.

    packed int32 [7, R] of `SampledRows.pack`; last int32 [rows + 1]; history int32 [rows + 1, length].
    """
    rules = CudaSamplingRules.unpack(packed)
    floor = rules.lowest_kept(logits, use_kernel=use_kernel)
    tokens = gumbel_max(logits, rules.keys, rules.temperature, floor, use_kernel=use_kernel)
    store_tokens(tokens, rules.rows, rules.positions, last, history, use_kernel=use_kernel)
    return tokens
