"""What XLA is told beside a program: the same wherever it is compiled, to run here or ahead of time."""

from __future__ import annotations

import os
from typing import Final

from pagoda.backends.jax_tpu.step_input import KernelChoice

_VMEM: Final = "xla_tpu_scoped_vmem_limit_kib"


def compiler_options(kernel: KernelChoice) -> dict[str, str] | None:
    """Options of every program; None off the TPU.

    Half of VMEM, in KiB, is for the windows of one operation, where XLA takes an eighth to a quarter: larger tiles let
    the matrix units of a v6e work at 92 % of their peak instead of 65 to 80 %, and three quarters would leave too
    little for what XLA keeps in VMEM between operations (benchmarks/LOG.md). A limit in LIBTPU_INIT_ARGS stands.
    """
    if not kernel.use_kernel or kernel.interpret or _VMEM in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return None
    return {_VMEM: str(kernel.chip.vmem_bytes // 2 // 1024)}
