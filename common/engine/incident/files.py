"""Writes incident snapshots to files, and reads them."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any, Final

import msgspec

import pagoda
from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.incident.snapshot import FORMAT, Snapshot
from pagoda.common.errors import RequestError

KEPT: Final = 16
"""Files of a folder; when another is written, the oldest goes."""

_FIELD: Final = "file"


def snapshot_of(
    core: EngineCore,
    cause: str,
    *,
    error: BaseException | None = None,
    config: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    tokens: bool = False,
) -> Snapshot:
    """Return the snapshot of an engine, now. `tokens`: with the token ids of requests.

    `config`: settings, without secrets. `engine`: what else describes it.
    """
    head = Snapshot(
        version=pagoda.__version__,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        cause=cause,
        traceback=[] if error is None else traceback.format_exception(error),
        config=config or {},
        engine=engine or {},
        limits=core.limits,
        stats=core.stats,
        why_not=core.why_no_journal,
    )
    if core.journal is None:
        return head
    state, events, plans, kv = core.journal.state(tokens=tokens)
    return msgspec.structs.replace(head, state=state, events=events, plans=plans, kv=kv)


def write_snapshot(folder: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot to a new file with mode 0600 and return its path. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stamp = snapshot.created.replace(":", "").replace("-", "")
    path = folder / f"incident-{stamp}-{os.getpid()}-{time.monotonic_ns() % 1_000_000:06d}.json"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(snapshot))
    for old in sorted(folder.glob("incident-*.json"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def read_snapshot(path: Path) -> Snapshot:
    """Return the snapshot in a file. Raises RequestError with the remedy."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RequestError(_FIELD, f"{path}: {error.strerror}; give a file that the server wrote") from None
    try:
        version = msgspec.json.decode(text, type=dict[str, Any]).get("format")
        if version != FORMAT:
            raise RequestError(
                _FIELD, f"{path}: its format is {version!r}, this version reads {FORMAT}; use the version that wrote it"
            )
        return msgspec.json.decode(text, type=Snapshot)
    except msgspec.DecodeError as error:
        raise RequestError(_FIELD, f"{path}: not an incident snapshot: {error}") from None
