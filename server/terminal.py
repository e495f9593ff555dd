"""What `chat` and `complete` share: the server and model to ask, and a loop over lines that a person types."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pagoda.common.config.client import ClientConfig
from pagoda.common.config.env import CLIENT_API_KEY
from pagoda.server.http_client import ApiClient, ApiError


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


def show(pieces: Iterator[str]) -> str:
    """Print pieces as they come; all of them as one text."""
    said = []
    for piece in pieces:
        said.append(piece)
        print(piece, end="", flush=True)
    print()
    return "".join(said)
