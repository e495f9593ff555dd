"""Structural tags and choices as a grammar in llguidance's Lark.

A text terminal matches no special token, so a special token written in a tag becomes a reference by id.
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
    """A text as a Lark string."""
    return msgspec.json.encode(text).decode()


def choices(texts: Sequence[str]) -> str:
    """A grammar of these texts."""
    return "start: " + " | ".join(map(quoted, texts))


class TagGrammar:
    """Rules of one structural tag. `schema`: a JSON schema as it goes into the grammar; `regex`: escapes a pattern."""

    def __init__(self, special: Special, schema: Callable[[Any], dict[str, Any]], regex: Callable[[str], str]) -> None:
        self._special = (
            re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
        )
        self._ids = special
        self._schema, self._regex = schema, regex
        self._lines = [f"TEXT: /{ANY}/"]
        self.others: dict[str, str] = {}

    def text(self, found: Format) -> str:
        """The grammar of a format, in Lark; it may refer to `others` by name."""
        start = f"start: {self._of(found)}"
        return "\n".join([start, *self._lines])

    def _of(self, found: Format) -> str:
        """An expression of that format."""
        match found["type"]:
            case "const_string":
                return self._literal(found["value"])
            case "json_schema":
                return "%json " + msgspec.json.encode(self._schema(found["json_schema"])).decode()
            case "any_text":
                return self._text_without(found.get("excludes") or [])
            case "regex":
                return self._rule(f"/{self._regex(found['pattern'])}/", "R")
            case "grammar":
                name = f"grammar_{len(self.others)}"
                self.others[name] = found["grammar"]
                return f"@{name}"
            case "sequence":
                return " ".join(self._rule(self._of(each)) for each in found["elements"])
            case "or":
                return "(" + " | ".join(self._rule(self._of(each)) for each in found["elements"]) + ")"
            case "tag":
                return self._tag(found)
            case "triggered_tags":
                return self._triggered(found)
            case _:
                return self._separated(found)

    def _rule(self, body: str, prefix: str = "r", attributes: str = "") -> str:
        """The name of a new rule; in capitals, of a terminal."""
        name = f"{prefix}{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """A text, its special tokens by id."""
        if self._special is None:
            return quoted(text)
        parts, end = [], 0
        for found in self._special.finditer(text):
            if found.start() > end:
                parts.append(quoted(text[end : found.start()]))
            parts.append(f"<[{self._ids[found.group()]}]>")
            end = found.end()
        if end < len(text) or not parts:
            parts.append(quoted(text[end:]))
        return " ".join(parts)

    def _tag(self, found: Format, begun: int = 0) -> str:
        """A tag, of whose beginning so many characters are there."""
        ends = [found["end"]] if isinstance(found["end"], str) else found["end"]
        content = found["content"]
        begin = self._literal(found["begin"][begun:])
        if content["type"] == "any_text" and not content.get("excludes") and all(ends):
            return f"{begin} ({' | '.join(self._up_to(end) for end in ends)})"
        end = " | ".join(map(self._literal, ends))
        return f"{begin} {self._rule(self._of(content))} ({end})"

    def _up_to(self, mark: str) -> str:
        """Any text up to the first place of that mark, which is part of it."""
        found = self._special.search(mark) if self._special is not None else None
        if found is None:
            return self._rule(f"TEXT {quoted(mark)}", attributes="[lazy]")
        return f"TEXT {self._literal(mark[found.start() :])}"  # what stands before it is text as well

    def _text_without(self, excluded: Sequence[str]) -> str:
        """Any text in which none of these stands."""
        spelt = [each for each in excluded if self._special is None or not self._special.search(each)]
        if not spelt:
            return "TEXT"
        any_of = "|".join(each.translate(_IN_REGEX) for each in spelt)
        return self._rule(f"/{ANY}/ & ~/{ANY}({any_of}){ANY}/", "T")

    def _triggered(self, found: Format) -> str:
        """Text in which a trigger begins one of the tags."""
        tags, once = found["tags"], found.get("stop_after_first", False)
        segments = []
        for trigger in found["triggers"]:
            ours = [tag for tag in tags if tag["begin"].startswith(trigger)]
            if ours:
                rest = " | ".join(self._rule(self._tag(tag, len(trigger))) for tag in ours)
                segments.append(self._rule(f"{self._up_to(trigger)} ({rest})"))
        segment = self._rule(" | ".join(segments))
        tail = self._text_without([*found["triggers"], *(found.get("excludes") or [])])
        more = f"{segment}* {tail}"
        if not found.get("at_least_one", False):
            return self._rule(f"{tail} | {segment}") if once else self._rule(more)
        first = self._rule(" | ".join(self._rule(self._tag(tag)) for tag in tags))
        return first if once else self._rule(f"{first} {more}")

    def _separated(self, found: Format) -> str:
        """Tags with a separator between them."""
        one = self._rule(" | ".join(self._rule(self._tag(tag)) for tag in found["tags"]))
        body = one
        if not found.get("stop_after_first", False):
            body = self._rule(f"{one} ({self._literal(found['separator'])} {one})*")
        return body if found.get("at_least_one", False) else f"({body})?"
