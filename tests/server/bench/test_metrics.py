"""Statistics of a benchmark, by hand-made timings; the table and the pages that show them."""

import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from pagoda.common.config.groups.bench.traffic import ReportConfig, TrafficConfig
from pagoda.common.errors import ConfigError
from pagoda.server.bench.online.metrics import Outcome, detailed, peak_concurrency, peak_tokens, results_of, times_of
from pagoda.server.bench.report.pages import Scale, line_chart, page, timeline_page
from pagoda.server.bench.report.table import result_table

OUTCOMES = [
    Outcome(start=10.0, end=14.0, ttft=1.0, gaps=[1.0, 2.0], prompt_tokens=5, output_tokens=4, queued=0.5),
    Outcome(start=11.0, end=13.0, ttft=2.0, prompt_tokens=7, output_tokens=1),
    Outcome(start=11.0, prompt_tokens=100, error="no"),
]


def test_results_follow_from_outcomes() -> None:
    report = ReportConfig(percentile_metrics=("ttft", "tpot", "itl", "e2el"), metric_percentiles=(50.0, 99.9))
    results = results_of(OUTCOMES, 4.0, report)
    assert (results["completed"], results["failed"]) == (2, 1)
    assert (results["total_input_tokens"], results["total_output_tokens"]) == (12, 5)
    assert (results["request_throughput"], results["output_throughput"]) == (0.5, 1.25)
    assert results["total_token_throughput"] == 4.25
    assert (results["mean_ttft_ms"], results["mean_tpot_ms"]) == (1500.0, 1000.0)
    assert (results["mean_itl_ms"], results["p50_e2el_ms"]) == (1500.0, 3000.0)
    assert results["std_ttft_ms"] == 500.0
    assert results["p99.9_ttft_ms"] == pytest.approx(1999.0)
    assert results["request_goodput"] is None
    text = result_table(results, (50.0, 99.9))
    assert "Failed requests:                        1" in text
    assert "P99.9 TTFT (ms):                        1999.00" in text
    assert "goodput" not in text


def test_percentiles_are_those_of_all_requests() -> None:
    times = np.random.default_rng(0).exponential(size=500)
    outcomes = [Outcome(start=0.0, end=each, ttft=each, output_tokens=1) for each in times.tolist()]
    results = results_of(outcomes, 1.0, ReportConfig(metric_percentiles=(25.0, 90.0)))
    assert results["p90_ttft_ms"] == pytest.approx(np.percentile(times, 90) * 1000)
    assert results["p25_ttft_ms"] == pytest.approx(np.percentile(times, 25) * 1000)
    assert results["median_ttft_ms"] == pytest.approx(np.median(times) * 1000)


def test_results_without_a_success_are_zeros() -> None:
    results = results_of(OUTCOMES[2:], 1.0, ReportConfig(goodput=("ttft:1",)))
    assert not any(isinstance(value, float) and math.isnan(value) for value in results.values())
    assert (results["mean_ttft_ms"], results["request_goodput"], results["max_concurrent_requests"]) == (0.0, 0.0, 0)


@pytest.mark.setting("--goodput")
@pytest.mark.parametrize(
    ("objectives", "goodput"),
    [
        (("ttft:2000",), 0.5),  # both
        (("ttft:1999",), 0.25),  # the first
        (("tpot:999",), 0.25),  # a single token meets any
        (("e2el:3999", "ttft:2000"), 0.25),  # the second
        (("ttft:1000", "tpot:999"), 0.0),
    ],
)
def test_goodput_counts_requests_that_meet_all_objectives(objectives: tuple[str, ...], goodput: float) -> None:
    results = results_of(OUTCOMES, 4.0, ReportConfig(goodput=objectives))
    assert results["request_goodput"] == goodput
    assert f"Request goodput (req/s):                {goodput:.2f}" in result_table(results, ())


def test_latencies_of_the_clients_queue() -> None:
    report = ReportConfig(percentile_metrics=("client_queue_time", "e2el_including_client_queue"))
    results = results_of(OUTCOMES, 4.0, report, TrafficConfig(max_concurrency=2))
    assert results["mean_client_queue_time_ms"] == 250.0
    assert results["mean_e2el_including_client_queue_ms"] == 3250.0
    assert "mean_ttft_ms" not in results
    assert "Mean Client Queue Time (ms):            250.00" in result_table(results, (99.0,))


