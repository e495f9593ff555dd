"""Forked programs behave as those with an interpreter of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.suite import fork_server

PROGRAM = (sys.executable, "-P", str(Path(__file__).parents[2] / "support" / "suite" / "forked_program.py"))
KINDS = {"forked": subprocess.Popen, "fresh": fork_server.FreshPopen}


@pytest.fixture(params=KINDS)
def start(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


def test_files_folder_environment_and_group_are_those_that_were_asked_for(start: Any, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = start(
        [*PROGRAM, "describe", str(writing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"GIVEN": "x"},
        pass_fds=[writing],
        process_group=0,
        text=True,
    )
    os.close(writing)
    out, err = process.communicate("typed")
    assert err == "typed\n"
    pid, parent, group, folder, given, name, path = out.split()
    assert (int(pid), int(parent), int(group)) == (process.pid, os.getpid(), process.pid)
    assert (folder, given, name) == (str(tmp_path), "x", "__main__")
    assert path != str(Path(PROGRAM[2]).parent), "-P"
    assert os.read(reading, 10) == b"passed"
    assert os.read(reading, 10) == b"", "nobody else holds the other end"
    os.close(reading)


@pytest.mark.parametrize(("word", "status", "text"), [("3", 3, ""), ("0", 0, ""), ("words", 1, "words\n")])
def test_exit_status(start: Any, word: str, status: int, text: str) -> None:
    with start([*PROGRAM, "exit", word], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.read() == text
    assert process.returncode == status


def test_an_exception_ends_it_with_a_traceback(start: Any) -> None:
    with start([*PROGRAM, "fail"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.read().endswith("ValueError: it failed\n")
    assert process.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it(start: Any, number: int) -> None:
    with start([*PROGRAM, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait() == -number


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGHUP])
def test_signals_have_the_same_handlers(number: int | None) -> None:
    """Those that this process ignores are ignored in both, as an interrupt is in the background of a shell."""
    usual = None if number is None else signal.signal(number, signal.SIG_IGN)
    try:
        handlers = [start([*PROGRAM, "signals"], stdout=subprocess.PIPE).communicate()[0] for start in KINDS.values()]
    finally:
        if number is not None:
            signal.signal(number, usual)
    assert handlers[0] == handlers[1] != b""


def test_a_program_may_start_programs(start: Any) -> None:
    out = start([*PROGRAM, "start"], stdout=subprocess.PIPE, text=True).communicate()[0]
    status, has_torch = out.split()
    assert status == "7"
    assert has_torch == str(start is not fork_server.FreshPopen), "imported by the fork server, or not at all"
