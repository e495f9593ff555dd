"""`pagoda bench serve`: load a running OpenAI server with random prompts; print its throughput and latencies."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from pagoda.common.config.commands import OWN_SETTINGS
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.env import CLIENT_API_KEY
from pagoda.common.config.groups.bench import ServeLoadConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.settings import build
from pagoda.common.engine.messages import DraftStats
from pagoda.common.errors import ConfigError, PagodaError
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.cli.bench.client import Endpoint, Outcome
from pagoda.server.cli.bench.offline import acceptance, acceptance_rows, ordinary_tokens, write_results
from pagoda.server.cli.http_client import ApiClient, ApiError
from pagoda.server.settings.flags import FlagParser, add_settings, resolve_flags
from pagoda.server.settings.tokenizer import open_tokenizer

SETTINGS: Final = OWN_SETTINGS["bench serve"]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the load."""

    body: dict[str, Any]
    prompt_tokens: int
    at: float  # sending time, in seconds after the first request


def add_arguments(parser: FlagParser) -> None:
    add_settings(parser, SETTINGS.values())


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0. Raises PagodaError if a request failed or the server is unreachable."""
    config: ServeLoadConfig = build(ServeLoadConfig, resolve_flags(args, SETTINGS), SETTINGS.values())
    key = CLIENT_API_KEY.read()
    name, source = _model(config, key)
    requests = plan_requests(config, name, _tokenizer(source))
    endpoint = Endpoint(config.address + config.path, {"authorization": f"Bearer {key}"} if key else {})
    before = server_drafts(config.address, key)
    outcomes, seconds = asyncio.run(_load(config, endpoint, requests))
    drafts = acceptance(before, server_drafts(config.address, key))
    results = figures(config, outcomes, seconds) | drafts
    print(report(config, results))
    if config.save_result:
        _save(config, name, source, results | (detailed(outcomes) if config.save_detailed else {}))
    errors = [each.error for each in outcomes if each.error]
    if errors:
        raise PagodaError(f"{len(errors)} of {len(outcomes)} requests failed, the first with: {errors[0]}")
    return 0


def server_drafts(address: str, key: str | None) -> DraftStats | None:
    """Return a server's counters of speculative decoding; None without it, or if its metrics cannot be read."""
    try:
        families = list(text_string_to_metric_families(ApiClient(address, key).text("/metrics")))
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


def _model(config: ServeLoadConfig, key: str | None) -> tuple[str, str]:
    """Return the model's name and the source of its tokenizer, by default from the server's model list."""
    name = config.served_model_name or config.model
    source = config.tokenizer or config.model
    if name and source:
        return name, source
    cards = ApiClient(f"{config.address}/v1", key).cards()
    if not cards:
        raise ApiError(f"{config.address}: the server lists no model")
    card = next((each for each in cards if each["id"] == name), cards[0])
    return name or str(card["id"]), source or str(card.get("root") or card["id"])


def _tokenizer(source: str) -> Tokenizer:
    try:
        tokenizer = open_tokenizer(EngineConfig(model=ModelConfig(model=source)))
    except PagodaError as error:
        raise ConfigError("--tokenizer", f"{source}: {error}; name the served model's folder or hub id") from None
    assert tokenizer is not None
    return tokenizer


def plan_requests(config: ServeLoadConfig, model: str, tokenizer: Tokenizer) -> list[PlannedRequest]:
    """Return the requests, determined by the seed."""
    rng = np.random.default_rng(config.seed)
    tokens = ordinary_tokens(tokenizer.vocab_size, set(tokenizer.special_ids))
    prefix = rng.choice(tokens, config.random_prefix_len).tolist()
    inputs, outputs = (_lengths(rng, mean, config) for mean in (config.random_input_len, config.random_output_len))
    prompts = [prefix + rng.choice(tokens, length).tolist() for length in inputs]
    return [
        PlannedRequest(_body(config, model, prompt, tokenizer, length), len(prompt), at)
        for prompt, length, at in zip(prompts, outputs, _arrivals(rng, config))
    ]


def _lengths(rng: np.random.Generator, mean: int, config: ServeLoadConfig) -> list[int]:
    least = max(1, math.floor(mean * (1 - config.random_range_ratio)))
    most = math.ceil(mean * (1 + config.random_range_ratio))
    return [int(length) for length in rng.integers(least, most + 1, config.num_prompts)]


