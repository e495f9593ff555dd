"""What a backend does with matrices of a scheme, declared for the documentation and for messages at load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SchemeSupport:
    """What a backend does with matrices of a scheme, or with those of experts."""

    kind: Literal["computes", "dequantises", "refused"]
    how: str  # computes: the kernel; dequantises: the type in memory; refused: the reason and the remedy
