"""`bench sweep`: grids of flags, resumed experiments, the search for a load, figures and the report page."""

import csv
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from support.suite.own_address import OWN_ADDRESS, own_port

from pagoda.common.config.groups.bench.sweep import ParetoConfig, SweepConfig, SweepServeConfig
from pagoda.common.errors import ConfigError, PagodaError
from pagoda.server.bench.report import plots
from pagoda.server.bench.sweep import plot
from pagoda.server.bench.sweep.params import Combination, linked, read_params
from pagoda.server.bench.sweep.plot_pareto import ParetoPoint, device_count, frontier, pareto_point
from pagoda.server.bench.sweep.report import write_report
from pagoda.server.bench.sweep.results import binned, filtered, grouped, parameter_names, points
from pagoda.server.bench.sweep.runs import Experiment, SweptServer
from pagoda.server.bench.sweep.serve_sla import Criterion, largest
from pagoda.server.cli import main

# A server that is healthy at once and logs its arguments and POSTs; and a benchmark that writes results by its flags.
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
log = open(sys.argv[1], "a")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self): self.answer()
    def do_POST(self): log.write(self.path + "\\n"); log.flush(); self.answer()
    def answer(self): self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *words): pass
log.write("start " + " ".join(sys.argv[6:]) + "\\n"); log.flush()
HTTPServer((sys.argv[3], int(sys.argv[5])), Handler).serve_forever()
"""
BENCH = """
import json, pathlib, sys
words = sys.argv[2:]
value = lambda flag, default: words[words.index(flag) + 1] if flag in words else default
with open(sys.argv[1], "a") as log:
    log.write(" ".join(["bench", *words[:words.index("--percentile-metrics")]]) + "\\n")
users = float(value("--max-concurrency", 10)); rate = float(value("--request-rate", "inf"))
if users == 13: sys.exit("unlucky")
load = min(users, 40.0) if rate == float("inf") else rate
path = pathlib.Path(value("--result-dir", "."), value("--result-filename", ""))
path.write_text(json.dumps({"request_throughput": load, "output_throughput": 10 * load, "mean_e2el_ms": 100.0,
    "median_ttft_ms": 5.0 * load, "p99_ttft_ms": 7.0 * load, "total_token_throughput": 30 * load, "date": "now"}))
"""


class Commands:
    """The commands of a sweep, and the log of what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        (folder / "server.py").write_text(SERVER)
        (folder / "bench.py").write_text(BENCH)
        self.serve = f"{sys.executable} {folder / 'server.py'} {self.log} --host {OWN_ADDRESS} --port {own_port()}"
        self.bench = f"{sys.executable} {folder / 'bench.py'} {self.log}"

    def file(self, name: str, data: Any) -> str:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(data))
        return str(path)

    def sweep(self, command: str, *words: str) -> int:
        usual = ["--serve-cmd", self.serve, "--bench-cmd", self.bench, "-o", str(self.folder), "-e", "x"]
        return main.main(["bench", "sweep", command, *usual, *words])

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


# --- grids ---


def test_flags_of_a_combination_replace_those_of_the_command() -> None:
    command = ["pagoda", "serve", "m", "--max-num-seqs", "8", "--dtype=auto", "--enforce-eager", "--port", "80"]
    flags = Combination.of(
        {"max_num_seqs": 4, "dtype": "float32", "enforce-eager": False, "hf_overrides.a_b": 1, "x": None}
    )
    assert flags.applied(command) == [
        *("pagoda", "serve", "m", "--port", "80", "--max-num-seqs", "4", "--dtype", "float32", "--no-enforce-eager"),
        *("--hf-overrides.a_b", "1"),
    ]
    more = Combination.of({"goodput": ["ttft:5", "tpot:6"], "extra_body": {"a": 1}, "save_result": True, "x.y": False})
    words = ["--goodput", "ttft:5", "tpot:6", "--extra-body", '{"a": 1}', "--save-result", "--x.y", "false"]
    assert more.applied(["b", "--goodput", "e2el:1", "-1"]) == ["b", *words]
    assert Combination.of({"a": 1, "b": "c"}).name == "a=1-b=c"
    assert Combination.of({"_benchmark_name": "n", "a": 1}) == Combination("n", {"a": 1})
    assert Combination.of({"a-b": 1}).with_value("a_b", 2).values == {"a_b": 2}


