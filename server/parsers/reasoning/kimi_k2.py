"""Kimi K2, thinking, and K2.5."""

from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

KIMI_K2: Final = TaggedFormat(
    turns=("<|im_assistant|>assistant<|im_middle|>",), calls=("<|tool_calls_section_begin|>",)
)
