"""`serve` on a Cloud TPU host stops, as after SIGTERM, when the host is maintained."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.config.tpu_host import TpuKind
from pagoda.server.cli.serving import serve


@pytest.mark.setting("--drain-on-maintenance")
@pytest.mark.parametrize(("drain", "chips", "signals"), [(True, 1, [signal.SIGTERM]), (False, 1, []), (True, 0, [])])
def test_a_server_stops_when_its_host_is_maintained(
    drain: bool, chips: int, signals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    told = threading.Event()

    def watch(on_event: Callable[[str], None]) -> None:
        on_event("maintenance-event TERMINATE_ON_HOST_MAINTENANCE")
        told.set()

    monkeypatch.setattr(serve, "watch_maintenance", watch)
    monkeypatch.setattr(serve, "tpu_chips", lambda: [TpuKind("V6E")] * chips)
    monkeypatch.setattr(serve.os, "kill", lambda pid, number: sent.append(number))
    serve._watch_host(ServerConfig(drain_on_maintenance=drain))
    assert told.wait(10 if signals else 0.05) == bool(signals)
    assert sent == signals
