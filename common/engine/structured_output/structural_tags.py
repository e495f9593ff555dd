"""Structural tags as one format: OpenAI's `structures` and `triggers`, and vLLM's `format`, which includes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pagoda.common.engine.structured_output.grammar import refused

Format = Mapping[str, Any]
"""A format: {"type": ..., ...} with the keys of `KEYS`."""

KEYS: Final[Mapping[str, tuple[frozenset[str], frozenset[str]]]] = {
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
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise refused("structural_tag needs structures and triggers, each a list")
    tags = []
    for index, each in enumerate(structures):
        if not isinstance(each, Mapping) or not each.keys() >= {"begin", "end"}:
            raise refused(f"structures[{index}] needs begin, schema and end")
        schema = each.get("schema", each.get("structural_tag_schema", True))
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": each["begin"], "content": content, "end": each["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _checked(part: object, where: str = "format", depth: int = 0) -> Format:
    """Return the format if it is valid."""
    if depth > MAX_DEPTH:
        raise refused(f"{where}: formats are nested deeper than {MAX_DEPTH}")
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise refused(f"{where} must be an object with a type")
    kind = part["type"]
    if kind not in KEYS:
        raise refused(f"{where}: unknown format type {kind[:80]!r}; use one of {', '.join(KEYS)}")
    required, optional = KEYS[kind]
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
        for index, each in enumerate(value):
            untyped = key == "tags" and isinstance(each, Mapping) and "type" not in each  # the list has one type only
            child = _checked({**each, "type": "tag"} if untyped else each, f"{where}[{index}]", depth + 1)
            _need(key == "elements" or child["type"] == "tag", f"{where}[{index}]", "a tag")


def _check_triggers(part: Format, where: str) -> None:
    for index, tag in enumerate(part["tags"]):
        if not any(tag["begin"].startswith(trigger) for trigger in part["triggers"]):
            raise refused(f"{where}.tags[{index}].begin starts with none of the triggers")


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value)


def _need(good: bool, where: str, what: str) -> None:
    if not good:
        raise refused(f"{where} must be {what}")
