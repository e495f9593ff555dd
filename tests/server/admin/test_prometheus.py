"""Where Prometheus is installed, it reads /metrics: no panel of vLLM's dashboards is empty, the rules are valid."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from support.live_server import LiveServer, live_server
from support.ports import two_free_ports

ROOT = Path(__file__).resolve().parents[3]
QUERIES = (ROOT / "tests" / "data" / "grafana_queries.tsv").read_text().splitlines()
GUIDE = (ROOT / "docs" / "guides" / "monitoring.md").read_text()

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus is installed")


class Prometheus:
    """A Prometheus server on this machine."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[float]:
        """Return the values of an instant query. NaN stands for a quotient by zero."""
        with urlopen(f"{self._url}/api/v1/query?{urlencode({'query': expression})}", timeout=30) as answer:
            series = json.load(answer)["data"]["result"]
        return [float(each["value"][1]) for each in series]

    def scrapes(self) -> float:
        """Return how often the target was read, or 0 before Prometheus serves."""
        try:
            return sum(self.query("count_over_time(up{job='pagoda'}[5m])"))
        except OSError:
            return 0


@contextmanager
def prometheus(folder: Path, server: LiveServer) -> Iterator[Prometheus]:
    """The guide's configuration, with this server as target and a short interval."""
    config = re.search(r"# prometheus\.yml\n(.*?)```", GUIDE, re.DOTALL)
    assert config is not None
    text = config[1].replace("localhost:8000", f"127.0.0.1:{server.port}").replace("5s", "1s")
    (folder / "prometheus.yml").write_text(text)
    port = two_free_ports()
    words = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*words, f"--web.listen-address=127.0.0.1:{port}"], cwd=folder, stdout=log, stderr=log
        )
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


def test_no_panel_of_vllms_dashboards_is_empty(tmp_path: Path) -> None:
    body = {"prompt": ["abcdefgh", "abcdefgh"], "max_tokens": 4, "n": 2}
    with live_server() as server, prometheus(tmp_path, server) as reader:
        deadline = time.monotonic() + 120
        while reader.scrapes() < 4:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            assert server.post("/v1/completions", body)[0] == 200
            time.sleep(0.2)
        empty = []
        for row in csv.DictReader(QUERIES, delimiter="\t", quoting=csv.QUOTE_NONE):
            expression = row["expression"].replace("$model_name", "fake").replace("$Deployment_id", "fake")
            values = reader.query(re.sub(r"\$__(rate_interval|interval|range)", "2m", expression))
            if all(value != value for value in values):
                empty.append(f"{row['dashboard']}, {row['panel']}: {expression}")
    assert empty == []


def test_the_guides_rules_are_valid(tmp_path: Path) -> None:
    rules = re.search(r"```yaml\n(groups:\n.*?)```", GUIDE, re.DOTALL)
    assert rules is not None
    (tmp_path / "rules.yml").write_text(rules[1])
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS: 4 rules found" in done.stdout
