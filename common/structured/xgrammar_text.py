"""What a request asks of its answer's form -> the text that `xgrammar_library` compiles: kind, text, switches."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from pagoda.common.structured.lark import quoted
from pagoda.common.structured.refusal import refused
from pagoda.common.structured.schema import json_schema
from pagoda.common.structured.tags import tag_format
from pagoda.common.structured_outputs import StructuredOutputsParams

Kind = Literal["json_schema", "regex", "grammar", "structural_tag"]

ANY_OBJECT: Final = {"type": "object"}


class Source(msgspec.Struct, frozen=True):
    """A grammar as xgrammar takes it. `closed`: objects hold no properties but those of their schema."""

    kind: Kind
    text: str
    any_whitespace: bool = True
    closed: bool = False


def xgrammar_text(asked: StructuredOutputsParams) -> str:
    """The grammar of an answer. Raises RequestError."""
    if asked.whitespace_pattern is not None:
        raise refused("whitespace_pattern needs a server whose structured output runs on guidance; leave it out")
    kind, text = _source(asked)
    any_whitespace, closed = not asked.disable_any_whitespace, asked.disable_additional_properties
    return msgspec.json.encode(Source(kind, text, any_whitespace, closed)).decode()


def _source(asked: StructuredOutputsParams) -> tuple[Kind, str]:
    if asked.json is not None:
        return "json_schema", _json(json_schema(asked.json))
    if asked.json_object:
        return "json_schema", _json(ANY_OBJECT)
    if asked.choice:
        return "grammar", "root ::= " + " | ".join(map(quoted, asked.choice))
    if asked.regex is not None:
        return "regex", asked.regex
    if asked.grammar is not None:
        if "::=" not in asked.grammar:
            raise refused("this server reads grammars in EBNF (root ::= ...); Lark needs the guidance backend")
        return "grammar", asked.grammar
    assert asked.structural_tag is not None, "one of them is set"
    return "structural_tag", _json({"type": "structural_tag", "format": tag_format(asked.structural_tag)})


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, TypeError, ValueError) as error:
        raise refused(f"the schema is nested too deeply or holds what JSON cannot ({error})") from None
