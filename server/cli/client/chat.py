"""`pagoda chat`: a conversation with a running server."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from pagoda.common.config.commands import OWN_SETTINGS, ChatConfig, ClientConfig
from pagoda.common.config.settings import build
from pagoda.server.cli.client.http_client import ApiClient
from pagoda.server.cli.client.terminal import Dialog, TerminalCommand, TerminalReply, connect
from pagoda.server.settings.flags import resolve_flags

SETTINGS: Final = OWN_SETTINGS["chat"]


def run(args: argparse.Namespace) -> int:
    """Chat until the end of the input, or once with --quick. Returns 0. Raises ApiError."""
    values = resolve_flags(args, SETTINGS)
    config = build(ClientConfig, values)
    chat = build(ChatConfig, values)
    client, model = connect(config)
    talk = TerminalConversation(chat.system_prompt or "")
    dialog = Dialog(config, talk.commands())
    if dialog.interactive:
        print(f"{model} at {config.url}; /help lists the commands")
    for message in dialog.messages():
        pieces = _answer(client, model, talk.with_message(message), config.max_tokens)
        answer = dialog.show(pieces)
        if answer is not None:
            talk.add(message, answer)
    return 0


class TerminalConversation:
    """The system prompt, and the messages that were answered."""

    def __init__(self, system_prompt: str) -> None:
        self._system_prompt = system_prompt
        self._messages: list[dict[str, str]] = []

    def with_message(self, text: str) -> list[dict[str, str]]:
        """Return the messages of a request that continues the conversation with `text`."""
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return [*system, *self._messages, {"role": "user", "content": text}]

    def add(self, text: str, answer: str) -> None:
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def commands(self) -> dict[str, TerminalCommand]:
        return {
            "/clear": TerminalCommand("/clear", "starts a new conversation", self._clear),
            "/system": TerminalCommand("/system [TEXT]", "sets the system prompt, or removes it", self._set_system),
        }

    def _clear(self, text: str) -> None:
        self._messages.clear()
        print("the conversation is empty")

    def _set_system(self, text: str) -> None:
        self._system_prompt = text
        print("the system prompt is set" if text else "there is no system prompt")


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
