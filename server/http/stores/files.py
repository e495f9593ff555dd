"""Files of /v1/files in a folder, bounded in number and total size, and in what one owner uses of both.

Each is only visible to its owner. A file is `ID`, its content, and `ID.json`, its description, which is written last.
While it is written they are `ID.part` and `ID.draft`; a file that its writer has not finished can be continued by the
next server process.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from pagoda.common.engine.scheduling.shares import Shares
from pagoda.common.errors import ConfigError
from pagoda.server.core_client.private_folder import PrivateFolder
from pagoda.server.http.errors import HttpError

_DESCRIPTION_BYTES: Final = 4096
"""Room on the disk that a description has from the beginning, so that a file can be finished when the disk is full."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class StoredFile(msgspec.Struct, frozen=True):
    """One file."""

    id: str
    bytes: int
    created_at: int  # Unix time in seconds.
    filename: str
    purpose: str
    owner: str  # Hexadecimal digest of the API key that may read it, see server.owner_of.
    expires_at: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        fields = msgspec.structs.asdict(self) | {"object": "file", "status": "processed", "status_details": None}
        del fields["owner"]
        return fields


class FileStore:
    """Files in `folder`, by default a private temporary one that is removed when the process ends.

    `share`: of the number and the bytes that one owner may use. Raises ConfigError if the folder cannot be written.
    """

    def __init__(self, folder: str | None, max_count: int, max_bytes: int, share: float = 1.0) -> None:
        self._shares: Shares[str] = Shares(max_count, max_bytes)  # Files that are being written are included.
        self._share = share
        self._temporary: PrivateFolder | None = None
        self._folder = None if folder is None else Path(folder)
        self._files: dict[str, StoredFile] = {}  # The files, oldest first.
        self._orphans: dict[str, Path] = {}  # Id -> content of a file that an earlier process has not finished.
        if self._folder is not None:
            try:
                self._open(self._folder)
            except OSError as error:
                raise ConfigError("--files-dir", f"{folder}: {error.strerror or error}; use another folder") from None

    @property
    def folder(self) -> Path:
        """The folder; a temporary one is created when it is first needed."""
        if self._folder is None:
            self._temporary = PrivateFolder("files")
            self._folder = self._temporary.path
        return self._folder

    @property
    def outlives_process(self) -> bool:
        """Whether the next server process finds the files."""
        return self._temporary is None and self._folder is not None

    def free_bytes(self, owner: str) -> int:
        """Return the bytes that an owner may still store."""
        _, used = self._shares.of(owner)
        return max(0, min(self._shares.max_bytes - self._shares.bytes, self._most(self._shares.max_bytes) - used))

    def files(self, owner: str) -> list[StoredFile]:
        """Return the owner's files, oldest first."""
        self._drop_expired()
        return [file for file in self._files.values() if file.owner == owner]

    def get(self, file_id: str, owner: str) -> StoredFile:
        """Return the owner's file. Raise HttpError (404), also for another owner's."""
        self._drop_expired()
        file = self._files.get(file_id)
        if file is None or file.owner != owner:
            raise HttpError(
                404, f"there is no file {file_id[:200]!r}: it was deleted, expired, or never stored", "file_id"
            )
        return file

    def path(self, file: StoredFile) -> Path:
        """Return the path of a file's content."""
        return self.folder / file.id

    def delete(self, file_id: str, owner: str) -> None:
        """Delete the owner's file. Raise HttpError (404)."""
        self._drop(self.get(file_id, owner))

    def write(self, owner: str) -> FileWriter:
        """Start a new file. Raise HttpError: 413 if there are too many, 507 if the disk is full."""
        self._drop_expired()
        count, _ = self._shares.of(owner)
        limit = self._shares.max_count
        if self._shares.count >= limit:
            raise HttpError(413, f"there are {limit} files (--max-stored-files); delete some")
        if count >= self._most(limit):
            raise HttpError(413, f"this API key has {count} of {limit} files (--max-key-share); delete some")
        return FileWriter(self, owner, self.folder / f"file-{uuid.uuid4().hex}.part")

    def resume(self, file_id: str, owner: str) -> FileWriter | None:
        """Continue a file of an earlier process after its last complete line; None if there is no such file.

        It may be finished: that process ended before it could tell.
        """
        path = self._orphans.pop(file_id, None)
        if path is None and (finished := self._files.pop(file_id, None)) is not None:
            self._shares.add(finished.owner, count=-1, size=-finished.bytes)
            path = self.path(finished).rename(self.folder / f"{file_id}.part")
            (self.folder / f"{file_id}.json").unlink()
        return None if path is None else FileWriter(self, owner, path)

    def drop_unfinished(self, kept: Collection[str]) -> None:
        """Remove the files that an earlier process has not finished, other than these, which are to be continued."""
        for file_id in self._orphans.keys() - set(kept):
            _remove(self._orphans.pop(file_id))

    def _most(self, limit: int) -> int:
        """Return what one owner may use of a limit."""
        return max(1, int(limit * self._share)) if limit else 0

    def _open(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
        files = sorted(self._stored(folder), key=lambda file: file.created_at)
        self._files = {file.id: file for file in files}
        for file in files:
            self._shares.add(file.owner, count=1, size=file.bytes)
        self._orphans = {path.stem: path for path in folder.glob("file-*.part")}

    def _stored(self, folder: Path) -> Iterator[StoredFile]:
        for path in folder.glob("file-*.json"):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=StoredFile)
            except msgspec.DecodeError as error:
                raise ConfigError("--files-dir", f"{path}: {error}; remove it, or use another folder") from None

    def _drop(self, file: StoredFile) -> None:
        del self._files[file.id]
        self._shares.add(file.owner, count=-1, size=-file.bytes)
        for path in (self.folder / f"{file.id}.json", self.folder / file.id):
            path.unlink(missing_ok=True)

    def _drop_expired(self) -> None:
        now = time.time()
        for file in [
            candidate
            for candidate in self._files.values()
            if candidate.expires_at is not None and candidate.expires_at <= now
        ]:
            self._drop(file)

    # Called by a writer.

    def take(self, owner: str, *, count: int = 0, size: int = 0) -> None:
        """Count what an owner is about to write; negative for what was not. Raise HttpError (413) for too much."""
        if size > self.free_bytes(owner):
            limit = f"{self._shares.max_bytes} bytes (--max-stored-file-bytes, --max-key-share)"
            raise HttpError(413, f"the files would be larger than what there is of {limit}; delete some")
        self._shares.add(owner, count=count, size=size)

    def add(self, file: StoredFile) -> None:
        """Make a finished file visible."""
        self._files[file.id] = file


