"""MiniMax M3: the template opens or closes the thinking, or leaves it to the model."""

from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

MINIMAX_M3: Final = TaggedFormat(
    starts=("<mm:think>",), ends=("</mm:think>",), turns=("]~b]ai",), calls=("]<]minimax[>[<tool_call>",)
)