def test_linked_parameters() -> None:
    serve, bench = Combination.of({"max-num-seqs": 8}), Combination.of({"max_concurrency": 8})
    assert linked(serve, bench, ["max_num_seqs=max_concurrency"])
    assert not linked(serve, Combination.of({"max_concurrency": 9}), ["max_num_seqs=max_concurrency"])
    assert not linked(Combination.of({}), Combination.of({}), ["max_num_seqs=max_concurrency"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("server_ready_timeout", 0), ("warmup_num_prompts", -1), ("link_vars", ("a=",)), ("bench_cmd", " ")],
)
def test_unusable_settings_name_their_flag(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        SweepServeConfig(**{"serve_cmd": "a", "bench_cmd": "b", field: value})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "neither a list"),
        ("x", "neither a list"),
        ([1], "1 is not an object"),
        ({"a": 1}, "1 is not an object"),
        ([{"a": 1}, {"a": 1}], "two combinations are named a=1"),
    ],
)
def test_unusable_grids(data: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        read_params(str(file), "--bench-params")
    with pytest.raises(ConfigError, match=r"--bench-params: .*No such file"):
        read_params(str(tmp_path / "none"), "--bench-params")
    file.write_text("{")
    with pytest.raises(ConfigError, match="invalid JSON"):
        read_params(str(file), "--bench-params")


# --- serve ---


@pytest.mark.command("bench sweep serve")
@pytest.mark.setting("--serve-cmd", "--bench-cmd", "--serve-params", "--bench-params", "--num-runs", "--output-dir")
@pytest.mark.setting("--experiment-name", "--resume", "--warmup-num-prompts")
def test_a_sweep_and_its_continuation(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--serve-params", commands.file("s", {"small": {"max_num_seqs": 2}, "large": {"max_num_seqs": 8}})]
    words += ["--bench-params", commands.file("b", [{"max_concurrency": 4}, {"max_concurrency": 9}])]
    assert commands.sweep("serve", *words, "--num-runs", "1", "--warmup-num-prompts", "3") == 0
    one = ["bench --max-concurrency 4 --num-prompts 3", "/reset_prefix_cache", "bench --max-concurrency 4"]
    one += ["/reset_prefix_cache", *(line.replace("4", "9") for line in one[:3]), "/reset_prefix_cache"]
    assert commands.lines() == ["start --max-num-seqs 2", *one, "start --max-num-seqs 8", *one]
    folder = commands.folder / "x"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        *("SERVE-large-BENCH-max_concurrency=4", "SERVE-large-BENCH-max_concurrency=9"),
        *("SERVE-small-BENCH-max_concurrency=4", "SERVE-small-BENCH-max_concurrency=9"),
    ]
    rows = list(csv.DictReader((folder / "summary.csv").open()))
    assert [(row["max_num_seqs"], row["max_concurrency"], row["run_number"]) for row in rows] == [
        *(("2", "4", "0"), ("2", "9", "0"), ("8", "4", "0"), ("8", "9", "0"))
    ]
    assert "max_num_seqs=2" in (folder / "report.html").read_text()
    assert commands.sweep("serve", *words, "--num-runs", "1") == 2
    assert "exists; add --resume" in capsys.readouterr().err
    (folder / "SERVE-large-BENCH-max_concurrency=9" / "run=0.json").unlink()
    commands.log.unlink()
    assert commands.sweep("serve", *words, "--num-runs", "1", "--resume") == 0
    assert commands.lines() == ["start --max-num-seqs 8", "bench --max-concurrency 9", "/reset_prefix_cache"]


@pytest.mark.setting("--dry-run", "--link-vars")
def test_a_dry_run_runs_nothing(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--serve-params", commands.file("s", [{"max_num_seqs": 2}, {"max_num_seqs": 8}])]
    words += ["--bench-params", commands.file("b", [{"max_concurrency": 2}, {"max_concurrency": 8}])]
    assert commands.sweep("serve", *words, "--dry-run", "--link-vars", "max_num_seqs=max_concurrency") == 0
    assert commands.lines() == []
    assert not (commands.folder / "x").exists()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-2:] for line in lines if line[0] == "server:"] == [["--max-num-seqs", "2"], ["--max-num-seqs", "8"]]
    assert [line[-1] for line in lines if line[0] == "3"] == ["2", "8"]


