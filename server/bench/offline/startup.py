"""`pagoda bench startup`: seconds from the command `pagoda serve` to the first token that a client receives.

Each start is a new process, which is polled with one-token requests from its beginning.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from tqdm import tqdm

from pagoda.common.config.env import API_KEY, XLA_CACHE_PATH
from pagoda.common.config.groups.bench.offline import StartupConfig
from pagoda.common.config.settings import ResolvedSettings
from pagoda.common.errors import PagodaError
from pagoda.server.bench.offline.engine import check_load, engine_keywords, resolve_load, write_results
from pagoda.server.bench.offline.latency import PERCENTAGES
from pagoda.server.bench.report.machine import machine
from pagoda.server.cli.client.http_client import ApiClient, ApiError
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import Resolved

COMMAND: Final = "bench startup"
SERVE: Final = (sys.executable, "-m", "pagoda.server.cli.main", "serve")
RETRY_SECONDS: Final = 0.02
END_SECONDS: Final = 30.0
_LOADING: Final = 503

CACHES: Final = (XLA_CACHE_PATH.name, "TRITON_CACHE_DIR")
"""Variables of the folders where compiled programs are kept."""


def check(args: argparse.Namespace) -> tuple[ResolvedSettings, Resolved]:
    return check_load(args, COMMAND, StartupConfig, "server")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results. Returns 0."""
    load, settings = resolve_load(args, COMMAND, StartupConfig)
    EngineArgs.from_resolved(settings)  # This raises on unusable settings before a server is started.
    with tempfile.TemporaryDirectory(prefix="pagoda-startup-") as folder:
        config_file = Path(folder, "settings.yaml")
        keys = {name.replace("_", "-"): value for name, value in engine_keywords(settings).items()}
        config_file.write_text(json.dumps(keys), encoding="utf-8")  # JSON is YAML.

        def starts(count: int, label: str, *, cold: bool = False) -> list[float]:
            bar = tqdm(range(count), desc=label, disable=not count)
            return [time_start(config_file, load.input_len, cold=cold) for _ in bar]

        cold = starts(load.num_iters_cold, "Cold starts", cold=True)
        starts(load.num_iters_warmup, "Warmup starts")
        warm = starts(load.warm_starts, "Measured starts")
    results: dict[str, Any] = {"machine": machine()}
    for kind, seconds in (("cold", cold), ("warm", warm)):
        if seconds:
            results |= _summary(kind, seconds)
    if warm:
        results |= {"avg_startup": statistics.mean(warm), "median_startup": statistics.median(warm), "startups": warm}
    write_results(load.output_json, results)
    return 0


def _summary(kind: str, seconds: list[float]) -> dict[str, Any]:
    """Print the starts of a kind and return them under vLLM's names."""
    mean = statistics.mean(seconds)
    median = statistics.median(seconds)
    print(f"{kind.capitalize()} starts:")
    print(f"Avg time to first token: {mean:.3f} seconds")
    print(f"Median time to first token: {median:.3f} seconds")
    print(f"Fastest {min(seconds):.3f}, slowest {max(seconds):.3f} seconds of {len(seconds)} starts")
    percentiles = dict(zip(PERCENTAGES, np.percentile(seconds, PERCENTAGES).tolist()))
    return {
        f"avg_{kind}_startup_time": mean,
        f"{kind}_startup_times": seconds,
        f"{kind}_startup_percentiles": percentiles,
    }


def time_start(config_file: Path, input_len: int, *, cold: bool = False) -> float:
    """Return the seconds from a server's command to its first token. Raises PagodaError if it does not start.

    `cold`: with empty caches of compiled programs, in folders of its own.
    """
    port = _free_port()
    client = ApiClient(f"http://127.0.0.1:{port}/v1", API_KEY.read())
    body = {"prompt": [1 + index % 64 for index in range(input_len)], "max_tokens": 1, "temperature": 0.0}
    began = time.perf_counter()
    with _server(config_file, port, cold) as (process, log):
        while True:
            try:
                next(client.stream("/completions", body))
                return time.perf_counter() - began
            except ApiError as error:
                if error.status not in (None, _LOADING):
                    raise
            if process.poll() is not None:
                raise PagodaError(f"the server did not start: {_last_line(log)}")
            time.sleep(RETRY_SECONDS)


@contextlib.contextmanager
def _server(config_file: Path, port: int, cold: bool) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory(prefix="pagoda-cold-") as empty:
        caches = {name: str(Path(empty, name)) for name in CACHES} if cold else {}
        words = [*SERVE, "--config", str(config_file), "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log, env=os.environ | caches)
        try:
            yield process, log
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no output").removeprefix("pagoda: error: ")
