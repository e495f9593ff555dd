"""The row cache of a device in torch: embeddings that token ids from FIRST_ROW on name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagoda.common.engine.steps.contract import FIRST_ROW, Encode


class MediaRows:
    """Rows [R, D] in the dtype of the embedding table, after its scale."""

    def __init__(self, count: int, width: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self.table = torch.zeros(count, width, dtype=dtype, device=device)

    def write(self, encodes: Sequence[Encode]) -> None:
        """Write the items that a step encodes, before its forward pass, without waiting for the device."""
        if not encodes:
            return
        payload = b"".join(encode.item.payload for encode in encodes)
        rows = torch.frombuffer(bytearray(payload), dtype=self.table.dtype).view(-1, self.table.shape[1])
        numbers = torch.from_numpy(np.concatenate([encode.rows for encode in encodes]).astype(np.int64))
        if self.table.device.type != "cpu":
            rows = rows.pin_memory().to(self.table.device, non_blocking=True)
            numbers = numbers.pin_memory().to(self.table.device, non_blocking=True)
        self.table.index_copy_(0, numbers, rows)

    def insert(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """Return x [T, D] with the rows in place of the embeddings of those token_ids [T] that name one."""
        numbers = (token_ids - FIRST_ROW).clamp(min=0)
        named = (token_ids >= FIRST_ROW)[:, None]
        return torch.where(named, self.table.index_select(0, numbers).to(x.dtype), x)


def without_rows(token_ids: Tensor) -> Tensor:
    """Return token_ids [T] with 0 in place of those that name rows or are EMBEDDED, so that all can be looked up."""
    return torch.where(token_ids < FIRST_ROW, token_ids, 0)
