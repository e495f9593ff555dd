"""Counting JSON values without parsing: the same numbers as a parser's, whatever strings contain."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers.live_server import live_server

from pagoda.server.http import body
from pagoda.server.http.body import MAX_KEYS, MAX_OBJECTS, MAX_VALUES, check_size
from pagoda.server.http.errors import HttpError

TEXTS = st.text(alphabet=st.sampled_from('a,:[]{}"\\\u00e9/'), max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Commas with lists and objects, lists and objects, keys."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    commas, opened, keys = (sum(each[i] for each in inner) for i in range(3))
    return commas + max(len(value), 1), opened + 1, keys + (len(value) if isinstance(value, dict) else 0)


@given(value=VALUES, chunk=st.integers(1, 9), ascii=st.booleans())
def test_counts_equal_those_of_a_parser(value: Any, chunk: int, ascii: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii).encode()
    counts = counted(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_CHUNK", chunk)
        names = ("MAX_VALUES", "MAX_OBJECTS", "MAX_KEYS")
        for name, count in zip(names, counts):
            patch.setattr(body, name, count)
        check_size(raw)
        for name, count in zip(names, counts):
            if count:
                patch.setattr(body, name, count - 1)
                with pytest.raises(HttpError):
                    check_size(raw)
                patch.setattr(body, name, count)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b'{"prompt": [' + b"1," * MAX_VALUES + b"1]}", f"{MAX_VALUES} values"),
        (b'{"prompt": [' + b"[]," * MAX_OBJECTS + b"[]]}", f"{MAX_OBJECTS} lists and objects"),
        (b'{"session_id": {' + b'"a":1,' * MAX_KEYS + b'"a":1}}', f"{MAX_KEYS} keys"),
    ],
)
def test_a_body_of_too_many_values_is_refused(raw: bytes, what: str) -> None:
    with live_server() as server:
        status, answer = server.post("/v1/completions", raw)
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
        assert what in answer["error"]["message"]
        text = json.dumps({"prompt": "a", "max_tokens": 1, "user": ',:[]{}\\"' * MAX_OBJECTS})
        status, answer = server.post("/v1/completions", text.encode())  # it has few values, and a long one
        assert (status, answer["error"]["param"]) == (400, "user")


def test_a_compressed_body_is_refused() -> None:
    with live_server() as server:
        for coding, status in (("gzip", 415), ("GZIP, identity", 415), ("identity", 200), ("Identity", 200)):
            received, answer = server.request(
                "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, {"content-encoding": coding}
            )
            assert received == status, answer
