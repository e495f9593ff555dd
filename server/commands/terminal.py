"""What `chat` and `complete` share: the server and model to ask, and a loop over lines that a person types."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pagoda.common.config.client import ClientConfig
from pagoda.common.config.env import CLIENT_API_KEY
from pagoda.server.commands.http_client import ApiClient, ApiError


def connect(config: ClientConfig) -> tuple[ApiClient, str]:
    """The server and the model to ask. Raises ApiError or ConfigError."""
    client = ApiClient(config.url, config.api_key or CLIENT_API_KEY.read())
    if config.model_name:
        return client, config.model_name
    names = client.models()
    if not names:
        raise ApiError(f"{config.url}: the server lists no model")
    return client, names[0]


def said_lines(config: ClientConfig) -> Iterator[str]:
    """The one text of --quick, or the lines that a person types until the end of the input, without empty ones."""
    if config.quick is not None:
        yield config.quick
        return
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of an answer. `aside`: it is shown, but it is not what was answered."""

    text: str
    aside: bool = False


def show(pieces: Iterable[Said]) -> str:
    """Print pieces as they come, asides dimmed and apart; all that is no aside as one text."""
    said: list[str] = []
    dim, bright = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    aside = False
    for piece in pieces:
        if not piece.text:
            continue
        if piece.aside != aside:
            aside = piece.aside
            print(dim if aside else f"{bright}\n\n", end="")
        if not aside:
            said.append(piece.text)
        print(piece.text, end="", flush=True)
    print(bright if aside else "")
    return "".join(said)
