"""JSON schemas in grammar texts, resolved: passed to llguidance where it takes them as they are, else rewritten.

A request's grammar text is JSON, {"grammars": [...]}. An entry with `SCHEMA_ENTRY` is a schema, to be resolved if it
has `CLOSED`. Resolving happens outside the engine, before the request is sent to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from pagoda.common.engine.structured_output.grammar import (
    DATA,
    MAX_WHITESPACE,
    NAME_MAPS,
    SCHEMA_ENTRY,
    GrammarError,
    ResolvedGrammar,
    closed,
    closes_safely,
    json_text,
)
from pagoda.common.engine.structured_output.json_schema.documents import Document
from pagoda.common.engine.structured_output.json_schema.expand import Expander
from pagoda.common.engine.structured_output.json_schema.keywords import number_shape
from pagoda.common.engine.structured_output.json_schema.lark import schema_grammar
from pagoda.common.engine.structured_output.json_schema.texts import FORMATS, is_misread, is_misread_interval

OPTIONS: Final = "x-guidance"
"""Key of a schema with llguidance's options."""

CLOSED: Final = "close_objects"
"""Key of a grammar entry: a `Closing`."""

Closing = Literal["yes", "safe", "no"]
"""Whether objects have only the properties that their schema lists, unless it says so. "safe": only where that leaves
out none that another part of the schema lists."""


def resolved(text: str, error_of: Callable[[str], str | None]) -> ResolvedGrammar:
    """Return a grammar whose schemas llguidance takes.

    `error_of`: returns why llguidance refuses a grammar text, None if it does not. Raises GrammarError.
    """
    if f'"{CLOSED}"' not in text or not text.startswith('{"grammars":'):
        return ResolvedGrammar(text)
    try:
        entries = msgspec.json.decode(text)["grammars"]
    except (msgspec.DecodeError, RecursionError):
        return ResolvedGrammar(text)  # the library says what is wrong with it
    if not any(CLOSED in entry for entry in entries):
        return ResolvedGrammar(text)
    try:
        return _resolved_entries(entries, error_of)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply") from None


def _resolved_entries(entries: list[Mapping[str, Any]], error_of: Callable[[str], str | None]) -> ResolvedGrammar:
    ignored: set[str] = set()
    unchecked: frozenset[str] = frozenset()
    result = []
    for entry in entries:
        if CLOSED in entry:
            entry, left = _resolved_entry(entry, error_of, ignored)
            unchecked |= left
        result.append(entry)
    if unchecked and len(entries) > 1:
        raise GrammarError(f"{', '.join(sorted(unchecked))} cannot be enforced in a part of an answer; leave it out")
    schema = json_text(entries[0][SCHEMA_ENTRY]) if unchecked else ""
    return ResolvedGrammar(json_text({"grammars": result}), schema, tuple(sorted(unchecked)), tuple(sorted(ignored)))


def _resolved_entry(
    entry: Mapping[str, Any], error_of: Callable[[str], str | None], ignored: set[str]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return an entry that llguidance takes, and the keywords that it does not enforce."""
    schema = _without_unknown_formats(entry[SCHEMA_ENTRY], ignored)
    how = entry[CLOSED]
    native = closed(schema) if how == "yes" or (how == "safe" and closes_safely(schema)) else schema
    rest = {key: value for key, value in entry.items() if key not in (CLOSED, SCHEMA_ENTRY)}
    # Whether the schemas of a oneOf exclude each other must be found with their objects still open.
    tried = [native] if native is schema or "oneOf" not in json_text(schema) else [schema, native]
    if not _has_misread(schema) and not any(
        error_of(json_text({"grammars": [{SCHEMA_ENTRY: part}]})) is not None for part in tried
    ):
        return {**rest, SCHEMA_ENTRY: native}, frozenset()

    def is_possible(lark: str) -> bool:
        return "Unsatisfiable" not in (error_of(json_text({"grammars": [{"lark_grammar": lark}]})) or "")

    grammar = schema_grammar(schema, whitespace=_whitespace(schema), closed=how != "no", is_possible=is_possible)
    return {**rest, "lark_grammar": grammar.lark}, grammar.unchecked


def _has_misread(schema: Any, *, is_root: bool = True) -> bool:
    """Return True if llguidance would allow an invalid answer.

    It does not read some patterns and intervals as they are meant, resolves references in an embedded resource against
    the whole document, and counts a property twice whose name is written twice.
    """
    if isinstance(schema, list):
        return any(_has_misread(item, is_root=False) for item in schema)
    if not isinstance(schema, Mapping):
        return False
    if not is_root and isinstance(schema.get("$id"), str):
        return True
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and is_misread(pattern):
        return True
    least = schema.get("minProperties")
    if isinstance(least, int | float) and least > 1:
        return True
    if not schema.keys().isdisjoint(("exclusiveMinimum", "exclusiveMaximum")) and _has_misread_interval(schema):
        return True
    return any(_has_misread(value, is_root=False) for value in schema.values())


def _has_misread_interval(schema: Mapping[str, Any]) -> bool:
    try:
        number = number_shape(schema)
    except GrammarError:
        return False  # a property of this name, or an invalid schema
    return number is not None and is_misread_interval(number)


def _whitespace(schema: Mapping[str, Any]) -> str:
    """Return the pattern of white space between the tokens of JSON, empty if there is none."""
    options = schema.get(OPTIONS, {})
    if options.get("whitespace_flexible") is False:
        return ""
    return str(options.get("whitespace_pattern", rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}"))


def _without_unknown_formats(schema: Any, ignored: set[str]) -> Any:
    """Return a schema without the formats that are no constraint, which are added to `ignored`."""
    if isinstance(schema, list):
        return [_without_unknown_formats(item, ignored) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            ignored.add(value)
        elif key in NAME_MAPS and isinstance(value, Mapping):
            result[key] = {name: _without_unknown_formats(part, ignored) for name, part in value.items()}
        else:
            result[key] = value if key in DATA else _without_unknown_formats(value, ignored)
    return result


def answer_error(grammar: ResolvedGrammar, answer: str) -> str:
    """Return why an answer violates the schema of its grammar, empty if it does not."""
    try:
        value = msgspec.json.decode(answer)
    except msgspec.DecodeError as error:
        return f"the answer is not JSON: {error}"
    document = Document(msgspec.json.decode(grammar.schema))
    if Expander(document).allows(frozenset({document.root}), value):
        return ""
    return f"the answer violates the JSON schema ({', '.join(grammar.unchecked)})"
