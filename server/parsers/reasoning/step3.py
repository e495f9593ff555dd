"""Step3 and 3.5: the template opens the thinking."""

from typing import Final

from pagoda.server.parsers.reasoning.calls import XML_CALLS
from pagoda.server.parsers.reasoning.tagged import TaggedFormat

STEP3: Final = TaggedFormat(unasked=True, turns=("<|BOT|>assistant",), calls=("<｜tool_calls_begin｜>",))
STEP3P5: Final = TaggedFormat(unasked=True, calls=XML_CALLS)
