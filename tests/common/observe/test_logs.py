import io
import logging

import pytest

from pagoda.common.engine.messages import DraftStats, EngineStats
from pagoda.common.observe.logs import Totals, one_line, setup_logging, shortened, stats_line


@pytest.fixture
def log() -> io.StringIO:
    stream = io.StringIO()
    setup_logging("info", stream)
    return stream


def test_a_record_is_one_line(log: io.StringIO) -> None:
    logging.getLogger("pagoda.x").info("user %s", "a\nINFO forged\r\x1b[31m\x85\u2028")
    text = log.getvalue()
    assert text.count("\n") == 1
    assert "a\\nINFO forged\\r\\x1b[31m\\x85\\u2028" in text
    assert text.splitlines()[0].startswith("INFO ")


def test_a_traceback_cannot_forge_lines(log: io.StringIO) -> None:
    try:
        raise ValueError("bad\nERROR forged")
    except ValueError:
        logging.getLogger("pagoda.x").exception("it failed")
    lines = log.getvalue().splitlines()
    assert lines[0].startswith("ERROR")
    assert all(line.startswith("    ") for line in lines[1:])


def test_setup_twice_logs_once() -> None:
    setup_logging("info", io.StringIO())
    stream = io.StringIO()
    setup_logging("warning", stream)
    logging.getLogger("pagoda.x").info("quiet")
    logging.getLogger("pagoda.x").warning("loud")
    assert stream.getvalue().count("\n") == 1


def test_shortened() -> None:
    assert shortened("abcdef", 3) == "abc..."
    assert shortened("abc", 3) == shortened("abc", None) == "abc"
    assert one_line("plain") == "plain"


def test_stats_line() -> None:
    stats = EngineStats(running=2, waiting=1, kv_blocks_used=1, kv_blocks_total=4, prefix_queries=10, prefix_hits=5)
    line = stats_line(Totals(0.0, 0, 0), Totals(10.0, 100, 50), stats)
    assert line == (
        "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 50.0%"
    )
    assert stats_line(Totals(0.0, 5, 5), Totals(10.0, 5, 5), EngineStats()) is None


def test_the_statistics_line_has_the_acceptance_of_the_interval() -> None:
    before = DraftStats(drafts=10, tokens=30, accepted=(9, 6, 3))
    now = DraftStats(drafts=20, tokens=50, accepted=(14, 9, 5, 2))
    line = stats_line(Totals(0.0, 0, 0, before), Totals(10.0, 0, 50, now), EngineStats())
    assert line is not None
    assert line.endswith(
        ", Mean acceptance length: 2.20, Drafted: 2.0 tokens/s, Accepted: 1.2 tokens/s (60.0%), "
        "by position: 0.50, 0.30, 0.20, 0.20"
    )
    idle = stats_line(Totals(0.0, 0, 0, now), Totals(10.0, 0, 50, now), EngineStats())
    assert idle is not None
    assert idle.endswith(", Drafts: none")
