"""The reliability table: what counts as passed, and what a row without a server's answer says."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import threading
from pathlib import Path

import pytest
from support.servers.live_server import live_server
from support.suite.watching import eventually

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "server"))

import reliability
from faults.load import _judge_growth
from faults.report import Options, Report
from faults.server import Usage
from faults.streams import Neighbours, ask, neighbours, run_neighbours, stream_body


def test_a_row_passes_if_it_has_checks_and_all_hold() -> None:
    report = Report("row")
    assert not report.passed
    report.at_most("gap", 0.5, 0.5)
    assert report.passed
    report.at_most("gap", 0.51, 0.5)
    assert not report.passed
    assert "MISS gap: 0.51 s (<= 0.5 s)" in report.text()


def test_a_failing_row_and_one_that_cannot_be_carried_out_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def good(options: Options) -> list[Report]:
        report = Report("good")
        report.require("it holds", True)
        return [report]

    def broken(options: Options) -> list[Report]:
        raise RuntimeError("no server")

    monkeypatch.setattr(reliability, "SCENARIOS", {"good": good, "broken": broken})
    words = ["reliability.py", "m", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", [*words, "--only", "good"])
    assert reliability.main() == 0
    monkeypatch.setattr("sys.argv", words)
    assert reliability.main() == 1
    assert "RuntimeError: no server" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["passed"] for row in result["rows"]] == [True, False]
    assert result["machine"]["cores"]
    assert result["machine"]["commit"]


def test_growth_is_that_of_the_last_quarter_over_the_second() -> None:
    def growth(memory: list[float], threads: int = 9) -> bool:
        report = Report("soak")
        _judge_growth(report, [Usage(each, 9 if i < 30 else threads, 50) for i, each in enumerate(memory)])
        return report.passed

    assert growth([*range(500, 600, 10), *[600.0] * 30])  # it warms up, then stays
    assert not growth([500.0 + 2 * i for i in range(40)])
    assert not growth([500.0] * 40, threads=12)
    assert not growth([500.0])


def test_the_client_tells_how_each_request_ended() -> None:
    with live_server("fake:endless") as server:
        whole = asyncio.run(ask(server.port, stream_body("a", 5)))
        assert (whole.status, whole.done, whole.finished) == (200, True, "length")
        assert 1 <= whole.tokens <= 5, "events, which may have several tokens"
        refused = asyncio.run(ask(server.port, stream_body("a", 5, temperature=-1)))
        assert (refused.status, refused.done) == (400, False)
        assert "temperature" in refused.error
        left = asyncio.run(ask(server.port, stream_body("a", 5000), cut_after=3))
        assert (left.done, left.ended, left.tokens) == (False, False, 3)
        late = asyncio.run(ask(server.port, stream_body("a", 5000), timeout=0.2))
        assert (late.cut, late.ended) == ("timeout", False)


def test_neighbours_measure_gaps_between_tokens() -> None:
    now = 100.0
    ours, theirs = multiprocessing.Pipe()
    with live_server("fake:endless") as server:
        streams = threading.Thread(target=run_neighbours, args=(theirs, server.port, 3, "", lambda: now))
        streams.start()
        assert ours.recv() == "ready"
        gaps = Neighbours(ours, streams).gaps()
        assert (gaps.worst, gaps.streams_failed) == (0.0, 0)
        now = 107.5
        gaps = Neighbours(ours, streams).gaps()
        assert (gaps.worst, gaps.streams_failed) == (7.5, 0), "also a gap that has not ended"
        eventually(lambda: Neighbours(ours, streams).gaps().tokens > 0)
        ours.send("close")
        streams.join(60)


def test_neighbours_run_in_a_process_of_their_own() -> None:
    with live_server("fake:endless") as server, neighbours(server.port, 3) as streams:
        eventually(lambda: streams.gaps().tokens > 0)
        assert streams.gaps().streams_failed == 0
        assert server.state.running == 3
