"""Poolside's Laguna: the template opens or closes the thinking."""

from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

POOLSIDE_V1: Final = TaggedFormat(turns=("<assistant>",), calls=("<tool_call>",))
