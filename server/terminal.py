"""What `chat` and `complete` share: their flags, the model to ask, and a loop over lines that a person types."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from pagoda.common.config.env import CLIENT_API_KEY
from pagoda.server.flags import FlagParser
from pagoda.server.http_client import ApiClient, ApiError


def add_client_arguments(parser: FlagParser) -> None:
    """Flags that say which server and model to ask."""
    parser.add_argument("--url", default="http://localhost:8000/v1", help="Base address of the server.")
    parser.add_argument("--model-name", help="Model to ask; default: the first that the server lists.")
    parser.add_argument("--api-key", help=f"Key to present; default: the environment's {CLIENT_API_KEY.name}.")
    parser.add_argument("--max-tokens", type=int, help="Most tokens of an answer; default: the server's.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Send this one text, print the answer and exit.")


def connect(args: argparse.Namespace) -> tuple[ApiClient, str]:
    """The server and the model to ask. Raises ApiError or ConfigError."""
    client = ApiClient(args.url, args.api_key or CLIENT_API_KEY.read())
    if args.model_name:
        return client, args.model_name
    names = client.models()
    if not names:
        raise ApiError(f"{args.url}: the server lists no model")
    return client, names[0]


def typed_lines() -> Iterator[str]:
    """Lines that a person types, until the end of the input; empty ones are left out."""
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
