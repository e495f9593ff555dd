"""The fast decoder as a function of one sequence, so that it can stand beside the naive one in the same tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.execution import make_batch
from pagoda.backends.reference.memory import allocate
from pagoda.backends.reference.model.adapters import AdapterMatrices
from pagoda.backends.reference.model.decoder import Decoder
from pagoda.backends.reference.model.numerics import numerics
from pagoda.backends.reference.weights.load import Packer
from pagoda.common.backend import Weight
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.contract import StepPlan
from pagoda.common.models.spec import ModelSpec

BLOCK = 4


class PagedModel:
    """Logits [T, V] of one sequence: half of it as one prefill chunk, then token by token, over scattered blocks."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Iterable[Weight],
        max_len: int,
        dtype: str = "float32",
        adapters: AdapterMatrices | None = None,
    ) -> None:
        numbers = self.numerics = numerics(dtype)
        self.slot: int | None = None  # of the sequence's adapter
        with torch.inference_mode():
            params = Packer(spec, numbers, adapters=adapters).pack(weights)
            self.decoder = Decoder(spec, params, numbers, max_len, adapters)
        self.layout = kv_layout(spec, BLOCK)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """One row per token."""
        pages = -(-len(token_ids) // BLOCK)
        count = pages * len(self.layout.groups)
        caches = allocate(self.layout, (1 + count,) * len(self.layout.pools), self.numerics.compute)
        blocks = 1 + np.random.default_rng(0).permutation(count).astype(np.int32).reshape(-1, 1, pages)
        half = len(token_ids) // 2
        found, begin = [], 0
        for end in [half, *range(half + 1, len(token_ids) + 1)]:
            plan = StepPlan(
                step=0,
                starts=(),
                rows=np.zeros(1, np.int32),
                query_start=np.array([0, end - begin], np.int32),
                context=np.array([begin], np.int32),
                token_ids=np.array(token_ids[begin:end], np.int32),
                block_tables=tuple(blocks),
                samples=np.ones(1, np.bool_),
                adapter_slots=None if self.slot is None else np.array([self.slot], np.int32),
            )
            ids, batch = torch.tensor(token_ids[begin:end]), make_batch(plan, self.layout)
            hidden = self.decoder.hidden(ids, batch, caches)
            slots = () if batch.adapters is None else (batch.adapters,)  # models of transformers have no adapters
            found.append(self.decoder.logits(hidden, *slots))
            begin = end
        return torch.cat(found)
