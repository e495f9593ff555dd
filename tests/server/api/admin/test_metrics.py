"""GET /metrics after some traffic: counts, formats, and what the dashboards of vLLM query."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row
from support.suite.watching import eventually

DATA = Path(__file__).resolve().parents[3] / "data"
QUERIES = list(
    csv.DictReader((DATA / "grafana_queries.tsv").read_text().splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
)
TEXT = {"prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        server.post("/v1/completions", TEXT | {"prompt": ["abcdefgh", "abcdefgh"], "n": 2})
        yield server


def test_metrics_count_requests() -> None:
    with live_server() as server:
        server.post("/v1/completions", TEXT | {"prompt": ["abcd", "k"]})
        server.post("/v1/completions", TEXT | {"prompt": "x", "max_tokens": 9})
        assert server.post("/v1/completions", TEXT | {"temperature": -1})[0] == 400
        assert server.post("/v1/completions", TEXT | {"prompt": "a" * 100})[0] == 400, "refused by the engine's checks"
        assert server.post("/v1/completions", TEXT | {"prompt": ["a" * 100, "k"]})[0] == 400
        lines = server.get("/metrics")[1].decode().splitlines()
    value = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    labels = '{engine="0",model_name="fake"}'
    assert value[f"vllm:prompt_tokens_total{labels}"] == 6
    assert value[f"vllm:generation_tokens_total{labels}"] == 7
    assert value[f"vllm:time_to_first_token_seconds_count{labels}"] == 3
    assert value[f"vllm:e2e_request_latency_seconds_count{labels}"] == 3
    success = {
        reason: value[f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="fake"}}']
        for reason in ("length", "stop", "abort", "error")
    }
    assert success == {"length": 2, "stop": 1, "abort": 0, "error": 0}


def metric_values(server: LiveServer) -> dict[str, float]:
    """The samples of a server with one replica, without the labels that name model and replica."""
    values = {}
    for family in text_string_to_metric_families(server.get("/metrics")[1].decode()):
        for sample in family.samples:
            labels = ",".join(
                f'{label}="{text}"' for label, text in sample.labels.items() if label not in ("engine", "model_name")
            )
            values[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return values


def test_metrics_of_several_sequences_agree() -> None:
    """Each of the n sequences counts as a request, as in vLLM; n and the longest count per request."""
    with live_server(engine={"max_num_seqs": 1}) as server:
        server.post("/v1/completions", TEXT | {"prompt": "abcdefgh", "n": 3, "max_tokens": 2})
        value = metric_values(server)
    intervals = ("queue", "prefill", "decode", "inference")
    seconds = {interval: value[f"vllm:request_{interval}_time_seconds_sum"] for interval in intervals}
    assert seconds["queue"] > 0
    assert seconds["prefill"] + seconds["decode"] == pytest.approx(seconds["inference"])
    assert value['vllm:request_success_total{finished_reason="length"}'] == 3
    per_sequence = [f"request_{interval}_time_seconds" for interval in intervals]
    per_sequence += ["time_to_first_token_seconds", "e2e_request_latency_seconds", "inter_token_latency_seconds"]
    per_sequence += ["request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"]
    per_sequence += ["request_num_preemptions", "request_time_per_output_token_seconds"]
    assert {name: value[f"vllm:{name}_count"] for name in per_sequence} == dict.fromkeys(per_sequence, 3)
    assert value["vllm:prompt_tokens_total"] == value["vllm:request_prompt_tokens_sum"] == 3 * 8
    assert value["vllm:generation_tokens_total"] == value["vllm:request_generation_tokens_sum"] == 3 * 2
    computed = value["vllm:request_prefill_kv_computed_tokens_sum"]
    assert computed == value['vllm:prompt_tokens_by_source_total{source="local_compute"}'] == 8 + 4 + 4
    assert value["vllm:prompt_tokens_cached_total"] == value["vllm:prefix_cache_hits_total"] == 4 + 4
    assert value["vllm:iteration_tokens_total_sum"] == computed + 3 * 2
    assert value["vllm:request_params_n_sum"] == 3
    assert value["vllm:request_params_n_count"] == value["vllm:request_max_num_generation_tokens_count"] == 1
    assert value["vllm:request_max_num_generation_tokens_sum"] == 2


def test_metrics_count_every_step_of_a_chunked_prompt() -> None:
    """700 tokens in chunks of 64, then 2 tokens of output: ten full chunks, one of 60 with a token, and a token."""
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 400}
    with live_server("fake:say", engine=engine) as server:
        status, answer = server.post(
            "/v1/completions", TEXT | {"prompt": "[[xyz]]" + "a" * 683 + "assistant:", "max_tokens": 2}
        )
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
        value = metric_values(server)
    assert value["vllm:iteration_tokens_total_count"] == 12
    assert value["vllm:iteration_tokens_total_sum"] == 700 + 2
    by_tokens = [value[f'vllm:iteration_tokens_total_bucket{{le="{bound}"}}'] for bound in ("1.0", "32.0", "64.0")]
    assert by_tokens == [1, 1, 12]


def test_metrics_show_rejected_requests() -> None:
    with live_server("fake:slow", engine={"max_num_queued_reqs": 1}) as server:
        connection = server.raw("POST", "/v1/completions", TEXT | {"max_tokens": 9})
        eventually(lambda: server.llm.num_unfinished == 1)
        assert server.post("/v1/completions", TEXT)[0] == 429
        value = metric_values(server)
        connection.close()
    assert value['vllm:admission_rejections_total{reason="max_num_queued_reqs"}'] == 1
    assert value['vllm:admission_rejections_total{reason="max_num_queued_tokens"}'] == 0


def test_metrics_describe_the_cache(server: LiveServer) -> None:
    with (DATA / "vllm_metrics.tsv").open(newline="") as file:
        labels = {row["name"]: row["labels"] for row in csv.DictReader(file, delimiter="\t")}
    [info] = [family for family in server.state.metrics.registry.collect() if family.name == "vllm:cache_config_info"]
    [sample] = info.samples
    assert set(sample.labels) == set(labels["vllm:cache_config_info"].split(","))
    assert sample.labels["block_size"] == str(server.llm.info.limits.block_size)
    assert sample.labels["num_gpu_blocks"] == str(server.llm.info.num_blocks)
    assert sample.value == 1


def test_metrics_as_openmetrics(server: LiveServer) -> None:
    plain = server.response("GET", "/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    answer = server.response("GET", "/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    families = {family.name: family for family in parse_openmetrics(answer.body.decode())}
    assert families["vllm:generation_tokens"].type == "counter"


# --- dashboards ---

PANELS = (DATA / "grafana_queries.tsv").read_text().splitlines()
QUERIES = list(csv.DictReader(PANELS, delimiter="\t", quoting=csv.QUOTE_NONE))
SELECTOR = re.compile(r"(vllm:\w+)(?:\{(\w+)=~?\"([^\"]+)\"\})?")
GROUPING = re.compile(r"by ?\(([^)]+)\)")


@each_row("query", QUERIES, ids=lambda query: f"{query['dashboard']}: {query['expression']}")
def test_a_panel_of_vllms_dashboards_has_series(server: LiveServer, query: dict[str, str]) -> None:
    """The metrics, label values and groupings of its expression exist."""
    samples = [sample for family in server.state.metrics.registry.collect() for sample in family.samples]
    selectors = SELECTOR.findall(query["expression"])
    assert selectors
    assert {variable for _, _, variable in selectors} <= {"", "$model_name", "$Deployment_id"}
    groupings = {label.strip() for labels in GROUPING.findall(query["expression"]) for label in labels.split(",")}
    for name, label, _ in selectors:
        found = [sample for sample in samples if sample.name == name]
        assert found
        assert all(groupings <= set(sample.labels) for sample in found)
        assert all(sample.labels[label] == "fake" for sample in found if label)
        if name.endswith("_count"):
            assert sum(sample.value for sample in found), "a quotient by it is empty"
