"""Grammars, as structural tags, of output that may call tools in the model's own format."""

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
    structured: StructuredOutputsParams,
    format: ToolFormat,
    tools: Sequence[Tool],
    special: Collection[str],
    *,
    parallel: bool,
) -> StructuredOutputsParams | None:
    """Return a grammar of either the structured output or tool calls; None if no grammar can distinguish them.

    Calls conform to their tools' schemas where the format defines the content between its delimiters. `special`: the
    tokenizer's special tokens, which `any_text` between delimiters excludes. `parallel`: allow several calls. Raise
    RequestError for an invalid schema.
    """
    form = _form(structured)
    brackets = format.brackets(tools) if isinstance(format, Brackets) else ()
    if form is None or not brackets or any(_has_special(bracket, special) for bracket in brackets):
        return None
    calls = {
        "type": "tags_with_separator",
        "tags": [tag_of(each) for each in brackets],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    tag = {"format": {"type": "or", "elements": [form, calls]}}
    return replace(structured, structural_tag=tag, json=None, regex=None, choice=None, grammar=None, json_object=None)


def _form(structured: StructuredOutputsParams) -> dict[str, Any] | None:
    """Return the constraint as a structural tag element; None for a structural tag, which may itself contain calls."""
    if structured.json is not None:
        return {"type": "json_schema", "json_schema": json_schema(structured.json)}
    if structured.json_object:
        return {"type": "json_schema", "json_schema": _ANY_OBJECT}
    if structured.choice:
        return {"type": "or", "elements": [{"type": "const_string", "value": each} for each in structured.choice]}
    if structured.regex is not None:
        return {"type": "regex", "pattern": whole_pattern(structured.regex)}
    return None


def tag_of(bracket: Bracket) -> dict[str, Any]:
    """Return the structural tag of calls between the format's delimiters."""
    content: dict[str, Any] = _ANY_TEXT
    if bracket.call is not None:
        call = {"type": "json_schema", "json_schema": bracket.call}
        content = {"type": "sequence", "elements": [_LINE, call, _LINE]}
    return {"type": "tag", "begin": bracket.begin, "content": content, "end": bracket.end}


def _has_special(bracket: Bracket, special: Collection[str]) -> bool:
    return any(token in mark for mark in bracket.inner for token in special)


def strict_calls(format: ToolFormat, tools: Sequence[Tool], *, parallel: bool) -> StructuredOutputsParams | None:
    """Return a grammar of free text in which calls of strict tools conform to their schemas; None if not possible.

    Calls of other tools have arbitrary arguments. `parallel`: allow several calls. Raise RequestError for an invalid
    schema.
    """
    if not any(tool.strict for tool in tools) or not isinstance(format, Brackets):
        return None
    brackets = format.brackets([tool if tool.strict else replace(tool, parameters=_ANY_OBJECT) for tool in tools])
    if not brackets or any(bracket.call is None for bracket in brackets):
        return None
    calls = {
        "type": "triggered_tags",
        "triggers": [bracket.begin for bracket in brackets],
        "tags": [tag_of(bracket) for bracket in brackets],
        "stop_after_first": not parallel,
    }
    return StructuredOutputsParams(structural_tag={"format": calls})
