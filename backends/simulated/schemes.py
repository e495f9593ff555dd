"""What of quantised weights this backend simulates; importable without anything else."""

from __future__ import annotations

from typing import Final

from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.common.weights.quantization.support import SchemeSupport

ROUNDED_ON_DEVICE: Final[tuple[str, ...]] = ()
"""Values of --quantization that the backend rounds by itself; matrices of others come rounded."""


def scheme_support(scheme: Scheme, experts: bool) -> SchemeSupport:
    """Return what the backend does with matrices of a scheme: it has no weights, their bytes are in the step time."""
    return SchemeSupport("computes", "in the model of step times")
