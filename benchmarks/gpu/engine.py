"""The whole engine on a GPU: graphs against eager steps; decode, prefill and throughput with Llama-3.1-8B's shapes.

`graph_checks`, `decode`, `prefill`, `throughput`, `short` and `fp8` yield numbers; an engine starts with the first one
that runs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

import pagoda
from pagoda.benchmarks.gpu import model
from pagoda.benchmarks.gpu.measure import Bench, Number, copy_bandwidth, matmul_rate

BATCHES = (1, 32, 64, 256)
CONTEXT = 1024
STEPS, WARM, PROFILED = 64, 8, 12
START_SECONDS = 240
"""Time limit of a number that starts an engine."""


class Engine:
    """An engine with random weights that starts on first use."""

    def __init__(self, bench: Bench, config: dict, **settings) -> None:
        self._bench, self._config, self._settings = bench, config, settings
        self._llm: pagoda.LLM | None = None
        self.start_seconds = 0.0

    @property
    def llm(self) -> pagoda.LLM:
        if self._llm is None:
            began = time.perf_counter()
            usual = {"dtype": "bfloat16", "enable_prefix_caching": False, "max_num_seqs": 256}
            self._llm = pagoda.LLM(
                str(model.write(Path(tempfile.mkdtemp()) / "model", self._config)),
                backend="torch_cuda",
                load_format="dummy",
                skip_tokenizer_init=True,
                **usual | self._settings,
            )
            self.start_seconds = time.perf_counter() - began
        return self._llm

    @property
    def recompiles(self) -> int:
        """Programs compiled or captured since the engine was ready."""
        return self.llm.llm_engine.stats.recompiles

    def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None
        if self._bench.is_gpu:
            torch.cuda.empty_cache()


def prompts(config: dict, count: int, length: int, seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, config["vocab_size"], (count, length), generator=generator)
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def answer(tokens: int, **rules) -> pagoda.SamplingParams:
    rules = {"temperature": 0.0} | rules
    return pagoda.SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **rules)


GRAPHED = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 weights": {"quantization": "fp8"},
    "int4 weights": {"quantization": "int4"},
}
"""Settings under which captured and eager decode steps must give the same tokens."""


def graph_checks(bench: Bench) -> Iterator[Number]:
    """Yield comparisons of captured graphs with eager steps; nothing may be compiled after the engine is ready."""
    for name, settings in list(GRAPHED.items())[: bench.choose(None, 2)]:
        yield Number(name, partial(graphs_equal_eager, bench, settings), START_SECONDS)


def graphs_equal_eager(bench: Bench, settings: dict) -> dict:
    """Run two layers of Llama-3.1-8B, 24 prompts of all lengths, greedy and seeded requests in one batch.

    Captured prefill and mixed steps are padded further, which changes the last bits of products: only float32 has them.
    """
    decodes = {} if settings.get("dtype") == "float32" else {"cudagraph_mode": "FULL_DECODE_ONLY"}
    tokens_of, recompiles, starts = [], [], []
    for eager in (False, True):
        done, engine = _answers(bench, enforce_eager=eager, compilation_config=decodes, **settings)
        tokens_of.append(done)
        recompiles.append(engine.recompiles)
        starts.append(round(engine.start_seconds, 1))
        engine.close()
    if bench.spoil:
        tokens_of[0][0][-1] += 1
    equal = sum(one == other for one, other in zip(*tokens_of))
    facts = {"recompiles": recompiles, "start_seconds": starts, "distinct": len({tuple(one) for one in tokens_of[0]})}
    return {
        "right": equal == len(tokens_of[0]) and not any(recompiles),
        "equal": equal,
        "of": len(tokens_of[0]),
        **facts,
    }


def depth_checks(bench: Bench) -> Iterator[Number]:
    """Yield the comparison of steps that are planned while the last one runs with steps one after the other."""
    yield Number("async", partial(depths_equal, bench), START_SECONDS)


def depths_equal(bench: Bench) -> dict:
    """Run two layers of Llama-3.1-8B with the requests of `graphs_equal_eager`, planned ahead and not.

    In float32: steps hold other tokens, which changes the last bits.
    """
    tokens_of, recompiles = [], []
    for ahead in (True, False):
        done, engine = _answers(bench, async_scheduling=ahead, dtype="float32")
        tokens_of.append(done)
        recompiles.append(engine.recompiles)
        engine.close()
    if bench.spoil:
        tokens_of[0][0][-1] += 1
    equal = sum(one == other for one, other in zip(*tokens_of))
    right = equal == len(tokens_of[0]) and not any(recompiles)
    return {"right": right, "equal": equal, "of": len(tokens_of[0]), "recompiles": recompiles}


def _answers(bench: Bench, **settings) -> tuple[list[list[int]], Engine]:
    """Return the tokens of prompts of all lengths, greedy and seeded requests in one batch, and the engine."""
    config = bench.choose(model.CONFIG | {"num_hidden_layers": 2}, model.TINY)
    seqs, tokens = bench.choose((24, 48), (3, 5))
    inputs = [prompts(config, 1, 5 + 37 * at % 500 if not bench.tiny else 5 + at, at)[0] for at in range(seqs)]
    rules = [
        answer(tokens) if at % 2 else answer(tokens, temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=at)
        for at in range(seqs)
    ]
    engine = Engine(bench, config, max_model_len=1024, max_num_seqs=seqs, **settings)
    done = engine.llm.generate(inputs, rules, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done], engine


def decode(bench: Bench) -> Iterator[Number]:
    """Yield a decode step at 1k context for every batch size."""
    config = bench.choose(model.CONFIG, model.TINY)
    context, steps, batches = bench.choose((CONTEXT, STEPS, BATCHES), (24, 3, (1, 3)))
    engine = Engine(bench, config, max_model_len=context + answer_length(steps), max_num_seqs=max(batches))
    for batch in batches:
        yield Number(
            f"batch_{batch}", partial(decode_step, bench, engine, config, batch, context, steps), START_SECONDS
        )
    engine.close()


def answer_length(steps: int) -> int:
    """Return enough tokens for the first sequence to run until the last one is measured and profiled."""
    return 3 * steps + 4 * PROFILED


def decode_step(bench: Bench, running: Engine, config: dict, batch: int, context: int, steps: int) -> dict:
    """Return milliseconds of a step, and relative to reading the weights and the context's K and V once."""
    bandwidth = copy_bandwidth(bench)  # while there is memory for it
    engine = running.llm.llm_engine
    for number, prompt in enumerate(prompts(config, batch, context)):
        engine.add_request(f"{batch}-{number}", prompt, answer(answer_length(steps)))
    while sum(len(engine.step()) for _ in range(2)) < 2 * batch:  # until all decode
        pass
    for _ in range(bench.choose(WARM, 1)):
        engine.step()
    bench.synchronize()
    times = []
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
        now = time.perf_counter()
        times.append(now - begin)
        begin = now
    wall = statistics.median(times)
    more = prompts(config, 1, context)[0]
    profiled = profile_steps(engine, wall, more, f"{batch}-more") if bench.is_gpu else {}
    engine.abort_all()
    while engine.step():
        pass
    floor = 2 * model.matrix_elements(config) + batch * context * model.kv_bytes(config)
    floor /= bandwidth
    return {
        "right": running.recompiles == 0,
        "recompiles": running.recompiles,
        "step_ms": 1e3 * wall,
        "tokens_per_s": batch / wall,
        "floor_ms": 1e3 * floor,
        "of_floor": floor / wall,
        "slowest_ms": 1e3 * max(times),
        **profiled,
        "copy_bytes_per_s": bandwidth,
        "memory": running.llm.llm_engine.info.memory,
        "start_up": dict(running.llm.llm_engine.info.phases),
    }