def write_json(path: Path, content: Any) -> None:
    """Replace a file's content with JSON, in one step."""
    draft = path.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_bytes(msgspec.json.encode(content))
    draft.replace(path)


class FileWriter:
    """A file that is being written. `finish`, `abandon` or `leave` ends it. What is there of it is counted at once."""

    def __init__(self, store: FileStore, owner: str, path: Path) -> None:
        """`path`: of the content, which may be there from an earlier process. Raises HttpError: 413, 507."""
        self._store = store
        self._owner = owner
        self._path = path
        self.size = 0
        is_new = not path.exists()
        with _storing():
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                self._draft.touch(mode=0o600)
                self._draft.write_bytes(bytes(_DESCRIPTION_BYTES))
                self.lines, kept = _complete_lines(self._file)
                store.take(owner, count=1, size=kept)
            except BaseException:
                os.close(self._file)
                if is_new:  # What an earlier process has written is not lost.
                    _remove(path)
                raise
            os.ftruncate(self._file, kept)
            os.lseek(self._file, kept, os.SEEK_SET)
        self.size = kept

    @property
    def id(self) -> str:
        """Of the file, once it is finished."""
        return self._path.stem

    @property
    def _draft(self) -> Path:
        return self._path.with_suffix(".draft")

    def write(self, data: bytes) -> None:
        """Append all of `data`, or nothing. Raise HttpError: 413 if the store has no room, 507 if the disk has none."""
        self._store.take(self._owner, size=len(data))
        try:
            with _storing():
                left = memoryview(data)
                while left:
                    left = left[os.write(self._file, left) :]
        except BaseException:
            self._store.take(self._owner, size=-len(data))
            os.ftruncate(self._file, self.size)
            os.lseek(self._file, self.size, os.SEEK_SET)
            raise
        self.size += len(data)

    def finish(self, filename: str, purpose: str, seconds: int | None) -> StoredFile:
        """Store the file, for `seconds` or, with None, until it is deleted.

        Raises HttpError 507 if the disk fails; then the file is still one that is being written.
        """
        now = int(time.time())
        expires_at = None if seconds is None else now + seconds
        file = StoredFile(self.id, self.size, now, filename, purpose, self._owner, expires_at)
        text = msgspec.json.encode(file)
        content = self._path.with_suffix("")
        with _storing():
            with self._draft.open("r+b") as draft:  # The file is written in the room that it has.
                draft.write(text)
                draft.truncate()
            self._path.rename(content)
            try:
                self._draft.rename(self._path.with_suffix(".json"))
            except OSError:
                content.rename(self._path)
                raise
        os.close(self._file)
        self._store.add(file)
        return file

    def leave(self) -> None:
        """Leave what was written to the next process."""
        os.close(self._file)

    def abandon(self) -> None:
        """Remove what was written."""
        os.close(self._file)
        self._store.take(self._owner, count=-1, size=-self.size)
        _remove(self._path)


def _complete_lines(file: int) -> tuple[int, int]:
    """Return how many lines of an open file are complete, and where the last of them ends."""
    lines = end = place = 0
    while piece := os.pread(file, 1 << 20, place):
        lines += piece.count(b"\n")
        if b"\n" in piece:
            end = place + piece.rindex(b"\n") + 1
        place += len(piece)
    return lines, end


def _remove(path: Path) -> None:
    """Remove a file that is not finished."""
    path.unlink(missing_ok=True)
    path.with_suffix(".draft").unlink(missing_ok=True)


@contextmanager
def _storing() -> Iterator[None]:
    """Turn what the system raises on a full disk into an HttpError (507)."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise HttpError(507, "the server's disk is full (--files-dir); delete files, or try again later") from None
