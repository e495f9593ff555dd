"""Where Prometheus is installed, it reads /metrics: no panel of a dashboard is empty, the rules are loaded."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.own_address import OWN_ADDRESS, own_port
from support.suite.watching import eventually

ROOT = Path(__file__).resolve().parents[4]
QUERIES = (ROOT / "tests" / "data" / "grafana_queries.tsv").read_text().splitlines()
FILES = ROOT / "docs" / "deploy" / "monitoring"

pytestmark = pytest.mark.program("prometheus")


class Prometheus:
    """A Prometheus server on this machine."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[float]:
        """Return the values of an instant query. NaN stands for a quotient by zero."""
        with urlopen(f"{self._url}/api/v1/query?{urlencode({'query': expression})}", timeout=60) as answer:
            series = json.load(answer)["data"]["result"]
        return [float(each["value"][1]) for each in series]

    def rules(self) -> dict[str, tuple[str, str]]:
        """Return (health, state) of each alert."""
        with urlopen(f"{self._url}/api/v1/rules?type=alert", timeout=60) as answer:
            groups = json.load(answer)["data"]["groups"]
        return {rule["name"]: (rule["health"], rule["state"]) for group in groups for rule in group["rules"]}

    def has_read(self, times: int) -> bool:
        """Whether the target was read so often; False before Prometheus serves."""
        try:
            return sum(self.query("count_over_time(up{job='pagoda'}[5m])")) >= times
        except OSError:
            return False


@contextmanager
def prometheus(folder: Path, server: LiveServer) -> Iterator[Prometheus]:
    """The project's configuration, with this server as target and a short interval."""
    text = (
        (FILES / "prometheus.yml").read_text().replace("localhost:8000", f"127.0.0.1:{server.port}").replace("5s", "1s")
    )
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(FILES / "rules.yml", folder)
    place = f"{OWN_ADDRESS}:{own_port()}"
    words = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*words, f"--web.listen-address={place}"], cwd=folder, stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://{place}")
    finally:
        process.terminate()
        process.wait()


ALERTS = (FILES / "rules.yml").read_text().count("alert: ")


def panels(name: str) -> list[tuple[str, str]]:
    """(panel, expression) of vLLM's dashboards, or of the project's own."""
    if name == "vllm":
        rows = csv.DictReader(QUERIES, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(f"{row['dashboard']}, {row['panel']}", row["expression"]) for row in rows]
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has read a server with some traffic several times."""
    folder = tmp_path_factory.mktemp("prometheus")
    body = {"prompt": ["abcdefgh", "abcdefgh"], "max_tokens": 4, "n": 2}
    with live_server() as server, prometheus(folder, server) as reader:
        for scrapes in range(1, 5):  # with new requests between two of them
            eventually(partial(reader.has_read, scrapes))
            assert server.post("/v1/completions", body)[0] == 200
        eventually(partial(reader.has_read, 5))
        yield reader


@pytest.mark.parametrize("dashboard", ["vllm", "own"])
def test_no_panel_of_a_dashboard_is_empty(reader: Prometheus, dashboard: str) -> None:
    empty = []
    for panel, query in panels(dashboard):
        expression = re.sub(r"\$(model_name|Deployment_id)", "fake", query)
        values = reader.query(re.sub(r"\$__(rate_interval|interval|range)", "2m", expression))
        if all(value != value for value in values):
            empty.append(f"{panel}: {expression}")
    assert empty == []


def test_the_rules_are_loaded_and_quiet_ones_do_not_fire(reader: Prometheus) -> None:
    eventually(lambda: "unknown" not in {health for health, _ in reader.rules().values()})  # until evaluated once
    alerts = reader.rules()
    assert len(alerts) == ALERTS
    assert all(health == "ok" for health, _ in alerts.values())
    assert {state for _, state in alerts.values()} == {"inactive"}


def test_the_rules_are_valid() -> None:
    done = subprocess.run(["promtool", "check", "config", FILES / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {ALERTS} rules found" in done.stdout
