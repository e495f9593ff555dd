"""A model hub on this machine: enough of its HTTP interface for the real client to list and fetch a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class HubServer:
    """Repositories as {name: {revision: {path: bytes}}}. Use as a context; `requests` holds (path, token)."""

    def __init__(self, repositories: Mapping[str, Mapping[str, Mapping[str, bytes]]]) -> None:
        self.requests: list[tuple[str, str | None]] = []
        self._commits = {
            (name, revision): (hashlib.sha1(f"{name}{revision}".encode()).hexdigest(), files)
            for name, revisions in repositories.items()
            for revision, files in revisions.items()
        }
        self._by_sha = {(name, sha): files for (name, _), (sha, files) in self._commits.items()}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for path, _ in self.requests if "/resolve/" in path}

    @property
    def tokens(self) -> set[str | None]:
        """Every token that came with a request."""
        return {token for _, token in self.requests}

    def _find(self, name: str, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        if (name, revision) in self._by_sha:
            return revision, self._by_sha[name, revision]
        return self._commits.get((name, revision))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def log_message(self, *args: object) -> None:
                pass

        return Handler

    def _answer(self, http: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = urlsplit(http.path).path
        authorization = http.headers.get("Authorization")
        self.requests.append((path, authorization.removeprefix("Bearer ") if authorization else None))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            kind, revision = parts[4] if len(parts) > 4 else "revision", parts[5] if len(parts) > 5 else "main"
            found = self._find("/".join(parts[2:4]), revision)
            known = any(name == "/".join(parts[2:4]) for name, _ in self._commits)
            if found is None:
                return _send(http, 404, b"{}", {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"}, body)
            sha, files = found
            listed: object = {"id": "/".join(parts[2:4]), "sha": sha, "siblings": [{"rfilename": n} for n in files]}
            if kind == "tree":
                listed = [
                    {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for n, d in files.items()
                ]
            return _send(http, 200, json.dumps(listed).encode(), {"Content-Type": "application/json"}, body)
        found = self._find("/".join(parts[:2]), parts[3]) if parts[2:3] == ["resolve"] else None
        data = found[1].get("/".join(parts[4:])) if found else None
        if found is None or data is None:
            return _send(http, 404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": found[0]}
        return _send(http, 200, data, headers, body)


def _send(http: BaseHTTPRequestHandler, status: int, data: bytes, headers: Mapping[str, str], body: bool) -> None:
    http.send_response(status)
    for name, value in headers.items():
        http.send_header(name, value)
    http.send_header("Content-Length", str(len(data)))
    http.end_headers()
    if body:
        http.wfile.write(data)
