"""IBM Granite: 3.2 says in words where its thinking and its response begin, 3.3 has tags for both, 4.2 for thinking."""

from typing import Final

from pagoda.server.parsers.reasoning.calls import XML_CALLS
from pagoda.server.parsers.reasoning.tagged import TaggedFormat

_TURNS: Final = ("<|end_of_role|>",)

GRANITE: Final = TaggedFormat(
    starts=("Here is my thought process:", "Here's my thought process:", "<think>"),
    ends=("Here is my response:", "Here's my response:", "</think>"),
    turns=_TURNS,
    wrapping=("<response>", "</response>"),
    calls=("<|tool_call|>",),
)
THINKING: Final = TaggedFormat(turns=_TURNS, calls=XML_CALLS)
