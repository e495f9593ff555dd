"""Cohere Command A, reasoning: special tokens around the thinking and around the answer."""

from dataclasses import replace
from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

COMMAND3: Final = TaggedFormat(
    starts=("<|START_THINKING|>",),
    ends=("<|END_THINKING|>",),
    turns=("<|CHATBOT_TOKEN|>",),
    wrapping=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    calls=("<|START_ACTION|>",),
    control=True,
)
COMMAND4: Final = replace(COMMAND3, wrapping=("<|START_TEXT|>", "<|END_TEXT|>"))
