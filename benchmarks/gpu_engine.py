"""The whole engine on a GPU, with the shapes of Llama-3.1-8B: decode steps, prefill, throughput, the host's share.

usage: python gpu_engine.py decode|prefill|throughput [--requests N --input N --output N] [--tiny]

Prints one JSON object as its last line. --tiny tries it with a tiny model, on CPU tensors where no GPU is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import gpu_model
import torch
from gpu_measure import copy_bandwidth, matmul_rate

import pagoda

CONTEXT = 1024
STEPS = 100
PROFILED = 20


def start(config: dict, args: argparse.Namespace, **settings) -> pagoda.LLM:
    folder = gpu_model.write(Path(tempfile.mkdtemp()) / "model", args.tiny)
    return pagoda.LLM(
        str(folder),
        backend="torch_cuda",
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enable_prefix_caching=False,
        **settings,
    )


def prompts(config: dict, count: int, length: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, config["vocab_size"], (count, length), generator=generator)
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def answer(tokens: int) -> pagoda.SamplingParams:
    return pagoda.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def decode(config: dict, args: argparse.Namespace) -> dict:
    """Milliseconds of a decode step against reading the weights and the context's K and V once."""
    bandwidth = copy_bandwidth(torch.device("cuda")) if torch.cuda.is_available() else 1e10
    context = 64 if args.tiny else CONTEXT
    llm = start(config, args, max_model_len=context + 4 * STEPS, max_num_seqs=32)
    found = {}
    for batch in (1, 32):
        engine = llm.llm_engine
        for number, prompt in enumerate(prompts(config, batch, context)):
            engine.add_request(f"{batch}-{number}", prompt, answer(3 * STEPS))
        while sum(len(engine.step()) for _ in range(2)) < 2 * batch:  # until all decode
            pass
        synchronize()
        times = []
        begin = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
            now = time.perf_counter()
            times.append(now - begin)
            begin = now
        wall = statistics.median(times)
        busy = gpu_busy(engine) if torch.cuda.is_available() else wall
        waited = waits(engine, prompts(config, 1, context)[0], f"{batch}-more") if torch.cuda.is_available() else []
        engine.abort_all()
        floor = (2 * gpu_model.matrix_elements(config) + batch * context * gpu_model.kv_bytes(config)) / bandwidth
        found[f"batch_{batch}"] = {
            "step_ms": 1e3 * wall,
            "floor_ms": 1e3 * floor,
            "of_floor": floor / wall,
            "gpu_busy_ms": 1e3 * busy,
            "host_not_hidden": 1 - busy / wall,
            "waits": waited,
        }
    llm.shutdown()
    return found | {"copy_bytes_per_s": bandwidth, "context": context}


def gpu_busy(engine) -> float:
    """Seconds per step in which some kernel or copy ran, from the profiler's timeline."""
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
    """Where a step makes the host wait for the GPU, but for the events that steps end with. One more request comes."""
    rules = pagoda.SamplingParams(
        temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=2, max_tokens=4, ignore_eos=True, detokenize=False
    )
    engine.add_request(name, prompt, rules)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.set_sync_debug_mode("default")
    return sorted({f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchronizing" in str(one.message)})


def prefill(config: dict, args: argparse.Namespace) -> dict:
    """Seconds of a prompt of 8192 tokens in one step against the rate of a large product."""
    tokens = 256 if args.tiny else 8192
    rate = matmul_rate(torch.device("cuda")) if torch.cuda.is_available() else 1e10
    llm = start(config, args, max_model_len=tokens + 16, max_num_batched_tokens=tokens, max_num_seqs=4)
    times = []
    for prompt in prompts(config, 8, tokens):
        synchronize()
        begin = time.perf_counter()
        llm.generate([prompt], answer(1), use_tqdm=False)
        times.append(time.perf_counter() - begin)
    llm.shutdown()
    seconds = statistics.median(times[2:])
    flops = gpu_model.prefill_flops(config, tokens)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "flop_per_s": flops / seconds,
        "matmul_flop_per_s": rate,
        "of_matmul_rate": flops / seconds / rate,
    }


def throughput(config: dict, args: argparse.Namespace) -> dict:
    """Output tokens per second when all requests are there at once."""
    if args.tiny:
        args.requests, args.input, args.output = 4, 32, 8
    llm = start(config, args, max_model_len=args.input + args.output + 16, max_num_seqs=args.requests)
    llm.generate(prompts(config, 2, args.input), answer(4), use_tqdm=False)
    asked = prompts(config, args.requests, args.input)
    begin = time.perf_counter()
    done = llm.generate(asked, answer(args.output), use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = sum(len(one.outputs[0].token_ids) for one in done)
    info = llm.llm_engine.info
    llm.shutdown()
    assert tokens == args.requests * args.output, "an answer is short"
    return {
        "requests": args.requests,
        "input": args.input,
        "output": args.output,
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "memory": info.memory,
        "start_up": dict(info.phases),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("decode", "prefill", "throughput"))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    config = gpu_model.TINY if args.tiny else gpu_model.CONFIG
    found = {"decode": decode, "prefill": prefill, "throughput": throughput}[args.part](config, args)
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
