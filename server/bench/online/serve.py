"""`pagoda bench serve`: load a running server with requests of a dataset; print its throughput and latencies."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from pagoda.common.config.commands import OWN_SETTINGS
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.env import CLIENT_API_KEY
from pagoda.common.config.groups.bench.dataset import DatasetConfig
from pagoda.common.config.groups.bench.serve import PATHS, ResultFileConfig, ServeLoadConfig
from pagoda.common.config.groups.bench.traffic import QUEUE_LATENCIES, ReportConfig, TrafficConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.settings import build
from pagoda.common.engine.messages import DraftStats
from pagoda.common.errors import ConfigError, PagodaError
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.bench.datasets.draw import draw_samples
from pagoda.server.bench.datasets.samples import PromptVocabulary
from pagoda.server.bench.offline.engine import acceptance, write_results
from pagoda.server.bench.online.apis import APIS, lora_names
from pagoda.server.bench.online.arrivals import schedule
from pagoda.server.bench.online.client import Endpoint
from pagoda.server.bench.online.load import (
    READY_RETRY_SECONDS,
    LoadGenerator,
    LoadResult,
    PlannedRequest,
    probe_results,
)
from pagoda.server.bench.online.metrics import Outcome, detailed, results_of, times_of
from pagoda.server.bench.report.pages import timeline_page
from pagoda.server.bench.report.plots import need_matplotlib, plot_lengths
from pagoda.server.bench.report.table import result_table
from pagoda.server.cli.client.http_client import ApiClient, ApiError
from pagoda.server.settings.flags import resolve_flags
from pagoda.server.settings.tokenizer import open_tokenizer

SETTINGS: Final = OWN_SETTINGS["bench serve"]

_FULL_LENGTH: Final = ("random", "multi_turn", "timed_trace")
"""Datasets whose requests ignore end-of-sequence tokens."""

_RECORDED: Final = ("timed_trace", "burstgpt")
"""Datasets with arrival times."""


@dataclass(frozen=True, slots=True)
class ServeBenchmark:
    """The settings of `bench serve`. Raises ConfigError if they contradict each other."""

    target: ServeLoadConfig
    dataset: DatasetConfig
    traffic: TrafficConfig
    report: ReportConfig
    files: ResultFileConfig

    def __post_init__(self) -> None:
        self._check_api()
        self._check_metrics()
        self._check_arrivals()
        if self.files.plot_dataset_stats:
            need_matplotlib("--plot-dataset-stats")

    def _check_api(self) -> None:
        backend = self.target.backend
        name = self.dataset.dataset_name
        if (backend == "vllm-rerank") != (name == "random-rerank"):
            raise ConfigError("--backend", "vllm-rerank and --dataset-name random-rerank need each other")
        if self.dataset.random_batch_size > 1 and name == "random" and not self._takes_batches:
            raise ConfigError("--random-batch-size", f"{backend} takes one prompt per request; use openai-embeddings")
        if name == "timed_trace" and PATHS[backend] != PATHS["openai"]:
            raise ConfigError("--backend", f"{backend} takes text, and timed_trace has token ids; use openai")
        if name == "multi_turn" and (self.target.prompt_token_ids or self.target.is_pooling):
            raise ConfigError("--dataset-name", "multi_turn needs answers as text; use --backend openai-chat or openai")
        if self.target.prompt_token_ids and self.target.skip_tokenizer_init:
            raise ConfigError("--prompt-token-ids", "needs a tokenizer; drop --skip-tokenizer-init")

    def _check_metrics(self) -> None:
        chosen = self.report.percentile_metrics or ()
        if self.target.is_pooling and self.report.goodput:
            raise ConfigError("--goodput", f"{self.target.backend} does not generate; drop it")
        for name in chosen:
            if name in QUEUE_LATENCIES and self.traffic.max_concurrency is None:
                raise ConfigError("--percentile-metrics", f"{name} needs --max-concurrency")
            if self.target.is_pooling and name not in ("e2el", *QUEUE_LATENCIES):
                raise ConfigError("--percentile-metrics", f"{self.target.backend} has no {name}; use e2el")

    def _check_arrivals(self) -> None:
        name = self.dataset.dataset_name
        traffic = self.traffic
        if traffic.self_timed is not None and name not in _RECORDED:
            raise ConfigError("--self-timed", f"{name} has no arrival times; use --request-rate")
        rates = not math.isinf(traffic.request_rate) or traffic.ramp_up_strategy is not None
        if rates and self.is_self_timed:
            raise ConfigError("--request-rate", f"arrival times are those of {name}; add --no-self-timed, or drop it")

    @property
    def _takes_batches(self) -> bool:
        return self.target.backend in ("openai-embeddings", "vllm-pooling")

    @property
    def is_self_timed(self) -> bool:
        """True if requests are sent at recorded times."""
        usual = self.dataset.dataset_name == "timed_trace"
        return usual if self.traffic.self_timed is None else self.traffic.self_timed

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of each body that do not depend on the prompt."""
        generates = not self.target.is_pooling
        full = generates and (self.target.ignore_eos or self.dataset.dataset_name in _FULL_LENGTH)
        return {**self.target.sampling, **({"ignore_eos": True} if full else {}), **self.target.extra_body}

    @property
    def label(self) -> str:
        """--label, by default --backend."""
        return self.files.label or self.target.backend


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0. Raises PagodaError if a request failed or the server is unreachable."""
    bench = benchmark_of(args)
    target = bench.target
    key = CLIENT_API_KEY.read()
    name, source = _model(target, key)
    tokenizer = None if target.skip_tokenizer_init else _tokenizer(source)
    requests = plan_requests(bench, name, tokenizer)
    client = ApiClient(target.address, key, target.headers, insecure=target.insecure)
    before = server_drafts(client)
    measured = asyncio.run(_measure(bench, requests, client, key))
    results: dict[str, Any] = results_of(
        measured.outcomes, measured.seconds, bench.report, bench.traffic, pooling=target.is_pooling
    )
    results |= probe_results(measured.probes) | acceptance(before, server_drafts(client))
    shown = {"max_concurrency": bench.traffic.max_concurrency, "request_rate": bench.traffic.request_rate}
    print(result_table(results | shown, bench.report.metric_percentiles))
    _write_files(bench, name, source if tokenizer is not None else None, results, measured.outcomes)
    errors = [outcome.error for outcome in measured.outcomes if outcome.error]
    if errors:
        raise PagodaError(f"{len(errors)} of {len(requests)} requests failed, the first with: {errors[0]}")
    return 0


def benchmark_of(args: argparse.Namespace) -> ServeBenchmark:
    """Return the settings of the command line. Raises ConfigError."""
    values = resolve_flags(args, SETTINGS)
    return ServeBenchmark(
        target=build(ServeLoadConfig, values),
        dataset=build(DatasetConfig, values),
        traffic=build(TrafficConfig, values),
        report=build(ReportConfig, values),
        files=build(ResultFileConfig, values),
    )


def plan_requests(bench: ServeBenchmark, model: str, tokenizer: Tokenizer | None) -> list[PlannedRequest]:
    """Return the requests, determined by the seed. Raises ConfigError."""
    target = bench.target
    as_text = not (target.prompt_token_ids or bench.dataset.dataset_name == "timed_trace")
    vocabulary = PromptVocabulary(0) if tokenizer is None else PromptVocabulary.of(tokenizer, as_text=as_text)
    rng = np.random.default_rng(target.seed)
    samples = draw_samples(bench.dataset, vocabulary, rng)
    times = schedule(bench.traffic, samples, rng, recorded=bench.dataset.dataset_name == "timed_trace")
    names = [model] * len(samples)
    if target.lora_modules:
        choose = lambda count: int(rng.integers(count))  # noqa: E731
        names = lora_names(target.lora_modules, target.lora_assignment, len(samples), choose)
    prefix = f"bench-{uuid.uuid4().hex[:8]}-" if target.request_id_prefix is None else target.request_id_prefix
    return [
        PlannedRequest(sample, arrival, name, f"{prefix}{index}")
        for index, (sample, arrival, name) in enumerate(zip(samples, times, names))
    ]


async def _measure(
    bench: ServeBenchmark, requests: Sequence[PlannedRequest], client: ApiClient, key: str | None
) -> LoadResult:
    target = bench.target
    api = APIS[bench.target.backend]
    headers = {**({"authorization": f"Bearer {key}"} if key else {}), **target.headers}
    load = LoadGenerator(
        Endpoint(target.address + target.path, headers, api.read, bool(api.limit), target.insecure),
        api,
        bench.fields,
        target.logprobs,
        bench.traffic.max_concurrency,
        not bench.files.disable_tqdm,
    )
    if target.ready_check_timeout_sec:
        await load.wait_until_ready(requests[0], target.ready_check_timeout_sec)
    await load.warm_up(requests[0], target.num_warmups)
    if target.profile:
        client.post("/start_profile")
    try:
        return await load.run(requests, target.probe_request_rate)
    finally:
        if target.profile:
            print(f"Trace of the load: {client.post('/stop_profile').strip()}")


def server_drafts(client: ApiClient) -> DraftStats | None:
    """Return a server's counters of speculative decoding; None without it, or if its metrics cannot be read."""
    try:
        families = list(text_string_to_metric_families(client.text("/metrics")))
    except (ApiError, ValueError):
        return None
    totals: dict[str, float] = {}
    accepted: dict[int, int] = {}
    for sample in (sample for family in families for sample in family.samples):
        name = sample.name.removeprefix("vllm:spec_decode_num_")
        if name == "accepted_tokens_per_pos_total":
            position = int(sample.labels["position"])
            accepted[position] = accepted.get(position, 0) + int(sample.value)
        elif name in ("drafts_total", "draft_tokens_total"):
            totals[name] = totals.get(name, 0) + sample.value
    if len(totals) < 2:
        return None
    by_position = tuple(accepted.get(position, 0) for position in range(max(accepted, default=-1) + 1))
    return DraftStats(
        drafts=int(totals["drafts_total"]), tokens=int(totals["draft_tokens_total"]), accepted=by_position
    )


