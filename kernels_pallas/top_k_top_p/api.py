"""The smallest logit that each row keeps under top-k, top-p and min-p: the one entry point."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.top_k_top_p.kernel import kernel
from pagoda.kernels_pallas.top_k_top_p.reference import reference


def top_k_top_p(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> jax.Array:
    """float32 [R]: a row keeps its logits that are at least this; -inf where it keeps all.

    logits float32 [R, V]; temperature float32 [R], positive: what the logits will be divided by; top_k int32 [R], 0 or
    less for no limit; top_p float32 [R], 1 or more for no limit; min_p float32 [R], 0 for no limit.
    top-k keeps ties of the k-th value; top-p keeps the fewest tokens whose mass within top-k reaches p, and ties of
    the last; min-p keeps what is at least so probable, relative to the best. The best token always stays.
    Static: use_kernel (False: the jnp reference); interpret (True or pltpu.InterpretParams); chip (what the kernel is
    compiled for). ValueError: shapes or types that do not fit, or a vocabulary too large for the chip's VMEM.
    """
    rows = logits.shape[:1]
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits are {logits.dtype} {logits.shape}, not float32 [R, V]")
    for name, x in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if x.shape != rows:
            raise ValueError(f"{name} has shape {x.shape}, not {rows}")
    if not use_kernel:
        return reference(logits, temperature, top_k, top_p, min_p)
    return kernel(logits, temperature, top_k, top_p, min_p, interpret=interpret, chip=chip)
