"""The language of the tables of vLLM's requests: what is sent, what its test wants of the answer.

An expectation maps a path into the answer to a value, or to a Want that checks it. Paths are relative to the JSON body
unless they begin with `status`, `headers` or `raw`; `*` stands for every element, of which there must be one. The body
of an event stream is what Stream.fold makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

import jsonschema
from support.live_server import Answer, LiveServer

Expected = dict[str, Any]
Views = list[dict[str, Any]]
"""The answers so far, each with `status`, `headers`, `raw` and `body`."""

MISSING = object()


@dataclass(frozen=True)
class Want:
    """A check of a value, given also the answers so far; `says` describes it."""

    says: str
    holds: Callable[[Any, Views], bool]


@dataclass(frozen=True)
class Ref:
    """A value of an earlier answer, for a later request."""

    path: str


@dataclass(frozen=True)
class Sent:
    """A request and what vLLM's test wants of the answer. The status is 200 unless it says otherwise."""

    method: str
    path: str
    body: Any = None
    expected: Expected = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class VllmCase:
    """What a test of vLLM sends. `test`: its file below tests/ and its function; `what`: which of its requests."""

    test: str
    what: str
    server: str
    sent: tuple[Sent, ...]

    @property
    def id(self) -> str:
        return f"{self.test}[{self.what}]"

    def answers(self, server: LiveServer, model: str) -> Views:
        """Send the requests one after the other."""
        views: Views = []
        for sent in self.sent:
            body = filled(sent.body, views)
            if isinstance(body, dict) and "model" not in body:
                body = {"model": model} | body
            elif isinstance(body, dict) and body["model"] is MISSING:
                body = {name: value for name, value in body.items() if name != "model"}
            answer = exchange(server, sent, filled_path(sent.path, views), body)
            views.append(view(answer))
        return views

    def faults(self, views: Views) -> list[str]:
        """Return in which ways the answers are not what vLLM's test wants."""
        found = []
        for index, sent in enumerate(self.sent):
            found += [f"{index}: {fault}" for fault in faults(views, index, {"status": 200} | sent.expected)]
        return found


def faults(views: Views, index: int, expected: Expected) -> Iterator[str]:
    """Yield a line for each expectation that the answer does not meet."""
    for path, wanted in expected.items():
        for value in values_at(views[index], path):
            if isinstance(wanted, Want):
                if not held(wanted, value, views):
                    yield f"{path} is {shown(value)}, wanted {wanted.says}"
            elif value is MISSING or value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
                yield f"{path} is {shown(value)}, wanted {wanted!r}"


def held(wanted: Want, value: Any, views: Views) -> bool:
    """Whether a check holds; one that cannot read the value does not."""
    try:
        return wanted.holds(value, views)
    except (KeyError, IndexError, TypeError, ValueError, jsonschema.ValidationError):
        return False


def shown(value: Any) -> str:
    return "absent" if value is MISSING else repr(value)[:300]


def values_at(one: dict[str, Any], path: str) -> list[Any]:
    """Return the values at a path: one, or with `*` one per element; MISSING where there is none."""
    first, _, rest = path.partition(".")
    if first in ("status", "headers", "raw"):
        places, values = rest.split(".") if rest else [], [one[first]]
    else:
        places, values = path.split(".") if path else [], [one["body"]]
    for place in places:
        values = [found for value in values for found in step_into(value, place)]
    return values or [MISSING]


def step_into(value: Any, place: str) -> list[Any]:
    if isinstance(value, list):
        if place == "*":
            return value
        number = int(place)
        return [value[number]] if -len(value) <= number < len(value) else [MISSING]
    if isinstance(value, dict):
        return list(value.values()) if place == "*" else [value.get(place, MISSING)]
    return [MISSING]


def value_at(views: Views, path: str) -> Any:
    """Return the value at `number.path`, the number being that of the answer."""
    number, _, rest = path.partition(".")
    return values_at(views[int(number)], rest)[0]


def filled(body: Any, views: Views) -> Any:
    """Return the body with each Ref replaced."""
    if isinstance(body, Ref):
        return value_at(views, body.path)
    if isinstance(body, dict):
        return {name: filled(value, views) for name, value in body.items()}
    if isinstance(body, list):
        return [filled(value, views) for value in body]
    return body


def filled_path(path: str, views: Views) -> str:
    """Return the path with `{number.path}` replaced by that value."""
    before, brace, rest = path.partition("{")
    if not brace:
        return path
    reference, _, after = rest.partition("}")
    return f"{before}{value_at(views, reference)}{filled_path(after, views)}"


