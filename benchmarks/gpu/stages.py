"""The parts of each stage. A part is a function of a module here or in `kernels`, named `module.function`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagoda.benchmarks.gpu.measure import Bench, Number

PACKAGE = "pagoda.benchmarks.gpu"

STAGES: dict[str, tuple[str, ...]] = {
    "short": ("packed.checks", "experts.checks", "gemm.checks", "engine.short", "sanitizer.checks", "packed.trials"),
    "second": ("parity.checks", "engine.fp8", "peers.attention", "attention_backends.speeds", "peers.engines"),
    "smoke": (
        "facts.checks",
        "elementwise.checks",
        "decode_attention.checks",
        "prefill_attention.checks",
        "invariant.checks",
        "latent_attention.checks",
        "selection.checks",
        "recurrent.checks",
        "sampling.checks",
        "gemm.checks",
        "packed.checks",
        "experts.checks",
        "sleep.checks",
        "parity.checks",
        "engine.graph_checks",
        "engine.depth_checks",
        "sanitizer.checks",
        "invariance.checks",
    ),
    "decode": ("engine.decode",),
    "prefill": ("engine.prefill",),
    "throughput": ("engine.throughput",),
    "serving": ("serving.rates", "serving.out_of_memory"),
    "invariance": ("invariant.speeds", "invariance.speeds"),
    "peers": ("peers.attention", "attention_backends.speeds", "peers.engines"),
    "kernels": (
        "elementwise.speeds",
        "decode_attention.speeds",
        "prefill_attention.speeds",
        "sampling.speeds",
        "gemm.speeds",
        "packed.speeds",
    ),
    "mixers": ("latent_attention.speeds", "selection.speeds", "recurrent.speeds"),
    "experts": ("experts.speeds",),
    "tune": ("decode_attention.trials", "prefill_attention.trials", "gemm.trials", "packed.trials"),
    "tune_mixers": ("latent_attention.trials", "invariant.trials"),
    "tune_experts": ("experts.trials",),
}
"""In the recommended order. The first two are for a GPU of 15 minutes: what no interpreter can check and one engine,
then the comparisons. The others measure all: correctness, the engine, the comparison, then the details.
"""

TRIALS = ("tune", "tune_mixers", "tune_experts")
"""Stages that try settings for tuning.json."""


def numbers_of(part: str, bench: Bench) -> Iterator[Number]:
    """Import a part's module and yield its numbers."""
    name, _, function = part.rpartition(".")
    package = PACKAGE if find_spec(f"{PACKAGE}.{name}") else f"{PACKAGE}.kernels"
    yield from getattr(importlib.import_module(f"{package}.{name}"), function)(bench)
