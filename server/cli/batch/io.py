"""Where a batch comes from and where its answers go: files, or addresses that are fetched and uploaded.

Answers gather beside their place and appear there when all are written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from pagoda.common.config.commands import is_address
from pagoda.common.errors import ConfigError, PagodaError

TIMEOUT_SECONDS: Final = 600.0
UPLOAD_PAUSES: Final = (0.0, 1.0, 4.0)
"""Seconds to wait before each try."""

logger = logging.getLogger(__name__)


class OutputError(PagodaError):
    """The answers are written, but not where they should be; the message says where they are."""


def open_source(path: str) -> IO[bytes]:
    """The file at a path or an address, from its beginning. Raises ConfigError."""
    try:
        if not is_address(path):
            return open(path, "rb")
        copy = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
        with urlopen(path, timeout=TIMEOUT_SECONDS) as response:
            shutil.copyfileobj(response, copy)
    except (OSError, ValueError) as error:
        raise ConfigError("--input-file", f"{shown(path)}: {reason(error)}") from None
    copy.seek(0)
    return copy


def count_requests(source: IO[bytes]) -> int | None:
    """Lines that are not blank; None for a source that can be read only once."""
    if not source.seekable():
        return None
    count = sum(1 for line in source if line.strip())
    source.seek(0)
    return count


def shown(path: str) -> str:
    """A path, or an address without the secrets that it may carry."""
    if not is_address(path):
        return path
    parts = urlsplit(path)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def reason(error: Exception) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, HTTPError):
        return f"{error.code} {error.reason}"
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner)


class BatchOutput:
    """Where answers are written. Leaving it complete (`finish`) puts them in place; else they stay where they gather.

    They gather under a name that the next run to the same place finds again. Raises ConfigError when nothing can be
    written there.
    """

    def __init__(self, target: str, folder: str | None = None) -> None:
        self._target = target
        self._flag = "--output-file" if folder is None else "--output-tmp-dir"
        self._count = 0
        self._placed = False
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
                self._placed = True  # a pipe or a device: there is nothing to swap
                return open(target, "wb")
            self._target = target = os.path.realpath(target)
            if folder is None:
                return self._gather(f"{target}.partial", 0o666)
        name = hashlib.sha256(shown(target).encode()).hexdigest()[:16]
        return self._gather(os.path.join(folder or tempfile.gettempdir(), f"pagoda-batch-{name}.jsonl"), 0o600)

    def _gather(self, path: str, mode: int) -> IO[bytes]:
        """The file of an earlier run, or a new one; nobody else's, and for one run at a time."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(path, flags, mode), "r+b")
        found = os.fstat(file.fileno())
        try:
            if found.st_size and found.st_uid != os.geteuid():
                raise ConfigError(self._flag, f"{path} belongs to somebody else; remove it, or use another place")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(self._flag, f"{path}: another run writes there; wait for its end") from None
        except ConfigError:
            file.close()
            raise
        self.path = path
        return file

    def answers(self) -> Iterator[bytes]:
        """The whole lines that an earlier run left."""
        if self._placed:
            return
        self._file.seek(0)
        for line in self._file:
            if line.endswith(b"\n"):
                yield line

    def keep(self, count: int, end: int) -> None:
        """Go on behind so many answers, which end there. Raises ConfigError when the others are another batch's."""
        if self._placed:
            return
        self._file.seek(0)
        if not count and self._file.readline().endswith(b"\n"):
            self._placed = True  # they are not ours to remove
            raise ConfigError(
                self._flag, f"{self.path} holds answers of another batch; remove it, or name another place"
            )
        self._file.seek(end)
        self._file.truncate()
        self._count = count

    def write(self, line: bytes) -> None:
        """Add an answer, which is there even if this process is killed next. Raises OutputError."""
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from None
        self._count += 1

    def finish(self) -> None:
        """Put all answers in place. Raises OutputError."""
        try:
            if is_address(self._target):
                self._upload()
            elif not self._placed:
                self._move()
            self._file.close()
        except (OSError, ValueError) as error:
            raise self._failed(error) from None
        self._placed = True

    def _failed(self, error: Exception) -> OutputError:
        return OutputError(f"{shown(self._target)}: {reason(error)}; the answers so far are in {self._where}")

    @property
    def _where(self) -> str:
        return shown(self._target) if self._placed else self.path

    def _move(self) -> None:
        beside = f"{self._target}.partial"
        if self.path != beside:
            shutil.copyfile(self.path, beside)
            os.unlink(self.path)
        os.replace(beside, self._target)

    def _upload(self) -> None:
        staged = Path(self.path)
        headers = {"content-type": "application/octet-stream", "content-length": str(staged.stat().st_size)}
        for attempt, pause in enumerate(UPLOAD_PAUSES, 1):
            time.sleep(pause)
            try:
                with staged.open("rb") as data:
                    request = Request(self._target, data=data, headers=headers, method="PUT")
                    urlopen(request, timeout=TIMEOUT_SECONDS).close()
                break
            except OSError as error:
                refused = isinstance(error, HTTPError) and error.code < 500
                if refused or attempt == len(UPLOAD_PAUSES):
                    raise
                logger.warning("%s: %s; trying again", shown(self._target), reason(error))
        staged.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # what could not be written was told when it was
            self._file.close()
        if self._placed:
            return
        if self._count:
            logger.warning("%d answers are in %s; the same command goes on from there", self._count, self.path)
        else:
            os.unlink(self.path)
