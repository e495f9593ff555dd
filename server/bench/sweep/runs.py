"""Runs of a sweep: an experiment's folder, the commands of each combination, and what was already measured."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.env import API_KEY
from pagoda.common.config.groups.bench.sweep import SweepConfig, SweepServeConfig
from pagoda.common.errors import ConfigError, PagodaError
from pagoda.server.bench.sweep.params import Combination, file_name, linked
from pagoda.server.bench.sweep.report import write_report
from pagoda.server.cli.client.http_client import ApiClient, ApiError

SUMMARY: Final = "summary.json"
NO_FLAGS: Final = Combination("", {})
_POLL_SECONDS: Final = 0.2
_END_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Experiment:
    """The folder of a sweep: SERVE-x-BENCH-y/run=0.json and summary.json for each combination, summary.csv for all."""

    folder: Path
    config: SweepConfig

    @classmethod
    def of(cls, config: SweepConfig) -> Experiment:
        """Raises ConfigError if the folder exists without --resume, or does not with it."""
        name = config.experiment_name or f"{datetime.now():%Y%m%d_%H%M%S}"
        folder = Path(config.output_dir, name)
        if config.resume and not folder.exists():
            raise ConfigError("--resume", f"there is no experiment {folder}; drop it to begin one")
        if not config.resume and folder.exists():
            raise ConfigError("--experiment-name", f"{folder} exists; add --resume, or use another name")
        return cls(folder, config)

    def path(self, **parts: Combination) -> Path:
        """Return the folder of a combination, named after its non-empty parts."""
        names = [f"{kind.upper()}-{combination.name}" for kind, combination in parts.items() if combination.name]
        return self.folder / file_name("-".join(names) or "defaults")

    def runs(
        self, folder: Path, facts: Mapping[str, Any], run: Callable[[Path], None], *, tolerant: bool = False
    ) -> list[dict[str, Any]]:
        """Return the results of all runs of a combination; those without results are run and kept.

        `facts`: parameters to add to each result. `run`: writes the results of a run to a path. `tolerant`: record
        failures. Raises PagodaError.
        """
        results = []
        for number in range(self.config.num_runs):
            path = folder / f"run={number}.json"
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    run(path)
                    write_json(path, read_json(path) | {"run_number": number} | dict(facts))
                except PagodaError as error:
                    path.unlink(missing_ok=True)
                    if not tolerant:
                        raise PagodaError(f"{error}; continue with --resume -e {self.folder.name}") from None
                    print(f"failed: {error}")
                    write_json(
                        path.with_suffix(".failure.json"), {"error": str(error), "run_number": number} | dict(facts)
                    )
                    continue
            results.append(read_json(path))
        if results:
            write_json(folder / SUMMARY, results)
        return results

    def finish(self, results: Sequence[Mapping[str, Any]], title: str) -> None:
        """Write summary.csv and the report page."""
        if not results:
            raise PagodaError("no run succeeded")
        plain = [{key: value for key, value in row.items() if not isinstance(value, list | dict)} for row in results]
        columns = list(dict.fromkeys(key for row in plain for key in row))
        with (self.folder / "summary.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(plain)
        page = self.folder / "report.html"
        write_report(page, plain, title)
        print(f"Results: {self.folder / 'summary.csv'}, {page}")


class SweptServer:
    """A server that runs while combinations of benchmark flags are measured."""

    def __init__(self, command: Sequence[str], *, after_bench: str | None, show_stdout: bool) -> None:
        self._after_bench = after_bench
        self._output = None if show_stdout else subprocess.DEVNULL
        host = _value_of(command, "--host") or "127.0.0.1"
        port = _value_of(command, "--port") or "8000"
        address = "127.0.0.1" if host in ("0.0.0.0", "localhost") else host
        self.client = ApiClient(f"http://{address}:{port}", API_KEY.read())
        with contextlib.suppress(ApiError):
            self.client.text("/health")
            raise ConfigError("--serve-cmd", f"another server answers on port {port}; add another --port")
        environ = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}  # The route /reset_prefix_cache needs this.
        try:
            self._process = subprocess.Popen(command, stdout=self._output, env=environ, start_new_session=True)
        except OSError as error:
            raise ConfigError("--serve-cmd", f"{command[0]}: {error.strerror}") from None

    def wait_until_ready(self, seconds: float) -> None:
        """Raises PagodaError if the server ends, or is not ready in time."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(ApiError):
                self.client.text("/health")
                return
            if self._process.poll() is not None:
                raise PagodaError(f"the server ended with status {self._process.returncode}; --show-stdout shows why")
            if time.monotonic() >= end:
                raise PagodaError(f"the server is not ready after {seconds:g} s; raise --server-ready-timeout")
            time.sleep(_POLL_SECONDS)

    def run(self, command: Sequence[str]) -> None:
        """Run a benchmark, then the command after it. Raises PagodaError if it fails."""
        run_command(command, self._output)
        if self._after_bench is not None:
            run_command(shlex.split(self._after_bench), self._output)
            return
        try:
            self.client.post("/reset_prefix_cache")
        except ApiError as error:
            raise PagodaError(
                f"the prefix cache cannot be reset ({error}); set --after-bench-cmd, to true for none"
            ) from None

    def stop(self) -> None:
        """End the server and the processes that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)


def run_command(command: Sequence[str], output: int | None) -> None:
    """Raises PagodaError if the command fails or does not exist."""
    try:
        completed = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise PagodaError(f"{command[0]}: {error.strerror}") from None
    if completed.returncode:
        lines = [line.strip() for line in completed.stderr.splitlines() if line.strip()]
        raise PagodaError(
            f"{shlex.join(command)} ended with status {completed.returncode}: {lines[-1] if lines else ''}"
        )


@contextlib.contextmanager
def swept_server(
    config: SweepConfig, serve: SweepServeConfig, flags: Combination, *, needed: bool
) -> Iterator[SweptServer | None]:
    """Start the server with flags and wait until it is ready; None if it is not needed or for a dry run."""
    command = flags.applied(shlex.split(serve.serve_cmd or ""))
    if config.dry_run:
        print(f"server: {shlex.join(command)}")
    if config.dry_run or not needed:
        yield None
        return
    print(f"server: {flags.as_text()}", flush=True)
    server = SweptServer(command, after_bench=serve.after_bench_cmd, show_stdout=config.show_stdout)
    try:
        server.wait_until_ready(serve.server_ready_timeout)
        yield server
    finally:
        server.stop()


def measure_combination(
    experiment: Experiment,
    serve: SweepServeConfig,
    server: SweptServer | None,
    folder: Path,
    flags: tuple[Combination, Combination],
) -> list[dict[str, Any]]:
    """Return the results of the runs of a combination of server and benchmark flags. Raises PagodaError."""
    server_flags, bench_flags = flags
    command = bench_flags.applied(shlex.split(serve.bench_cmd or ""))
    if experiment.config.dry_run:
        print(f"  {experiment.config.num_runs} x {shlex.join(command)}\n    results: {folder}")
        return []

    def run(path: Path, more: Combination = NO_FLAGS) -> None:
        if server is None:
            raise PagodaError(f"{path} is missing")
        words = ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-dir", str(path.parent)]
        server.run([*more.applied(command), *words, "--result-filename", path.name])

    print(f"  benchmark: {bench_flags.as_text()}", flush=True)
    if serve.warmup_num_prompts and not (folder / SUMMARY).exists():
        folder.mkdir(parents=True, exist_ok=True)
        run(folder / "warmup.json", Combination("", {"num_prompts": serve.warmup_num_prompts}))
    facts = {**server_flags.values, **bench_flags.values}
    return experiment.runs(folder, facts, run, tolerant=serve.continue_on_error)


def is_measured(experiment: Experiment, folder: Path) -> bool:
    """True if all runs of a combination have results."""
    return all((folder / f"run={number}.json").exists() for number in range(experiment.config.num_runs))


def pairs_to_run(
    server_flags: Combination, bench_params: Sequence[Combination], serve: SweepServeConfig
) -> list[Combination]:
    """Return the benchmark flags that run with some server flags."""
    return [bench_flags for bench_flags in bench_params if linked(server_flags, bench_flags, serve.link_vars)]


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises PagodaError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise PagodaError(f"the benchmark wrote no results to {path}") from None
    if not isinstance(value, dict):
        raise PagodaError(f"{path} is not a JSON object")
    return value


def write_json(path: Path, value: object) -> None:
    """Write a JSON file whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")
    part.replace(path)


def _value_of(command: Sequence[str], flag: str) -> str | None:
    for index, word in enumerate(command):
        if word == flag and index + 1 < len(command):
            return command[index + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None
