"""The parts of each stage. A part is a function of a module here, named `module.function`."""

from __future__ import annotations

STAGES: dict[str, tuple[str, ...]] = {
    "smoke": (
        "facts.checks",
        "elementwise.checks",
        "decode_attention.checks",
        "prefill_attention.checks",
        "sampling.checks",
        "gemm.checks",
        "sleep.checks",
        "parity.checks",
        "engine.graph_checks",
    ),
    "decode": ("engine.decode",),
    "prefill": ("engine.prefill",),
    "throughput": ("engine.throughput",),
    "peers": ("peers.attention", "peers.engines"),
    "kernels": (
        "elementwise.speeds",
        "decode_attention.speeds",
        "prefill_attention.speeds",
        "sampling.speeds",
        "gemm.speeds",
    ),
    "tune": ("decode_attention.trials", "prefill_attention.trials", "gemm.trials"),
}
"""In the recommended order: correctness, the engine, the comparison, then the details."""
