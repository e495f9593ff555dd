"""Import this before any array is made: on the CPU, of whose devices `conftest.py` has XLA make eight.

Compiled programs are kept in the temporary folder, not in the user's: many tests run the same tiny models.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import jax
from jax._src.lib import xla_client
from support.suite import xla_flags

DEVICES = int(os.environ["JAX_NUM_CPU_DEVICES"])
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)


def read_flags(more: str) -> None:
    """Have XLA read its flags now, with these first. It reads them once; programs started later have other ones."""
    own = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{more} {own or ''}"
    xla_client.CompileOptions()
    if own is None:
        del os.environ["XLA_FLAGS"]
    else:
        os.environ["XLA_FLAGS"] = own


read_flags(xla_flags.FLAGS)
TEMPORARY = Path(tempfile.gettempdir())
os.environ["XDG_CACHE_HOME"] = str(TEMPORARY / "pagoda-tests-cache")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", str(TEMPORARY / "pagoda-tests-xla"))
    jax.config.update(
        "jax_persistent_cache_min_compile_time_secs", 0.1
    )  # programs of tiny models compile in less than 1 s
