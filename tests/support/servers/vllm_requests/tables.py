"""The requests of vLLM's server tests, and where the answers differ from what these want: tests/data/vllm_requests.

A table has `cases`, each a VllmCase, and `shared`, values by name. Other than JSON are objects with one of these keys:

    {"$want": ["contains", "a", "b"]}   a Want: the kind of check and its arguments
    {"$from": "0.id"}                   a Ref: the value of an earlier answer
    {"$bytes": "null"}                  the body of a request, byte for byte
    {"$repeat": ["ab", 3]}              a string or a list, repeated
    {"$join": ["a", "b"]}               the strings as one
    {"$shared": "weather"}              the value of that name in `shared`
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.servers.vllm_requests.case import Expected, Ref, Sent, VllmCase
from support.servers.vllm_requests.checks import Want

FOLDER = Path(__file__).resolve().parents[3] / "data" / "vllm_requests"
TABLES = (
    "completions",
    "chats",
    "chat_fields",
    "tools",
    "serving",
    "rendering",
    "pooling",
    "scoring",
    "responses",
    "messages",
)


@dataclass(frozen=True)
class Difference:
    """Cases that are answered otherwise, for one reason.

    `name`: as in docs/guides/coming-from-vllm.md; `cases`: beginnings of ids; `instead`: what the answer to the last
    request of each is. The driver fails when a case is answered as vLLM's test wants: then its row goes.
    """

    name: str
    cases: tuple[str, ...]
    instead: Expected


def read_table(name: str) -> list[VllmCase]:
    table = json.loads((FOLDER / f"{name}.json").read_text())
    shared: dict[str, Any] = {}
    for key, value in table["shared"].items():
        shared[key] = read_value(value, shared)
    return [read_case(read_value(row, shared)) for row in table["cases"]]


def read_case(row: dict[str, Any]) -> VllmCase:
    return VllmCase(**row | {"sent": tuple(Sent(**sent) for sent in row["sent"])})


def read_differences() -> list[Difference]:
    rows = read_value(json.loads((FOLDER / "differences.json").read_text()), {})
    return [Difference(**row | {"cases": tuple(row["cases"])}) for row in rows]


def read_value(value: Any, shared: dict[str, Any]) -> Any:
    """Return what a JSON value stands for, given the shared values."""
    if isinstance(value, list):
        return [read_value(one, shared) for one in value]
    if not isinstance(value, dict):
        return value
    read = {name: read_value(one, shared) for name, one in value.items()}
    if "$shared" in read:
        return shared[read["$shared"]]
    tag = next(iter(read), "")
    return TAGS[tag](read[tag]) if tag in TAGS else read


TAGS: dict[str, Callable[[Any], Any]] = {
    "$want": lambda words: Want(words[0], tuple(words[1:])),
    "$from": Ref,
    "$bytes": str.encode,
    "$repeat": lambda words: words[0] * words[1],
    "$join": "".join,
}

CASES = tuple(case for name in TABLES for case in read_table(name))
DIFFERENCES = tuple(read_differences())
