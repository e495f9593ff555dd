"""An answer that has a form or is calls of tools, in the model's own format: one grammar of both.

Knows structural tags. Where a format says what stands between its marks, calls keep to their tools' schemas; elsewhere
they are as free as without a form.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from pagoda.common.engine.structured_output.grammar import json_schema
from pagoda.common.engine.structured_output.guidance import whole_pattern
from pagoda.common.sampling_params import StructuredOutputsParams
from pagoda.server.parsers.parser import Bracket, Brackets, Tool, ToolFormat

_ANY_OBJECT = {"type": "object"}
_ANY_TEXT = {"type": "any_text"}
_LINE = {"type": "regex", "pattern": r"\n?"}


def form_or_calls(
    asked: StructuredOutputsParams,
    format: ToolFormat,
    tools: Sequence[Tool],
    special: Collection[str],
    *,
    parallel: bool,
) -> StructuredOutputsParams | None:
    """The form asked for, or calls; None where no grammar can tell them apart.

    `special`: the tokenizer's special tokens, of which none may stand between a format's marks: any text has none.
    `parallel`: whether there may be several calls. Raises RequestError for a schema that is none.
    """
    form = _form(asked)
    brackets = format.brackets(tools) if isinstance(format, Brackets) else ()
    if form is None or not brackets or any(_holds_special(bracket, special) for bracket in brackets):
        return None
    calls = {
        "type": "tags_with_separator",
        "tags": [tag_of(each) for each in brackets],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    tag = {"format": {"type": "or", "elements": [form, calls]}}
    return replace(asked, structural_tag=tag, json=None, regex=None, choice=None, grammar=None, json_object=None)


def _form(asked: StructuredOutputsParams) -> dict[str, Any] | None:
    """As an element of a structural tag; one that is a tag already may be about calls itself, so it has none."""
    if asked.json is not None:
        return {"type": "json_schema", "json_schema": json_schema(asked.json)}
    if asked.json_object:
        return {"type": "json_schema", "json_schema": _ANY_OBJECT}
    if asked.choice:
        return {"type": "or", "elements": [{"type": "const_string", "value": each} for each in asked.choice]}
    if asked.regex is not None:
        return {"type": "regex", "pattern": whole_pattern(asked.regex)}
    return None


def tag_of(bracket: Bracket) -> dict[str, Any]:
    """What calls stand between, as a structural tag has it."""
    content: dict[str, Any] = _ANY_TEXT
    if bracket.call is not None:
        call = {"type": "json_schema", "json_schema": bracket.call}
        content = {"type": "sequence", "elements": [_LINE, call, _LINE]}
    return {"type": "tag", "begin": bracket.begin, "content": content, "end": bracket.end}


def _holds_special(bracket: Bracket, special: Collection[str]) -> bool:
    return any(token in mark for mark in bracket.inner for token in special)


# Calls that the model makes on its own, of tools that are strict: text is free, and a call in it keeps to its schema.
#
# Knows structural tags. Only formats that say what stands between their marks can be held so.


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