def profile_steps(engine, wall: float, prompt: dict, name: str) -> dict:
    """Return what a step spends its time on, or why the profiler does not work here."""
    try:
        busy = gpu_busy(engine)
    except RuntimeError as error:
        return {"not_profiled": str(error)[:200]}
    times = {"gpu_busy_ms": 1e3 * busy, "host_not_hidden": 1 - busy / wall}
    return times | {"waits": waits(engine, prompt, name)}


def gpu_busy(engine) -> float:
    """Return seconds per step in which a kernel or copy ran, from the profiler's timeline."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, until = 0.0, float("-inf")
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e6 / PROFILED


def waits(engine, prompt: dict, name: str) -> list[str]:
    """Return where a step with one new request synchronizes with the GPU, except at its end."""
    rules = answer(4, temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=2)
    engine.add_request(name, prompt, rules)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(PROFILED):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sorted({f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchronizing" in str(one.message)})


def prefill(bench: Bench) -> Iterator[Number]:
    """Yield one prompt per step, and eight prompts per step."""
    config = bench.choose(model.CONFIG, model.TINY)
    loads = bench.choose(((2048, 1), (4096, 1), (8192, 1), (1024, 8)), ((24, 1), (8, 3)))
    max_tokens = max(length * count for length, count in loads)
    longest = max(length for length, _ in loads) + 16
    engine = Engine(bench, config, max_model_len=longest, max_num_batched_tokens=max_tokens, max_num_seqs=8)
    for length, count in loads:
        yield Number(f"{count}x{length}", partial(prefill_step, bench, engine, config, length, count), START_SECONDS)
    engine.close()


def prefill_step(bench: Bench, running: Engine, config: dict, length: int, count: int) -> dict:
    """Return seconds to the first token, and relative to the rate of a large product."""
    rate = matmul_rate(bench)  # while there is memory for it
    times = []
    for seed in range(bench.choose(8, 2)):
        inputs = prompts(config, count, length, seed)
        bench.synchronize()
        begin = time.perf_counter()
        running.llm.generate(inputs, answer(1), use_tqdm=False)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[len(times) // 4 :])
    flops = count * model.prefill_flops(config, length)
    return {
        "right": running.recompiles == 0,
        "recompiles": running.recompiles,
        "seconds": seconds,
        "tokens_per_s": count * length / seconds,
        "flop_per_s": flops / seconds,
        "matmul_flop_per_s": rate,
        "of_matmul_rate": flops / seconds / rate,
    }


LOADS = {
    "256x1024/1024": (256, 1024, 1024, {}),
    "256x1024/1024 fp8 weights": (256, 1024, 1024, {"quantization": "fp8"}),
    "256x1024/1024 fp8 weights and cache": (256, 1024, 1024, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "32x1024/128": (32, 1024, 128, {}),
}
"""Requests, input and output tokens of each, settings; the last load is also run with transformers."""


def throughput(bench: Bench) -> Iterator[Number]:
    """Yield output tokens per second with all requests submitted at once."""
    yield from _throughputs(bench, list(LOADS)[: bench.choose(None, 2)])


def fp8(bench: Bench) -> Iterator[Number]:
    """Yield the throughputs of 8-bit weights and caches."""
    yield from _throughputs(bench, [name for name, load in LOADS.items() if load[3]])


def _throughputs(bench: Bench, names: list[str]) -> Iterator[Number]:
    config = bench.choose(model.CONFIG, model.TINY)
    for name in names:
        requests, input_len, output_len, settings = LOADS[name]
        load = bench.choose((requests, input_len, output_len), (4, 12, 6))
        yield Number(name, partial(throughput_of, bench, config, load, settings), START_SECONDS)


def short(bench: Bench) -> Iterator[Number]:
    """Yield decode steps, a prefill and a throughput of one engine, which starts once: for a GPU of few minutes."""
    config = bench.choose(model.CONFIG, model.TINY)
    context, steps, batches = bench.choose((CONTEXT, 24, (1, 64, 256)), (24, 3, (1, 3)))
    length, load = bench.choose((8192, (256, 1024, 256)), (24, (3, 12, 6)))
    longest = max(length, context + answer_length(steps), sum(load[1:])) + 16
    tokens = bench.choose(length, 64)
    engine = Engine(bench, config, max_model_len=longest, max_num_batched_tokens=tokens, max_num_seqs=max(batches))
    for batch in batches:
        step = partial(decode_step, bench, engine, config, batch, context, steps)
        yield Number(f"decode_{batch}", partial(_after_rates, bench, step), START_SECONDS)
    yield Number(f"prefill_{length}", partial(prefill_step, bench, engine, config, length, 1), START_SECONDS)
    name = "throughput_" + "x".join(map(str, load[:2])) + f"/{load[2]}"
    yield Number(name, partial(throughput_with, engine, config, load), START_SECONDS)
    engine.close()


def _after_rates(bench: Bench, run: Callable[[], dict]) -> dict:
    """Return a number that is measured after the machine's rates, for which an engine leaves no memory."""
    copy_bandwidth(bench)
    matmul_rate(bench)
    return run()


def throughput_of(bench: Bench, config: dict, load: tuple[int, int, int], settings: dict) -> dict:
    requests, input_len, output_len = load
    engine = Engine(bench, config, max_model_len=input_len + output_len + 16, max_num_seqs=requests, **settings)
    result = throughput_with(engine, config, load)
    engine.close()
    return result


def throughput_with(engine: Engine, config: dict, load: tuple[int, int, int]) -> dict:
    """Return output tokens per second of an engine; `load`: requests, input and output tokens of each."""
    requests, input_len, output_len = load
    llm = engine.llm
    llm.generate(prompts(config, 2, input_len), answer(4), use_tqdm=False)
    inputs = prompts(config, requests, input_len)
    begin = time.perf_counter()
    done = llm.generate(inputs, answer(output_len), use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = sum(len(one.outputs[0].token_ids) for one in done)
    recompiles, info = engine.recompiles, llm.llm_engine.info
    return {
        "right": tokens == requests * output_len and recompiles == 0,
        "recompiles": recompiles,
        "requests": requests,
        "input": input_len,
        "output": output_len,
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "memory": info.memory,
        "start_up": dict(info.phases),
    }
