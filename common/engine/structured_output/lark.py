"""Structural tags and choices as a grammar in llguidance's Lark.

A text terminal matches no special token, so a special token in a tag becomes a reference by id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from pagoda.common.engine.structured_output.structural_tags import Format

ANY: Final = r"(.|\n)*"
_IN_REGEX: Final = str.maketrans(
    {char: "\\" + char for char in r".+*?()|[]{}^$\/"} | {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
)

Special = Mapping[str, int]
"""Text of each special token -> its id."""


def quoted(text: str) -> str:
    """Return a text as a Lark string."""
    return msgspec.json.encode(text).decode()


def choices(texts: Sequence[str]) -> str:
    """Return a grammar of these alternatives."""
    return "start: " + " | ".join(map(quoted, texts))


class TagGrammar:
    """Rules of one structural tag. `schema`: converts a JSON schema for the grammar; `regex`: escapes a pattern."""

    def __init__(self, special: Special, schema: Callable[[Any], dict[str, Any]], regex: Callable[[str], str]) -> None:
        self._special = (
            re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
        )
        self._ids = special
        self._schema, self._regex = schema, regex
        self._lines = [f"TEXT: /{ANY}/"]
        self.others: dict[str, str] = {}

    def text(self, tag: Format) -> str:
        """Return the grammar of a format, in Lark; it may refer to `others` by name."""
        start = f"start: {self._of(tag)}"
        return "\n".join([start, *self._lines])

    def _of(self, part: Format) -> str:
        """Return the expression of a format."""
        match part["type"]:
            case "const_string":
                return self._literal(part["value"])
            case "json_schema":
                return "%json " + msgspec.json.encode(self._schema(part["json_schema"])).decode()
            case "any_text":
                return self._text_without(part.get("excludes") or [])
            case "regex":
                return self._rule(f"/{self._regex(part['pattern'])}/", "R")
            case "grammar":
                name = f"grammar_{len(self.others)}"
                self.others[name] = part["grammar"]
                return f"@{name}"
            case "sequence":
                return " ".join(self._rule(self._of(each)) for each in part["elements"])
            case "or":
                return "(" + " | ".join(self._rule(self._of(each)) for each in part["elements"]) + ")"
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
        parts, end = [], 0
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
        plain = [each for each in excluded if self._special is None or not self._special.search(each)]
        if not plain:
            return "TEXT"
        any_of = "|".join(each.translate(_IN_REGEX) for each in plain)
        return self._rule(f"/{ANY}/ & ~/{ANY}({any_of}){ANY}/", "T")

    def _triggered(self, part: Format) -> str:
        """Return an expression of text in which a trigger begins one of the tags."""
        tags, once = part["tags"], part.get("stop_after_first", False)
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
