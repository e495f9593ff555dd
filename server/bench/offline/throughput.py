"""`pagoda bench throughput`: requests and tokens per second of engines that have all their requests at once."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.bench.dataset import DatasetConfig
from pagoda.common.config.groups.bench.offline import ThroughputConfig
from pagoda.common.config.groups.bench.serve import pairs
from pagoda.common.config.settings import ResolvedSettings, build
from pagoda.common.errors import ConfigError
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.bench.datasets.draw import draw_samples
from pagoda.server.bench.datasets.samples import DatasetSample, PromptVocabulary
from pagoda.server.bench.offline.engine import (
    EngineView,
    acceptance,
    check_fits,
    engine_keywords,
    need_profiler,
    resolve_load,
    start_llm,
    vocabulary_of,
    write_results,
)
from pagoda.server.bench.online.apis import lora_names
from pagoda.server.bench.peers.compare import EngineSpec, EngineWorkload, measure, weight_bytes, workers_of
from pagoda.server.bench.report.machine import machine, processor_kind
from pagoda.server.bench.report.table import acceptance_rows
from pagoda.server.core_client import check_one_engine, engine_processes
from pagoda.server.llm import LLM
from pagoda.server.outputs import RequestOutput
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import Resolved
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.startup.engine import check_engine
from pagoda.server.vllm.request_types import LoRARequest

COMMAND: Final = "bench throughput"

SHARED_SETTINGS: Final = (
    "dtype",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_prefix_caching",
    "seed",
    "tensor_parallel_size",
    "tokenizer",
)
"""Engine settings that vLLM gets, too, where they are set."""

UNEQUAL_WEIGHTS: Final = 1.2
"""Ratio of the sizes of two engines' weights from which the comparison is noted as unequal."""


def check(args: argparse.Namespace) -> tuple[ResolvedSettings, Resolved]:
    load, _, settings = _settings(args)
    config = EngineArgs.from_resolved(settings).create_engine_config()
    if load.async_engine:
        config = engine_processes(config)[0].config
    else:
        _check_one_engine(config)
    return settings, check_engine(config, "llm", settings.sources)


def run(args: argparse.Namespace) -> int:
    """Measure and print the results. Returns 0."""
    load, dataset, settings = _settings(args)
    if load.engines != ("pagoda",):
        return _compare(load, dataset, settings)
    engine_args = EngineArgs.from_resolved(settings)
    if not load.async_engine:
        _check_one_engine(engine_args.create_engine_config())
    llm = start_async(engine_args) if load.async_engine else start_llm(engine_args)
    engine = llm.llm_engine
    try:
        seed = engine.config.model.seed
        samples = _samples(dataset, vocabulary_of(engine), seed)
        for sample in samples:
            check_fits(engine, len(sample.token_ids), sample.output_len)
        warm_up = [samples[index % len(samples)] for index in range(load.num_warmups)]
        if warm_up:
            _generate(llm, load, warm_up, seed)
            llm.reset_prefix_cache()
        before = engine.stats.drafts
        if load.profile:
            llm.start_profile()
        began = time.perf_counter()
        outputs = _generate(llm, load, samples, seed)
        elapsed = time.perf_counter() - began
        if load.profile:
            print(f"Trace of all requests: {llm.stop_profile()}")
        drafts = acceptance(before, engine.stats.drafts)
    finally:
        llm.shutdown()
    prompt_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    output_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    results = throughput(settings.values["model"], len(outputs), prompt_tokens, output_tokens, elapsed)
    _print(results)
    for label, value in acceptance_rows(drafts):
        print(label, f"{value:.2f}" if isinstance(value, float) else value)
    write_results(load.output_json, results | drafts | {"machine": machine()})
    return 0


def throughput(model: str, requests: int, prompt_tokens: int, output_tokens: int, elapsed: float) -> dict[str, Any]:
    """Return the results under vLLM's names."""
    total = prompt_tokens + output_tokens
    return {
        "model_id": model,
        "elapsed_time": elapsed,
        "num_requests": requests,
        "total_num_tokens": total,
        "total_output_tokens": output_tokens,
        "requests_per_second": requests / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
    }


