"""The kernels need jax; where it is not installed there is nothing to collect here."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("jax") is None else []
