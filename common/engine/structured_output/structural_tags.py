"""Structural tags: OpenAI's `structures` and `triggers` and vLLM's `format`, which includes them, as one `Format`.

`TagGrammar` converts a format to a grammar in llguidance's Lark, `choice_grammar` a list of choices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from pagoda.common.engine.structured_output.grammar import refused

Format = Mapping[str, Any]
"""A format: {"type": ..., ...} with the keys of `FORMAT_KEYS`."""

FORMAT_KEYS: Final[Mapping[str, tuple[frozenset[str], frozenset[str]]]] = {
    "const_string": (frozenset({"value"}), frozenset()),
    "json_schema": (frozenset({"json_schema"}), frozenset({"style"})),
    "any_text": (frozenset(), frozenset({"excludes"})),
    "regex": (frozenset({"pattern"}), frozenset()),
    "grammar": (frozenset({"grammar"}), frozenset()),
    "sequence": (frozenset({"elements"}), frozenset()),
    "or": (frozenset({"elements"}), frozenset()),
    "tag": (frozenset({"begin", "content", "end"}), frozenset()),
    "triggered_tags": (
        frozenset({"triggers", "tags"}),
        frozenset({"at_least_one", "stop_after_first", "excludes"}),
    ),
    "tags_with_separator": (frozenset({"tags", "separator"}), frozenset({"at_least_one", "stop_after_first"})),
}
"""Type of a format -> required keys, optional keys."""

MAX_DEPTH: Final = 32
MAX_TAGS: Final = 1024


def tag_format(value: str | Mapping[str, Any]) -> Format:
    """Return the format of a structural tag, given as JSON text or object. Raises RequestError naming the key."""
    tag = value
    if isinstance(tag, str):
        try:
            tag = msgspec.json.decode(tag)
        except (msgspec.DecodeError, RecursionError) as error:
            raise refused(f"structural_tag is not JSON: {error}") from None
    if not isinstance(tag, Mapping):
        raise refused("structural_tag must be a JSON object")
    if "structures" in tag:
        return _checked(_of_structures(tag))
    if "format" not in tag:
        raise refused("structural_tag needs a format, or structures and triggers")
    return _checked(tag["format"])


def _of_structures(tag: Mapping[str, Any]) -> Format:
    structures = tag.get("structures")
    triggers = tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise refused("structural_tag needs structures and triggers, each a list")
    tags = []
    for index, structure in enumerate(structures):
        if not isinstance(structure, Mapping) or not structure.keys() >= {"begin", "end"}:
            raise refused(f"structures[{index}] needs begin, schema and end")
        schema = structure.get("schema", structure.get("structural_tag_schema", True))
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _checked(part: object, where: str = "format", depth: int = 0) -> Format:
    """Return the format if it is valid."""
    if depth > MAX_DEPTH:
        raise refused(f"{where}: formats are nested deeper than {MAX_DEPTH}")
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise refused(f"{where} must be an object with a type")
    kind = part["type"]
    if kind not in FORMAT_KEYS:
        raise refused(f"{where}: unknown format type {kind[:80]!r}; use one of {', '.join(FORMAT_KEYS)}")
    required, optional = FORMAT_KEYS[kind]
    given = {key for key, value in part.items() if value is not None} - {"type"}
    if missing := required - given:
        raise refused(f"{where}: {kind} lacks {', '.join(sorted(missing))}")
    if unknown := given - required - optional:
        raise refused(f"{where}: {kind} has no {', '.join(sorted(unknown))[:80]}")
    for key in given:
        _check_value(part, key, f"{where}.{key}", depth)
    if part.get("style", "json") != "json":
        raise refused(f"{where}.style: only json is supported")
    if kind == "triggered_tags":
        _check_triggers(part, where)
    return part


def _check_value(part: Format, key: str, where: str, depth: int) -> None:
    value = part[key]
    if key in ("value", "pattern", "grammar", "separator", "begin"):
        _need(isinstance(value, str), where, "a string")
    elif key == "end":
        _need(isinstance(value, str) or _are_strings(value), where, "a string or several")
    elif key in ("excludes", "triggers"):
        _need(_are_strings(value) or (key == "excludes" and value == []), where, "a list of strings")
    elif key in ("at_least_one", "stop_after_first"):
        _need(isinstance(value, bool), where, "true or false")
    elif key == "json_schema":
        _need(isinstance(value, Mapping | bool), where, "a JSON schema")
    elif key == "content":
        _checked(value, where, depth + 1)
    elif key in ("elements", "tags"):
        _need(isinstance(value, list) and 0 < len(value) <= MAX_TAGS, where, f"a list of 1 to {MAX_TAGS} formats")
        for index, item in enumerate(value):
            untyped = key == "tags" and isinstance(item, Mapping) and "type" not in item  # the list has one type only
            child = _checked({**item, "type": "tag"} if untyped else item, f"{where}[{index}]", depth + 1)
            _need(key == "elements" or child["type"] == "tag", f"{where}[{index}]", "a tag")


def _check_triggers(part: Format, where: str) -> None:
    for index, tag in enumerate(part["tags"]):
        if not any(tag["begin"].startswith(trigger) for trigger in part["triggers"]):
            raise refused(f"{where}.tags[{index}].begin starts with none of the triggers")


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)


def _need(good: bool, where: str, what: str) -> None:
    if not good:
        raise refused(f"{where} must be {what}")


ANY_TEXT: Final = r"(.|\n)*"
_IN_REGEX: Final = str.maketrans(
    {char: "\\" + char for char in r".+*?()|[]{}^$\/"} | {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
)

SpecialTokens = Mapping[str, int]
"""Text of each special token -> its id."""


def quoted(text: str) -> str:
    """Return a text as a Lark string."""
    return msgspec.json.encode(text).decode()


def choice_grammar(texts: Sequence[str]) -> str:
    """Return a grammar of these alternatives."""
    return "start: " + " | ".join(map(quoted, texts))


class TagGrammar:
    """The grammar of one structural tag. `schema`: converts a JSON schema for the grammar; `regex`: escapes a pattern.

    A text terminal matches no special token, so a special token in a tag becomes a reference by id.
    """

    def __init__(
        self, special: SpecialTokens, schema: Callable[[Any], dict[str, Any]], regex: Callable[[str], str]
    ) -> None:
        self._special = (
            re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
        )
        self._ids = special
        self._schema = schema
        self._regex = regex
        self._lines = [f"TEXT: /{ANY_TEXT}/"]
        self.others: dict[str, str] = {}
        self.schemas: dict[str, dict[str, Any]] = {}

    def text(self, tag: Format) -> str:
        """Return the grammar of a format, in Lark; it may refer to `others` and `schemas` by name."""
        start = f"start: {self._of(tag)}"
        return "\n".join([start, *self._lines])

    def _of(self, part: Format) -> str:
        """Return the expression of a format."""
        match part["type"]:
            case "const_string":
                return self._literal(part["value"])
            case "json_schema":
                name = f"schema_{len(self.schemas)}"
                self.schemas[name] = self._schema(part["json_schema"])
                return f"@{name}"
            case "any_text":
                return self._text_without(part.get("excludes") or [])
            case "regex":
                return self._rule(f"/{self._regex(part['pattern'])}/", "R")
            case "grammar":
                name = f"grammar_{len(self.others)}"
                self.others[name] = part["grammar"]
                return f"@{name}"
            case "sequence":
                return " ".join(self._rule(self._of(element)) for element in part["elements"])
            case "or":
                return "(" + " | ".join(self._rule(self._of(element)) for element in part["elements"]) + ")"
            case "tag":
                return self._tag(part)
            case "triggered_tags":
                return self._triggered(part)
            case _:
                return self._separated(part)

    def _rule(self, body: str, prefix: str = "r", attributes: str = "") -> str:
        """Add a rule and return its name; a name in capitals makes it a terminal."""
        name = f"{prefix}{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """Return an expression of a text, with special tokens by id."""
        if self._special is None:
            return quoted(text)
        parts = []
        end = 0
        for token in self._special.finditer(text):
            if token.start() > end:
                parts.append(quoted(text[end : token.start()]))
            parts.append(f"<[{self._ids[token.group()]}]>")
            end = token.end()
        if end < len(text) or not parts:
            parts.append(quoted(text[end:]))
        return " ".join(parts)

    def _tag(self, tag: Format, begun: int = 0) -> str:
        """Return the expression of a tag without the first `begun` characters of its beginning."""
        ends = [tag["end"]] if isinstance(tag["end"], str) else tag["end"]
        content = tag["content"]
        begin = self._literal(tag["begin"][begun:])
        if content["type"] == "any_text" and not content.get("excludes") and all(ends):
            return f"{begin} ({' | '.join(self._up_to(end) for end in ends)})"
        end = " | ".join(map(self._literal, ends))
        return f"{begin} {self._rule(self._of(content))} ({end})"

    def _up_to(self, delimiter: str) -> str:
        """Return an expression of any text up to and including the first occurrence of a delimiter."""
        token = self._special.search(delimiter) if self._special is not None else None
        if token is None:
            return self._rule(f"TEXT {quoted(delimiter)}", attributes="[lazy]")
        return f"TEXT {self._literal(delimiter[token.start() :])}"  # TEXT matches what precedes the special token

    def _text_without(self, excluded: Sequence[str]) -> str:
        """Return an expression of any text without these substrings."""
        plain = [text for text in excluded if self._special is None or not self._special.search(text)]
        if not plain:
            return "TEXT"
        any_of = "|".join(text.translate(_IN_REGEX) for text in plain)
        return self._rule(f"/{ANY_TEXT}/ & ~/{ANY_TEXT}({any_of}){ANY_TEXT}/", "T")

    def _triggered(self, part: Format) -> str:
        """Return an expression of text in which a trigger begins one of the tags."""
        tags = part["tags"]
        once = part.get("stop_after_first", False)
        segments = []
        for trigger in part["triggers"]:
            matching = [tag for tag in tags if tag["begin"].startswith(trigger)]
            if matching:
                tails = " | ".join(self._rule(self._tag(tag, len(trigger))) for tag in matching)
                segments.append(self._rule(f"{self._up_to(trigger)} ({tails})"))
        segment = self._rule(" | ".join(segments))
        tail = self._text_without([*part["triggers"], *(part.get("excludes") or [])])
        more = f"{segment}* {tail}"
        if not part.get("at_least_one", False):
            return self._rule(f"{tail} | {segment}") if once else self._rule(more)
        first = self._rule(" | ".join(self._rule(self._tag(tag)) for tag in tags))
        return first if once else self._rule(f"{first} {more}")

    def _separated(self, part: Format) -> str:
        """Return an expression of tags with a separator between them."""
        one = self._rule(" | ".join(self._rule(self._tag(tag)) for tag in part["tags"]))
        body = one
        if not part.get("stop_after_first", False):
            body = self._rule(f"{one} ({self._literal(part['separator'])} {one})*")
        return body if part.get("at_least_one", False) else f"({body})?"
