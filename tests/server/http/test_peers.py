"""Reports that API server processes ask each other for."""

from __future__ import annotations

import pytest

from pagoda.server.http import peers
from pagoda.server.http.peers import ApiPeers, PeerReport


async def test_a_closed_process_is_asked_no_more(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "TIMEOUT_SECONDS", 60.0)
    address = str(tmp_path_factory.mktemp("a") / "engine")
    first, second, later = (
        ApiPeers(address, index, 2, lambda metrics, running=running: PeerReport(running=running))
        for index, running in ((0, 3), (1, 5), (0, 3))
    )
    await second.start()
    assert [report.running for report in await first.reports(metrics=False)] == [3, 5]
    second.close()
    assert [report.running for report in await later.reports(metrics=False)] == [3]
