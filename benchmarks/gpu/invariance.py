"""--batch-invariant on a GPU: the same bits alone and in a batch, and what they cost.

`checks`: products and whole engines. `speeds`: products against torch's, and decode and prefill steps of the engine;
the stages `decode` and `prefill` have the same steps without the flag.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from pagoda.backends.torch_cuda.kernels.linear.invariant_linear import invariant_linear
from pagoda.benchmarks.gpu import model
from pagoda.benchmarks.gpu.engine import (
    START_SECONDS,
    STEPS,
    Engine,
    answer,
    answer_length,
    decode_step,
    prefill_step,
    prompts,
)
from pagoda.benchmarks.gpu.kernels.gemm import MATRICES, microseconds, random
from pagoda.benchmarks.gpu.measure import BF16, Bench, Number, figures

ROWS = (1, 64, 512, 4096)
SETTINGS = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "eager": {"enforce_eager": True},
}


def checks(bench: Bench) -> Iterator[Number]:
    """Yield products of every matrix, and engines, alone and in a batch."""
    for shape in bench.choose(MATRICES, ((64, 1100),)):
        yield Number(f"product_{shape[0]}x{shape[1]}", partial(product_bits, bench, shape))
    for name, settings in list(SETTINGS.items())[: bench.choose(None, 1)]:
        yield Number(name, partial(engine_bits, bench, settings), START_SECONDS)


def product_bits(bench: Bench, shape: tuple[int, int]) -> dict:
    """Return how many numbers of rows give other bits for a row than all rows do."""
    torch.manual_seed(0)
    weight, rows = random(*shape, device=bench.device), bench.choose(700, 70)
    x = torch.randn(rows, shape[1], device=bench.device).to(BF16)
    linear = partial(invariant_linear, weight=weight, bias=None, use_kernel=bench.use_kernel, chip=bench.chip)
    whole = bench.spoiled(linear(x))
    counts = bench.choose((1, 2, 16, 63, 64, 65, 200, 512), (1, 40))
    other = [count for count in counts if not torch.equal(linear(x[-count:]), whole[-count:])]
    return {"right": not other, "other": other, "of": len(counts)}


def engine_bits(bench: Bench, settings: dict) -> dict:
    """Run two layers of Llama-3.1-8B: tokens and logprobs of prompts of all lengths, alone and together."""
    config = bench.choose(model.CONFIG | {"num_hidden_layers": 2}, model.TINY)
    seqs, tokens = bench.choose((24, 32), (3, 4))
    inputs = [prompts(config, 1, 5 + 97 * at % 900 if not bench.tiny else 5 + at, at)[0] for at in range(seqs)]
    rules = [answer(tokens, logprobs=1, temperature=float(at % 2), seed=at) for at in range(seqs)]
    settings = {"max_model_len": 1024, "max_num_seqs": seqs, "batch_invariant": True} | settings
    engine = Engine(bench, config, **settings)

    def answers(chosen: slice) -> list[list[tuple]]:
        done = engine.llm.generate(inputs[chosen], rules[chosen], use_tqdm=False)
        steps = [one.outputs[0].logprobs or [] for one in done]
        return [[tuple((t, entry.logprob) for t, entry in step.items()) for step in each] for each in steps]

    alone = [answers(slice(at, at + 1))[0] for at in range(seqs)]
    together = answers(slice(None))
    recompiles = engine.recompiles
    engine.close()
    if bench.spoil:
        alone[0][-1] = ()
    equal = sum(one == other for one, other in zip(alone, together))
    return {"right": equal == seqs and not recompiles, "equal": equal, "of": seqs, "recompiles": recompiles}


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield the cost: products, then steps of the engine."""
    for shape, rows in itertools.product(bench.choose(MATRICES, ((64, 96),)), bench.choose(ROWS, (1,))):
        yield Number(f"product_{shape[0]}x{shape[1]}_{rows}", partial(product_speed, bench, shape, rows))
    config = bench.choose(model.CONFIG, model.TINY)
    context, steps, batches = bench.choose((1024, STEPS, (1, 32, 256)), (24, 3, (1,)))
    length, count = bench.choose((2048, 4), (24, 1))
    longest = max(context + answer_length(steps), length + 16)
    engine = Engine(
        bench,
        config,
        batch_invariant=True,
        max_model_len=longest,
        max_num_seqs=max(batches),
        max_num_batched_tokens=length * count,
    )
    for batch in batches:
        run = partial(decode_step, bench, engine, config, batch, context, steps)
        yield Number(f"decode_{batch}", run, START_SECONDS)
    yield Number(
        f"prefill_{count}x{length}", partial(prefill_step, bench, engine, config, length, count), START_SECONDS
    )
    engine.close()


def product_speed(bench: Bench, shape: tuple[int, int], rows: int) -> dict[str, float]:
    """Return the figures of a product, and microseconds of torch's."""
    x = torch.randn(rows, shape[1], device=bench.device).to(BF16)
    moved = 2 * shape[0] * shape[1]

    def own() -> partial:
        weight = random(*shape, device=bench.device)
        return partial(invariant_linear, x, weight, None, use_kernel=bench.use_kernel, chip=bench.chip)

    us = microseconds(bench, own, moved)
    of_torch = microseconds(bench, lambda: partial(F.linear, x, random(*shape, device=bench.device)), moved)
    speed = figures(bench, us / 1e6, moved, rows * moved)
    return speed | {"torch_us": of_torch, "times_torch": us / of_torch}
