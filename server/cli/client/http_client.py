"""A small client of the OpenAI HTTP API that needs only the standard library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final
from urllib.parse import urlsplit

from pagoda.common.errors import ConfigError, PagodaError

TIMEOUT_SECONDS: Final = 600.0


class ApiError(PagodaError):
    """The server is unreachable or answered with an error. `status` is None without an HTTP answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ApiClient:
    """A client of the server at base URL `url`, such as http://localhost:8000/v1.

    `headers`: further ones of each request. `insecure`: do not verify the server's certificate. Raises ConfigError for
    an invalid URL.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--url", f"{url} is not an http URL; use one such as http://localhost:8000/v1")
        self._url = url
        self._parts = parts
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._headers |= {name.lower(): value for name, value in (headers or {}).items()}
        self._insecure = insecure

    def models(self) -> list[str]:
        """Return the names of the server's models."""
        return [str(card["id"]) for card in self.cards()]

    def cards(self) -> list[dict[str, Any]]:
        """Return the server's model cards."""
        with self._request("GET", "/models", None) as response:
            return list(json.load(response)["data"])

    def text(self, path: str) -> str:
        """Return the body of a GET. Raises ApiError."""
        with self._request("GET", path, None) as response:
            return response.read().decode()

    def post(self, path: str) -> str:
        """Return the body of the answer to a POST without a body. Raises ApiError."""
        with self._request("POST", path, {}) as response:
            return response.read().decode()

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer. Raises ApiError, also for an error event in the stream."""
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
        raise ApiError(f"{self._url}: the answer ended early")

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> HTTPResponse:
        connection = self._connection()
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

    def _connection(self) -> HTTPConnection:
        host = self._parts.hostname or ""
        port = self._parts.port
        if self._parts.scheme == "http":
            return HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
        import ssl  # The import costs start-up time.

        context = ssl.create_default_context()
        if self._insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=context)


def message_of(raw: bytes) -> str:
    """Return the message of an error body."""
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")
