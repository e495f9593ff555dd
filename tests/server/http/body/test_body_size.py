"""Counting JSON values without parsing: the same numbers as a parser's, whatever strings contain."""

from __future__ import annotations

import gzip
import json
import zlib
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


BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


def zstd_of(text: bytes) -> bytes:
    return pytest.importorskip("backports.zstd").compress(text)


def test_compressed_bodies_are_read() -> None:
    two_streams = gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])
    with live_server() as server:
        for coding, raw, status in (
            ("gzip", gzip.compress(BODY), 200),
            ("X-GZIP", two_streams, 200),
            ("identity", BODY, 200),
            ("Identity", BODY, 200),
            ("br", BODY, 415),
            ("gzip, gzip", gzip.compress(gzip.compress(BODY)), 415),
            ("gzip", BODY, 400),
            ("gzip", gzip.compress(BODY)[:-9], 400),
            ("gzip", gzip.compress(BODY) + b"more", 400),
            ("gzip", gzip.compress(b"") * 16 + gzip.compress(BODY), 400),  # too many streams
        ):
            received, answer = server.request("POST", "/v1/completions", raw, {"content-encoding": coding})
            assert received == status, (coding, answer)
            assert status == 200 or "gzip" in answer["error"]["message"]


def test_a_compressed_body_is_bounded_once_decompressed() -> None:
    with live_server(max_body_bytes=10_000) as server:
        for text, status in ((BODY + b" " * (10_000 - len(BODY)), 200), (b" " * 10_001, 413), (b" " * 5_000_000, 413)):
            received, answer = server.request(
                "POST", "/v1/completions", gzip.compress(text), {"content-encoding": "gzip"}
            )
            assert received == status, answer
            assert status == 200 or "larger than 10000 bytes" in answer["error"]["message"]


def test_a_decoder_is_never_asked_for_more_than_the_limit() -> None:
    asked: list[int] = []

    class Decoder:
        def __init__(self) -> None:
            self._decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._decoder, name)

        def decompress(self, data: bytes, max_length: int) -> bytes:
            asked.append(max_length)
            return self._decoder.decompress(data, max_length)

    raw = gzip.compress(b"a" * 60) + gzip.compress(b"b" * 10_000_000)
    with pytest.raises(HttpError, match="larger than 100 bytes"):
        body._decompressed(raw, Decoder, "gzip", 100)
    assert asked == [101, 41]


def test_zstd_bodies() -> None:
    with live_server(max_body_bytes=10_000) as server:
        for raw, status in (
            (zstd_of(BODY), 200),
            (zstd_of(BODY[:9]) + zstd_of(BODY[9:]), 200),
            (zstd_of(b" " * 20_000_000), 413),
            (zstd_of(BODY)[:-3], 400),
            (BODY, 400),
        ):
            received, answer = server.request("POST", "/v1/completions", raw, {"content-encoding": "zstd"})
            assert received == status, answer
