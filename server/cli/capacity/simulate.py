"""`pagoda simulate`: serve a workload by the real scheduler and KV cache manager on a simulated device.

Prints the table of `bench serve`. No weights are read, and the clock is virtual.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from pagoda.common.config.commands import COMMAND_SETTINGS, SimulateConfig
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.bench.dataset import DatasetConfig
from pagoda.common.config.groups.bench.traffic import ReportConfig, TrafficConfig
from pagoda.common.config.settings import ResolvedSettings, build
from pagoda.common.engine.workload.drive import DrivenRun, RequestTimes, TimedRequest, VirtualClock, drive
from pagoda.common.errors import ConfigError, PagodaError
from pagoda.server.bench.datasets.draw import draw_samples
from pagoda.server.bench.datasets.samples import PromptVocabulary
from pagoda.server.bench.offline.engine import acceptance, write_results
from pagoda.server.bench.online.arrivals import schedule
from pagoda.server.bench.online.metrics import Outcome, results_of
from pagoda.server.bench.report.table import WIDTH, result_table
from pagoda.server.cli.capacity.trace_file import read_trace, timed_request
from pagoda.server.core_client.ipc_messages import EngineInfo
from pagoda.server.settings.flags import EngineArgs, resolve_settings
from pagoda.server.settings.resolve import SIMULATED, Resolved
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.startup.engine import build_simulation, check_engine

SETTINGS: Final = COMMAND_SETTINGS["simulate"]


def check(args: argparse.Namespace) -> tuple[ResolvedSettings, Resolved]:
    settings = resolve_settings(args, SETTINGS)
    return settings, check_engine(simulated_config(settings), "server", settings.sources)


def run(args: argparse.Namespace) -> int:
    """Simulate and print the results. Returns 0. Raises PagodaError if a request failed."""
    settings = resolve_settings(args, SETTINGS)
    load = SimulatedLoad.of(settings)
    config = simulated_config(settings)
    began = time.perf_counter()
    clock = VirtualClock()
    built = build_simulation(config, settings.sources, clock)
    requests = load.requests(config, built.info)
    simulated = drive(built.core, requests, clock, max_concurrency=load.traffic.max_concurrency)
    errors = [request.error for request in simulated.requests if request.error]
    if len(errors) < len(requests):
        results = simulation_results(load, simulated, built.info, time.perf_counter() - began)
        print(simulation_table(load, results))
        write_results(load.simulate.output_json, results)
    if errors:
        raise PagodaError(f"{len(errors)} of {len(requests)} requests failed, the first with: {errors[0]}")
    return 0


def simulated_config(settings: ResolvedSettings) -> EngineConfig:
    """Return the engine's configuration, on the backend `simulated`. Raises ConfigError for another one."""
    config = EngineArgs.from_resolved(settings).create_engine_config()
    if config.model.backend not in ("auto", SIMULATED):
        raise ConfigError("--backend", f"{config.model.backend} is a real one; drop it")
    if "simulated_time" in settings.sources:
        raise ConfigError("--simulated-time", "the clock of `simulate` is virtual; drop it")
    path = Path(config.model.model)
    model = str(path.parent) if path.name == "config.json" and path.is_file() else config.model.model
    return replace(
        config,
        model=replace(config.model, backend=SIMULATED, model=model),
        load=config.load if path.suffix == ".gguf" else replace(config.load, load_format="dummy"),
    )


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """The requests to simulate, and what is reported of them."""

    simulate: SimulateConfig
    dataset: DatasetConfig
    traffic: TrafficConfig
    report: ReportConfig

    @classmethod
    def of(cls, settings: ResolvedSettings) -> SimulatedLoad:
        """Return the load of the settings. Raises ConfigError if they contradict each other."""
        load = cls(
            simulate=build(SimulateConfig, settings.values),
            dataset=build(DatasetConfig, settings.values),
            traffic=build(TrafficConfig, settings.values),
            report=build(ReportConfig, settings.values),
        )
        load._check(settings)
        return load

    def _check(self, settings: ResolvedSettings) -> None:
        if self.simulate.trace is not None:
            for name in settings.sources:
                replaced = SETTINGS[name].config is DatasetConfig or SETTINGS[name].config is TrafficConfig
                if replaced and name != "max_concurrency":
                    raise ConfigError(SETTINGS[name].flag, "requests and arrivals are those of --trace; drop it")
        if self.dataset.dataset_name == "multi_turn":
            raise ConfigError("--dataset-name", "multi_turn needs real answers; use prefix_repetition or --trace")
        if self.dataset.dataset_name == "random-rerank":
            raise ConfigError("--dataset-name", "random-rerank is for pooling models; use random")
        if self.dataset.random_batch_size > 1:
            raise ConfigError("--random-batch-size", "is for pooling models; drop it")

    def requests(self, config: EngineConfig, info: EngineInfo) -> list[TimedRequest]:
        """Return the requests, in the order of arrival. Raises ConfigError."""
        vocabulary = _vocabulary(config, info)
        if self.simulate.trace is not None:
            return read_trace(Path(self.simulate.trace), vocabulary.ordinary, config.model.seed)
        rng = np.random.default_rng(config.model.seed)
        samples = draw_samples(self.dataset, vocabulary, rng)
        recorded = self.dataset.dataset_name == "timed_trace"
        times = schedule(self.traffic, samples, rng, recorded=recorded)
        requests = [
            timed_request(str(index), arrival, list(sample.token_ids), sample.output_len)
            for index, (sample, arrival) in enumerate(zip(samples, times))
        ]
        return sorted(requests, key=lambda request: request.at)