def _model(target: ServeLoadConfig, key: str | None) -> tuple[str, str]:
    """Return the model's name and the source of its tokenizer, by default from the server's model list."""
    name = target.served_model_name or target.model
    source = target.tokenizer or target.model
    if name and (source or target.skip_tokenizer_init):
        return name, source or name
    cards = _cards(target, key)
    if not cards:
        raise ApiError(f"{target.address}: the server lists no model")
    card = next((listed for listed in cards if listed["id"] == name), cards[0])
    return name or str(card["id"]), source or str(card.get("root") or card["id"])


def _cards(target: ServeLoadConfig, key: str | None) -> list[dict[str, Any]]:
    """Return the server's model list, once it answers within --ready-check-timeout-sec."""
    client = ApiClient(f"{target.address}/v1", key, target.headers, insecure=target.insecure)
    end = time.monotonic() + target.ready_check_timeout_sec
    while True:
        try:
            return client.cards()
        except ApiError:
            if time.monotonic() >= end:
                raise
            time.sleep(READY_RETRY_SECONDS)


def _tokenizer(source: str) -> Tokenizer:
    try:
        tokenizer = open_tokenizer(EngineConfig(model=ModelConfig(model=source)))
    except PagodaError as error:
        raise ConfigError("--tokenizer", f"{source}: {error}; name the served model's folder or hub id") from None
    assert tokenizer is not None
    return tokenizer


