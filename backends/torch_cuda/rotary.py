"""Tables of cos and sin on the device, one for every distinct Rope of a model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagoda.common.models.rope import cos_sin
from pagoda.common.models.spec import ModelSpec, Rope


def rotary_tables(spec: ModelSpec, max_len: int, device: torch.device) -> dict[Rope | None, Tensor | None]:
    """Float32 [max_len, 2, R/2] of cos and sin for each Rope, made in float64; None for None."""
    tables: dict[Rope | None, Tensor | None] = {None: None}
    for layer in spec.layers:
        rope = layer.mixer.rope
        if rope not in tables:
            assert rope is not None, "None is in the table"
            both = np.stack(cos_sin(rope, max_len, np.arange(max_len)), axis=1)
            tables[rope] = torch.from_numpy(both.astype(np.float32)).to(device)
    return tables
