"""Token ids -> the first hidden states. Each rank holds some rows of the table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.batch import Embedded
from pagoda.backends.torch_cuda.build import Build
from pagoda.common.models.spec import Embedding


class TokenEmbedding:
    """The table [V, D'], its scale, the projection to the model's width, positions, token types and the norm."""

    def __init__(self, spec: Embedding, build: Build) -> None:
        params = build.params
        self.spec, self.comm = spec, build.comm
        self.table, self.positions = params["embed"], params.get("positions")
        self.types = params.get("token_types")
        self.norm = build.norm(spec.norm, "embed_norm")
        self.project = build.linear("embed_in") if params.get("embed_in") is not None else None
        self.scale = float(torch.tensor(spec.scale).to(self.table.dtype))  # rounded to the weights' dtype, as trained

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        token_types: Tensor | None = None,
        embedded: Embedded | None = None,
    ) -> Tensor:
        """token_ids, positions, token_types [T] -> [T, D]. No token types: all are 0.

        `embedded`: rows as they are once they are looked up and scaled.
        """
        x = self._rows(token_ids if embedded is None else embedded.without(token_ids))
        if self.scale != 1.0:
            x = x * self.scale
        if embedded is not None:
            x = embedded.over(x)
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x = x + F.embedding(positions + self.spec.position_offset, self.positions)
        if self.types is not None:
            x = x + (self.types[0] if token_types is None else F.embedding(token_types, self.types))
        return self.norm(x, None)[0]

    def _rows(self, token_ids: Tensor) -> Tensor:
        if self.comm.size == 1:
            return F.embedding(token_ids, self.table)
        rows = token_ids - self.comm.rank * len(self.table)
        absent = (rows < 0) | (rows >= len(self.table))
        x = F.embedding(rows.masked_fill(absent, 0), self.table)
        return self.comm.all_reduce(x.masked_fill(absent[:, None], 0))
