"""Holo2, which always thinks unless the template shows that the thinking is over."""

from typing import Final

from pagoda.server.parsers.reasoning.calls import JSON_CALLS
from pagoda.server.parsers.reasoning.tagged import TaggedFormat

HOLO2: Final = TaggedFormat(unasked=True, calls=JSON_CALLS)
