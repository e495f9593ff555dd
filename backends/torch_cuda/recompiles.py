"""Counts what Triton compiles, so that a compilation while serving does not go unnoticed."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

logger = logging.getLogger(__name__)


class CompileCount:
    """`count`: kernels that Triton compiled in this process since `watch`. `loud`: each one is logged."""

    def __init__(self) -> None:
        self.count, self.loud = 0, False

    def watch(self) -> None:
        """Begin to count. Whoever listened before still does."""
        if importlib.util.find_spec("triton") is None:
            return
        import triton

        runtime = triton.knobs.runtime
        before = runtime.jit_post_compile_hook

        def compiled(*, repr: str, **about: Any) -> Any:
            self.count += 1
            if self.loud:
                logger.error("compiled while serving, which takes seconds; please report it: %s", repr)
            return None if before is None else before(repr=repr, **about)

        runtime.jit_post_compile_hook = compiled
