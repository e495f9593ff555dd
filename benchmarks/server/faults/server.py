"""A real `pagoda serve` and measurements of all of its processes."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

START_SECONDS: Final = 180
ENGINE_MODULE: Final = "core_client.engine"
DESCRIPTORS: Final = 20_000
CACHE: Final = ("--kv-cache-memory-bytes", str(256 << 20))
"""Pages of the KV cache become resident when they are first used: with a small one that growth ends soon."""


@dataclass(frozen=True)
class Usage:
    """Resources of all processes of a server."""

    memory: float  # MB, resident
    threads: int
    descriptors: int


class Server:
    """One server, started with `flags` and, by default, on a free port."""

    def __init__(self, model: str, *flags: str, log: Path) -> None:
        self.port = _free_port()
        _raise_descriptor_limit()
        words = [sys.executable, "-m", "pagoda.server.cli.main", "serve", model, "--served-model-name", "m"]
        self._log_path = log
        with log.open("ab") as file:
            file.write(f"\n# {' '.join(words)} {' '.join(flags)}\n".encode())
            self.process = subprocess.Popen(
                [*words, "--port", str(self.port), *flags], stdout=file, stderr=file, start_new_session=True
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.health(5) != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {self.log_tail()}")
            time.sleep(0.1)

    def log_tail(self, size: int = 400) -> str:
        """Return the end of the log."""
        return self._log_path.read_text(errors="replace")[-size:]

    def log_size(self) -> int:
        """Size of the log so far, in bytes."""
        return self._log_path.stat().st_size

    def pids(self) -> list[int]:
        """The server's process and all of its descendants."""
        children: dict[int, list[int]] = {}
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
        pids, i = [self.process.pid], 0
        while i < len(pids):
            pids += children.get(pids[i], [])
            i += 1
        return pids

    def pids_of(self, module: str) -> list[int]:
        """Return the ids of the server's processes whose command line names a module."""
        found = []
        for pid in self.pids():
            with suppress(OSError):
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def engine_pid(self) -> int:
        """Process id of the engine."""
        found = self.pids_of(ENGINE_MODULE)
        if not found:
            raise RuntimeError("the server has no engine process")
        return found[0]

    def memory_of(self, pid: int) -> float:
        """Return the resident memory of one process in MB; 0 if it has ended."""
        with suppress(OSError):
            kib = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
            return int(kib[1]) / 1024 if kib else 0.0
        return 0.0

    def usage(self) -> Usage:
        """Sum the resources of all processes."""
        memory = threads = descriptors = 0
        for pid in self.pids():
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                kib = re.search(r"VmRSS:\s+(\d+)", status)
                memory += int(kib[1]) if kib else 0
                threads += int(re.search(r"Threads:\s+(\d+)", status)[1])  # type: ignore[index]
                descriptors += len(os.listdir(f"/proc/{pid}/fd"))
        return Usage(memory / 1024, threads, descriptors)

    def health(self, timeout: float = 2.0, path: str = "/health") -> int | str:
        """Return the status of a probe, or the name of the error that it met."""
        try:
            return self.request("GET", path, timeout=timeout)[0]
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__

    def request(
        self, method: str, path: str, body: bytes | dict[str, Any] | None = None, *, key: str = "", timeout: float = 60
    ) -> tuple[int, bytes]:
        """Return status and body of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused before the body was complete
                connection.request(method, path, data, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """Return the sum of a metric's series."""
        text = self.request("GET", "/metrics")[1].decode()
        return sum(map(float, re.findall(rf"^{re.escape(name)}(?:\{{.*?\}})? (\S+)$", text, re.MULTILINE)))

    def metric_by(self, name: str, label: str) -> dict[str, float]:
        """Return a metric's sums by the values of one label."""
        text = self.request("GET", "/metrics")[1].decode()
        sums: dict[str, float] = {}
        for labels, value in re.findall(rf"^{re.escape(name)}\{{(.*?)\}} (\S+)$", text, re.MULTILINE):
            found = re.search(rf'{label}="(.*?)"', labels)
            if found:
                sums[found[1]] = sums.get(found[1], 0.0) + float(value)
        return sums

    def wait_for_exit(self, seconds: float) -> int | None:
        """Return the exit status; None if it is still running after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def stop(self) -> None:
        """End all processes."""
        pids = self.pids()
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        self.process.terminate()
        if self.wait_for_exit(5) is None:
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def serving(model: str, *flags: str, log: Path) -> Iterator[Server]:
    """Run a server."""
    server = Server(model, *flags, log=log)
    try:
        yield server
    finally:
        server.stop()


class MemoryProbe:
    """Context manager that samples the memory of a server. `growth`: peak growth since the start, in MB."""

    def __init__(self, server: Server, seconds: float = 0.1) -> None:
        self._server, self._seconds = server, seconds
        self.first = self.peak = server.usage().memory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def growth(self) -> float:
        """Peak growth, in MB."""
        return self.peak - self.first

    def _sample(self) -> None:
        while not self._stop.wait(self._seconds):
            self.peak = max(self.peak, self._server.usage().memory)

    def __enter__(self) -> MemoryProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class HealthProbe:
    """Context manager that asks for /health every `seconds`.

    `longest`: the longest wait, in seconds; `failures`: answers that are not 200.
    """

    def __init__(self, server: Server, seconds: float = 0.02) -> None:
        self._server = server
        self._seconds = seconds
        self.longest = 0.0
        self.failures: list[int | str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._probe, daemon=True)

    def _probe(self) -> None:
        while not self._stop.wait(self._seconds):
            begin = time.monotonic()
            status = self._server.health(30)
            self.longest = max(self.longest, time.monotonic() - begin)
            if status != 200:
                self.failures.append(status)

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def accepts_flag(flag: str) -> bool:
    """Return whether `pagoda serve` has this flag."""
    words = [sys.executable, "-m", "pagoda.server.cli.main", "serve", f"--help={flag}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode == 0 and flag in done.stdout


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _raise_descriptor_limit() -> None:
    """Allow this process and the servers that it starts as many descriptors as the sockets row opens."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
