"""Where a batch comes from and where its answers go: files, or addresses that are fetched and uploaded.

Answers gather beside their place and appear there when all are written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from pagoda.common.config.batch import is_address
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


class Output:
    """Where answers are written. Leaving it complete (`finish`) puts them in place; else they stay where they gather.

    Raises ConfigError when nothing can be written there.
    """

    def __init__(self, target: str, folder: str | None = None) -> None:
        self._target = target
        self._count = 0
        self._placed = False
        try:
            self._file = self._open(folder)
        except OSError as error:
            flag = "--output-file" if folder is None else "--output-tmp-dir"
            raise ConfigError(flag, f"{folder or shown(target)}: {error.strerror}") from None

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
                return open(f"{target}.partial", "wb")
        return tempfile.NamedTemporaryFile("wb", delete=False, dir=folder, prefix="pagoda-batch-", suffix=".jsonl")

    def write(self, line: bytes) -> None:
        """Add an answer. Raises OutputError."""
        try:
            self._file.write(line)
        except OSError as error:
            raise self._failed(error) from None
        self._count += 1

    def finish(self) -> None:
        """Put all answers in place. Raises OutputError."""
        try:
            self._file.close()
            if is_address(self._target):
                self._upload()
            elif not self._placed:
                self._move()
        except (OSError, ValueError) as error:
            raise self._failed(error) from None
        self._placed = True

    def _failed(self, error: Exception) -> OutputError:
        return OutputError(f"{shown(self._target)}: {reason(error)}; the answers so far are in {self._file.name}")

    def _move(self) -> None:
        beside = f"{self._target}.partial"
        if self._file.name != beside:
            shutil.copyfile(self._file.name, beside)
            os.unlink(self._file.name)
        os.replace(beside, self._target)

    def _upload(self) -> None:
        staged = Path(self._file.name)
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
            logger.warning("%d answers are in %s", self._count, self._file.name)
        else:
            os.unlink(self._file.name)
