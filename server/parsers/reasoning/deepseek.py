"""DeepSeek: R1 and its distillations, which always think, and V3.1 on, whose template says whether they do."""

from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

_TURNS: Final = (
    "<｜Assistant｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁end｜>",
    "<|im_start|>assistant",  # QwQ, which is read as R1 is
)
_CALLS: Final = (
    "<｜tool▁calls▁begin｜>",
    "<｜DSML｜function_calls>",
    "<｜DSML｜tool_calls>",
    "<｜DSML｜ calls>",
)

R1: Final = TaggedFormat(unasked=True, turns=_TURNS, calls=_CALLS)
V3: Final = TaggedFormat(turns=_TURNS, calls=_CALLS)
