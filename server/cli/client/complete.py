"""`pagoda complete`: text completions from a running server."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from pagoda.common.config.commands import OWN_SETTINGS, ClientConfig
from pagoda.common.config.settings import build
from pagoda.server.cli.client.http_client import ApiClient
from pagoda.server.cli.client.terminal import Dialog, TerminalReply, connect
from pagoda.server.settings.flags import resolve_flags

SETTINGS: Final = OWN_SETTINGS["complete"]


def run(args: argparse.Namespace) -> int:
    """Complete each text of the input, or the text of --quick. Returns 0. Raises ApiError."""
    config = build(ClientConfig, resolve_flags(args, SETTINGS))
    client, model = connect(config)
    dialog = Dialog(config)
    if dialog.interactive:
        print(f"{model} at {config.url}; /help lists the commands")
    for prompt in dialog.messages():
        dialog.show(_completion(client, model, prompt, config.max_tokens))
    return 0


def _completion(client: ApiClient, model: str, prompt: str, max_tokens: int | None) -> Iterator[TerminalReply]:
    body: dict[str, object] = {"model": model, "prompt": prompt}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    for event in client.stream("/completions", body):
        for choice in event["choices"]:
            yield TerminalReply(choice["text"])
