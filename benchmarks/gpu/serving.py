"""Requests that arrive over time, and requests that exceed a GPU's memory. The engine as servers run it, without HTTP.

`rates`: latencies at three rates of a Poisson process. `out_of_memory`: what is refused names its remedy, what waits is
served in the end, and the next request is served.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from pagoda.backends.torch_cuda import sampling
from pagoda.benchmarks.gpu import model
from pagoda.benchmarks.gpu.engine import START_SECONDS, Engine, answer, prompts
from pagoda.benchmarks.gpu.measure import GIB, Bench, Number
from pagoda.common.errors import ConfigError, RequestError

RATES = (4.0, 12.0, 24.0)
"""Requests per second; the last is more than a H200 computes, so that a queue grows."""
SECONDS, INPUT, OUTPUT = 40.0, 1024, 128
"""Of arrivals at each rate; tokens of each request."""


def rates(bench: Bench) -> Iterator[Number]:
    """Yield latencies at each rate, with Llama-3.1-8B's shapes."""
    config = bench.choose(model.CONFIG, model.TINY)
    seconds, size, length = bench.choose((SECONDS, INPUT, OUTPUT), (0.5, 12, 4))
    engine = Engine(bench, config, max_model_len=size + length + 16, max_num_seqs=bench.choose(256, 4))
    for rate in RATES:
        yield Number(f"{rate:g}/s", partial(serve, engine, config, rate, seconds, size, length), START_SECONDS)
    engine.close()


def serve(running: Engine, config: dict, rate: float, seconds: float, size: int, length: int) -> dict:
    """Return percentiles of the time to the first token and between tokens, and the throughput."""
    engine = running.llm.llm_engine
    count = max(2, round(rate * seconds))
    arrivals = np.random.default_rng(0).exponential(1 / rate, count).cumsum()
    inputs = prompts(config, count, size)
    times: list[list[float]] = [[] for _ in inputs]
    begin, begun, queued = time.perf_counter(), 0, 0
    while begun < count or engine.has_unfinished_requests():
        now = time.perf_counter() - begin
        while begun < count and arrivals[begun] <= now:
            engine.add_request(str(begun), inputs[begun], answer(length))
            begun += 1
            queued = engine.get_num_unfinished_requests()
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[begun] - now))
            continue
        for output in engine.step():
            times[int(output.request_id)].append(time.perf_counter() - begin)
    end = time.perf_counter() - begin
    first = np.array([own[0] for own in times]) - arrivals
    gaps = np.concatenate([np.diff(own) for own in times])
    each = np.array([(own[-1] - own[0]) / max(length - 1, 1) for own in times])
    return {
        "right": running.recompiles == 0,
        "recompiles": running.recompiles,
        "requests": count,
        "seconds": end,
        "requests_per_s": count / end,
        "output_tokens_per_s": count * length / end,
        "unfinished_at_the_last_arrival": queued,
        **percentiles("ttft_ms", first),
        **percentiles("tpot_ms", each),
        **percentiles("itl_ms", gaps),
    }


def percentiles(name: str, seconds: np.ndarray) -> dict[str, float]:
    """Return the mean, median and 99th percentile in milliseconds."""
    p50, p99 = 1e3 * np.percentile(seconds, [50, 99])
    return {name: 1e3 * float(seconds.mean()), f"{name}_p50": float(p50), f"{name}_p99": float(p99)}


def out_of_memory(bench: Bench) -> Iterator[Number]:
    """Yield each kind of shortage; `right`: it is handled as documented, and the next request is served."""
    yield Number("batch", partial(batch_beyond_the_cache, bench), START_SECONDS)
    engine = small_engine(bench)
    yield Number("start", partial(start_beyond_the_device, bench, engine), START_SECONDS)
    yield Number("request", partial(request_beyond_the_context, bench, engine), START_SECONDS)
    yield Number("earlier tokens", partial(history_beyond_the_device, bench, engine), START_SECONDS)
    engine.close()


def config_of(bench: Bench) -> dict:
    return bench.choose(model.CONFIG | {"num_hidden_layers": 2}, model.TINY)


def small_engine(bench: Bench, **settings) -> Engine:
    """Return an engine of two layers of Llama-3.1-8B, in float32: tokens do not depend on the batch."""
    usual = {"dtype": "float32", "max_model_len": context_of(bench), "max_num_seqs": bench.choose(8, 4)}
    return Engine(bench, config_of(bench), **usual | settings)


