"""Mistral's reasoning models (Magistral, Ministral): special tokens open and close the thinking."""

from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

MISTRAL: Final = TaggedFormat(
    starts=("[THINK]",),
    ends=("[/THINK]",),
    turns=("[/INST]", "[/TOOL_RESULTS]"),
    calls=("[TOOL_CALLS]",),
    control=True,
)
