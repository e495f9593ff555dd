"""`pagoda bench startup`: seconds from the command `pagoda serve` to the first token that a client receives.

Each start is a new process, which is polled with one-token requests from its beginning.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

from tqdm import tqdm

from pagoda.common.config.env import API_KEY
from pagoda.common.config.groups.bench import StartupConfig
from pagoda.common.config.settings import ENGINE_SETTINGS, ResolvedSettings
from pagoda.common.errors import PagodaError
from pagoda.server.cli.bench.offline import add_load_arguments, check_load, resolve_load, write_results
from pagoda.server.cli.http_client import ApiClient, ApiError
from pagoda.server.settings.flags import EngineArgs, FlagParser
from pagoda.server.settings.resolve import Resolved

COMMAND: Final = "bench startup"
SERVE: Final = (sys.executable, "-m", "pagoda.server.cli.main", "serve")
RETRY_SECONDS: Final = 0.02
END_SECONDS: Final = 30.0
_LOADING: Final = 503


def add_arguments(parser: FlagParser) -> None:
    add_load_arguments(parser, COMMAND)


def check(args: argparse.Namespace) -> tuple[ResolvedSettings, Resolved]:
    return check_load(args, COMMAND, StartupConfig, "server")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results. Returns 0."""
    load, settings = resolve_load(args, COMMAND, StartupConfig)
    EngineArgs.from_resolved(settings)  # raises on unusable settings before a server is started
    with tempfile.TemporaryDirectory(prefix="pagoda-startup-") as folder:
        config_file = Path(folder, "settings.yaml")
        config_file.write_text(json.dumps(engine_settings(settings)), encoding="utf-8")  # JSON is YAML
        for _ in tqdm(range(load.num_iters_warmup), desc="Warmup starts", disable=not load.num_iters_warmup):
            time_start(config_file, load.input_len)
        seconds = [time_start(config_file, load.input_len) for _ in tqdm(range(load.num_iters), desc="Measured starts")]
    mean, median = statistics.mean(seconds), statistics.median(seconds)
    print(f"Avg time to first token: {mean:.3f} seconds")
    print(f"Median time to first token: {median:.3f} seconds")
    print(f"Fastest {min(seconds):.3f}, slowest {max(seconds):.3f} seconds of {len(seconds)} starts")
    write_results(load.output_json, {"avg_startup": mean, "median_startup": median, "startups": seconds})
    return 0


def engine_settings(settings: ResolvedSettings) -> dict[str, Any]:
    """Return the given engine settings in the form of `serve --config`."""
    return {
        name.replace("_", "-"): settings.values[name]
        for name in settings.sources
        if name in ENGINE_SETTINGS and ENGINE_SETTINGS[name].option.deprecated is None
    }


def time_start(config_file: Path, input_len: int) -> float:
    """Return the seconds from a server's command to its first token. Raises PagodaError if it does not start."""
    port = _free_port()
    client = ApiClient(f"http://127.0.0.1:{port}/v1", API_KEY.read())
    body = {"prompt": [1 + index % 64 for index in range(input_len)], "max_tokens": 1, "temperature": 0.0}
    began = time.perf_counter()
    with _server(config_file, port) as (process, log):
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
def _server(config_file: Path, port: int) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    with tempfile.TemporaryFile() as log:
        words = [*SERVE, "--config", str(config_file), "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log)
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