def _arrivals(rng: np.random.Generator, config: ServeLoadConfig) -> list[float]:
    """Return sending times in seconds; gaps follow a gamma distribution of mean 1 / rate."""
    if math.isinf(config.request_rate):
        return [0.0] * config.num_prompts
    scale = 1.0 / (config.request_rate * config.burstiness)
    gaps = rng.gamma(config.burstiness, scale, config.num_prompts - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def _body(config: ServeLoadConfig, model: str, prompt: list[int], tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "temperature": config.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if config.ignore_eos:
        body["ignore_eos"] = True
    if not config.is_chat:
        return body | {"prompt": prompt, "max_tokens": length}
    text = tokenizer.decode(prompt)
    return body | {"messages": [{"role": "user", "content": text}], "max_completion_tokens": length}


async def _load(
    config: ServeLoadConfig, endpoint: Endpoint, requests: Sequence[PlannedRequest]
) -> tuple[list[Outcome], float]:
    """Return the outcomes in request order, and the seconds from the first request to the last answer."""
    for _ in range(config.num_warmups):
        warmup = await endpoint.measure(requests[0].body, requests[0].prompt_tokens)
        if warmup.error:
            raise ApiError(f"{endpoint.url}: {warmup.error}; is the server running? (pagoda serve MODEL)")
    gate = nullcontext() if config.max_concurrency is None else asyncio.Semaphore(config.max_concurrency)
    began = time.perf_counter()
    with tqdm(total=len(requests), disable=config.disable_tqdm) as bar:

        async def one(request: PlannedRequest) -> Outcome:
            await asyncio.sleep(began + request.at - time.perf_counter())
            async with gate:
                outcome = await endpoint.measure(request.body, request.prompt_tokens)
            bar.update()
            return outcome

        outcomes = await asyncio.gather(*map(one, requests))
    return list(outcomes), time.perf_counter() - began


def _save(config: ServeLoadConfig, model: str, source: str, results: dict[str, Any]) -> None:
    now = datetime.now()
    header = {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "backend": config.backend,
        "model_id": model,
        "tokenizer_id": source,
        "num_prompts": config.num_prompts,
        "request_rate": "inf" if math.isinf(config.request_rate) else config.request_rate,
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        **dict(pair.split("=", 1) for pair in config.metadata),
    }
    limit = "" if config.max_concurrency is None else f"-concurrency{config.max_concurrency}"
    rate = f"{config.request_rate:g}qps"
    default = f"{config.backend}-{rate}{limit}-{model.rstrip('/').rpartition('/')[2]}-{header['date']}.json"
    folder = Path(config.result_dir or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--result-dir", f"{folder}: {error.strerror}") from None
    write_results(str(folder / (config.result_filename or default)), header | results, "--result-filename")


# Results, as a table and as JSON: throughputs and the distributions of four latencies.

WIDTH: Final = 50
TITLES: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def figures(config: ServeLoadConfig, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return the results, times in milliseconds. `seconds`: first request to last answer."""
    good = [each for each in outcomes if not each.error]
    inputs, outputs = sum(each.prompt_tokens for each in good), sum(each.output_tokens for each in good)
    results: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    for name, times in _times(good).items():
        if name in config.percentile_metrics:
            results |= _statistics(name, np.array(times) * 1000.0, config.metric_percentiles)
    return results


def _times(good: Sequence[Outcome]) -> dict[str, list[float]]:
    return {
        "ttft": [each.ttft for each in good],
        "tpot": [each.per_token for each in good if each.per_token is not None],
        "itl": [gap for each in good for gap in each.gaps],
        "e2el": [each.latency for each in good],
    }


def _statistics(name: str, times: np.ndarray, percentiles: Sequence[float]) -> dict[str, float]:
    if not times.size:
        times = np.zeros(1)
    statistics = {"mean": times.mean(), "median": np.median(times), "std": times.std()}
    statistics |= {f"p{percentile:g}": np.percentile(times, percentile) for percentile in percentiles}
    return {f"{statistic}_{name}_ms": float(value) for statistic, value in statistics.items()}


def detailed(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the measurements of every request in sending order, times in seconds."""
    return {
        "input_lens": [each.prompt_tokens for each in outcomes],
        "output_lens": [each.output_tokens for each in outcomes],
        "ttfts": [each.ttft for each in outcomes],
        "itls": [each.gaps for each in outcomes],
        "errors": [each.error for each in outcomes],
    }


def report(config: ServeLoadConfig, results: Mapping[str, Any]) -> str:
    """Return the results as a table."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_row(label, value) for label, value in _totals(config, results)]
    for name, title in TITLES.items():
        if f"mean_{name}_ms" in results:
            lines.append(f"{title:-^{WIDTH}}")
            statistics = ("mean", "median", *(f"p{percentile:g}" for percentile in config.metric_percentiles))
            lines += [
                _row(f"{each.capitalize()} {name.upper()} (ms):", results[f"{each}_{name}_ms"]) for each in statistics
            ]
    if drafts := acceptance_rows(results):
        lines += [f"{'Speculative Decoding':-^{WIDTH}}", *(_row(label, value) for label, value in drafts)]
    return "\n".join([*lines, "=" * WIDTH])


def _totals(config: ServeLoadConfig, results: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield "Successful requests:", results["completed"]
    yield "Failed requests:", results["failed"]
    if config.max_concurrency is not None:
        yield "Maximum request concurrency:", config.max_concurrency
    if config.request_rate != float("inf"):
        yield "Request rate configured (RPS):", config.request_rate
    yield "Benchmark duration (s):", results["duration"]
    yield "Total input tokens:", results["total_input_tokens"]
    yield "Total generated tokens:", results["total_output_tokens"]
    yield "Request throughput (req/s):", results["request_throughput"]
    yield "Output token throughput (tok/s):", results["output_throughput"]
    yield "Total token throughput (tok/s):", results["total_token_throughput"]


def _row(label: str, value: float) -> str:
    number = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40}{number:<10}"