@pytest.mark.setting("--continue-on-error", "--after-bench-cmd", "--show-stdout")
def test_a_run_that_fails(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--bench-params", commands.file("b", [{"max_concurrency": 13}, {"max_concurrency": 4}]), "--num-runs", "1"]
    assert commands.sweep("serve", *words) == 1
    text = capsys.readouterr().err
    assert "ended with status 1: unlucky; continue with --resume -e x" in text
    assert "Traceback" not in text
    after = f"{sys.executable} -c pass"
    more = ["--resume", "--continue-on-error", "--after-bench-cmd", after, "--show-stdout"]
    assert commands.sweep("serve", *words, *more) == 0
    failure = commands.folder / "x" / "BENCH-max_concurrency=13" / "run=0.failure.json"
    assert "unlucky" in json.loads(failure.read_text())["error"]
    assert (commands.folder / "x" / "BENCH-max_concurrency=4" / "summary.json").exists()
    assert "/reset_prefix_cache" not in commands.lines()


@pytest.mark.setting("--server-ready-timeout")
def test_a_server_that_does_not_start(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    commands.serve = f"{sys.executable} -c 'raise SystemExit(3)' --port 1"
    assert commands.sweep("serve") == 1
    assert "the server ended with status 3; --show-stdout shows why" in capsys.readouterr().err
    commands.serve = f"{sys.executable} -c 'import signal; signal.pause()' --port 1"
    assert commands.sweep("serve", "--server-ready-timeout", "1") == 1
    assert "not ready after 1 s" in capsys.readouterr().err
    commands.serve = "/no/such/program --port 1"
    assert commands.sweep("serve") == 2
    assert "--serve-cmd: /no/such/program: No such file" in capsys.readouterr().err


def test_another_server_on_the_port_is_not_measured(commands: Commands) -> None:
    first = SweptServer(shlex.split(commands.serve), after_bench=None, show_stdout=False)
    try:
        first.wait_until_ready(60)
        with pytest.raises(ConfigError, match="another server answers"):
            SweptServer(shlex.split(commands.serve), after_bench=None, show_stdout=False)
    finally:
        first.stop()


@pytest.mark.parametrize(
    ("command", "words", "flag"),
    [
        ("serve", ["--bench-cmd", "x"], "--serve-cmd"),
        ("serve", ["--serve-cmd", "x"], "--bench-cmd"),
        ("serve", ["--serve-cmd", "x", "--bench-cmd", "x", "--link-vars", "a"], "--link-vars"),
        ("serve", ["--serve-cmd", "x", "--bench-cmd", "x", "--num-runs", "0"], "--num-runs"),
        ("serve", ["--serve-cmd", "x", "--bench-cmd", "x", "--resume"], "--experiment-name"),
        ("serve_sla", ["--serve-cmd", "x", "--bench-cmd", "x"], "--sla-params"),
        ("startup", ["--resume", "-e", "none", "-o", "/no/such"], "--resume"),
        ("plot", ["/no/such"], "EXPERIMENT_DIR"),
        ("plot", ["/no/such", "--fig-width", "0"], "--fig-width"),
        ("plot", ["/no/such", "--scale-x", "cubic"], "--scale-x"),
        ("plot_pareto", ["/no/such"], "EXPERIMENT_DIR"),
    ],
)
def test_settings_are_refused(command: str, words: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "sweep", command, *words]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"pagoda: error: {flag}: ")
    assert text.count("\n") == 1


# --- the search for a load ---


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 100, 1000])
@pytest.mark.parametrize("start", [1, 6, 64])
def test_the_largest_load_is_found(limit: int, start: int) -> None:
    tried: list[int] = []

    def meets(value: int) -> bool:
        tried.append(value)
        return value <= limit

    assert largest(meets, start, 50) == (limit or None, True)
    assert len(tried) == len(set(tried)) <= 20


