"""What a layer's scores go through."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRules:
    """See `api.prefill_attention`. sinks [N]; k_scale, v_scale float32 [1]."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
