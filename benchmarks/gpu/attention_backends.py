"""The attention backends of --attention-backend, as the engine calls them: our own kernels and those of others.

`speeds`: microseconds of each by heads and kind of step, from which tools/attention_table.py makes the table that
`auto` reads. A backend that is missing or does not support the load reports so in the number. What a backend plans on
the host once per step is not part of `us`; of decodes it is `plan_us`.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import (
    AttentionRequirements,
    DecodeStep,
    PlannedDecode,
    heads_key,
)
from pagoda.backends.torch_cuda.backend import PREFILL_MODULES
from pagoda.backends.torch_cuda.device import CPU, find_device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch, GroupBatch
from pagoda.backends.torch_cuda.kernels.attention.shared import HeadTerms
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache
from pagoda.benchmarks.gpu import model
from pagoda.benchmarks.gpu.kernels import decode_attention, prefill_attention
from pagoda.benchmarks.gpu.measure import BF16, Bench, Number
from pagoda.benchmarks.gpu.peers import AGREE, absent, distance
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Attention
from pagoda.common.models.registry import spec_from_config

OURS = "TRITON_ATTN"


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def key(self) -> str:
        return heads_key(self.head_dim, self.heads // self.kv_heads, BF16)


SHAPES = (Heads(32, 8, 128), Heads(64, 8, 128), Heads(28, 4, 128), Heads(32, 8, 64))
"""Of Llama-3.1-8B and 70B, Qwen2.5-7B and Llama-3.2-1B."""
DECODES = {"1x8k": (1, 8192), "64x4k": (64, 4096), "256x1k": (256, 1024)}
PREFILLS = {"1x8k": ((8192, 0),), "8x1k": ((1024, 0),) * 8}


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield each backend, shape of heads, kind of step and load."""
    shapes = bench.choose(SHAPES, (Heads(8, 2, 16),))
    for shape in shapes:
        for kind, loads in (("decode", DECODES), ("prefill", PREFILLS)):
            for load in list(loads)[: bench.choose(None, 1)]:
                for name in PREFILL_MODULES:
                    run = partial(speed, bench, shape, kind, load, name)
                    yield Number(f"{shape.key} {kind} {load} {name}", run, 120)


def speed(bench: Bench, shape: Heads, kind: str, load: str, name: str) -> dict:
    """Return microseconds of a call by one backend, and whether its result is ours."""
    about = {"heads": shape.key, "kind": kind, "load": load, "backend": name}
    make = decode_calls if kind == "decode" else prefill_calls
    try:
        timed = make(bench, shape, load, name)
        got = timed.calls[0]()
    except (ConfigError, ImportError, AttributeError) as error:
        return about | absent(error)
    relative = distance(bench.spoiled(got), timed.want)
    replay = bench.recorded(timed.calls) if kind == "decode" else timed.calls[0]
    us = bench.median_ms(lambda _: replay(), 10) * 1e3 / len(timed.calls)
    result = about | {"us": us, "right": relative <= AGREE, "distance": relative}
    return result if timed.plan is None else result | {"plan_us": host_us(timed.plan)}


def host_us(run: Callable[[], None], repeats: int = 10) -> float:
    """Return the median microseconds that a call takes the host, without waiting for the device."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


@dataclass(frozen=True)
class Timed:
    """Calls that take as long each, our result of the first, and what plans it on the host."""

    calls: list[Callable[[], Tensor]]
    want: Tensor
    plan: Callable[[], None] | None = None


def decode_calls(bench: Bench, shape: Heads, load: str, name: str) -> Timed:
    """Return calls over as many caches as exceed an L2 cache."""
    seqs, context = DECODES[load]
    wanted = decode_attention.Load(seqs, context, shape.heads, shape.kv_heads, shape.head_dim)
    inputs = decode_attention.make(
        decode_attention.small(wanted) if bench.tiny else wanted, bench, bench.choose(decode_attention.COLD_BYTES, 1)
    )
    how = {"work": inputs.planned(bench), "use_kernel": bench.use_kernel, "chip": bench.chip}
    copies, want = range(len(inputs.tables)), inputs.call(0, **how)
    if name == OURS:
        return Timed([partial(inputs.call, copy, **how) for copy in copies], want)
    cache, mixer = CudaLayerCache(inputs.keys, inputs.values, 0), mixer_of(shape)
    batches = [step_of(inputs.tables[copy], inputs.kv_lens, len(inputs.kv_lens)) for copy in copies]
    decodes, plans = [create(bench, shape, name).decode], []
    if isinstance(decodes[0], PlannedDecode):  # a plan is of one step
        decodes += [create(bench, shape, name).decode for _ in copies[1:]]
        plans = [partial(decode.plan, planned_step(inputs, copy)) for copy, decode in enumerate(decodes)]
    calls = [partial(decode, q, batch, cache, mixer) for decode, q, batch in zip(cycle(decodes), inputs.q, batches)]
    for plan, call in zip(plans, calls):
        plan()
        call()  # makes the wrapper, which a capture cannot
    return Timed(calls, want, next(iter(plans), None))


def planned_step(inputs: decode_attention.Inputs, copy: int) -> DecodeStep:
    """Return what the host knows of a step."""
    kv_lens, table = inputs.kv_lens.cpu().numpy(), inputs.tables[copy].cpu().numpy()
    return DecodeStep(kv_lens, (table,), len(kv_lens), fixed=True)


def prefill_calls(bench: Bench, shape: Heads, load: str, name: str) -> Timed:
    """Return one call."""
    wanted = prefill_attention.Load(PREFILLS[load], shape.heads, shape.kv_heads, shape.head_dim)
    inputs = prefill_attention.make(
        replace(wanted, seqs=((20, 0), (20, 0))) if bench.tiny else wanted, bench.device, bench.chip
    )
    ours = partial(inputs.call, bench.chip, use_kernel=bench.use_kernel)
    if name == OURS:
        return Timed([ours], ours())
    prefill, mixer, out = create(bench, shape, name), mixer_of(shape), torch.empty_like(inputs.q)
    batch = replace(step_of(inputs.tables, inputs.kv_lens, 0), query_start=inputs.query_start, tiles=inputs.tiles)
    cache = CudaLayerCache(inputs.keys, inputs.values, 0)

    def call() -> Tensor:
        prefill(inputs.q, batch, cache, mixer, HeadTerms(), out)
        return out

    return Timed([call], ours())


def step_of(tables: Tensor, kv_lens: Tensor, num_decodes: int) -> CudaStepBatch:
    """Return a step with the fields that attention reads."""
    none = torch.zeros(0, dtype=torch.int32, device=tables.device)
    return CudaStepBatch(none, none, none, kv_lens, (GroupBatch(tables, none),), num_decodes, None)


def mixer_of(shape: Heads) -> Attention:
    """Return the attention of a Llama with such heads."""
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    spec, _ = spec_from_config(model.CONFIG | heads | {"num_hidden_layers": 1})
    [mixer] = spec.mixers
    assert isinstance(mixer, Attention), "a Llama has no other"
    return mixer


def create(bench: Bench, shape: Heads, name: str):
    """Return a backend for pages of the benchmark's size. Raise ConfigError if it cannot be used."""
    device = find_device(bench.device.index or 0) if bench.is_gpu else CPU
    page = prefill_attention.PAGE
    needs = AttentionRequirements((mixer_of(shape),), (), BF16, BF16, page, device)
    module = f"pagoda.backends.torch_cuda.attention_backends.{PREFILL_MODULES[name]}"
    return importlib.import_module(module).create(needs)
