"""Latent attention on a GPU: correctness in bfloat16, and speed relative to the chip's.

`checks`: errors against the same inputs in float32, in units of the output's rounding. `speeds`: bytes of latents per
second relative to a copy for decodes, to all tokens and to selected ones; FLOP per second relative to a product for
prefills. Launches are recorded in CUDA graphs. `trials`: settings to try for the tuning.json of both kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.latent_attention import (
    even_latent_pieces,
    latent_decode,
    latent_selected,
)
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import (
    ExpansionRound,
    latent_prefill,
    plan_rounds,
    query_tile,
    round_capacity,
)
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.kernels.attention.work_list import WorkList, cut_evenly
from pagoda.benchmarks.gpu.measure import BF16, Bench, Number, each_of, figures, settings_trials, verdict, worst

PAGE = 16
STEP_TOKENS = 8192
"""Tokens of the engine's largest step, which bound the memory of a round of a prefill."""
ROUNDINGS = 8
"""Of bfloat16: products of several steps are rounded between them."""


@dataclass(frozen=True)
class LatentLoad:
    """Sequences of `context` tokens, the last `new` of them in this step, with the dimensions of DeepSeek-V3."""

    seqs: int
    context: int
    new: int = 1
    heads: int = 16
    nope: int = 128
    rotary: int = 64
    rank: int = 512
    values: int = 128

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of `tokens` latents of each sequence."""
        return self.seqs * tokens * (self.rank + self.rotary) * 2

    def decode_flop(self, tokens: int) -> int:
        """Return the FLOP of attention to `tokens` latents of each sequence."""
        return 2 * self.seqs * self.heads * tokens * (2 * self.rank + self.rotary)

    @property
    def prefill_flop(self) -> int:
        """FLOP of the expansion and of both products, where each token sees all before it."""
        pairs = self.new * (self.context - self.new) + self.new * (self.new + 1) // 2
        expanded = self.context * self.rank * (self.nope + self.values)
        return 2 * self.seqs * self.heads * (expanded + pairs * (self.nope + self.rotary + self.values))


SELECTED = LatentLoad(3, 5000, heads=128)
TOP = 2048
"""Tokens that the indexer of DeepSeek-V3.2 selects."""


@dataclass(frozen=True)
class LatentCall:
    load: LatentLoad
    q: Tensor
    absorbed: Tensor
    kv_b: Tensor
    cache: Tensor
    tables: Tensor
    kv_lens: Tensor

    def wide(self) -> LatentCall:
        """Return the same numbers in float32."""
        floats = (x.float() for x in (self.q, self.absorbed, self.kv_b, self.cache))
        return LatentCall(self.load, *floats, self.tables, self.kv_lens)

    def decode(self, bench: Bench, work: WorkList | None, *, use_kernel: bool) -> Tensor:
        how = {"scale": 0.07, "work": work, "use_kernel": use_kernel, "chip": bench.chip}
        return latent_decode(self.absorbed, self.q, self.cache, self.tables, self.kv_lens, **how)

    def selected(
        self, bench: Bench, rows: Tensor, positions: Tensor, counts: Tensor, work: WorkList | None, *, use_kernel: bool
    ) -> Tensor:
        how = {"scale": 0.07, "work": work, "use_kernel": use_kernel, "chip": bench.chip}
        return latent_selected(self.absorbed, self.q, self.cache, self.tables, rows, positions, counts, **how)

    def prefill(self, bench: Bench, *, use_kernel: bool) -> Callable[[], Tensor]:
        """Return the call, whose tiles and rounds are on the device."""
        load, device = self.load, bench.device
        tile = query_tile(load.nope, load.values, BF16, bench.chip)
        counts, lens = np.full(load.seqs, load.new, np.int32), np.full(load.seqs, load.context, np.int32)
        capacity = round_capacity(load.heads * (load.nope + load.values) * 2, STEP_TOKENS)
        rounds = tuple(
            ExpansionRound(*(torch.from_numpy(part).to(device) for part in each))
            for each in plan_rounds(lens, 0, capacity)
        )
        return partial(
            latent_prefill,
            self.q,
            self.cache,
            self.kv_b,
            self.tables,
            torch.arange(0, len(self.q) + 1, load.new, dtype=torch.int32, device=device),
            self.kv_lens,
            torch.from_numpy(make_tiles(counts, 0, tile)).to(device),
            rounds,
            nope_dim=load.nope,
            scale=0.07,
            out=self.q.new_empty(len(self.q), load.heads, load.values),
            tile=tile,
            use_kernel=use_kernel,
            chip=bench.chip,
        )


def latent_inputs(load: LatentLoad, bench: Bench) -> LatentCall:
    """Return random inputs; pages in random order."""
    torch.manual_seed(0)
    width, tokens = -(-load.context // PAGE), load.seqs * load.new

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=bench.device) * size).to(BF16)

    return LatentCall(
        load,
        normal(tokens, load.heads, load.nope + load.rotary),
        normal(load.heads, tokens, load.rank, size=0.5).transpose(0, 1),
        normal(load.heads * (load.nope + load.values), load.rank, size=load.rank**-0.5),
        normal(load.seqs * width + 1, PAGE, load.rank + load.rotary),
        (1 + torch.randperm(load.seqs * width)).view(load.seqs, width).to(bench.device, torch.int32),
        torch.full((load.seqs,), load.context, dtype=torch.int32, device=bench.device),
    )


def checks(bench: Bench) -> Iterator[Number]:
    """Yield each kernel of several shapes."""
    for name, load in (("heads of a rank", LatentLoad(5, 700)), ("all heads", LatentLoad(2, 300, heads=128))):
        yield Number(f"latent_decode_{name}", partial(check_decode, bench, load))
    for name, load in (("whole", LatentLoad(3, 200, 200)), ("chunk of a long prompt", LatentLoad(1, 9000, 70))):
        yield Number(f"latent_prefill_{name}", partial(check_prefill, bench, load))
    yield Number("latent_selected", partial(check_selected, bench, SELECTED))


def small(load: LatentLoad, bench: Bench) -> LatentLoad:
    """Return the load, reduced if shapes are tiny."""
    new = min(load.new, 20)
    return bench.choose(load, LatentLoad(2, 40, new, 2, 16, 16, 32, 16))


def check_decode(bench: Bench, load: LatentLoad) -> dict:
    inputs = latent_inputs(small(load, bench), bench)
    got = [inputs.decode(bench, cut_evenly(inputs.kv_lens, n), use_kernel=bench.use_kernel) for n in (1, 4)]
    want = inputs.wide().decode(bench, None, use_kernel=False).double()
    return verdict(max(worst(bench.spoiled(each), want, ROUNDINGS) for each in got))


def check_prefill(bench: Bench, load: LatentLoad) -> dict:
    inputs = latent_inputs(small(load, bench), bench)
    got = inputs.prefill(bench, use_kernel=bench.use_kernel)()
    want = inputs.wide().prefill(bench, use_kernel=False)().double()
    return verdict(worst(bench.spoiled(got), want, ROUNDINGS))


def check_selected(bench: Bench, load: LatentLoad) -> dict:
    inputs, top = latent_inputs(small(load, bench), bench), bench.choose(TOP, 16)
    arguments = selected_positions(inputs, top)
    works = [cut_evenly(arguments[2], pieces) for pieces in (1, 4)]
    got = [inputs.selected(bench, *arguments, work, use_kernel=bench.use_kernel) for work in works]
    want = inputs.wide().selected(bench, *arguments, None, use_kernel=False).double()
    return verdict(max(worst(bench.spoiled(each), want, ROUNDINGS) for each in got))


def selected_positions(inputs: LatentCall, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, random positions in ascending order, and how many of them are selected, for each sequence."""
    load, device = inputs.load, inputs.q.device
    chosen = [torch.randperm(load.context)[:top].sort().values for _ in range(load.seqs)]
    counts = torch.full((load.seqs,), top, dtype=torch.int32, device=device)
    return torch.arange(load.seqs, dtype=torch.int32, device=device), torch.stack(chosen).int().to(device), counts


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield decodes and prefills at sizes of serving."""
    for name, load in (("64x4k", LatentLoad(64, 4096)), ("64x4k_128_heads", LatentLoad(64, 4096, heads=128))):
        yield Number(f"latent_decode_{name}", partial(decode_speed, bench, load))
    for name, load in (("8k", LatentLoad(1, 8192, 8192)), ("2k_after_30k", LatentLoad(1, 32768, 2048))):
        yield Number(f"latent_prefill_{name}", partial(prefill_speed, bench, load))
    yield Number("latent_selected_64x32k", partial(selected_speed, bench, replace(SELECTED, seqs=64, context=32768)))


def decode_speed(bench: Bench, load: LatentLoad) -> dict:
    load = small(load, bench)
    inputs = latent_inputs(load, bench)
    work = even_latent_pieces(load.seqs, load.heads, load.context, bench.device, bench.chip)
    replay = bench.recorded([lambda: inputs.decode(bench, work, use_kernel=bench.use_kernel)])
    took = bench.median_ms(lambda _: replay(), 20) / 1e3
    return figures(bench, took, load.bytes_of(load.context), load.decode_flop(load.context))


def selected_speed(bench: Bench, load: LatentLoad) -> dict:
    load, top = small(load, bench), bench.choose(TOP, 16)
    inputs = latent_inputs(load, bench)
    work = even_latent_pieces(load.seqs, load.heads, top, bench.device, bench.chip)
    arguments = selected_positions(inputs, top)
    replay = bench.recorded([lambda: inputs.selected(bench, *arguments, work, use_kernel=bench.use_kernel)])
    took = bench.median_ms(lambda _: replay(), 20) / 1e3
    return figures(bench, took, load.bytes_of(top), load.decode_flop(top))


def prefill_speed(bench: Bench, load: LatentLoad) -> dict:
    """Return the speed outside a graph, as the engine runs it; FLOP include the expansion of the latents."""
    load = small(load, bench)
    call = latent_inputs(load, bench).prefill(bench, use_kernel=bench.use_kernel)
    took = bench.median_ms(lambda _: call(), 10) / 1e3
    tokens = load.seqs * load.new
    return figures(bench, took, load.bytes_of(load.context), load.prefill_flop) | {"tokens_per_s": tokens / took}


def trials(bench: Bench) -> Iterator[Number]:
    """Yield trials for decodes of 16 and 128 heads, which share a key, then for prefills."""
    from pagoda.backends.torch_cuda.kernels.attention.latent_attention import kernel as decode_kernel
    from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import kernel as prefill_kernel

    decodes = partial(decode_calls, bench, (LatentLoad(64, 4096), LatentLoad(32, 4096, heads=128)))
    tried = {"ROWS": (16, 32, 64), "TILE": (32, 64), "num_warps": (4, 8), "num_stages": (2, 3)}
    yield from settings_trials(bench, decode_kernel, "16bit", each_of(tried), decodes)
    prefills = partial(prefill_calls, bench, LatentLoad(1, 8192, 8192))
    tried = {"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3)}
    yield from settings_trials(bench, prefill_kernel, "h128_b2", each_of(tried), prefills)


def decode_calls(bench: Bench, loads: tuple[LatentLoad, ...]) -> list[Callable[[], object]]:
    calls = []
    for load in loads:
        load = small(load, bench)
        work = even_latent_pieces(load.seqs, load.heads, load.context, bench.device, bench.chip)
        calls.append(partial(latent_inputs(load, bench).decode, bench, work, use_kernel=bench.use_kernel))
    return calls


def prefill_calls(bench: Bench, load: LatentLoad) -> list[Callable[[], object]]:
    return [latent_inputs(small(load, bench), bench).prefill(bench, use_kernel=bench.use_kernel)]
