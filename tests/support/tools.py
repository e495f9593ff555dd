"""Scripts of tools/ as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load_tool(name: str) -> ModuleType:
    """tools/NAME.py, imported anew."""
    path = Path(__file__).resolve().parents[2] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
