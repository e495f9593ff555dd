"""A request of vLLM's server tests: what is sent, and what its test wants of the answer.

An expectation maps a path into the answer (see answers.py) to a value, or to a Want that checks it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

from support.servers.live_server import Answer, LiveServer
from support.servers.vllm_requests.answers import MISSING, Views, value_at, values_at, view
from support.servers.vllm_requests.checks import Want

Expected = dict[str, Any]


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
    """What a test of vLLM sends, by default with the name of the model.

    `test`: its file below tests/ and its function; `what`: which of its requests.
    """

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
                if not wanted.holds(value, views):
                    yield f"{path} is {shown(value)}, wanted {wanted}"
            elif value is MISSING or value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
                yield f"{path} is {shown(value)}, wanted {wanted!r}"


def shown(value: Any) -> str:
    return "absent" if value is MISSING else repr(value)[:300]


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
