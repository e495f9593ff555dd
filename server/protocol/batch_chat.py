"""The body of POST /v1/chat/completions/batch: several conversations, answered in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import Field

from pagoda.server.conversation.conversation import Conversation
from pagoda.server.protocol.base import unsupported
from pagoda.server.protocol.chat import ChatFields, check_messages

MAX_CONVERSATIONS: Final = 1_024


class BatchChatCompletionRequest(ChatFields):
    """Conversations to continue, each with the same settings. Choices are numbered over all of them, n for each."""

    messages: list[Annotated[list[dict[str, Any]], Field(min_length=1)]] = Field(
        min_length=1, max_length=MAX_CONVERSATIONS
    )
    return_token_ids: bool | None = False
    stream: Any = unsupported(False, why="the answers come together")
    stream_options: Any = unsupported(why="the answers come together")
    stream_interval: Any = unsupported(why="the answers come together")
    return_token_offsets: Any = unsupported(False, why="offsets are shown by the render endpoints only")

    def check(self) -> None:
        """What no single field shows. Raises RequestError."""
        self.check_fields()
        for index, messages in enumerate(self.messages):
            check_messages(f"messages[{index}]", messages)

    def conversations(self) -> Iterator[Conversation]:
        """What is to be answered, one after the other."""
        return map(self.conversation_of, self.messages)
