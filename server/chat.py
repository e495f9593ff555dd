"""`pagoda chat`: a conversation with a running server."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from pagoda.server.flags import FlagParser
from pagoda.server.http_client import ApiClient
from pagoda.server.terminal import add_client_arguments, connect, show, typed_lines


def add_arguments(parser: FlagParser) -> None:
    """Flags of the command."""
    add_client_arguments(parser)
    parser.add_argument("--system-prompt", help="System message that begins the conversation.")


def run(args: argparse.Namespace) -> int:
    """Talk until the end of the input, or once with --quick. Raises ApiError."""
    client, model = connect(args)
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    for line in typed_lines() if args.quick is None else [args.quick]:
        messages.append({"role": "user", "content": line})
        answer = show(_answer(client, model, messages, args.max_tokens))
        messages.append({"role": "assistant", "content": answer})
    return 0


def _answer(client: ApiClient, model: str, messages: list[dict[str, str]], max_tokens: int | None) -> Iterator[str]:
    body: dict[str, object] = {"model": model, "messages": messages}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    for event in client.stream("/chat/completions", body):
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""
