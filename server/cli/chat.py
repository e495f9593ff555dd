"""`pagoda chat`: a conversation with a running server."""

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
from pagoda.server.settings.args import resolve_flags
from pagoda.server.settings.flags import FlagParser, add_settings

# What `chat` and `complete` share: the server and model to ask, and a loop over lines that a person types.


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
class TerminalReply:
    """A piece of an answer. `aside`: it is shown, but it is not what was answered."""

    text: str
    aside: bool = False


def show(pieces: Iterable[TerminalReply]) -> str:
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


SETTINGS: Final = OWN_SETTINGS["chat"]


def add_arguments(parser: FlagParser) -> None:
    """Flags of the command."""
    add_settings(parser, SETTINGS.values())


def run(args: argparse.Namespace) -> int:
    """Talk until the end of the input, or once with --quick. Raises ApiError."""
    values = resolve_flags(args, SETTINGS)
    config: ClientConfig = build(ClientConfig, values, SETTINGS.values())
    begin: ChatConfig = build(ChatConfig, values, SETTINGS.values())
    client, model = connect(config)
    messages = [{"role": "system", "content": begin.system_prompt}] if begin.system_prompt else []
    for line in said_lines(config):
        messages.append({"role": "user", "content": line})
        answer = show(_answer(client, model, messages, config.max_tokens))
        messages.append({"role": "assistant", "content": answer})
    return 0


def _answer(
    client: ApiClient, model: str, messages: list[dict[str, str]], max_tokens: int | None
) -> Iterator[TerminalReply]:
    """What is said, and the thinking before it."""
    body: dict[str, object] = {"model": model, "messages": messages}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    for event in client.stream("/chat/completions", body):
        for choice in event["choices"]:
            delta = choice["delta"]
            yield TerminalReply(delta.get("reasoning") or "", aside=True)
            yield TerminalReply(delta.get("content") or "")
