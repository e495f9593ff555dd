"""Folders for sockets and temporary files that only this user may enter, removed at the end of the process.

A process that is killed cannot remove its folder. Each folder therefore holds a lock file, locked for as long as its
process runs, and the next process removes folders whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Final

_LOCK: Final = ".lock"
_YOUNG_SECONDS: Final = 2.0
"""Age up to which a folder is taken for one that is being created, whose lock file is missing or not locked yet."""


class PrivateFolder:
    """A new folder with mode 0700 in `base`, by default the system's for temporary files. `kind` is part of its name.

    Stale folders of the same kind in `base` are removed first. Raises OSError.
    """

    def __init__(self, kind: str, base: str | None = None) -> None:
        prefix = f"pagoda-{kind}-"
        parent = Path(tempfile.gettempdir() if base is None else base)
        remove_stale(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def remove(self) -> None:
        """Remove the folder with all it contains. Idempotent."""
        self._remove()


def remove_stale(parent: Path, prefix: str) -> None:
    """Remove this user's folders whose process has ended."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(parent):
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False) and _is_stale(entry):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_stale(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    if status.st_uid != os.getuid() or time.time() - status.st_mtime < _YOUNG_SECONDS:
        return False
    try:
        lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
