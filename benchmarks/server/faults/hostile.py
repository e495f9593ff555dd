"""Rows of hostile input: generated requests to a real server, mutated model files to the readers."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from http.client import HTTPException
from pathlib import Path
from typing import Final

from faults.report import Options, Report
from faults.server import Server, serving

TOOLS: Final = Path(__file__).resolve().parents[3] / "tools"
FLAGS: Final = ("--max-model-len", "64", "--max-num-seqs", "16", "--enable-tokenizer-info-endpoint")
UNCAUGHT: Final = "Traceback (most recent call last)"


def hostile(options: Options) -> list[Report]:
    """Hostile requests without a 5xx, an engine's death or an uncaught error; mutated headers of each format."""
    return [_requests(options), *([_headers(options)] if options.mutants else [])]


class _Canary:
    """Context manager that sends a plain request twice a second. `failures`: how those failed that did."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.sent, self.failures, self.longest = 0, list[str](), 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            begin = time.monotonic()
            try:
                body = {"prompt": "a", "max_tokens": 3}
                status, text = self._server.request("POST", "/v1/completions", body, timeout=60)
                if status != 200:
                    self.failures.append(f"{status} {text[:100]!r}")
            except (OSError, HTTPException) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self.sent += 1
            self.longest = max(self.longest, time.monotonic() - begin)

    def __enter__(self) -> _Canary:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _requests(options: Options) -> Report:
    report = Report(f"{options.cases} hostile requests")
    log = Path(options.log_folder) / "hostile.log"
    log.unlink(missing_ok=True)  # it is searched for errors of this server
    flags = (*FLAGS, "--override-generation-config", '{"max_new_tokens": 2}', "--max-num-queued-reqs", "256")
    with serving(options.model, *flags, log=log) as server, _Canary(server) as canary:
        engine = server.engine_pid()
        words = [sys.executable, str(TOOLS / "fuzz_api.py"), f"http://127.0.0.1:{server.port}"]
        done = subprocess.run(
            [*words, "--cases", str(options.cases), "--seed", "0"], capture_output=True, text=True, check=False
        )
        summary = re.findall(r"(\d+) cases in (\d+) s, (\d+) kinds of failure", done.stdout)
        failures = done.stdout.partition("kinds of failure")[2].strip()
        report.require("no 5xx, no timeout, errors in a known format", done.returncode == 0, failures[:300] or "none")
        report.require("all requests were sent", bool(summary), summary or done.stderr[-200:])
        report.require("the engine lives", server.process.poll() is None and server.engine_pid() == engine)
        report.require("health is true", server.health(5) == 200)
    report.require(
        "canary is served throughout", not canary.failures, f"{len(canary.failures)} of {canary.sent} failed"
    )
    report.require("no uncaught error", UNCAUGHT not in log.read_text(errors="replace"))
    report.notes |= {"longest canary": round(canary.longest, 2), "failures": canary.failures[:2]}
    return report


def _headers(options: Options) -> Report:
    report = Report(f"{options.mutants} mutated headers of each format")
    tool = TOOLS / "fuzz_files.py"
    if not tool.exists():
        report.require("there is tools/fuzz_files.py", False, "missing")
        return report
    done = subprocess.run(
        [sys.executable, str(tool), "--cases", str(options.mutants)], capture_output=True, text=True, check=False
    )
    rows = re.findall(r"^(\S+)\s+(\d+) cases", done.stdout, re.MULTILINE)
    report.require("no uncaught error", done.returncode == 0, done.stdout[-400:] if done.returncode else "none")
    report.require("all formats", len(rows) >= 4, dict(rows))
    return report
