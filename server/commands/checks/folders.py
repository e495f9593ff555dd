"""Room and permission where files go."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

from pagoda.common.config.doctor import DoctorConfig
from pagoda.server.commands.checks import machine
from pagoda.server.commands.checks.finding import Finding, Findings

LITTLE_DISK: Final = 10 * machine.GIB


def folders(config: DoctorConfig) -> Findings:
    """Room and permission where downloads and sockets go."""
    cache = machine.hub_cache(config.download_dir)
    yield _folder("downloads", cache, "--download-dir or HF_HOME", LITTLE_DISK)
    yield _folder("sockets", Path(config.rpc_base_path or tempfile.gettempdir()), "--rpc-base-path or TMPDIR", 2**20)
    shared = Path("/dev/shm")
    if shared.exists():
        yield Finding(
            "ok", "shared memory", f"{machine.gib(machine.free_bytes(shared))} free; the engine uses none of it"
        )


def _folder(subject: str, folder: Path, remedy: str, enough: int) -> Finding:
    try:
        if not os.access(machine.existing(folder), os.W_OK | os.X_OK):
            return Finding("fail", subject, f"{folder} cannot be written to; name another with {remedy}")
        free = machine.free_bytes(folder)
    except OSError as error:
        return Finding("fail", subject, f"{folder}: {error.strerror or error}; name another with {remedy}")
    if free < enough:
        return Finding(
            "warn", subject, f"{folder} has {machine.gib(free)} left; make room, or name another with {remedy}"
        )
    return Finding("ok", subject, f"{folder}, {machine.gib(free)} free")
