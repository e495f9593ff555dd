"""`pagoda complete`: text completions from a running server."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from pagoda.server.flags import FlagParser
from pagoda.server.http_client import ApiClient
from pagoda.server.terminal import add_client_arguments, connect, show, typed_lines


def add_arguments(parser: FlagParser) -> None:
    """Flags of the command."""
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Complete line by line until the end of the input, or one text with --quick. Raises ApiError."""
    client, model = connect(args)
    for line in typed_lines() if args.quick is None else [args.quick]:
        show(_completion(client, model, line, args.max_tokens))
    return 0


def _completion(client: ApiClient, model: str, prompt: str, max_tokens: int | None) -> Iterator[str]:
    body: dict[str, object] = {"model": model, "prompt": prompt}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    for event in client.stream("/completions", body):
        for choice in event["choices"]:
            yield choice["text"]
