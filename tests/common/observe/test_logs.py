import io
import logging

import pytest

from pagoda.common.engine.messages import EngineStats
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
