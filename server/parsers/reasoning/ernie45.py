"""ERNIE 4.5, thinking: the template opens the thinking; the answer may stand between tags too."""

from typing import Final

from pagoda.server.parsers.reasoning.calls import JSON_CALLS
from pagoda.server.parsers.reasoning.tagged import TaggedFormat

ERNIE45: Final = TaggedFormat(
    unasked=True,
    turns=("<|im_start|>assistant", "\nAssistant: "),
    wrapping=("<response>", "</response>"),
    calls=JSON_CALLS,
)
