"""vLLM's names and module paths for programs that import `vllm`; all of them are pagoda's objects."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pagoda
from pagoda.server.vllm.modules import VLLM_VERSION, find, missing_attribute, public_object

__version__ = VLLM_VERSION
__all__ = ["__version__", *(name for name in pagoda.__all__ if name != "__version__")]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise missing_attribute(__name__, name)
    return public_object(name)


class _StandInPaths:
    """A finder of sys.meta_path."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        return find(fullname) if fullname.startswith("vllm.") else None


if __name__ == "vllm":
    sys.meta_path.append(_StandInPaths)
