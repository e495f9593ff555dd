"""A small client of the OpenAI HTTP API, on the standard library alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final
from urllib.parse import urlsplit

from pagoda.common.errors import ConfigError, PagodaError

TIMEOUT_SECONDS: Final = 600.0


class ApiError(PagodaError):
    """The server could not be reached, or it answered with an error. `status`: the HTTP status, if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ApiClient:
    """One server. `url`: its base, such as http://localhost:8000/v1. Raises ConfigError for a URL of another kind."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--url", f"{url} is not an http URL; use one such as http://localhost:8000/v1")
        self._url = url
        self._parts = parts
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """The names that the server answers to."""
        return [str(card["id"]) for card in self.cards()]

    def cards(self) -> list[dict[str, Any]]:
        """What the server says about each of its models."""
        with self._request("GET", "/models", None) as response:
            return list(json.load(response)["data"])

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer. Raises ApiError, also for an error inside the stream."""
        with self._request("POST", path, {**body, "stream": True}) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ApiError(str(event["error"].get("message", event["error"])))
                yield event
        raise ApiError(f"{self._url}: the answer broke off")

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> HTTPResponse:
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_SECONDS)
        text = None if body is None else json.dumps(body)
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, text, self._headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or error
            raise ApiError(f"{self._url}: {reason}; is the server running? (pagoda serve MODEL)") from None
        if response.status >= 400:
            raise ApiError(f"{self._url}: {response.status}: {message_of(response.read())}", response.status)
        return response


def message_of(raw: bytes) -> str:
    """What an error's body says."""
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")