def _settings(args: argparse.Namespace) -> tuple[ThroughputConfig, DatasetConfig, ResolvedSettings]:
    """Return the load, its dataset, and the engine's settings with the device backend of --backend."""
    load, settings = resolve_load(args, COMMAND, ThroughputConfig)
    values = dict(settings.values)
    if load.prefix_len:
        values["random_prefix_len"] = load.prefix_len
    dataset = build(DatasetConfig, values)
    if dataset.dataset_name in ("multi_turn", "random-rerank") or dataset.random_batch_size > 1:
        flag = "--random-batch-size" if dataset.random_batch_size > 1 else "--dataset-name"
        raise ConfigError(flag, "needs a server; use `bench serve`")
    need_profiler(load.profile, settings)
    if load.lora_path and not values["enable_lora"]:
        raise ConfigError("--lora-path", "needs --enable-lora; add it")
    values["backend"] = load.device
    return load, dataset, dataclasses.replace(settings, values=values)


def _samples(dataset: DatasetConfig, vocabulary: PromptVocabulary, seed: int) -> list[DatasetSample]:
    return draw_samples(dataset, vocabulary, np.random.default_rng(seed))


def _check_one_engine(config: EngineConfig) -> None:
    """Raise ConfigError if the replicas of the model run in several engines, which LLM does not."""
    try:
        check_one_engine(config)
    except ConfigError as error:
        raise ConfigError(error.setting, "each replica has an engine process of its own; add --async-engine") from None


