"""Input and output of a batch: local files, or URLs that are downloaded and uploaded.

Answers are written to a partial file, which becomes the output file when all of them are written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import socket
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from http.client import HTTPMessage
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pagoda.common.config.commands import is_address
from pagoda.common.errors import ConfigError, PagodaError

TIMEOUT_SECONDS: Final = 600.0
UPLOAD_DELAYS: Final = (0.0, 1.0, 4.0)  # Seconds before each attempt.

logger = logging.getLogger(__name__)


class OutputError(PagodaError):
    """The answers could not be moved to their destination; the message names the file that has them."""


def open_source(path: str) -> IO[bytes]:
    """Open the file at a path or URL. Raises ConfigError."""
    try:
        if not is_address(path):
            return open(path, "rb")
        copy = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
        with opened(path) as response:
            shutil.copyfileobj(response, copy)
    except (OSError, ValueError) as error:
        raise ConfigError("--input-file", f"{shown(path)}: {reason(error)}") from None
    copy.seek(0)
    return copy


class _OutsideOnly(HTTPRedirectHandler):
    """Follows no redirect from a public address to one of this machine or its network."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if _is_public(req.full_url) and not _is_public(newurl):
            raise HTTPError(
                shown(req.full_url), code, f"it redirects to the private address {shown(newurl)}", headers, fp
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_public(url: str) -> bool:
    """Return whether all addresses of a URL's host are public."""
    parts = urlsplit(url)
    addresses = socket.getaddrinfo(parts.hostname, parts.port or parts.scheme, type=socket.SOCK_STREAM)
    return all(ip_address(str(address[0]).partition("%")[0]).is_global for *_, address in addresses)


def opened(
    url: str, data: IO[bytes] | None = None, headers: Mapping[str, str] | None = None, *, method: str = "GET"
) -> IO[bytes]:
    """Open a URL, with the user and password that it may have. Raises OSError, ValueError."""
    parts = urlsplit(url)
    request = Request(urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])), data, dict(headers or {}))
    request.method = method
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        request.add_unredirected_header("Authorization", f"Basic {b64encode(pair.encode()).decode()}")
    response: IO[bytes] = build_opener(_OutsideOnly).open(request, timeout=TIMEOUT_SECONDS)
    return response


def count_requests(source: IO[bytes]) -> int | None:
    """Return the number of non-blank lines; None if the source is not seekable."""
    if not source.seekable():
        return None
    count = sum(1 for line in source if line.strip())
    source.seek(0)
    return count


def shown(path: str) -> str:
    """Return a path, or a URL without credentials and query."""
    if not is_address(path):
        return path
    parts = urlsplit(path)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def reason(error: Exception) -> str:
    """Return a short description of an I/O error."""
    if isinstance(error, HTTPError):
        return f"{error.code} {error.reason}"
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner)


class BatchOutput:
    """The output file. `finish` moves the partial file to its destination; without it the next run resumes from it.

    The partial file's name depends on the destination alone. Raises ConfigError if it cannot be written.
    """

    def __init__(self, target: str, folder: str | None = None) -> None:
        self._target = target
        self._flag = "--output-file" if folder is None else "--output-tmp-dir"
        self._count = 0
        self._finished = False
        try:
            self._file = self._open(folder)
        except OSError as error:
            raise ConfigError(self._flag, f"{folder or shown(target)}: {error.strerror}") from None

    def _open(self, folder: str | None) -> IO[bytes]:
        target = self._target
        if not is_address(target):
            if os.path.isdir(target):
                raise ConfigError("--output-file", f"{target} is a folder; name a file")
            if os.path.exists(target) and not os.path.isfile(target):
                self._finished = True  # A pipe or device cannot be replaced.
                return open(target, "wb")
            self._target = target = os.path.realpath(target)
            if folder is None:
                return self._open_partial(f"{target}.partial", 0o666)
        name = hashlib.sha256(shown(target).encode()).hexdigest()[:16]
        return self._open_partial(os.path.join(folder or tempfile.gettempdir(), f"pagoda-batch-{name}.jsonl"), 0o600)

    def _open_partial(self, path: str, mode: int) -> IO[bytes]:
        """Open the partial file of a previous run or a new one, locked, and only if this user owns it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(path, flags, mode), "r+b")
        status = os.fstat(file.fileno())
        try:
            if status.st_size and status.st_uid != os.geteuid():
                raise ConfigError(self._flag, f"{path} belongs to another user; remove it, or use another folder")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(self._flag, f"{path}: another run is writing it; wait for that run to end") from None
        except ConfigError:
            file.close()
            raise
        self.path = path
        return file

    def answers(self) -> Iterator[bytes]:
        """Yield the complete lines of a previous run."""
        if self._finished:
            return
        self._file.seek(0)
        for line in self._file:
            if line.endswith(b"\n"):
                yield line

    def resume(self, count: int, end: int) -> None:
        """Continue after the first `count` answers, which end at byte `end`.

        Raises ConfigError if another batch wrote the file.
        """
        if self._finished:
            return
        self._file.seek(0)
        if not count and self._file.readline().endswith(b"\n"):
            self._finished = True  # The other batch's file is kept.
            raise ConfigError(
                self._flag, f"{self.path} contains answers of another batch; remove it, or use another path"
            )
        self._file.seek(end)
        self._file.truncate()
        self._count = count

    def write(self, line: bytes) -> None:
        """Append an answer and flush it. Raises OutputError."""
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from None
        self._count += 1

    def finish(self) -> None:
        """Move or upload all answers to their destination. Raises OutputError."""
        try:
            if is_address(self._target):
                self._upload()
            elif not self._finished:
                self._move()
            self._file.close()
        except (OSError, ValueError) as error:
            raise self._failed(error) from None
        self._finished = True

    def _failed(self, error: Exception) -> OutputError:
        return OutputError(f"{shown(self._target)}: {reason(error)}; the answers so far are in {self._where}")

    @property
    def _where(self) -> str:
        return shown(self._target) if self._finished else self.path

    def _move(self) -> None:
        partial = f"{self._target}.partial"
        if self.path != partial:
            shutil.copyfile(self.path, partial)
            os.unlink(self.path)
        os.replace(partial, self._target)

    def _upload(self) -> None:
        staged = Path(self.path)
        headers = {"content-type": "application/octet-stream", "content-length": str(staged.stat().st_size)}
        for attempt, pause in enumerate(UPLOAD_DELAYS, 1):
            time.sleep(pause)
            try:
                with staged.open("rb") as data:
                    opened(self._target, data, headers, method="PUT").close()
                break
            except OSError as error:
                refused = isinstance(error, HTTPError) and error.code < 500
                if refused or attempt == len(UPLOAD_DELAYS):
                    raise
                logger.warning("%s: %s; retrying", shown(self._target), reason(error))
        staged.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # A write error has been reported already.
            self._file.close()
        if self._finished:
            return
        if self._count:
            logger.warning("%d answers are in %s; run the same command to continue", self._count, self.path)
        else:
            os.unlink(self.path)
