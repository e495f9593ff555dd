"""What `pagoda chat` and `pagoda complete` share: the connection, messages typed on a terminal, answers shown there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Final

from pagoda.common.config.commands import ClientConfig
from pagoda.common.config.env import CLIENT_API_KEY
from pagoda.server.cli.client.http_client import ApiClient, ApiError

PROMPT: Final = "> "
CONTINUATION: Final = "... "
BLOCK: Final = '"""'
MAX_HISTORY: Final = 1_000  # Number of lines.

_COMMAND: Final = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL)

_KEYS: Final = f"""\
  {BLOCK}text{BLOCK}       a message of several lines; a line that ends with \\ is continued too
  Ctrl-C          stops the answer, or discards the line
  Ctrl-D, /exit   ends the program"""


def connect(config: ClientConfig) -> tuple[ApiClient, str]:
    """Return a client of the server and the name of the model. Raises ApiError or ConfigError."""
    client = ApiClient(config.url, config.api_key or CLIENT_API_KEY.read())
    if config.model_name:
        return client, config.model_name
    names = client.models()
    if not names:
        raise ApiError(f"{config.url}: the server lists no models")
    return client, names[0]


@dataclass(frozen=True, slots=True)
class TerminalCommand:
    """A command such as `/system TEXT`, and what it does with its text."""

    usage: str
    help: str
    run: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TerminalReply:
    """A piece of an answer."""

    text: str
    reasoning: bool = False


class CtrlC:
    """Ctrl-C of an interactive program: one KeyboardInterrupt within `with ctrl_c:`, no effect elsewhere.

    A second one, while the first is handled, therefore does not end the program.
    """

    def __init__(self) -> None:
        self._raises = False

    def __enter__(self) -> None:
        self._raises = True

    def __exit__(self, *_: object) -> None:
        self._raises = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT in this context, which the main thread enters."""
        previous = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt


class Dialog:
    """A dialog with a user, whose messages are the text of --quick, or standard input, line by line.

    On a terminal lines are edited and kept in a history, messages may have several lines, and commands are run.
    """

    def __init__(self, config: ClientConfig, commands: Mapping[str, TerminalCommand] | None = None) -> None:
        self._quick = config.quick
        self.interactive = config.quick is None and sys.stdin.isatty()
        self._ctrl_c = CtrlC()
        help_command = TerminalCommand("/help", "lists the commands", lambda _: print(self._help()))
        self._commands = {"/help": help_command, **(commands or {})}

    def messages(self) -> Iterator[str]:
        """Yield each message that is not empty, until the end of the input."""
        if self._quick is not None:
            yield self._quick
        elif self.interactive:
            with _editing(), self._ctrl_c.installed():
                yield from self._typed()
        else:
            yield from filter(str.strip, _lines())

    def show(self, pieces: Iterable[TerminalReply]) -> str | None:
        """Print pieces as they arrive, reasoning dimmed. Return the content without reasoning.

        On a terminal Ctrl-C stops the answer, and an error is printed; None if it came before any content.
        """
        content: list[str] = []
        if not self.interactive:
            _print_pieces(pieces, content)
            return "".join(content)
        try:
            with self._ctrl_c:
                _print_pieces(pieces, content)
        except KeyboardInterrupt:
            print("(stopped)")
        except ApiError as error:
            print(f"error: {error}")
        else:
            return "".join(content)
        return "".join(content) or None

    def _typed(self) -> Iterator[str]:
        while True:
            try:
                with self._ctrl_c:
                    message = read_message()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends the program)")
                continue
            command = _COMMAND.fullmatch(message.strip())
            if command is not None:
                if command[1] in ("/exit", "/quit", "/bye"):
                    return
                self._run(command[1], (command[2] or "").strip())
            elif message.strip():
                yield message

    def _run(self, name: str, text: str) -> None:
        if name in self._commands:
            self._commands[name].run(text)
        else:
            print(f"there is no command {name}; /help lists them")

    def _help(self) -> str:
        return "\n".join([*(f"  {command.usage:<16}{command.help}" for command in self._commands.values()), _KEYS])


def read_message() -> str:
    """Return a typed message. Raises EOFError at the end of the input."""
    line = input(PROMPT)
    if line.lstrip().startswith(BLOCK):
        return _read_block(line.lstrip().removeprefix(BLOCK))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(CONTINUATION))
    return "\n".join(lines)


def _read_block(line: str) -> str:
    """Return the lines up to the one that ends with BLOCK."""
    lines = [line]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(input(CONTINUATION))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")


def _lines() -> Iterator[str]:
    with contextlib.suppress(EOFError):
        while True:
            yield input()


@contextlib.contextmanager
def _editing() -> Iterator[None]:
    """A context in which `input` edits lines and has the history of earlier runs, where Python has readline."""
    try:
        readline: Any = import_module("readline")
    except ImportError:
        yield
        return
    path = history_path()
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(MAX_HISTORY)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


def history_path() -> Path:
    """Return the file of the lines typed before."""
    folder = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(folder) / "pagoda" / "history"


def _print_pieces(pieces: Iterable[TerminalReply], content: list[str]) -> None:
    dim, bright = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    reasoning = printed = False
    try:
        for piece in pieces:
            if not piece.text:
                continue
            if piece.reasoning != reasoning:
                reasoning = piece.reasoning
                print(dim if reasoning else f"{bright}\n\n", end="")
            if not reasoning:
                content.append(piece.text)
            print(piece.text, end="", flush=True)
            printed = True
    except BaseException:
        print(bright if reasoning else "", end="\n" if printed else "")
        raise
    print(bright if reasoning else "")
