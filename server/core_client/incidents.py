"""Incident snapshots of an engine process: when it fails, on a signal, and on demand."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.incident.files import snapshot_of, write_snapshot
from pagoda.server.core_client.process_client import SNAPSHOT_SIGNAL
from pagoda.server.redact import without_secrets
from pagoda.server.startup.engine import BuiltEngine

logger = logging.getLogger(__name__)


def incident_folder(config: EngineConfig) -> Path:
    """Return --incident-dir or its default."""
    if config.runtime.incident_dir is not None:
        return Path(config.runtime.incident_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda" / "incidents"


class IncidentWriter:
    """Writes snapshots of one engine. Thread-safe, as far as the engine's own thread does not need to take part."""

    def __init__(self, config: EngineConfig, built: BuiltEngine) -> None:
        self._config, self._built = config, built

    def write(self, cause: str, error: BaseException | None = None) -> Path:
        """Write a snapshot and return its path. Raises OSError."""
        info = self._built.info
        snapshot = snapshot_of(
            self._built.core,
            cause,
            error=error,
            config=without_secrets("", self._config),
            engine={"backend": info.backend, "device": info.device, "dtype": info.dtype, "memory": info.memory},
            tokens=self._config.runtime.incident_tokens,
        )
        path = write_snapshot(incident_folder(self._config), snapshot)
        logger.warning("incident snapshot: %s (pagoda replay FILE steps through it)", path)
        return path

    def try_write(self, cause: str, error: BaseException | None = None) -> None:
        """Write a snapshot; log why it cannot be written, if so. For an engine that has failed."""
        try:
            self.write(cause, error)
        except Exception as failure:
            logger.error("no incident snapshot: %r", failure)

    def on_signal(self) -> None:
        """From now on write a snapshot for each SNAPSHOT_SIGNAL, in a thread. Call it in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(SNAPSHOT_SIGNAL, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written to by C code: the main thread may be stuck
        threading.Thread(target=self._wait, args=(reader,), name="pagoda-incidents", daemon=True).start()

    def _wait(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            if SNAPSHOT_SIGNAL in numbers:
                self.try_write("on demand, by signal")
