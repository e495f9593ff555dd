"""The kernels of --batch-invariant on a GPU: correctness in bfloat16, and speed relative to the chip's.

`checks`: errors against float64 in units of the output's rounding, and the same bits for every number of workers, alone
and in a batch. `speeds`: the loads of decode and prefill attention, with their figures. `trials`: settings to try for
the tuning.json of both kernels. `invariance` has the bits of products and engines, and products against torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.invariant_attention import (
    SequenceTokens,
    invariant_attention,
    query_tile,
    span_tokens,
)
from pagoda.backends.torch_cuda.kernels.attention.shared import ScoreRules
from pagoda.backends.torch_cuda.kernels.linear.invariant_linear import invariant_linear
from pagoda.benchmarks.gpu.kernels import decode_attention as decodes
from pagoda.benchmarks.gpu.kernels import prefill_attention as prefills
from pagoda.benchmarks.gpu.kernels.gemm import MATRICES, random
from pagoda.benchmarks.gpu.measure import (
    BF16,
    Bench,
    Number,
    each_of,
    figures,
    matmul_rate,
    settings_trials,
    verdict,
    worst,
)

ROUNDINGS = 6
"""Of bfloat16. Interpreted in float16, with errors scaled to bfloat16, attention reaches 3."""
DECODES = ("llama", "long", "drafts", "head dim 64, sinks, window", "head dim 256, soft cap, window", "float8")
PREFILLS = ("llama", "group of 7", "head dim 64, sinks, window", "float8")
"""Cases of decode and prefill attention."""
TIMED_DECODES = ("64x4k", "1x8k", "256x1k", "8x32k", "64x4k_float8")
TIMED_PREFILLS = ("1x8k", "8x1k", "4x2k after 8k", "1x8k float8")


def checks(bench: Bench) -> Iterator[Number]:
    """Yield products of few and many rows, then attention in decodes and prefills."""
    for rows in bench.choose((1, 33, 300), (1, 33)):
        yield Number(f"product_{rows}", partial(check_product, bench, rows))
    for name in DECODES:
        load = decodes.ERRORS[name]
        yield Number(f"decode {name}", partial(check_decode, bench, bench.choose(load, small_decode(load))))
    for name in PREFILLS:
        load = prefills.ERRORS[name]
        yield Number(f"prefill {name}", partial(check_prefill, bench, bench.choose(load, small_prefill(load))))


def small_decode(load: decodes.Load) -> decodes.Load:
    """Return the load reduced for a CPU, with one KV head."""
    return replace(decodes.small(load), heads=load.heads // load.kv_heads, kv_heads=1)


def small_prefill(load: prefills.Load) -> prefills.Load:
    return replace(load, seqs=((20, 30), (7, 0)), heads=load.heads // load.kv_heads, kv_heads=1)


def check_product(bench: Bench, rows: int) -> dict:
    torch.manual_seed(0)
    outputs, inputs = bench.choose((1040, 4096), (40, 300))
    weight, bias = random(outputs, inputs, device=bench.device), torch.randn(outputs, device=bench.device).to(BF16)
    x = torch.randn(rows, inputs, device=bench.device).to(BF16)
    got = invariant_linear(x, weight, bias, use_kernel=bench.use_kernel, chip=bench.chip)
    return verdict(worst(bench.spoiled(got), x.double() @ weight.double().T + bias.double(), 2))


def check_decode(bench: Bench, load: decodes.Load) -> dict:
    inputs = decodes.make(load, bench)
    got = decode(bench, inputs, 0, 4)
    others = [decode(bench, inputs, 0, workers, rows) for workers, rows in ((1, load.seqs), (1, 1), (7, 2))]
    same = all(torch.equal(each, got[: len(each)]) for each in others)
    want = inputs.call(q=inputs.q[0].double(), use_kernel=False, chip=bench.chip)
    result = verdict(worst(bench.spoiled(got), want, ROUNDINGS))
    return result | {"right": result["right"] and same, "same_bits": same}


def decode(bench: Bench, inputs: decodes.Inputs, copy: int, workers: int | None, rows: int | None = None) -> Tensor:
    """Return attention of the first `rows` sequences."""
    load = inputs.load
    return invariant_attention(
        inputs.q[copy][: None if rows is None else rows * load.query_len],
        inputs.keys,
        inputs.values,
        inputs.tables[copy, :rows],
        SequenceTokens(inputs.kv_lens[:rows], load.query_len),
        ScoreRules(load.head_dim**-0.5, load.window, load.softcap, inputs.sinks, None, inputs.scale, inputs.scale),
        span=span_tokens(load.context),
        workers=workers,
        use_kernel=bench.use_kernel,
        chip=bench.chip,
    )


def check_prefill(bench: Bench, load: prefills.Load) -> dict:
    inputs = prefill_inputs(bench, load)
    got = prefill(bench, inputs)
    want = inputs.call(bench.chip, use_kernel=False, wide=True)
    return verdict(prefills.worst(bench.spoiled(got), want) * prefills.ROUNDINGS / ROUNDINGS)


def prefill_inputs(bench: Bench, load: prefills.Load) -> prefills.Inputs:
    """Return inputs cut into the kernel's own tiles."""
    tile = query_tile(load.heads // load.kv_heads, load.head_dim, BF16, bench.chip)
    return prefills.make(load, bench.device, bench.chip, tile)


def prefill(bench: Bench, inputs: prefills.Inputs) -> Tensor:
    tokens = SequenceTokens(inputs.kv_lens, query_start=inputs.query_start, tiles=inputs.tiles, tile=inputs.tile)
    return invariant_attention(
        inputs.q,
        inputs.keys,
        inputs.values,
        inputs.tables,
        tokens,
        inputs.rules,
        span=span_tokens(inputs.tables.shape[1] * decodes.PAGE),
        use_kernel=bench.use_kernel,
        chip=bench.chip,
    )


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield decodes, then prefills."""
    for name in bench.choose(TIMED_DECODES, TIMED_DECODES[:1]):
        load = decodes.SPEEDS[name]
        yield Number(f"decode {name}", partial(decode_speed, bench, bench.choose(load, small_decode(load))))
    for name in bench.choose(TIMED_PREFILLS, TIMED_PREFILLS[:1]):
        load = prefills.SPEEDS[name]
        yield Number(f"prefill {name}", partial(prefill_speed, bench, bench.choose(load, small_prefill(load))))


def decode_speed(bench: Bench, load: decodes.Load) -> dict:
    """Return the figures of a decode in a CUDA graph; bytes are those of K and V."""
    inputs = decodes.make(load, bench, bench.choose(decodes.COLD_BYTES, 1))
    took = decodes.seconds(bench, inputs, lambda copy: decode(bench, inputs, copy, None))
    return figures(bench, took, load.bytes_read)


def prefill_speed(bench: Bench, load: prefills.Load) -> dict:
    inputs = prefill_inputs(bench, load)
    took = bench.median_ms(lambda _: prefill(bench, inputs), 10) / 1e3
    return {"us": took * 1e6, "flop_per_s": load.flop / took, "of_matmul": load.flop / took / matmul_rate(bench)}


def trials(bench: Bench) -> Iterator[Number]:
    """Yield trials for products, then for attention in decodes and prefills, which share their settings."""
    from pagoda.backends.torch_cuda.kernels.attention.invariant_attention import kernel as attention
    from pagoda.backends.torch_cuda.kernels.linear.invariant_linear import kernel as linear

    tried = {"TOKENS": (64, 128), "CHANNELS": (64, 128), "DEPTH": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)}
    yield from settings_trials(bench, linear, "b2", each_of(tried), partial(product_calls, bench))
    tried = {"BLOCK_M": (32, 64, 128), "BLOCK_N": (32, 64), "num_warps": (4, 8), "num_stages": (2, 3)}
    for dim, heads in ((128, 32), (64, 64)):
        make = partial(attention_calls, bench, heads, dim)
        yield from settings_trials(bench, attention, f"h{dim}_b2", each_of(tried), make)


def product_calls(bench: Bench) -> list[Callable[[], object]]:
    """Return calls over two matrices of an 8B model, each with as many rows as a decode and a prefill have."""
    calls = []
    for shape in bench.choose(MATRICES[1:], ((64, 96),)):
        weight = random(*shape, device=bench.device)
        for rows in bench.choose((64, 2048), (1,)):
            x = torch.randn(rows, shape[1], device=bench.device).to(BF16)
            calls.append(partial(invariant_linear, x, weight, None, use_kernel=bench.use_kernel, chip=bench.chip))
    return calls


def attention_calls(bench: Bench, heads: int, dim: int) -> list[Callable[[], object]]:
    """Return a decode of 64 sequences of 4k and a prefill of 4k."""
    usual = decodes.Load(64, 4096, heads=heads, head_dim=dim, cache=BF16)
    load = bench.choose(usual, small_decode(usual))
    inputs = decodes.make(load, bench)
    prompt = prefills.Load(((4096, 0),), heads=heads, head_dim=dim, cache=BF16)
    prompts = prefill_inputs(bench, bench.choose(prompt, small_prefill(prompt)))
    return [partial(decode, bench, inputs, 0, None), partial(prefill, bench, prompts)]