class AsyncEngine:
    """An AsyncLLM with the methods of LLM that the benchmark calls; it runs in a loop of its own."""

    def __init__(self, llm: AsyncLLM, runner: asyncio.Runner) -> None:
        self._llm = llm
        self._runner = runner

    @property
    def llm_engine(self) -> EngineView:
        """What is known of the engine."""
        return self._llm

    def generate(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        lora_request: Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        """Return the outputs of all prompts, which are sent at once."""

        async def last(index: int) -> RequestOutput:
            adapter = None if lora_request is None else lora_request[index]
            outputs = self._llm.generate(prompts[index], params[index], f"request-{index}", lora_request=adapter)
            return [output async for output in outputs][-1]

        async def everything() -> list[RequestOutput]:
            return await asyncio.gather(*map(last, range(len(prompts))))

        return self._runner.run(everything())

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        self._runner.run(self._llm.reset_prefix_cache())

    def start_profile(self) -> None:
        """Trace the steps that follow."""
        self._runner.run(self._llm.start_profile())

    def stop_profile(self) -> str:
        """Write the trace and return its path."""
        return self._runner.run(self._llm.stop_profile())

    def shutdown(self) -> None:
        """End the engine and the loop."""
        self._llm.shutdown()
        self._runner.close()


def start_async(engine_args: EngineArgs) -> AsyncEngine:
    """Return an engine in a process of its own, or one for each replica, once it is warm."""
    return AsyncEngine(AsyncLLM.from_engine_args(engine_args), asyncio.Runner())


def _generate(
    llm: LLM | AsyncEngine, load: ThroughputConfig, samples: Sequence[DatasetSample], seed: int
) -> list[RequestOutput]:
    params = [
        SamplingParams(
            n=load.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=sample.output_len,
            detokenize=not load.disable_detokenize,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for sample in samples
    ]
    adapters = _adapters(load, llm.llm_engine.config.lora.max_loras, len(samples), seed)
    prompts: list[Any] = [{"prompt_token_ids": list(sample.token_ids)} for sample in samples]
    return llm.generate(prompts, params, lora_request=adapters)


def _adapters(load: ThroughputConfig, copies: int, count: int, seed: int) -> list[LoRARequest | None] | None:
    """Return an adapter for each request: a copy of --lora-path, of which there are --max-loras."""
    if not load.lora_path:
        return None
    requests = [LoRARequest(f"bench-{number}", number, load.lora_path) for number in range(1, copies + 1)]
    by_name = {request.lora_name: request for request in requests}
    rng = np.random.default_rng(seed)
    names = lora_names(list(by_name), load.lora_assignment, count, lambda size: int(rng.integers(size)))
    return [by_name[name] for name in names]


def _print(results: dict[str, Any]) -> None:
    print(
        f"Throughput: {results['requests_per_second']:.2f} requests/s, "
        f"{results['tokens_per_second']:.2f} total tokens/s, "
        f"{results['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {results['total_num_tokens'] - results['total_output_tokens']}")
    print(f"Total num output tokens:  {results['total_output_tokens']}")


# Several engines, in turns.


def engine_specs(load: ThroughputConfig, settings: ResolvedSettings) -> list[EngineSpec]:
    """Return the engines of --backend with the arguments of their constructors."""
    models = pairs("--peer-model", load.peer_model)
    pythons = pairs("--peer-python", load.peer_python)
    shared: dict[str, Any] = {name: settings.values[name] for name in SHARED_SETTINGS if name in settings.sources}
    specs = []
    for name in load.engines:
        options: dict[str, Any]
        match name:
            case "pagoda":
                options = engine_keywords(settings) | {"backend": load.device}
            case "vllm":
                options = dict(shared)
            case "transformers":
                options = {"batch_size": load.hf_max_batch_size, "compile": load.hf_enable_torch_compile}
                options |= {"dtype": settings.values["dtype"]}
            case _:
                options = {key: shared[key] for key in ("max_model_len", "max_num_seqs") if key in shared}
        options["model"] = models.get(name, settings.values["model"])
        if name == "llama.cpp" and not str(options["model"]).endswith(".gguf"):
            raise ConfigError("--peer-model", f"llama.cpp reads GGUF files, not {options['model']}; add llama.cpp=FILE")
        options |= load.arguments.get(name, {})
        specs.append(EngineSpec(name, name, options, pythons.get(name, sys.executable)))
    return specs


def _compare(load: ThroughputConfig, dataset: DatasetConfig, settings: ResolvedSettings) -> int:
    specs = engine_specs(load, settings)
    tokenizer = open_tokenizer(EngineArgs.from_resolved(settings).create_engine_config())
    if tokenizer is None:
        raise ConfigError("--skip-tokenizer-init", "prompts for several engines need a tokenizer; drop it")
    samples = _samples(dataset, PromptVocabulary.of(tokenizer, as_text=False), settings.values["seed"])
    work = EngineWorkload([sample.token_ids for sample in samples], [sample.output_len for sample in samples])
    with workers_of(specs) as workers:
        warm_up = max(1, load.num_warmups)
        for worker in workers:
            worker.run(EngineWorkload(work.prompts[:warm_up], work.outputs[:warm_up]))
        engines = measure(workers, work, load.rounds)
        versions = {worker.spec.name: worker.version for worker in workers}
    facts = machine()
    sizes = {spec.name: weight_bytes(str(spec.options["model"])) for spec in specs}
    print(processor_kind(facts))
    print(f"{'Engine':<16}{'version':<22}{'weights (MB)':>14}{'output tokens/s':>18}{specs[0].name + ' is':>18}")
    for spec in specs:
        ratio = engines["ratios"].get(spec.name, {}).get("median")
        size = sizes[spec.name]
        print(
            f"{spec.name:<16}{versions[spec.name]:<22}{'' if size is None else f'{size / 1e6:.0f}':>14}"
            f"{engines[spec.name]['median']:>18.2f}{'' if ratio is None else f'{ratio:.2f} x':>18}"
        )
    known_sizes = [size for size in sizes.values() if size is not None]
    if known_sizes and max(known_sizes) > UNEQUAL_WEIGHTS * min(known_sizes):
        print("The engines read weights of different sizes: this compares formats, too, not engines alone.")
    first = specs[0].name
    outputs = sum(work.outputs)
    prompts = sum(map(len, work.prompts))
    results = throughput(settings.values["model"], len(samples), prompts, outputs, outputs / engines[first]["median"])
    models = {spec.name: str(spec.options["model"]) for spec in specs}
    more = {"versions": versions, "models": models, "weight_bytes": sizes, "machine": facts}
    write_results(load.output_json, results | {"engines": engines} | more)
    return 0
