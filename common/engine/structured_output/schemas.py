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
from pagoda.common.engine.structured_output.json_schema.texts import (
    FORMATS,
    escaped_slashes,
    is_misread,
    is_misread_interval,
)

OPTIONS: Final = "x-guidance"
"""Key of a schema with llguidance's options."""

MAX_NAME: Final = 100
"""Characters of an unknown format that are kept for the log."""

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
            entry, left = _resolved_entry(entry, error_of, ignored, alone=len(entries) == 1)
            unchecked |= left
        result.append(entry)
    if unchecked and len(entries) > 1:
        raise GrammarError(f"{', '.join(sorted(unchecked))} cannot be enforced in a part of an answer; leave it out")
    schema = json_text(_to_check(entries[0][SCHEMA_ENTRY])) if unchecked else ""
    return ResolvedGrammar(json_text({"grammars": result}), schema, tuple(sorted(unchecked)), tuple(sorted(ignored)))


def _resolved_entry(
    entry: Mapping[str, Any], error_of: Callable[[str], str | None], ignored: set[str], *, alone: bool
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return an entry that llguidance takes, and the keywords that it does not enforce.

    What llguidance takes but misreads is rewritten where that is possible and, unless the entry is `alone`, leaves
    nothing to be checked.
    """
    schema = _without_unknown_formats(entry[SCHEMA_ENTRY], ignored)
    how = entry[CLOSED]
    native = closed(schema) if how == "yes" or (how == "safe" and closes_safely(schema)) else schema
    rest = {key: value for key, value in entry.items() if key not in (CLOSED, SCHEMA_ENTRY)}
    # Whether the schemas of a oneOf exclude each other must be found with their objects still open.
    tried = [native] if native is schema or "oneOf" not in json_text(schema) else [schema, native]
    misreads = _has_misread(schema)  # It refuses what is nested too deeply for llguidance's stack, too.
    is_taken = not any(error_of(json_text({"grammars": [{SCHEMA_ENTRY: part}]})) is not None for part in tried)
    as_it_is = {**rest, SCHEMA_ENTRY: native}
    if is_taken and not misreads:
        return as_it_is, frozenset()

    def is_possible(lark: str) -> bool:
        return "Unsatisfiable" not in (error_of(json_text({"grammars": [{"lark_grammar": lark}]})) or "")

    try:
        grammar = schema_grammar(schema, whitespace=_whitespace(schema), closed=how != "no", is_possible=is_possible)
    except GrammarError:
        if is_taken:
            return as_it_is, frozenset()
        raise
    if is_taken and grammar.unchecked and not alone:
        return as_it_is, frozenset()
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


_MATCHING: Final = ("not", "oneOf", "if", "contains", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems")
"""Keywords whose meaning changes where a schema loses its patterns."""


def _to_check(schema: Any) -> Any:
    """Return a schema without its patterns, which the grammar enforces: Python reads some of them otherwise."""
    if any(f'"{key}"' in json_text(schema) for key in _MATCHING):
        return schema
    return _without_patterns(schema)


def _without_patterns(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_patterns(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {}
    for key, value in schema.items():
        if key in NAME_MAPS and isinstance(value, Mapping):
            result[key] = {name: _without_patterns(part) for name, part in value.items()}
        elif key != "pattern":
            result[key] = value if key in DATA else _without_patterns(value)
    return result


def _whitespace(schema: Mapping[str, Any]) -> str:
    """Return the pattern of white space between the tokens of JSON, empty if there is none."""
    options = schema.get(OPTIONS, {})
    if not isinstance(options, Mapping):
        raise GrammarError(f"{OPTIONS} is not an object")
    if options.get("whitespace_flexible") is False:
        return ""
    return escaped_slashes(str(options.get("whitespace_pattern", rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}")))


def _without_unknown_formats(schema: Any, ignored: set[str]) -> Any:
    """Return a schema without the formats that are no constraint, which are added to `ignored`."""
    if isinstance(schema, list):
        return [_without_unknown_formats(item, ignored) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            ignored.add(value[:MAX_NAME])
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
    try:
        if Expander(document).allows(frozenset({document.root}), value):
            return ""
    except (GrammarError, RecursionError):
        return ""  # a pattern that Python does not know, or a deep answer: what the grammar enforces is all there is
    return f"the answer violates the JSON schema ({', '.join(grammar.unchecked)})"