def test_a_search_that_is_cut_short() -> None:
    best, complete = largest(lambda value: value <= 1000, 1, 5)
    assert (best, complete) == (16, False)


@pytest.mark.command("bench sweep serve_sla")
@pytest.mark.setting("--sla-params", "--sla-variable", "--sla-iters")
def test_the_load_that_meets_objectives(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    objectives = [{"_benchmark_name": "tight", "p99_ttft_ms": "<=50"}, {"median_ttft_ms": "<=1000"}]
    words = ["--sla-params", commands.file("o", objectives), "--num-runs", "1"]
    assert commands.sweep("serve_sla", *words, "--sla-variable", "request_rate", "--sla-iters", "9") == 0
    text = capsys.readouterr().out
    assert "p99_ttft_ms=<=50: request_rate 7\n" in text  # 7 ms for each request per second
    assert "median_ttft_ms=<=1000: request_rate any" in text
    found = json.loads((commands.folder / "x" / "defaults" / "SLA-tight.json").read_text())
    assert (found["best"], found["complete"]) == ("7", True)
    assert (commands.folder / "x" / "defaults" / "request_rate=7" / "run=0.json").exists()
    assert commands.sweep("serve_sla", *words, "--sla-variable", "max_concurrency", "-e", "y", "--sla-iters", "1") == 0
    assert "(--sla-iters 1 ended the search)" in capsys.readouterr().out


def test_objectives_are_checked_first(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.sweep("serve_sla", "--sla-params", commands.file("o", [{"p99_ttft_ms": 50}])) == 2
    assert 'p99_ttft_ms: 50 is not a bound; use one such as "<=500"' in capsys.readouterr().err
    bench = commands.file("b", [{"request-rate": 3}])
    words = ["--sla-params", commands.file("o", [{"p99_ttft_ms": "<1"}]), "--bench-params", bench]
    assert commands.sweep("serve_sla", *words) == 2
    assert "sets request_rate, which is searched" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no result p95_ttft_ms; add it to --metric-percentiles"):
        Criterion("p95_ttft_ms", "<", 1.0).met_by([{"p99_ttft_ms": 1.0}])
    assert Criterion.of("a", ">= 2", "f").met_by([{"a": 1.0}, {"a": 3.0}])
    assert not Criterion.of("a", "<2", "f").met_by([{"a": 1.0}, {"a": 3.0}])


# --- start-up ---


@pytest.mark.command("bench sweep startup")
@pytest.mark.setting("--startup-cmd", "--startup-params")
def test_a_sweep_of_starts(tmp_path: Path) -> None:
    script = tmp_path / "startup.py"
    script.write_text(
        "import json, sys\njson.dump({'words': ' '.join(sys.argv[1:-2]), 'avg_startup': 1.5}, open(sys.argv[-1], 'w'))"
    )
    for name, rows in (("s", [{"dtype": "float32"}, {"dtype": "bfloat16"}]), ("t", [{"num_iters": 2}])):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    words = ["--startup-cmd", f"{sys.executable} {script} --model m", "-o", str(tmp_path), "-e", "x", "--num-runs", "1"]
    words += ["--serve-params", str(tmp_path / "s.json"), "--startup-params", str(tmp_path / "t.json")]
    assert main.main(["bench", "sweep", "startup", *words]) == 0
    rows = list(csv.DictReader((tmp_path / "x" / "summary.csv").open()))
    assert [row["words"] for row in rows] == [
        f"--model m --dtype {dtype} --num-iters 2 --output-json" for dtype in ("float32", "bfloat16")
    ] or [row["words"] for row in rows] == [
        f"--model m --dtype {dtype} --num-iters 2" for dtype in ("float32", "bfloat16")
    ]
    assert {row["avg_startup"] for row in rows} == {"1.5"}


# --- results ---

RUNS: list[dict[str, Any]] = [
    {
        "max_concurrency": users,
        "tensor_parallel_size": size,
        "run_number": number,
        "output_throughput": 100.0 * size * users / (users + 4) + number,
        "total_token_throughput": 300.0 * users / (users + 4),
        "median_ttft_ms": 5.0 * users + 2 * number,
        "request_throughput": float(users),
        "model_id": "m",
    }
    for size in (1, 2)
    for users in (1, 4, 16)
    for number in (0, 1)
]


def test_conditions_bins_and_groups() -> None:
    assert len(filtered(RUNS, ["max_concurrency<=4", "tensor_parallel_size==2"])) == 4
    assert len(filtered(RUNS, ["model_id==m", "max_concurrency!=4"])) == 8
    with pytest.raises(ConfigError, match="no run meets"):
        filtered(RUNS, ["model_id==other"])
    with pytest.raises(ConfigError, match="is not a condition"):
        filtered(RUNS, ["max_concurrency"])
    assert {run["max_concurrency"] for run in binned(RUNS, ["max_concurrency%4"])} == {0, 4, 16}
    with pytest.raises(ConfigError, match="--bin-by"):
        binned(RUNS, ["max_concurrency"])
    assert list(grouped(RUNS, ["max_concurrency"])) == [f"max_concurrency={users}" for users in (1, 4, 16)]
    assert list(grouped(RUNS, [])) == [""]
    assert parameter_names(RUNS) == ["max_concurrency", "tensor_parallel_size"]


def test_repeated_runs_are_one_point() -> None:
    first, *_ = points(RUNS[:6], "max_concurrency", "median_ttft_ms", ("--var-x", "--var-y"))
    assert first == (1.0, 6.0, 1.0)
    assert len(points(RUNS, "total_token_throughput", "median_ttft_ms", ("--var-x", "--var-y"))) == 6
    with pytest.raises(ConfigError, match="--var-y: a run has no number speed; use one of max_concurrency"):
        points(RUNS, "max_concurrency", "speed", ("--var-x", "--var-y"))


def test_the_frontier_has_no_point_that_another_exceeds() -> None:
    one, two, three, four = (ParetoPoint(a, b, "") for a, b in ((1.0, 9.0), (2.0, 5.0), (3.0, 5.0), (4.0, 1.0)))
    assert frontier([two, four, one, three]) == [one, three, four]


@pytest.mark.setting("--user-count-var", "--gpu-count-var", "--label-by")
def test_points_per_user_and_device() -> None:
    run = {"output_throughput": 120.0, "max_concurrency": 4, "tp": 2, "data-parallel-size": 3, "chips": 5}
    point = pareto_point(run, ParetoConfig())
    assert point is not None
    assert (point.per_user, point.per_device, point.label) == (30.0, 20.0, "max_concurrency=4, gpu_count=6")
    other = pareto_point(run, ParetoConfig(user_count_var="chips", gpu_count_var="max_concurrency", label_by=("tp",)))
    assert other == ParetoPoint(24.0, 30.0, "tp=2")
    peak = pareto_point({"output_throughput": 8.0, "max_concurrent_requests": 2}, ParetoConfig())
    assert peak is not None
    assert peak.per_user == 4.0
    assert pareto_point({"output_throughput": 8.0}, ParetoConfig()) is None
    with pytest.raises(ConfigError, match="--gpu-count-var: a run has no gpus"):
        device_count(run, "gpus")


def experiment(folder: Path) -> Path:
    (folder / "all").mkdir(parents=True)
    (folder / "all" / "summary.json").write_text(json.dumps(RUNS))
    return folder


@pytest.mark.command("bench sweep plot")
@pytest.mark.setting("--fig-dir", "--fig-by", "--row-by", "--col-by", "--curve-by", "--var-x", "--var-y", "--filter-by")
@pytest.mark.setting("--bin-by", "--scale-x", "--scale-y", "--fig-name", "--fig-width", "--fig-height", "--fig-dpi")
@pytest.mark.setting("--no-error-bars")
def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []

    def keep(figure: Any, path: Path, dpi: float) -> None:
        drawn.append((figure, path.relative_to(tmp_path), dpi))

    monkeypatch.setattr(plot, "save", keep)
    words = ["--fig-dir", "f", "--fig-name", "F", "--curve-by", "tensor_parallel_size", "--var-x", "max_concurrency"]
    words += ["--var-y", "output_throughput", "--scale-x", "log", "--scale-y", "sqrt", "--fig-dpi", "50"]
    words += ["--fig-width", "5", "--fig-height", "3", "--filter-by", "max_concurrency>1"]
    assert main.main(["bench", "sweep", "plot", str(experiment(tmp_path)), *words]) == 0
    ((figure, path, dpi),) = drawn
    (axes,) = figure.axes
    assert (str(path), dpi, figure.get_size_inches().tolist()) == ("f/F.png", 50, [5.0, 3.0])
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale()) == ("max_concurrency", "output_throughput", "log")
    assert axes.get_yscale() == "function"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [f"tensor_parallel_size={n}" for n in (1, 2)]
    assert [list(each.lines[0].get_xdata()) for each in axes.containers] == [[4.0, 16.0]] * 2
    assert all(each.has_yerr for each in axes.containers)
    assert (tmp_path / "f" / "report.html").exists()
    words = [
        "--fig-by",
        "tensor_parallel_size",
        "--row-by",
        "max_concurrency",
        "--col-by",
        "run_number",
        "--no-error-bars",
    ]
    assert main.main(["bench", "sweep", "plot", str(tmp_path), *words, "--bin-by", "max_concurrency%4"]) == 0
    assert [str(path) for _, path, _ in drawn[1:]] == [f"FIGURE-tensor_parallel_size={n}.png" for n in (1, 2)]
    assert [len(figure.axes) for figure, _, _ in drawn[1:]] == [6, 6]
    assert {axes.get_title().split(" | ")[0] for axes in drawn[1][0].axes} == {
        f"max_concurrency={n}" for n in (0, 4, 16)
    }
    assert not any(each.has_yerr for axes in drawn[1][0].axes for each in axes.containers)
    capsys.readouterr()
    assert main.main(["bench", "sweep", "plot", str(tmp_path), "--dry-run"]) == 0
    assert len(drawn) == 3
    assert "FIGURE.png: 12 runs, 1 curves of median_ttft_ms" in capsys.readouterr().out


def test_the_report_joins_the_means_of_runs_by_their_load(tmp_path: Path) -> None:
    common = {"model_id": "m"}
    runs: list[dict[str, Any]] = [
        common
        | {"max_concurrency": users, "run_number": number}
        | {"request_throughput": load + number, "median_ttft_ms": 10.0 * users}
        for users, load in ((1, 2.0), (8, 6.0), (32, 4.0))
        for number in (0, 1)
    ]
    write_report(tmp_path / "r.html", runs, "title")
    text = (tmp_path / "r.html").read_text()
    chart = text[text.index("Latency against load") :]
    assert re.findall(r"requests/s ([\d.]+), median TTFT \(ms\) ([\d.]+)", chart) == [
        ("2.5", "10"),
        ("6.5", "80"),
        ("4.5", "320"),
    ]
    assert text.count("<tr>") == 1 + len(runs)


@pytest.mark.command("bench sweep plot_pareto")
def test_the_pareto_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = str(experiment(tmp_path))
    assert main.main(["bench", "sweep", "plot_pareto", folder, "--dry-run"]) == 0
    assert not (tmp_path / "pareto").exists()
    assert main.main(["bench", "sweep", "plot_pareto", folder]) == 0
    text = capsys.readouterr().out
    assert "tokens/s/device  max_concurrency=16, gpu_count=1" in text
    assert (tmp_path / "pareto" / "PARETO.png").read_bytes()[1:4] == b"PNG"


def test_figures_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    folder = str(experiment(tmp_path))
    for command in ("plot", "plot_pareto"):
        assert main.main(["bench", "sweep", command, folder]) == 2
        assert (
            f"bench sweep {command}: needs matplotlib; install it: pip install 'pagoda[bench]'"
            in capsys.readouterr().err
        )


def test_an_experiment_without_success(tmp_path: Path) -> None:
    config = SweepConfig(output_dir=str(tmp_path), experiment_name="x")
    with pytest.raises(PagodaError, match="no run succeeded"):
        Experiment.of(config).finish([], "t")
