"""K2 Horizon, which has tags for each of three efforts of thinking."""

from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

_EFFORTS: Final = ("think", "think_fast", "think_faster")

K2_HORIZON: Final = TaggedFormat(
    starts=tuple(f"<ifm|{effort}>" for effort in _EFFORTS),
    ends=tuple(f"</ifm|{effort}>" for effort in _EFFORTS),
    calls=("<ifm|tool_calls>",),
)
