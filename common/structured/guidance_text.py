"""What a request asks of its answer's form -> the text that llguidance compiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pagoda.common.structured.guidance import import_llguidance
from pagoda.common.structured.lark import Special, TagGrammar, choices
from pagoda.common.structured.matcher import GrammarError, one_line
from pagoda.common.structured.refusal import refused
from pagoda.common.structured.schema import closed, json_schema
from pagoda.common.structured.tags import tag_format
from pagoda.common.structured_outputs import StructuredOutputsParams

ANY_OBJECT: Final = {"type": "object"}

MAX_EBNF_CHARS: Final = 1 << 18
"""What a converter in Python reads in a second or two: before that, nothing watches its time."""


def guidance_text(asked: StructuredOutputsParams, special: Special) -> str:
    """The grammar of an answer. `special`: text of each special token -> its id. Raises RequestError."""
    if asked.json is not None:
        return _grammars({"json_schema": _with_options(json_schema(asked.json), asked)})
    if asked.json_object:
        return _grammars({"json_schema": _with_options(ANY_OBJECT, asked)})
    if asked.choice:
        return _grammars({"lark_grammar": choices(asked.choice)})
    if asked.regex is not None:
        return _grammars({"lark_grammar": f"start: /{_in_lark(whole_pattern(asked.regex))}/"})
    if asked.grammar is not None:
        return _grammars({"lark_grammar": _lark_of(asked.grammar)})
    assert asked.structural_tag is not None, "one of them is set"
    found = TagGrammar(special, lambda schema: _with_options(json_schema(schema), asked), _in_lark)
    main = found.text(tag_format(asked.structural_tag))
    others = [{"name": name, "lark_grammar": _lark_of(text)} for name, text in found.others.items()]
    return _grammars({"name": "main", "lark_grammar": main}, *others)


def _grammars(*grammars: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode({"grammars": grammars}).decode()
    except (RecursionError, TypeError, ValueError) as error:
        raise refused(f"the schema is nested too deeply or holds what JSON cannot ({error})") from None


def _with_options(schema: Mapping[str, Any], asked: StructuredOutputsParams) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    if asked.disable_additional_properties:
        schema = closed(schema)
    return {**schema, "x-guidance": options} if options else dict(schema)


def whole_pattern(pattern: str) -> str:
    """A pattern is of the whole answer anyway; anchors at its ends are dropped."""
    pattern = pattern.removeprefix("^")
    bare = pattern.removesuffix("$")
    escapes = len(bare) - len(bare.rstrip("\\"))
    return bare if escapes % 2 == 0 else pattern


def _in_lark(pattern: str) -> str:
    try:
        escaped: str = import_llguidance().regex_to_lark(pattern)
    except GrammarError as error:
        raise refused(error) from None
    return escaped


def _lark_of(text: str) -> str:
    """Lark as it is; EBNF (GBNF) as Lark."""
    if "::=" not in text:
        return text
    if len(text) > MAX_EBNF_CHARS:
        raise refused(f"the EBNF grammar has {len(text)} characters; at most {MAX_EBNF_CHARS} are allowed")
    try:
        import_llguidance()
        from llguidance.gbnf_to_lark import any_to_lark

        # Blank lines go first: the converter takes hours over a million of them.
        return str(any_to_lark("\n".join(line for line in text.split("\n") if line.strip())))
    except GrammarError as error:
        raise refused(error) from None
    except Exception as error:  # the converter's errors have no class in common
        raise refused(f"the EBNF grammar cannot be read: {one_line(str(error))}") from None
