"""`pagoda chat`: a conversation with a running server, and what `pagoda complete` shares with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from pagoda.common.config.commands import OWN_SETTINGS, ChatConfig, ClientConfig
from pagoda.common.config.env import CLIENT_API_KEY
from pagoda.common.config.settings import build
from pagoda.server.cli.http_client import ApiClient, ApiError
from pagoda.server.settings.flags import FlagParser, add_settings, resolve_flags

SETTINGS: Final = OWN_SETTINGS["chat"]


def add_arguments(parser: FlagParser) -> None:
    add_settings(parser, SETTINGS.values())


def run(args: argparse.Namespace) -> int:
    """Chat until the end of the input, or once with --quick. Returns 0. Raises ApiError."""
    values = resolve_flags(args, SETTINGS)
    config: ClientConfig = build(ClientConfig, values, SETTINGS.values())
    chat: ChatConfig = build(ChatConfig, values, SETTINGS.values())
    client, model = connect(config)
    messages = [{"role": "system", "content": chat.system_prompt}] if chat.system_prompt else []
    for line in input_lines(config):
        messages.append({"role": "user", "content": line})
        answer = show(_answer(client, model, messages, config.max_tokens))
        messages.append({"role": "assistant", "content": answer})
    return 0


def _answer(
    client: ApiClient, model: str, messages: list[dict[str, str]], max_tokens: int | None
) -> Iterator[TerminalReply]:
    body: dict[str, object] = {"model": model, "messages": messages}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    for event in client.stream("/chat/completions", body):
        for choice in event["choices"]:
            delta = choice["delta"]
            yield TerminalReply(delta.get("reasoning") or "", reasoning=True)
            yield TerminalReply(delta.get("content") or "")


# Shared with `pagoda complete`.


def connect(config: ClientConfig) -> tuple[ApiClient, str]:
    """Return a client of the server and the name of the model. Raises ApiError or ConfigError."""
    client = ApiClient(config.url, config.api_key or CLIENT_API_KEY.read())
    if config.model_name:
        return client, config.model_name
    names = client.models()
    if not names:
        raise ApiError(f"{config.url}: the server lists no models")
    return client, names[0]


def input_lines(config: ClientConfig) -> Iterator[str]:
    """Yield the text of --quick, or each non-empty line of standard input."""
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
class TerminalReply:
    """A piece of an answer."""

    text: str
    reasoning: bool = False


def show(pieces: Iterable[TerminalReply]) -> str:
    """Print pieces as they arrive, reasoning dimmed. Returns the content without reasoning."""
    content: list[str] = []
    dim, bright = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    reasoning = False
    for piece in pieces:
        if not piece.text:
            continue
        if piece.reasoning != reasoning:
            reasoning = piece.reasoning
            print(dim if reasoning else f"{bright}\n\n", end="")
        if not reasoning:
            content.append(piece.text)
        print(piece.text, end="", flush=True)
    print(bright if reasoning else "")
    return "".join(content)
