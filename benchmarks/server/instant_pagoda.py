"""`pagoda serve` with a backend that answers at once; scheduler, processes, sockets and HTTP are the real ones.

usage: python instant_pagoda.py MODEL_FOLDER [FLAG ...]

Run with a socket's address it is the engine's process.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from instant_answer import Pace, tokens

from pagoda.backends.reference.backend import CAPABILITIES
from pagoda.common.backend import MemoryPlan
from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.steps.contract import StepPlan, StepResult
from pagoda.server.cli import main
from pagoda.server.cli.serving import serve
from pagoda.server.core_client import engine
from pagoda.server.core_client.process_client import ProcessClient
from pagoda.server.startup import engine as engine_build
from pagoda.server.startup.engine import BuiltEngine

BLOCKS = 100_000
"""Pretended: none of them is allocated."""


@dataclass(frozen=True)
class Done:
    """A step that was never under way."""

    answer: StepResult
    pace: Pace

    def result(self) -> StepResult:
        """What it brought."""
        self.pace.wait()
        return self.answer


class InstantBackend:
    """Runs no model. Takes blocks from anywhere, as backends with paged kernels do."""

    capabilities = replace(CAPABILITIES, prefers_extents=False)

    def __init__(self, words: list[int]) -> None:
        self._words = np.array(words, np.int32)
        self._pace = Pace()

    def load(self, weights: Any) -> None:
        """Reads none."""

    def plan_memory(self) -> MemoryPlan:
        """Room for everything."""
        return MemoryPlan(0, 0, (BLOCKS,), (0,))

    def init_cache(self, num_blocks: tuple[int, ...]) -> None:
        """Allocates nothing."""

    def warmup(self) -> None:
        """Is warm."""

    def execute(self, plan: StepPlan) -> Done:
        """The token of each sequence's place, where its prompt is complete."""
        ends = plan.context + np.diff(plan.query_start)
        return Done(StepResult(plan.step, np.where(plan.samples, self._words[ends % len(self._words)], -1)), self._pace)

    def close(self) -> None:
        """Holds nothing."""


def build(config: EngineConfig, usage: Any = "server") -> BuiltEngine:
    """The real engine, whose backend is not."""
    words = tokens(config.model.model)
    module = SimpleNamespace(
        CAPABILITIES=CAPABILITIES, check=lambda _: None, create=lambda *_, **__: InstantBackend(words)
    )
    engine_build.load_backend = lambda _: module
    return engine_build.build_engine(replace(config, load=replace(config.load, load_format="dummy")), usage)


def start(config: EngineConfig, *, in_process: bool) -> ProcessClient:
    """The engine in a process of its own: this program again."""
    return ProcessClient(config, (sys.executable, "-P", str(Path(__file__).resolve())))


if __name__ == "__main__":
    if sys.argv[1].startswith("ipc://"):
        status = engine.serve(sys.argv[1], build)
        os._exit(status)
    serve.start_engine = start
    sys.exit(main.main(["serve", *sys.argv[1:]]))
