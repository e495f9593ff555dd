"""Conversations that are too long: their oldest turns are left out until the rest fits.

Knows messages and prompts. Does not know how a prompt is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagoda.common.errors import PromptTooLongError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.conversation.conversation import Conversation
from pagoda.server.http.state import ServerState
from pagoda.server.http.turn import Turn, prepare

Message = Mapping[str, Any]


async def prepare_fitting(state: ServerState, conversation: Conversation, params: SamplingParams) -> Turn:
    """As prepare, without the oldest messages where all of them are too many. Raises as prepare does.

    System messages at the beginning stay, and what is kept begins with a user's. Room is left for max_tokens, at most
    half of the context. The last turn alone is not cut: it may still be refused as too long.
    """
    context = state.llm().max_model_len
    most = context - min(params.max_tokens or 1, context // 2)
    messages = list(conversation.messages)
    head = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [n for n, message in enumerate(messages) if n > head and message["role"] == "user"]
    if not starts:
        return await prepare(state, conversation, params)

    async def fitting(kept: list[Message]) -> Turn | None:
        try:
            turn = await prepare(state, replace(conversation, messages=kept), params)
        except PromptTooLongError:
            return None
        return turn if len(turn.prompt["prompt_token_ids"]) <= most else None

    turn = await fitting(messages)
    if turn is not None:
        return turn
    last = messages[:head] + messages[starts.pop() :]
    turn = await fitting(last)
    if turn is None:
        return await prepare(state, replace(conversation, messages=last), params)
    while starts:  # `turn` fits; what is left of `starts` keeps more than it does
        middle = len(starts) // 2
        longer = await fitting(messages[:head] + messages[starts[middle] :])
        if longer is not None:
            turn, starts = longer, starts[:middle]
        else:
            starts = starts[middle + 1 :]
    return turn
