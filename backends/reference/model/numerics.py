"""How the CPU computes: dtypes, from --dtype and the processor's instructions, and --batch-invariant.

A processor without bfloat16 (or float16) instructions emulates them several times slower than float32. There the
weights have the values of the requested dtype, while activations and KV cache are float32: more exact and faster.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from pagoda.common.config.env import OMP_NUM_THREADS
from pagoda.common.errors import ConfigError

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Numerics:
    """How a model is computed."""

    weights: torch.dtype  # precision of the parameters
    compute: torch.dtype  # activations, KV cache and matrix products
    batch_invariant: bool = False  # a token's numbers do not depend on what else is in the step

    @property
    def widened(self) -> bool:
        """True when products run in a wider dtype than the weights."""
        return self.weights != self.compute


def numerics(dtype: str, *, batch_invariant: bool = False) -> Numerics:
    """Return the numerics of a dtype name. Raises ConfigError if it is unknown."""
    if dtype not in _DTYPES:
        raise ConfigError("--dtype", f"{dtype} is not one of auto, {', '.join(_DTYPES)}")
    weights = _DTYPES[dtype]
    native = {
        torch.float32: True,
        torch.bfloat16: torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() or _arm_bf16(),
        torch.float16: torch.cpu._is_amx_fp16_supported() if hasattr(torch.cpu, "_is_amx_fp16_supported") else False,
    }
    return Numerics(weights, weights if native[weights] else torch.float32, batch_invariant)


def _arm_bf16() -> bool:
    return os.uname().machine == "aarch64" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def thread_count() -> int:
    """Return the number of compute threads: OMP_NUM_THREADS, or one per physical core this process may use.

    From eight cores on, one is left for the server and the tokenizer.
    """
    if OMP_NUM_THREADS.read() is not None:
        return torch.get_num_threads()
    cores = len({_core_of(cpu) for cpu in os.sched_getaffinity(0)})
    return cores - 1 if cores >= 8 else cores


def _core_of(cpu: int) -> tuple[str, str]:
    """Return (package, core) of a logical processor; each is a core of its own if sysfs lacks the topology."""
    base = f"/sys/devices/system/cpu/cpu{cpu}/topology"
    try:
        with open(f"{base}/physical_package_id") as package, open(f"{base}/core_id") as core:
            return package.read().strip(), core.read().strip()
    except OSError:
        return "", str(cpu)
