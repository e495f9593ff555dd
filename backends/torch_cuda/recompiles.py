"""Counts what Triton compiles, so that a compilation while serving does not go unnoticed."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

logger = logging.getLogger(__name__)


class CompileCount:
    """`count`: kernels that Triton compiled in this process while watched. `loud`: each one is logged."""

    def __init__(self) -> None:
        self.count, self.loud = 0, False
        self._before: Any = None
        self._watching = False

    def watch(self) -> None:
        """Begin to count. Whoever listened before still does."""
        if self._watching or importlib.util.find_spec("triton") is None:
            return
        import triton

        self._watching, self._before = True, triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._compiled

    def unwatch(self) -> None:
        """Stop, unless somebody else has begun to listen since."""
        if not self._watching:
            return
        import triton

        if triton.knobs.runtime.jit_post_compile_hook == self._compiled:
            triton.knobs.runtime.jit_post_compile_hook, self._watching = self._before, False

    def _compiled(self, *, repr: str, **about: Any) -> Any:
        self.count += 1
        if self.loud:
            logger.error("compiled while serving, which takes seconds; please report it: %s", repr)
        return None if self._before is None else self._before(repr=repr, **about)
