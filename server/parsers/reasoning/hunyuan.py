"""Hunyuan A13B, which puts its answer between tags too, and Hy3, whose published weights have tags of their own."""

from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

_TURNS: Final = ("<|extra_0|>", "<｜hy_Assistant｜>")

HUNYUAN_A13B: Final = TaggedFormat(turns=_TURNS, wrapping=("<answer>", "</answer>"))
HY_V3: Final = TaggedFormat(
    starts=("<think>", "<think:opensource>"), ends=("</think>", "</think:opensource>"), turns=_TURNS
)