def _vocabulary(config: EngineConfig, info: EngineInfo) -> PromptVocabulary:
    """Return the tokens of made-up prompts; without a tokenizer any of the model's."""
    try:
        tokenizer = open_tokenizer(config)
    except PagodaError:
        tokenizer = None
    return PromptVocabulary(info.vocab_size) if tokenizer is None else PromptVocabulary.of(tokenizer, as_text=False)


# Results: those of `bench serve`, and what a simulation knows beside them.


def simulation_results(
    load: SimulatedLoad, simulated: DrivenRun, info: EngineInfo, wall_seconds: float
) -> dict[str, Any]:
    """Return the results of `bench serve`, times in milliseconds, and what the engine counted."""
    outcomes = [outcome_of(request) for request in simulated.requests]
    stats = simulated.stats
    return {
        **results_of(outcomes, simulated.seconds, load.report, load.traffic),
        **acceptance(None, stats.drafts),
        "max_concurrency": load.traffic.max_concurrency,
        "request_rate": "inf" if math.isinf(load.traffic.request_rate) else load.traffic.request_rate,
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "prefix_cache_hit_rate": stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
        "kv_blocks": stats.kv_blocks_total,
        "block_size": info.limits.block_size,
        "max_num_seqs": info.limits.max_num_seqs,
        "max_num_batched_tokens": info.limits.max_num_batched_tokens,
        "device": info.device,
        "wall_seconds": wall_seconds,
    }


def outcome_of(times: RequestTimes) -> Outcome:
    """Return a request's times as `bench serve` measures them."""
    if times.error or not times.times:
        return Outcome(prompt_tokens=times.prompt_tokens, error=times.error or "no output")
    return Outcome(
        start=times.start,
        end=times.times[-1],
        ttft=times.times[0] - times.start,
        gaps=np.diff(times.times).tolist(),
        prompt_tokens=times.prompt_tokens,
        output_tokens=times.output_tokens,
        queued=times.queued,
    )


def simulation_table(load: SimulatedLoad, results: Mapping[str, Any]) -> str:
    """Return the results as the table of `bench serve`, with a section about the engine."""
    shown = {name: value for name, value in results.items() if value != "inf"}
    *lines, last = result_table(shown, load.report.metric_percentiles).splitlines()
    return "\n".join([*lines, f"{'Simulated Engine':-^{WIDTH}}", *_engine_rows(results), last])


def _engine_rows(results: Mapping[str, Any]) -> Sequence[str]:
    rows = [
        ("Steps:", f"{results['steps']}"),
        ("Prefix cache hit rate (%):", f"{100.0 * results['prefix_cache_hit_rate']:.2f}"),
        ("Preemptions:", f"{results['preemptions']}"),
        ("KV blocks:", f"{results['kv_blocks']} x {results['block_size']} tokens"),
        ("Simulated in (s):", f"{results['wall_seconds']:.2f}"),
    ]
    return [f"{label:<40}{value:<10}".rstrip() for label, value in rows]
