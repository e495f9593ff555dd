"""The drafter's part of a step: queued after its sampling, on the tensors that the step left on the device.

A drafter runs first on all tokens of the step, rejected drafts included, whose keys and values later tokens replace.
Then one token per sequence and guess; where a sequence has no further guess, its token is written to the null block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch, GroupBatch, make_slots
from pagoda.backends.torch_cuda.kernels.attention.work_list import cut_evenly
from pagoda.backends.torch_cuda.memory.cache import CudaCache
from pagoda.backends.torch_cuda.model.drafters import CudaDraftBatch, CudaDraftModel
from pagoda.backends.torch_cuda.sampling import CudaSampler
from pagoda.backends.torch_decoder.drafters import DraftTokens
from pagoda.backends.torch_decoder.media_rows import without_rows


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What a forward pass leaves for the drafter."""

    batch: CudaStepBatch  # at true positions
    features: Tensor  # [T, W] what the drafter reads of the target
    token_rows: Tensor  # int32 [T] batch row of each token
    logits_indices: Tensor  # int32 [S * width] the token of each row of logits
    guess_counts: Tensor  # int32 [S]


class DraftPasses:
    """Runs a drafter over its caches, which are numbered from 0."""

    def __init__(
        self,
        decoder: CudaDraftModel,
        caches: Mapping[int, CudaCache],
        sampler: CudaSampler,
        captured: tuple[int, ...],
        block_size: int,
        max_len: int,
        *,
        has_media: bool = False,
    ) -> None:
        """`captured`: layers of the target whose inputs the drafter reads; (): what its head reads. `has_media`: token
        ids may name rows of media.
        """
        self.decoder = decoder
        self.caches = caches
        self.sampler = sampler
        self.captured = captured
        self._block_size = block_size
        self._max_len = max_len
        self._has_media = has_media
        assert sampler.newest.guesses is not None, "the sampler keeps guesses"
        self._kept = sampler.newest.guesses
        self.guesses = torch.zeros_like(self._kept)  # int32 [S, K] of the newest step, by sequence

    def first(self, step: DraftStep) -> Tensor:
        """Run on all tokens of a step. Return the drafter's outputs [T, D]."""
        batch = step.batch
        decoder = self.decoder
        if decoder.reads_next:
            after = self.sampler.history[step.token_rows.long(), (batch.positions + 1).long()]
            batch = replace(batch, token_ids=after)
        if self._has_media:  # 0 in place of a row costs guesses, never answers
            batch = replace(batch, token_ids=without_rows(batch.token_ids))
        return decoder.first(self._tokens(batch, step.features))

    def _tokens(self, batch: CudaStepBatch, features: Tensor | None) -> DraftTokens[CudaDraftBatch]:
        return DraftTokens(batch.token_ids, batch.positions, (batch, self.caches), features)

    def run(self, step: DraftStep, tokens: Tensor, rows: Tensor, width: int, pieces: int = 0) -> Tensor:
        """Return the guesses int32 [S, K] after each sequence, recorded by row.

        `tokens`, `rows` [R]: of the step's rows of logits, `width` per sequence: the sampled token, -1 after a
        rejected draft, and the batch row. `pieces`: that attention cuts the sequences into together if the step's own
        work list lacks some of them, those with prompts; 0: attention takes no work list.
        """
        outputs = self.first(step)
        count = len(step.guess_counts)
        accepted = ((tokens.view(-1, width)[:count] >= 0).sum(1, keepdim=True) - 1).clamp_(min=0)
        last = step.logits_indices.view(-1, width)[:count].gather(1, accepted)[:, 0].long()
        rows = rows.view(-1, width)[:count, 0].long()
        position = step.batch.positions[last]
        newest = self.sampler.newest.last[rows]
        guessed = newest
        read = None
        every = torch.arange(count, device=rows.device, dtype=torch.int32)
        for number in range(self._kept.shape[1]):
            # A drafter that reads next tokens has its first guess from the pass over all tokens.
            if number == 0 and self.decoder.reads_next:
                outputs = outputs[last]
            else:
                active = step.guess_counts > number
                ahead = number if self.decoder.reads_next else number + 1
                positions = torch.where(active, position + ahead, 0).clamp_(max=self._max_len - 1)
                batch = self._single(step.batch, every, guessed, positions, active, pieces)
                outputs = self.decoder.run(self._tokens(batch, read))
            token_ids, read = self.decoder.guess(number, outputs, guessed)
            guessed = token_ids.to(torch.int32)
            self.guesses[:count, number] = guessed
        self._kept[rows] = self.guesses[:count]
        return self.guesses[:count]

    def _single(
        self, batch: CudaStepBatch, every: Tensor, token_ids: Tensor, positions: Tensor, active: Tensor, pieces: int
    ) -> CudaStepBatch:
        """Return a decode of one token of each sequence; those that are not `active` read and write the null block."""
        count = len(every)
        tables = [group.tables[:count] for group in batch.groups]
        groups = []
        for table in tables:
            slots = make_slots(table[None], every, positions, self._block_size)[0]
            groups.append(GroupBatch(table, slots.masked_fill_(~active, 0)))
        kv_lens = torch.where(active, positions + 1, 0).to(torch.int32)
        work = batch.work
        if batch.num_decodes != count:
            work = cut_evenly(kv_lens, -(-pieces // count)) if pieces else None
        return CudaStepBatch(
            token_ids=token_ids,
            positions=positions,
            query_start=torch.arange(count + 1, device=every.device, dtype=torch.int32),
            kv_lens=kv_lens,
            groups=tuple(groups),
            num_decodes=count,
            tiles=None,
            work=work,
        )
