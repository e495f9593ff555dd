"""Ranks over FakeBackend, for tests of how they start, follow and end. Run as a program, it is a rank's process.

The model's name says how ranks other than 0 behave: "fake" follows, "fake:load" finds no weights on rank 2,
"fake:step" fails in a step on rank 1, "fake:hang" never comes back from one, "fake:stay" does not end when it is told
to. RANK_ENDS_IN in the environment:
"import" ends them before they have their job, "meet" while they meet rank 0.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fakes import FakeBackend, full_layout, scrambled

from pagoda.backends import registry
from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.distributed.messages import RankInfo
from pagoda.common.engine.core import generation_core
from pagoda.common.errors import WeightError
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.startup import executors
from pagoda.server.startup.engine import BuiltEngine, Gather
from pagoda.server.startup.ranks import leading

LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=4)
PROGRAM = (sys.executable, "-P", __file__)
GREETING_SECONDS = 60.0


@dataclasses.dataclass
class FakeComm:
    """A line to the others: one connection of each to rank 0."""

    lines: list[socket.socket]
    left: bool = False
    abandoned: threading.Event = dataclasses.field(default_factory=threading.Event)

    def leave(self) -> None:
        self.left = True

    def abandon(self) -> None:
        self.abandoned.set()

    def release(self) -> None:
        for line in self.lines:
            line.close()


def check(spec: Any, size: int, drafter: Any = None) -> None:
    pass


def check_devices(size: int) -> None:
    pass


def needs_gpu() -> bool:
    return True


def join(place: RankInfo, listener: socket.socket | None) -> FakeComm:
    """Rank 0 waits for all; the others hear from it."""
    if listener is None:
        if os.environ.get("RANK_ENDS_IN") == "meet":
            os._exit(7)
        line = socket.create_connection((place.host, place.port), GREETING_SECONDS)
        assert line.recv(1) == b"!"
        return FakeComm([line])
    with listener:
        lines = [listener.accept()[0] for _ in range(1, place.size)]
    for line in lines:
        line.sendall(b"!")
    return FakeComm(lines)


def build(config: EngineConfig, usage: str, gather: Gather) -> BuiltEngine:
    """An engine over FakeBackend, on any rank."""
    kind = Path(config.model.model).name.partition(":")[2]
    resolved: Any = SimpleNamespace(config=config, backend="fake", spec=None)
    with gather(resolved, "server") as company:
        assert company is not None
        link = company.arrive(resolved_checkpoint(config))
        assert link is not None
        rank = link.device
        fails = kind == "step" and rank == 1
        own = FakeBackend(
            full_layout(),
            num_blocks=40 - rank,
            next_token=hang if kind == "hang" and rank else scrambled,
            fail_at=2 if fails else None,
        )
        backend = company.joined(own)
        try:
            if kind == "load" and rank == 2:
                raise WeightError("the checkpoint lacks 3 parameters")
            blocks = backend.plan_memory().num_blocks
            backend.init_cache(blocks)
            backend.warmup()
        except BaseException:
            backend.close()
            raise
    if kind == "stay" and rank:
        backend.close = threading.Event().wait  # type: ignore[method-assign, assignment]
    core = generation_core(backend, own.layout, LIMITS, blocks)
    return BuiltEngine(core, backend, None, backend)  # type: ignore[arg-type]


def hang(history: list[int]) -> int:
    threading.Event().wait()
    return 0


def resolved_checkpoint(config: EngineConfig) -> Any:
    return SimpleNamespace(path=Path(config.model.model))


def lead(kind: str, size: int = 3) -> BuiltEngine:
    """Rank 0 of so many, warm."""
    config = EngineArgs(f"/nowhere/{kind}", tensor_parallel_size=size).create_engine_config()
    return build(config, "server", leading)


@contextmanager
def fake_backend() -> Iterator[None]:
    """Let the registry know this module as the ranks of the backend `fake`, and executors this program."""
    entry = registry.Entry("fake", "fakes", (), "", "", parallel=("tensor",), ranks="support.engines.fake_ranks")
    backends, program = registry.BACKENDS, executors.RANK_PROGRAM
    registry.BACKENDS = (entry,)  # type: ignore[misc]
    executors.RANK_PROGRAM = PROGRAM  # type: ignore[misc]
    try:
        yield
    finally:
        registry.BACKENDS, executors.RANK_PROGRAM = backends, program  # type: ignore[misc]


if __name__ == "__main__":
    from pagoda.server.startup import rank_process

    if os.environ.get("RANK_ENDS_IN") == "import":
        os._exit(7)
    with fake_backend():
        rank_process.main(build)
