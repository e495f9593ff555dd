"""Gemma 4: a channel of special tokens holds the thinking.

After the results of tools the model goes on in the same turn.
"""

from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

GEMMA4: Final = TaggedFormat(
    starts=("<|channel>thought",),
    ends=("<channel|>",),
    turns=("<|turn>model", "<tool_response|>"),
    calls=("<|tool_call>",),
    control=True,
)
