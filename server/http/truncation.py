"""Conversations that are too long: their oldest turns are left out until the rest fits.

Knows messages and prompts. Does not know how a prompt is written.
"""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.sampling_params import SamplingParams
from pagoda.server.conversation.conversation import Conversation
from pagoda.server.http.state import ServerState
from pagoda.server.http.turn import Turn, prepare


async def prepare_fitting(state: ServerState, conversation: Conversation, params: SamplingParams) -> Turn:
    """As prepare, without the oldest messages where all of them are too many. Raises as prepare does.

    System messages at the beginning stay, and what is kept begins with a user's. Room is left for max_tokens, at most
    half of the context. The last turn alone is not cut: it may still be refused as too long.
    """
    context = state.llm().max_model_len
    most = context - min(params.max_tokens or 1, context // 2)
    turn = await prepare(state, conversation, params)
    messages = list(conversation.messages)
    head = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [n for n, message in enumerate(messages) if n > head and message["role"] == "user"]
    if _length(turn) <= most or not starts:
        return turn

    async def kept_from(start: int) -> Turn:
        return await prepare(state, replace(conversation, messages=messages[:head] + messages[start:]), params)

    turn = await kept_from(starts.pop())
    if _length(turn) > most:
        return turn
    while starts:  # `turn` fits; what is left of `starts` keeps more than it does
        middle = len(starts) // 2
        longer = await kept_from(starts[middle])
        if _length(longer) <= most:
            turn, starts = longer, starts[:middle]
        else:
            starts = starts[middle + 1 :]
    return turn


def _length(turn: Turn) -> int:
    return len(turn.prompt["prompt_token_ids"])
