"""Record the conversations and generations of a route; replace its output by a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.engines.scripted import ScriptedParser

from pagoda.common.sampling_params import SamplingParams
from pagoda.server.api.chat_prompt import ChatPrompt, Conversation
from pagoda.server.http import generation
from pagoda.server.http.state import ServerState
from pagoda.server.parsers.parser import Event


@dataclass
class Spy:
    """Recorded calls of a route, latest last. `script`: events of the next outputs.

    With a script, the prompt of every conversation is "a" and the output has one character per event.
    """

    script: Sequence[Event] | None = None
    conversations: list[Conversation] = field(default_factory=list)
    generations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def conversation(self) -> Conversation:
        return self.conversations[-1]

    @property
    def params(self) -> SamplingParams:
        return self.generations[-1]["params"]


def spy_on(monkeypatch: pytest.MonkeyPatch, module: str) -> Spy:
    """Install a spy on a route module until the test ends."""
    from pagoda.server.api.chat_prompt import prepare as real

    spy = Spy()

    async def prepare(state: ServerState, conversation: Conversation, params: SamplingParams) -> ChatPrompt:
        spy.conversations.append(conversation)
        if spy.script is None:
            return await real(
                state,
                Conversation(messages=[{"role": "user", "content": "a"}], cache_salt=conversation.cache_salt),
                params,
            )
        events: Any = list(spy.script)
        return ChatPrompt(
            "a",
            [97],
            params=params,
            reader=lambda: ScriptedParser(events),  # type: ignore[return-value]
        )

    class Generation(generation.Generation):
        def __init__(self, state: Any, request_id: str, prompts: Any, params: Any, **rest: Any) -> None:
            spy.generations.append({"id": request_id, "prompt": prompts[0], "params": params} | rest)
            super().__init__(state, request_id, prompts, params, **rest)

    monkeypatch.setattr(f"{module}.prepare", prepare)
    monkeypatch.setattr(f"{module}.Generation", Generation)
    return spy
