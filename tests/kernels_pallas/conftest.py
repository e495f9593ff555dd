"""Skip these tests if jax is not installed."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("jax") is None else []
if not collect_ignore_glob:
    import support.devices.jax_devices  # noqa: F401
