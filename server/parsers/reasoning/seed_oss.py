"""Seed-OSS. Its remarks on the thinking budget stand within the thinking and are part of it."""

from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

SEED_OSS: Final = TaggedFormat(
    starts=("<seed:think>",),
    ends=("</seed:think>",),
    turns=("<seed:bos>assistant",),
    calls=("<seed:tool_call>\n<function=", "<seed:tool_call><function="),
)