def context_of(bench: Bench) -> int:
    return bench.choose(256, 48)


def batch_beyond_the_cache(bench: Bench) -> dict:
    """Requests that grow beyond a cache for two of them: some are preempted, with the tokens of each alone."""
    begin = time.perf_counter()
    engine, config = small_engine(bench, num_gpu_blocks_override=1 + 2 * context_of(bench) // 16), config_of(bench)
    count, size, length = bench.choose((8, 40, 200), (3, 8, 38))
    inputs, rules = prompts(config, count, size), answer(length)
    together = [one.outputs[0].token_ids for one in engine.llm.generate(inputs, rules, use_tqdm=False)]
    preemptions = engine.llm.llm_engine.stats.preemptions
    alone = [engine.llm.generate([one], rules, use_tqdm=False)[0].outputs[0].token_ids for one in inputs]
    recompiles = engine.recompiles
    engine.close()
    equal = sum(list(one) == list(other) for one, other in zip(together, alone))
    return {
        "right": equal == len(inputs) and preemptions > 0 and recompiles == 0,
        "equal": equal,
        "preemptions": preemptions,
        "seconds": time.perf_counter() - begin,
    }


def start_beyond_the_device(bench: Bench, next_one: Engine) -> dict:
    """An engine without memory for a KV block; then one with."""
    begin = time.perf_counter()
    refusal, limits = "", {} if bench.is_gpu else {"kv_cache_memory_bytes": 1}
    with no_memory(bench):
        engine = small_engine(bench, **limits)
        try:
            tokens_of(bench, engine)
        except ConfigError as error:
            refusal = str(error)
        engine.close()
    return outcome("use" in refusal and tokens_of(bench, next_one) == 4, refusal, begin)


def request_beyond_the_context(bench: Bench, engine: Engine) -> dict:
    """A prompt that is longer than the context."""
    begin = time.perf_counter()
    refusal = ""
    try:
        engine.llm.generate(prompts(config_of(bench), 1, context_of(bench) + 1), answer(4), use_tqdm=False)
    except RequestError as error:
        refusal = str(error)
    return outcome(str(context_of(bench)) in refusal and tokens_of(bench, engine) == 4, refusal, begin)


def history_beyond_the_device(bench: Bench, engine: Engine) -> dict:
    """A request with a penalty without memory for earlier tokens, beside one without."""
    begin = time.perf_counter()
    rules = [answer(4, presence_penalty=0.5), answer(4)]
    llm, inputs = engine.llm, prompts(config_of(bench), 2, 20)
    with no_memory(bench):
        refused, plain = llm.generate(inputs, rules, use_tqdm=False)
    [after] = llm.generate(inputs[:1], rules[0], use_tqdm=False)
    end, refusal = refused.outputs[0].finish_reason, str(refused.outputs[0].stop_reason)
    served = [len(one.outputs[0].token_ids) for one in (plain, after)]
    return outcome(end == "error" and "--gpu-memory-utilization" in refusal and served == [4, 4], refusal, begin)


def outcome(right: bool, refusal: str, begin: float) -> dict:
    return {"right": right, "refusal": refusal, "seconds": time.perf_counter() - begin}


def tokens_of(bench: Bench, engine: Engine) -> int:
    """Return the tokens of a request's answer of 4."""
    [done] = engine.llm.generate(prompts(config_of(bench), 1, 20), answer(4), use_tqdm=False)
    return len(done.outputs[0].token_ids)


@contextmanager
def no_memory(bench: Bench) -> Iterator[None]:
    """Take all of the GPU's free memory but a few MiB; on a CPU, report none."""
    with ExitStack() as stack:
        if bench.is_gpu:
            torch.cuda.empty_cache()
            taken = []
            for size in (GIB, GIB >> 4, GIB >> 9):
                while torch.cuda.mem_get_info(bench.device)[0] > size + (4 << 20):
                    taken.append(torch.empty(size, dtype=torch.uint8, device=bench.device))
            stack.callback(torch.cuda.empty_cache)
            stack.callback(taken.clear)
        else:
            stack.enter_context(patch.object(sampling, "available_bytes", lambda: 0))
        yield
