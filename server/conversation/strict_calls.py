"""Calls that the model makes on its own, of tools that are strict: text is free, and a call in it keeps to its schema.

Knows structural tags. Only formats that say what stands between their marks can be held so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagoda.common.structured_outputs import StructuredOutputsParams
from pagoda.server.conversation.form_or_calls import tag_of
from pagoda.server.parsers.parser import Brackets, Tool, ToolFormat


def strict_calls(format: ToolFormat, tools: Sequence[Tool], *, parallel: bool) -> StructuredOutputsParams | None:
    """The form of an answer with such calls, one at most unless `parallel`; None where nothing is to be held.

    Calls of tools that are not strict have arguments of any kind. Raises RequestError for a schema that is none.
    """
    if not any(tool.strict for tool in tools) or not isinstance(format, Brackets):
        return None
    loose = {"type": "object"}
    brackets = format.brackets([tool if tool.strict else replace(tool, parameters=loose) for tool in tools])
    if not brackets or any(bracket.call is None for bracket in brackets):
        return None
    calls = {
        "type": "triggered_tags",
        "triggers": [bracket.begin for bracket in brackets],
        "tags": [tag_of(bracket) for bracket in brackets],
        "stop_after_first": not parallel,
    }
    return StructuredOutputsParams(structural_tag={"format": calls})