def test_pooling_has_no_output() -> None:
    outcomes = [Outcome(start=0.0, end=2.0, prompt_tokens=6, sequences=3), Outcome(start=0.0, end=4.0, prompt_tokens=2)]
    results = results_of(outcomes, 4.0, ReportConfig(), pooling=True)
    assert results["input_sequence_throughput"] == 1.0
    assert (results["total_input_sequences"], results["total_token_throughput"]) == (4, 2.0)
    assert results["mean_e2el_ms"] == 3000.0
    assert not any("ttft" in key or "output" in key for key in results)


def test_peaks() -> None:
    assert peak_concurrency(OUTCOMES[:2]) == 2
    back_to_back = [Outcome(start=0.0, end=1.0), Outcome(start=1.0, end=2.0)]
    assert peak_concurrency(back_to_back) == 1
    assert peak_tokens([]) == 0.0
    # 4 tokens in 3 pieces: 4/3 a piece, in the seconds 1, 2 and 4; and one token in second 3
    assert peak_tokens(OUTCOMES[:2]) == pytest.approx(4 / 3)
    burst = Outcome(start=0.0, end=1.9, ttft=1.1, gaps=[0.4, 0.4], output_tokens=3)
    assert peak_tokens([burst, Outcome(start=0.5, end=1.5, ttft=1.0, output_tokens=1)]) == pytest.approx(4)


def test_details_are_in_the_order_of_the_requests() -> None:
    details = detailed(OUTCOMES)
    assert details["input_lens"] == [5, 7, 100]
    assert details["itls"] == [[1.0, 2.0], [], []]
    assert times_of(OUTCOMES) == {"latencies": [4.0, 2.0, 0.0], "queue_times": [0.5, 0.0, 0.0]}
    assert details["errors"] == ["", "", "no"]


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"percentile_metrics": ("ttft", "speed")}, "--percentile-metrics"),
        ({"metric_percentiles": (101.0,)}, "--metric-percentiles"),
        ({"goodput": ("itl:3",)}, "--goodput"),
        ({"goodput": ("ttft=3",)}, "--goodput"),
        ({"goodput": ("ttft:-3",)}, "--goodput"),
    ],
)
def test_settings_are_refused(settings: dict[str, tuple[str, ...]], flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        ReportConfig(**settings)
    assert error.value.setting == flag


# --- pages ---


class Elements(HTMLParser):
    """Checks that elements are closed in order; counts them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_timeline_has_a_bar_for_each_request_and_a_colour_for_each_speed() -> None:
    outcomes = [
        Outcome(start=1.0, end=1.3, ttft=0.1, gaps=[0.01, 0.01, 0.04, 0.14], output_tokens=5),
        Outcome(start=1.0, end=1.1, ttft=0.1, output_tokens=1),
        Outcome(start=1.0, error="no"),
    ]
    text = timeline_page(outcomes, (25.0, 50.0), "m")
    assert Elements(text).counts["g"] == 2
    assert "2 requests, and 1 that failed" in text
    (first, _) = re.findall(r"<g>.*?</g>", text)
    assert re.findall(r'fill="(#\w+)"', first) == ["#94a3b8", "#16a34a", "#f59e0b", "#dc2626"]
    assert "http" not in text
    assert "All 1 requests failed" in timeline_page(outcomes[2:], (25.0, 50.0), "m")


def test_a_chart_places_its_points() -> None:
    text = line_chart("t < u", {"one": [(0.0, 0.0), (10.0, 100.0)], "two": [(5.0, 50.0)]}, "rate", "ms")
    assert Elements(text).counts["circle"] == 3
    assert "t &lt; u" in text
    assert "one: rate 10, ms 100" in text
    assert line_chart("empty", {}, "x", "y") == ""
    backwards = line_chart("t", {"one": [(10.0, 1.0), (5.0, 2.0)]}, "x", "y")
    (path,) = re.findall(r'polyline points="(\S+) (\S+)"', backwards)
    assert float(path[0].split(",")[0]) > float(path[1].split(",")[0])
    Elements(page("a & b", text))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 7.3), (-3.0, 40000.0), (0.0, 0.0)])
def test_ticks_are_round_and_in_range(low: float, high: float) -> None:
    ticks = Scale(low, high, 0, 100).ticks()
    assert len(ticks) <= 12
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
