"""chat and complete on a pseudo-terminal: editing, history, several lines, commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.watching import eventually

from pagoda.server.cli import main
from pagoda.server.cli.client.http_client import ApiClient

CTRL_C, CTRL_D, LEFT, UP = "\x03", "\x04", "\x1b[D", "\x1b[A"
PROMPT = "> "


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def until(self, text: str) -> str:
        """What was printed up to and including `text`."""
        assert self._wait(text, 60), f"no {text!r} in {self._read!r}"
        shown, _, self._read = self._read.partition(text)
        return shown + text

    def discard_line(self) -> None:
        """Press Ctrl-C at a prompt until it is answered: readline misses a signal that comes before it waits."""
        for _ in range(60):
            self.type(CTRL_C)
            if self._wait("(Ctrl-D ends the program)\n> ", 2):
                break
        self.until("(Ctrl-D ends the program)\n> ")

    def _wait(self, text: str, seconds: float) -> bool:
        """True if `text` is printed within this time."""
        deadline = time.monotonic() + seconds
        while text not in self._read:
            if not select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            try:
                data = os.read(self._descriptor, 65536).decode()
            except OSError:
                data = ""
            assert data, f"the program ended after {self._read!r}"
            self._read += re.sub(r"\x1b\[\?2004[hl]|\r", "", data)
        return True


@contextmanager
def terminal(server: LiveServer, home: Path, command: str = "chat", *flags: str) -> Iterator[Terminal]:
    """The command on a terminal; it must end with status 0 by itself."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "pagoda.server.cli.main", command, "--url", f"{server.url}/v1", *flags]
    process = subprocess.Popen(
        words,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: _own(theirs),
        env=os.environ | {"XDG_STATE_HOME": str(home), "TERM": "xterm", "PYTHONUNBUFFERED": "1"},
    )
    os.close(theirs)
    try:
        yield Terminal(ours)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _own(descriptor: int) -> None:
    """Make the pseudo-terminal the controlling one, so that Ctrl-C becomes a signal."""
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


def test_lines_are_edited_and_kept(server: LiveServer, tmp_path: Path) -> None:
    with terminal(server, tmp_path, "complete", "--max-tokens", "2") as page:
        page.until(PROMPT)
        page.type(f"xa{LEFT}\x7f\n")  # removes the x
        assert page.until(f"bc\n{PROMPT}")
        page.type(f"{UP}\n")
        assert page.until(f"bc\n{PROMPT}")
        page.type(CTRL_D)
    history = tmp_path / "pagoda" / "history"
    assert history.read_text() == "a\n"
    assert history.stat().st_mode & 0o777 == 0o600
    with terminal(server, tmp_path, "complete", "--max-tokens", "2") as page:
        page.until(PROMPT)
        page.type(f"{UP}\n")
        assert page.until(f"bc\n{PROMPT}")
        page.type("/exit\n")


def test_commands_and_messages_of_several_lines(server: LiveServer, tmp_path: Path) -> None:
    with live_server("fake:say") as saying, terminal(saying, tmp_path) as page:
        page.until(PROMPT)
        page.type("/help\n")
        shown = page.until(f"\n{PROMPT}")
        for name in ("/help", "/clear", "/system [TEXT]", "Ctrl-C", "Ctrl-D"):
            assert name in shown
        page.type("/nothing\n")
        assert "there is no command /nothing" in page.until(f"\n{PROMPT}")
        page.type('"""[[one\n')
        page.until("... ")
        page.type('two]]"""\n')
        assert page.until(f"one\ntwo\n{PROMPT}")
        page.type("/clear\n")
        page.until(f"empty\n{PROMPT}")
        page.type("[[a\\\n")
        page.until("... ")
        page.type("b]]\n")
        assert page.until(f"a\nb\n{PROMPT}")
        page.type(CTRL_D)


def test_the_system_prompt_and_the_conversation(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[str]] = []
    left = iter(["one", "two", "/clear", "/system T", "three", "/system", "four", "/quit", "five"])
    real_stream = ApiClient.stream

    def stream(client: ApiClient, path: str, body: dict[str, Any]) -> Iterator[Any]:
        sent.append([f"{each['role'][0]}:{each['content']}" for each in body["messages"]])
        return real_stream(client, path, body)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(ApiClient, "stream", stream)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt="": next(left))
    words = ["chat", "--url", f"{server.url}/v1", "--max-tokens", "1", "--system-prompt", "S"]
    assert main.main(words) == 0
    assert sent == [
        ["s:S", "u:one"],
        ["s:S", "u:one", "a:;", "u:two"],
        ["s:T", "u:three"],
        ["u:three", "a:;", "u:four"],
    ]


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    with live_server("fake:endless") as server, terminal(server, tmp_path, "complete") as page:
        page.until(PROMPT)
        page.type("never sent")
        page.until("never sent")
        page.discard_line()
        page.type("a\n")
        page.until("bcd")
        assert server.state.running
        page.type(CTRL_C)
        page.until(f"\n(stopped)\n{PROMPT}")
        eventually(lambda: not server.state.running)
        page.type("p\n")
        page.until("bcd")
        page.type(CTRL_C)
        page.until(f"\n(stopped)\n{PROMPT}")
        page.type(CTRL_D)


@pytest.mark.parametrize("at", ["(stopped)", "the conversation is empty"])
def test_ctrl_c_between_answers_has_no_effect(
    at: str, server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a second Ctrl-C, while an answer is stopped, nor one while a command is run ends the program."""
    typed = iter(["one", "/clear", "two"])
    shown: list[str] = []

    def stream(client: ApiClient, path: str, body: dict[str, Any]) -> Iterator[Any]:
        yield {"choices": [{"delta": {"content": "b"}}]}
        signal.raise_signal(signal.SIGINT)
        yield {"choices": [{"delta": {"content": "never shown"}}]}

    def show(text: str = "", **_: Any) -> None:
        shown.append(text)
        if text == at:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(ApiClient, "stream", stream)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt="": next(typed, "/exit"))
    monkeypatch.setattr("builtins.print", show)
    before = signal.getsignal(signal.SIGINT)
    assert main.main(["chat", "--url", f"{server.url}/v1"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert shown.count("(stopped)") == 2
    assert "never shown" not in shown


def test_an_error_does_not_end_the_conversation(server: LiveServer, tmp_path: Path) -> None:
    with terminal(server, tmp_path, "chat", "--max-tokens", "1") as page:
        page.until(PROMPT)
        page.type("x" * 100 + "\n")  # the fake model's context is 64 tokens
        assert "error: " in page.until("context") + page.until(f"\n{PROMPT}")
        page.type("a\n")
        assert "error" not in page.until(f"\n{PROMPT}")
        page.type(CTRL_D)
