"""`pagoda serve --headless`: an engine without HTTP, which does what host 0 says."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from types import FrameType

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.parallel import ParallelConfig
from pagoda.common.errors import ConfigError
from pagoda.server.link.process_client import ProcessClient

logger = logging.getLogger(__name__)


class _Stopped(BaseException):
    """A signal asked for the end."""


def check_headless(parallel: ParallelConfig, headless: bool) -> None:
    """Host 0 serves HTTP, and only it. Raises ConfigError."""
    rank, last = parallel.node_rank, parallel.nnodes - 1
    if last and rank > last:
        raise ConfigError("--node-rank", f"{rank} is none of {last + 1} hosts; use 0 to {last}")
    if headless and not last:
        raise ConfigError("--headless", "there is no host 0 to follow; give --nnodes and --node-rank, or drop it")
    if headless and not rank:
        raise ConfigError("--headless", "host 0 takes the requests; drop it, or give this host another --node-rank")
    if rank and not headless:
        raise ConfigError("--node-rank", "only host 0 serves HTTP; add --headless and --nnodes on the others")


def run_headless(config: EngineConfig) -> int:
    """Follow host 0 until it ends or a signal comes (0). Raises what this host or host 0 failed with."""
    client = ProcessClient(config)
    try:
        with _stopping_on_signals():
            info = client.wait_ready()
            logger.info("%s on %s (%s): %s", info.backend, info.device, info.dtype, info.memory)
            logger.info("ready to follow host 0")
            client.wait_end()
            logger.info("host 0 has ended")
    except _Stopped:
        logger.info("stopping")
    finally:
        client.close(timeout=0)
    return 0


@contextlib.contextmanager
def _stopping_on_signals() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped

    usual = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
