"""A child that crashes, hangs or outgrows its memory fails one request; the next one gets a new child."""

from __future__ import annotations

import os
import resource
import signal
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from support.suite.rows import each_row
from support.suite.watching import Children, gone

from pagoda.server.processing.workers import worker as module
from pagoda.server.processing.workers.worker import ChildWorker, WorkerEndedError, WorkerTimeoutError

HANDLE = """
def handle(data):
    global served
    word, _, number = data.decode().partition(" ")
    served += 1
    if word == "exit":
        os._exit(int(number))
    if word == "exit_if_used" and served > 1:
        os._exit(3)
    if word == "spin":
        while True:
            pass
    if word == "hang":
        signal.pause()
    if word == "allocate":
        bytearray(int(number))
    if word == "print":
        print("not a reply")
    if word == "secrets":
        status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
        return " ".join([status["NoNewPrivs"].strip(), *sorted(os.environ)]).encode()
    if word == "stack":
        handle(data)
    return data + f" {served}".encode()
"""


def worker_of(folder: Path, *, seconds: float = 60, elapsed: float = 60) -> ChildWorker:
    path = folder / "child.py"
    head = "import os, signal, sys\nfrom pagoda.server.processing.workers.worker import serve\nserved = 0\n"
    path.write_text(head + textwrap.dedent(HANDLE) + f"serve(lambda setup: handle, {64 << 20})\n")
    return ChildWorker((sys.executable, "-P", str(path)), seconds, elapsed)


def test_replies_of_any_size(tmp_path: Path) -> None:
    worker = worker_of(tmp_path)
    for size in (0, 1, 100_000, 5_000_000):
        assert worker.call(b"x" * size).startswith(b"x" * size)
    assert worker.call(b"print").endswith(b" 5")
    worker.close()


@each_row(
    ("request_", "out_of_time"),
    [(b"exit 0", False), (b"exit 9", False), (b"allocate 200000000", False), (b"spin", True)],
)
def test_a_child_that_ends_fails_one_request(tmp_path: Path, request_: bytes, out_of_time: bool) -> None:
    worker = worker_of(tmp_path, seconds=0.3)
    with pytest.raises(WorkerEndedError) as caught:
        worker.call(request_)
    assert caught.value.out_of_time is out_of_time
    assert worker.call(b"next") == b"next 1"
    worker.close()


def test_memory_is_limited_beyond_what_the_child_has_at_the_start(tmp_path: Path) -> None:
    worker = worker_of(tmp_path)
    assert worker.call(b"allocate 40000000") == b"allocate 40000000 1"
    limit = resource.prlimit(worker.pid or 0, resource.RLIMIT_AS)[0]
    assert 64 << 20 < limit < 1 << 30
    worker.close()


def test_a_crash_of_a_used_child_is_tried_once_more_in_a_new_one(tmp_path: Path) -> None:
    worker = worker_of(tmp_path)
    assert worker.call(b"first") == b"first 1"
    first = worker.pid
    assert worker.call(b"exit_if_used") == b"exit_if_used 1"
    assert worker.pid != first
    with pytest.raises(WorkerEndedError):
        worker.call(b"exit 1")
    worker.close()


def test_a_child_that_is_out_of_time_is_not_tried_again(tmp_path: Path) -> None:
    young = Children()
    worker = worker_of(tmp_path, seconds=0.2)
    worker.call(b"first")
    with pytest.raises(WorkerEndedError):
        worker.call(b"spin")
    assert worker.pid is None
    assert young() == []
    worker.close()


def test_a_child_that_does_not_reply_is_ended(tmp_path: Path) -> None:
    young = Children()
    worker = worker_of(tmp_path, elapsed=0.3)
    worker.start()
    with pytest.raises(WorkerTimeoutError):
        worker.call(b"hang")
    assert young() == []
    worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="privileges are read in /proc")
def test_the_child_has_no_secrets_and_gains_no_privileges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lib")
    worker = worker_of(tmp_path)
    no_new_privileges, *names = worker.call(b"secrets").decode().split()
    assert no_new_privileges == "1"
    assert {*names} - {"LC_CTYPE"} == {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH"}  # Python sets LC_CTYPE itself
    worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read in /proc")
def test_a_stopped_child_is_replaced_within_the_limit_of_its_request(tmp_path: Path) -> None:
    worker = worker_of(tmp_path, seconds=0.2)
    worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    assert worker.call(b"x") == b"x 1"
    worker.close()


def test_closing_ends_a_request_in_flight(tmp_path: Path) -> None:
    worker = worker_of(tmp_path)
    worker.start()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            worker.call(b"hang")
        except (WorkerEndedError, RuntimeError) as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    worker.close()
    thread.join(60)
    assert len(errors) == 1
    with pytest.raises(RuntimeError, match="closed"):
        worker.call(b"x")


def test_the_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    worker = worker_of(tmp_path)
    worker.start()
    pid = worker.pid
    assert pid is not None
    del worker
    assert gone(pid)


def test_a_child_starts_with_more_open_files_than_select_can_watch(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    worker = worker_of(tmp_path)
    try:
        assert worker.call(b"x") == b"x 1"
    finally:
        worker.close()
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_program_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.5)
    for code in ("pass", "import signal; signal.pause()"):
        worker = ChildWorker((sys.executable, "-c", code), 60, 60, name="test")
        with pytest.raises(RuntimeError, match="the process of the test did not start"):
            worker.call(b"x")
        worker.close()
