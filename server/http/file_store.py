"""Files of /v1/files in a folder, bounded in number and total size. Each is only visible to its owner.

A file is `ID`, its content, and `ID.json`, its description, which is written last.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pagoda.common.errors import ConfigError
from pagoda.server.http.errors import HttpError
from pagoda.server.private_folder import PrivateFolder


class StoredFile(msgspec.Struct, frozen=True):
    """One file."""

    id: str
    bytes: int
    created_at: int  # Unix time in seconds
    filename: str
    purpose: str
    owner: str  # hexadecimal digest of the API key that may read it, see server.owner_of
    expires_at: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        fields = msgspec.structs.asdict(self) | {"object": "file", "status": "processed", "status_details": None}
        del fields["owner"]
        return fields


class FileStore:
    """Files in `folder`, by default a private temporary one that is removed when the process ends.

    Raises ConfigError if the folder cannot be written.
    """

    def __init__(self, folder: str | None, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._temporary: PrivateFolder | None = None
        self._folder = None if folder is None else Path(folder)
        self._files: dict[str, StoredFile] = {}  # oldest first
        self._size = 0  # bytes of all files, those being written included
        self._written = 0  # number of files being written
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
    def free_bytes(self) -> int:
        return max(self._max_bytes - self._size, 0)

    def files(self, owner: str) -> list[StoredFile]:
        """Return the owner's files, oldest first."""
        self._drop_expired()
        return [each for each in self._files.values() if each.owner == owner]

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

    def write(self) -> FileWriter:
        """Start a new file. Raise HttpError (413) if there are too many."""
        self._drop_expired()
        if len(self._files) + self._written >= self._max_count:
            raise HttpError(413, f"there are {self._max_count} files (--max-stored-files); delete some")
        return FileWriter(self)

    def _open(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
        files = sorted(self._stored(folder), key=lambda each: each.created_at)
        self._files = {each.id: each for each in files}
        self._size = sum(each.bytes for each in files)
        for path in folder.glob("file-*.part"):  # of a process that was killed
            path.unlink()

    def _stored(self, folder: Path) -> Iterator[StoredFile]:
        for path in folder.glob("file-*.json"):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=StoredFile)
            except msgspec.DecodeError as error:
                raise ConfigError("--files-dir", f"{path}: {error}; remove it, or use another folder") from None

    def _drop(self, file: StoredFile) -> None:
        del self._files[file.id]
        self._size -= file.bytes
        for path in (self.folder / f"{file.id}.json", self.folder / file.id):
            path.unlink(missing_ok=True)

    def _drop_expired(self) -> None:
        now = time.time()
        for file in [each for each in self._files.values() if each.expires_at is not None and each.expires_at <= now]:
            self._drop(file)

    # Called by a writer.

    def reserve(self, count: int) -> None:
        """Count bytes that are about to be written. Raise HttpError (413) if they are too many."""
        if count > self.free_bytes:
            limit = f"{self._max_bytes} bytes (--max-stored-file-bytes)"
            raise HttpError(413, f"the files would be larger than {limit} in total; delete some")
        self._size += count

    def begin(self) -> Path:
        """Return the path of the new file's content while it is written."""
        self._written += 1
        return self.folder / f"file-{uuid.uuid4().hex}.part"

    def abandon(self, path: Path, size: int) -> None:
        """Remove a file that was not finished."""
        self._written -= 1
        self._size -= size
        path.unlink(missing_ok=True)

    def add(self, path: Path, file: StoredFile) -> None:
        """Make a finished file visible."""
        self._written -= 1
        path.rename(self.folder / file.id)
        write_json(self.folder / f"{file.id}.json", file)
        self._files[file.id] = file


def write_json(path: Path, content: Any) -> None:
    """Replace a file's content with JSON, in one step."""
    draft = path.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_bytes(msgspec.json.encode(content))
    draft.replace(path)


class FileWriter:
    """A file that is being written. `finish` or `abandon` ends it."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._path = store.begin()
        self._file = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append. Raise HttpError (413) if the store has no room."""
        self._store.reserve(len(data))
        self.size += len(data)
        self._file.write(data)

    def finish(self, filename: str, purpose: str, owner: str, seconds: int | None) -> StoredFile:
        """Store the file, for `seconds` or, with None, until it is deleted."""
        self._file.close()
        now = int(time.time())
        expires_at = None if seconds is None else now + seconds
        file = StoredFile(self._path.stem, self.size, now, filename, purpose, owner, expires_at)
        self._store.add(self._path, file)
        return file

    def abandon(self) -> None:
        """Remove what was written."""
        self._file.close()
        self._store.abandon(self._path, self.size)