def exchange(server: LiveServer, sent: Sent, path: str, body: Any) -> Answer:
    """Return the answer to a request, which a model on a busy machine may take its time for."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(sent.method, path, raw, {"content-type": "application/json"} | sent.headers)
    response = connection.getresponse()
    headers = {name.lower(): value for name, value in response.headers.items()}
    found = Answer(response.status, headers, response.read())
    connection.close()
    return found


def view(answer: Answer) -> dict[str, Any]:
    """Return an answer as paths see it."""
    kind = answer.headers.get("content-type", "")
    body: Any = None
    if kind.startswith("application/json") and answer.body:
        body = json.loads(answer.body)
    elif kind.startswith("text/event-stream"):
        body = fold(answer.body.decode())
    raw = answer.body.decode(errors="replace")
    return {"status": answer.status, "headers": answer.headers, "raw": raw, "body": body}


def fold(text: str) -> dict[str, Any]:
    """Return the events of a stream, and of chat and completion chunks what they add up to per choice."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    folded: dict[str, Any] = {
        "chunks": chunks,
        "done": bool(lines) and lines[-1] == "[DONE]",
        "types": [chunk.get("type") for chunk in chunks],
        "choices": choices,
        "texts": {},
        "reasoning": {},
        "reasons": [choice["finish_reason"] for choice in choices if choice.get("finish_reason")],
        "calls": [],
        "roles": [],
        "token_ids": [],
    }
    for choice in choices:
        delta, index = choice.get("delta", {}), str(choice["index"])
        said = choice.get("text") or delta.get("content") or ""
        folded["texts"][index] = folded["texts"].get(index, "") + said
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        folded["reasoning"][index] = folded["reasoning"].get(index, "") + thought
        folded["roles"] += [delta["role"]] if delta.get("role") else []
        folded["token_ids"] += choice.get("token_ids") or []
        for call in delta.get("tool_calls") or []:
            add_call(folded["calls"], call)
    return folded


def add_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Add a piece of a tool call."""
    while len(calls) <= call["index"]:
        calls.append({"id": "", "name": "", "arguments": "", "names": 0})
    into, function = calls[call["index"]], call.get("function") or {}
    into["id"] += call.get("id") or ""
    into["name"] += function.get("name") or ""
    into["names"] += bool(function.get("name"))
    into["arguments"] += function.get("arguments") or ""


# --- requests ---


def post(path: str, body: Any, expected: Expected | None = None, **headers: str) -> Sent:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Sent("POST", path, body, expected or {}, named)


def get(path: str, expected: Expected | None = None, **headers: str) -> Sent:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Sent("GET", path, None, expected or {}, named)


def refused(*parts: str, status: int = 400) -> Expected:
    """Return what a test expects that wants an error whose message contains the parts."""
    return {"status": status, "error": BODY} | ({"error.message": contains(*parts)} if parts else {})


# --- wants ---

NULL = Want("null, and not absent", lambda value, _: value is None)
GONE = Want("null or absent", lambda value, _: value is None or value is MISSING)
ABSENT = Want("no such key", lambda value, _: value is MISSING)
GIVEN = Want("anything but null", lambda value, _: value is not None and value is not MISSING)
BODY = Want("an object", lambda value, _: isinstance(value, dict))
TEXT = Want("a string", lambda value, _: isinstance(value, str))
NUMBERS = Want(
    "a list of integers", lambda value, _: isinstance(value, list) and all(type(one) is int for one in value)
)


def size(number: int) -> Want:
    return Want(f"{number} of them", lambda value, _: hasattr(value, "__len__") and len(value) == number)


def longer(number: int) -> Want:
    """More than that many elements or characters."""
    return Want(f"more than {number}", lambda value, _: hasattr(value, "__len__") and len(value) > number)


def sized(least: int, most: int) -> Want:
    return Want(f"{least} to {most}", lambda value, _: hasattr(value, "__len__") and least <= len(value) <= most)


def between(least: float, most: float) -> Want:
    return Want(f"{least} to {most}", lambda value, _: isinstance(value, (int, float)) and least <= value <= most)


def contains(*parts: str) -> Want:
    return Want(f"containing {parts}", lambda value, _: isinstance(value, str) and all(part in value for part in parts))


def lacks(part: str) -> Want:
    return Want(f"without {part!r}", lambda value, _: isinstance(value, str) and part not in value)


def starts(part: str) -> Want:
    return Want(f"beginning with {part!r}", lambda value, _: isinstance(value, str) and value.startswith(part))


def one_of(*values: Any) -> Want:
    return Want(f"one of {values}", lambda value, _: value in values)


def keys(*names: str) -> Want:
    return Want(f"an object with {names}", lambda value, _: isinstance(value, dict) and set(names) <= set(value))


def same(path: str) -> Want:
    """Equal to a value of another answer, given as `number.path`."""
    return Want(f"as {path}", lambda value, views: value is not MISSING and value == value_at(views, path))


def other(path: str) -> Want:
    return Want(f"not as {path}", lambda value, views: value is not MISSING and value != value_at(views, path))


def fits(says: str, holds: Callable[[Any], bool]) -> Want:
    """A check of one value by a function."""
    return Want(says, lambda value, _: value is not MISSING and holds(value))