# Files beside the printed table.


def result_header(bench: ServeBenchmark, model: str, tokenizer: str | None, now: datetime) -> dict[str, Any]:
    """Return the settings that are saved with the results."""
    traffic = bench.traffic
    ramp = (
        {}
        if traffic.ramp_up_strategy is None
        else {name: getattr(traffic, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    )
    return {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "endpoint_type": bench.target.backend,
        "backend": bench.target.backend,
        "label": bench.files.label,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": bench.dataset.num_prompts,
        **bench.files.facts,
        "request_rate": "inf" if math.isinf(traffic.request_rate) else traffic.request_rate,
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
        **ramp,
    }


def result_path(bench: ServeBenchmark, model: str, now: datetime) -> Path:
    """Return the path of the result file. Raises ConfigError if its folder cannot be made."""
    traffic = bench.traffic
    rate = f"{traffic.request_rate:g}qps"
    if traffic.ramp_up_strategy is not None:
        rate = f"ramp-up-{traffic.ramp_up_strategy}-{traffic.ramp_up_start_rps:g}qps-{traffic.ramp_up_end_rps:g}qps"
    limit = "" if traffic.max_concurrency is None else f"-concurrency{traffic.max_concurrency}"
    usual = f"{bench.label}-{rate}{limit}-{model.rstrip('/').rpartition('/')[2]}-{now:%Y%m%d-%H%M%S}.json"
    folder = Path(bench.files.result_dir or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--result-dir", f"{folder}: {error.strerror}") from None
    return folder / (bench.files.result_filename or usual)


def _write_files(
    bench: ServeBenchmark, model: str, tokenizer: str | None, results: dict[str, Any], outcomes: Sequence[Outcome]
) -> None:
    files = bench.files
    now = datetime.now()
    if not (files.save_result or files.append_result or files.plot_timeline or files.plot_dataset_stats):
        return
    path = result_path(bench, model, now)
    report = result_header(bench, model, tokenizer, now) | results | times_of(outcomes)
    report |= detailed(outcomes) if files.save_detailed else {}
    if files.append_result:
        _append(path, report)
    elif files.save_result:
        write_results(str(path), report, "--result-filename")
    if files.plot_timeline:
        page = timeline_page(outcomes, files.timeline_itl_thresholds, f"{model}, {now:%Y-%m-%d %H:%M}")
        path.with_suffix(".timeline.html").write_text(page, encoding="utf-8")
    if files.plot_dataset_stats:
        plot_lengths(outcomes, path.with_suffix(".dataset_stats.png"))


def _append(path: Path, results: dict[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(results) + "\n")
    except OSError as error:
        raise ConfigError("--result-filename", f"{path}: {error.strerror}") from None
