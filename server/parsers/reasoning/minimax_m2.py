"""MiniMax M2: the template opens the thinking. The second format leaves it in the content, with its start put back."""

from __future__ import annotations

from typing import Final

from pagoda.server.parsers.parser import Parser
from pagoda.server.parsers.reasoning.identity import AllContent
from pagoda.server.parsers.reasoning.tagged import TaggedFormat

MINIMAX_M2: Final = TaggedFormat(
    unasked=True, turns=("]~b]ai",), calls=("<minimax:tool_call>\n<invoke", "<minimax:tool_call><invoke")
)


class AppendThink:
    """Thinking as content: what clients want that show it to the model again, as MiniMax M2 likes it."""

    starts: tuple[str, ...] = MINIMAX_M2.starts
    ends: tuple[str, ...] = MINIMAX_M2.ends

    def thinks(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within the thinking."""
        return MINIMAX_M2.thinks(prompt)

    def parser(self, prompt: str) -> Parser:
        """A reader that takes everything for content."""
        return AllContent("<think>" if self.thinks(prompt) else "")


APPEND_THINK: Final = AppendThink()
