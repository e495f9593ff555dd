"""Logits -> tokens and logprobs, by the order that common.engine.sampling defines: the host's half.

Packs what a step needs of its rows' rules. Choosing is one program for all rows; edits and logprobs run beside it, only
for the rows that ask. Nothing waits for the device but logits processors, which are the operator's Python: their rows
go to the host and back, and the step after waits for that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.reference.sampling import RowRules
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.stream import DeviceStream
from pagoda.backends.torch_cuda.kernels import edit_logits
from pagoda.backends.torch_cuda.kernels.gumbel_max import gumbel_max, remember
from pagoda.backends.torch_cuda.kernels.logprobs import logprobs
from pagoda.backends.torch_cuda.kernels.top_k_top_p import top_k_top_p
from pagoda.common.engine.logit_edits import additions, allowed, banned_words, grammar_masks, penalties
from pagoda.common.engine.pending import FetchLogprobs
from pagoda.common.engine.sampling import USUAL, SamplerOptions
from pagoda.common.engine.sampling_state import RowTable, SampledRows
from pagoda.common.engine.step import Int32, RowStart, StepPlan, TokenLogprobs

# Edited logits -> tokens, on the device and without a sort: top-k, top-p and min-p are one threshold per row.


class CudaRowRules(RowRules):
    """Sampling parameters per row of logits, and the filters they mean."""

    __slots__ = ()

    def lowest_kept(self, logits: Tensor, *, use_kernel: bool) -> Tensor:
        """float32 [R]: the smallest of the logits [R, V] inside top-k, top-p and min-p; -inf for greedy rows."""
        return top_k_top_p(logits, self.temperature, self.top_k, self.top_p, self.min_p, use_kernel=use_kernel)

    def drawn_from(self, logits: Tensor, *, use_kernel: bool) -> Tensor:
        """Edited logits [R, V] -> those that tokens are drawn from: over temperature, filtered ones minus infinity."""
        floor = self.lowest_kept(logits, use_kernel=use_kernel)
        scaled = logits / torch.where(self.temperature > 0, self.temperature, 1.0)[:, None]
        return torch.where(logits >= floor[:, None], scaled, -torch.inf)


def choose(logits: Tensor, packed: Tensor, last: Tensor, history: Tensor, *, use_kernel: bool) -> Tensor:
    """Logits float32 [R, V] -> tokens int32 [R], also written to `last` and `history`. Nothing waits for the device.

    packed int32 [7, R] of `SampledRows.pack`; last int32 [rows + 1]; history int32 [rows + 1, length].
    """
    rules = CudaRowRules.unpack(packed)
    floor = rules.lowest_kept(logits, use_kernel=use_kernel)
    tokens = gumbel_max(logits, rules.keys, rules.temperature, floor, use_kernel=use_kernel)
    remember(tokens, rules.rows, rules.positions, last, history, use_kernel=use_kernel)
    return tokens


class CudaSampler:
    """Chooses one token per sampling row; row s of a step's logits is sequence s's.

    `rows`: what is known of each row on the host. On the device, with one row more for padding: `last` int32 [rows+1],
    the token that each row sampled last; `history` int32 [rows+1, max_len+1], the tokens of rows that need it.
    """

    def __init__(
        self, vocab: int, max_rows: int, max_len: int, device: Device, options: SamplerOptions = USUAL
    ) -> None:
        self.vocab, self.device, self.options = vocab, device, options
        self.rows = RowTable(max_rows)
        self.last = torch.zeros(max_rows + 1, dtype=torch.int32, device=device.torch)
        self.history = torch.zeros((max_rows + 1, max_len + 1), dtype=torch.int32, device=device.torch)

    def start(self, start: RowStart) -> None:
        """A row begins anew. Its tokens go to the device only if somebody looks at them there."""
        self.rows.start(start, self.vocab)
        rules = start.rules
        if rules.reads_history or self.options.processors:
            self.history[start.row, : len(start.token_ids)] = self._send(start.token_ids)

    def pack(self, plan: StepPlan, seqs: int) -> Int32:
        """int32 [7, R] that `choose` reads. `seqs`: R, rows of the logits; at least the plan's sequences."""
        return self._chosen(plan).pack(seqs, len(self.rows))

    def choose(self, logits: Tensor, packed: Tensor) -> Tensor:
        """Logits float32 [R, V], packed int32 [7, R] on the device -> tokens int32 [R], remembered. May be captured."""
        return choose(logits, packed, self.last, self.history, use_kernel=self.device.use_kernels)

    def edit(self, logits: Tensor, plan: StepPlan) -> Tensor | None:
        """What the rows' rules do to logits float32 [R, V] before temperature, in place.

        Returns the logits [n, V] that logprobs are taken of, one row for each sequence that asked; None if none did.
        """
        needs_edit = self.rows.columns["needs_edit"][plan.rows].any() or plan.masks is not None
        if not (self.options.processors or needs_edit):
            return None
        chosen = self._chosen(plan)
        asked = [place.index for place in chosen.where("logprobs")]
        processed = self.options.logprobs_mode.startswith("processed")
        shown = logits[self._send(asked)] if asked and not processed else None
        self._edit(logits, chosen, plan)
        if asked and processed:
            rules = CudaRowRules.unpack(self._send(chosen.pack(len(logits), len(self.rows))[:, asked]))
            shown = rules.drawn_from(logits[self._send(asked)], use_kernel=self.device.use_kernels)
        return shown

    def logprobs(
        self, shown: Tensor | None, tokens: Tensor, plan: StepPlan, stream: DeviceStream
    ) -> Callable[[], dict[int, TokenLogprobs]]:
        """Of every sequence that asked: its token and the best few; a function that waits for them.

        shown: of `edit`; tokens int32 [R]: of `choose`.
        """
        if shown is None:
            return dict
        places = self._chosen(plan).where("logprobs")
        wanted = [(place.index, self._best(place.state.rules.logprobs)) for place in places]
        own = tokens[self._send([index for index, _ in wanted])]
        fetch = self._fetch(shown, own, max(best for _, best in wanted), stream)

        def found() -> dict[int, TokenLogprobs]:
            every = fetch()
            return {
                index: TokenLogprobs(
                    every.token_ids[at : at + 1, : 1 + best],
                    every.logprobs[at : at + 1, : 1 + best],
                    every.ranks[at : at + 1],
                )
                for at, (index, best) in enumerate(wanted)
            }

        return found

    def score(self, logits: Tensor, targets: Int32, best: int, stream: DeviceStream) -> FetchLogprobs:
        """Logprobs of given tokens int32 [n], those of a prompt: logits float32 [n, V]; `best` -1: all."""
        return self._fetch(logits, self._send(targets), self._best(best), stream)

    def _fetch(self, logits: Tensor, tokens: Tensor, best: int, stream: DeviceStream) -> FetchLogprobs:
        normalise = not self.options.logprobs_mode.endswith("logits")
        found = logprobs(logits, tokens, best, normalise=normalise, use_kernel=self.device.use_kernels)
        ids, values, ranks = map(stream.fetch, found)
        return lambda: TokenLogprobs(ids.array(), values.array(), ranks.array())

    def _best(self, asked: int | None) -> int:
        """How many best tokens that is."""
        return self.vocab if asked is not None and asked < 0 else asked or 0

    def _chosen(self, plan: StepPlan) -> SampledRows:
        return SampledRows.of({0: plan}, plan.num_seqs, self.rows)

    def _edit(self, logits: Tensor, chosen: SampledRows, plan: StepPlan) -> None:
        seqs, use_kernel = len(logits), self.device.use_kernels
        if penalised := chosen.where("penalised"):
            packed = self._send(penalties(penalised, len(penalised)))
            edit_logits.penalise(logits, self.history, packed, use_kernel=use_kernel)
        if edited := chosen.where("edited"):
            for entries in additions(edited, seqs):
                edit_logits.add(logits, self._send(entries), use_kernel=use_kernel)
            for words, heads in banned_words(edited, seqs):
                sent = self._send(words), self._send(heads)
                edit_logits.ban_words(logits, self.history, *sent, use_kernel=use_kernel)
        if masks := allowed(chosen.where("masked"), grammar_masks({0: plan}, seqs), self.vocab):
            sequences = self._send(np.array(list(masks), np.int32))
            bits = self._send(np.stack(list(masks.values())).view(np.int32))
            edit_logits.mask(logits, sequences, bits, use_kernel=use_kernel)
        if self.options.processors:
            self._process(logits, chosen)

    def _process(self, logits: Tensor, chosen: SampledRows) -> None:
        """The operator's edits, on a copy in the host's memory."""
        at = self._send(chosen.indices)
        edited = logits[at].cpu()
        tokens = self.history[self._send(chosen.rows), : int(chosen.ends.max())].cpu()
        for row, number, known, values in zip(chosen.rows.tolist(), tokens, chosen.ends.tolist(), edited.numpy()):
            state = self.rows[row]
            for processor in self.options.processors:
                extra = state.rules.extra_args or {}
                processor.apply(values, number[:known].tolist(), len(state.prompt), extra)
        logits[at] = edited.to(logits.device)

    def _send(self, numbers: npt.ArrayLike) -> Tensor:
        """A copy on the device; the host goes on."""
        array = torch.from_numpy(np.array(numbers, order="C"))
        if self.device.torch.type == "cuda":
            return array.pin_memory().to(self.device.torch, non_blocking=True)
        return array
