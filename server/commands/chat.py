"""`pagoda chat`: a conversation with a running server."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from pagoda.common.config.client import ChatConfig, ClientConfig
from pagoda.common.config.commands import OWN_SETTINGS
from pagoda.common.config.table import build
from pagoda.server.commands.http_client import ApiClient
from pagoda.server.commands.terminal import Said, connect, said_lines, show
from pagoda.server.settings.client_args import settle_flags
from pagoda.server.settings.flags import FlagParser, add_settings

SETTINGS: Final = OWN_SETTINGS["chat"]


def add_arguments(parser: FlagParser) -> None:
    """Flags of the command."""
    add_settings(parser, SETTINGS.values())


def run(args: argparse.Namespace) -> int:
    """Talk until the end of the input, or once with --quick. Raises ApiError."""
    values = settle_flags(args, SETTINGS)
    config: ClientConfig = build(ClientConfig, values, SETTINGS.values())
    begin: ChatConfig = build(ChatConfig, values, SETTINGS.values())
    client, model = connect(config)
    messages = [{"role": "system", "content": begin.system_prompt}] if begin.system_prompt else []
    for line in said_lines(config):
        messages.append({"role": "user", "content": line})
        answer = show(_answer(client, model, messages, config.max_tokens))
        messages.append({"role": "assistant", "content": answer})
    return 0


def _answer(client: ApiClient, model: str, messages: list[dict[str, str]], max_tokens: int | None) -> Iterator[Said]:
    """What is said, and the thinking before it."""
    body: dict[str, object] = {"model": model, "messages": messages}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    for event in client.stream("/chat/completions", body):
        for choice in event["choices"]:
            delta = choice["delta"]
            yield Said(delta.get("reasoning") or "", aside=True)
            yield Said(delta.get("content") or "")
