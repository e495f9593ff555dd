"""How XLA compiles in tests: with few optimisations, since compiling takes far longer than running tiny models."""

from __future__ import annotations

from typing import Final

FLAGS: Final = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""Fusions of the older kind compile in half the time, and whole modules are faster than their parts are.

They make NaN of tiny negative numbers in float8_e4m3b11fnuz, which has no -0: a test of such numbers asks for the newer
kind.
"""

ENVIRONMENT: Final = {"XLA_FLAGS": FLAGS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""Variables of a program that uses jax."""
