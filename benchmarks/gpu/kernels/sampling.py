"""Sampling on a GPU: correctness against the definition, and speed relative to sampling by a sort.

`checks`: each kernel against its definition. `speeds`: microseconds of sampling for R rows, recorded in a CUDA graph as
in the engine. Logits are `peaked`, as a language model's are, or `flat`, the hardest to filter.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.sampling import edit_logits
from pagoda.backends.torch_cuda.kernels.sampling.gumbel_max import gumbel_max, store_history
from pagoda.backends.torch_cuda.kernels.sampling.logprobs import logprobs
from pagoda.backends.torch_cuda.sampling import CudaSamplingRules, sample_tokens
from pagoda.benchmarks.gpu.measure import Bench, Number
from pagoda.common.engine.sampling.rules import gumbel, noise_keys

VOCAB = 128_256
ROWS = (1, 32, 256)
KINDS = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 0, 1.0, 0.0),
    "random": (1.0, 0, 1.0, 0.0),
    "top_k": (1.0, 50, 1.0, 0.0),
    "top_p": (0.7, 0, 0.95, 0.0),
    "filtered": (0.7, 1000, 0.9, 0.02),
}


def make_logits(spread: str, rows: int, vocab: int, device: torch.device) -> Tensor:
    """Return float32 [R, V]: a power law over tokens in random order, or a normal distribution."""
    generator = torch.Generator().manual_seed(rows)
    noise = torch.randn(rows, vocab, generator=generator)
    if spread == "flat":
        return (noise * 2).to(device)
    ranks = torch.rand(rows, vocab, generator=generator).argsort(-1).float()
    return (-2.0 * torch.log1p(ranks) + 0.5 * noise).to(device)


def make_rules(rows: int, kinds: list[str], device: torch.device) -> Tensor:
    """Return int32 [7, R] as `SampledRows.pack` does, the kinds in rotation."""
    packed = np.zeros((7, rows), np.int32)
    packed[0], packed[1] = np.arange(rows), 5
    packed[2] = noise_keys(np.arange(rows), np.full(rows, 5)).view(np.int32)
    each = [KINDS[kinds[row % len(kinds)]] for row in range(rows)]
    packed[4] = [rule[1] for rule in each]
    floats = packed.view(np.float32)
    for field, index in ((3, 0), (5, 2), (6, 3)):
        floats[field] = [rule[index] for rule in each]
    return torch.from_numpy(packed).to(device)


def memory(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return last and history, which sampling writes."""
    zeros = torch.zeros((rows + 1, 9), dtype=torch.int32, device=device)
    return zeros[:, 0].clone(), zeros


def checks(bench: Bench) -> Iterator[Number]:
    """Yield each check by name."""
    vocab, rows = bench.choose((VOCAB, 250), (600, 20))
    for spread in ("peaked", "flat"):
        yield Number(f"choice_{spread}", lambda spread=spread: {"right": right_choice(bench, spread, rows, vocab)})
    yield Number("noise", lambda: {"right": right_noise(bench, vocab)})
    yield Number("logprobs", lambda: {"right": right_logprobs(bench, vocab)})
    yield Number("edits", lambda: {"right": right_edits(bench, vocab)})


def right_choice(bench: Bench, spread: str, rows: int, vocab: int) -> bool:
    """Every kind of row: thresholds keep what a sort keeps, within rounding; tokens match plain torch."""
    device, kernel = bench.device, bench.use_kernel
    logits, packed = make_logits(spread, rows, vocab, device), make_rules(rows, list(KINDS), device)
    rules = CudaSamplingRules.unpack(packed)
    floor, want = (rules.lowest_kept(logits, use_kernel=use_kernel) for use_kernel in (kernel, False))
    floor = floor + bench.spoil
    scaled = logits.double() / rules.temperature.clamp(min=1e-3)[:, None]
    chance = (scaled - scaled.amax(-1, keepdim=True)).exp()
    mass, wanted = (((logits >= x[:, None]) * chance).sum(-1) for x in (floor, want))
    kept = bool(((mass - wanted).abs() <= 1e-4 * wanted).all())
    last, history = memory(rows, device)
    tokens = sample_tokens(logits, packed, last, use_kernel=kernel)
    store_history(tokens, rules.rows, rules.positions, history, use_kernel=kernel)
    same = gumbel_max(logits, rules.keys, rules.temperature, floor, use_kernel=False) == tokens
    written = torch.equal(last[:rows], tokens) and torch.equal(history[:rows, 5], tokens)
    return kept and written and float(same.float().mean()) >= 0.99  # ties within rounding may differ


def right_noise(bench: Bench, vocab: int) -> bool:
    """The token with the highest noise is numpy's, so the hash is right."""
    device = bench.device
    keys = noise_keys(np.arange(16), np.arange(16))
    want = gumbel(keys, np.arange(vocab, dtype=np.uint32)).argmax(-1)
    ones = torch.ones(16, device=device)
    sent = torch.from_numpy(keys.view(np.int32)).to(device) + int(bench.spoil > 0)
    tokens = gumbel_max(torch.zeros(16, vocab, device=device), sent, ones, -ones, use_kernel=bench.use_kernel)
    return tokens.tolist() == want.tolist()


def right_logprobs(bench: Bench, vocab: int) -> bool:
    """Against float64."""
    logits = make_logits("peaked", 8, vocab, bench.device)
    targets = torch.arange(8, dtype=torch.int32, device=bench.device) * 11
    ids, values, ranks = logprobs(logits, targets, 20, use_kernel=bench.use_kernel)
    want = logits.double().log_softmax(-1).gather(1, ids.long())
    better = (logits > logits.gather(1, targets[:, None].long())).sum(-1) + 1
    return bool((bench.spoiled(values) - want).abs().max() < 1e-4) and ranks.tolist() == better.tolist()


def right_edits(bench: Bench, vocab: int) -> bool:
    """Each edit by its kernel against plain torch: penalties, additions, banned words, masks."""
    device = bench.device
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 50, (9, 4097), generator=generator, dtype=torch.int32)
    generated = history[3, 10:12].tolist()
    history = history.to(device)
    penalties = np.array([[1, 5], [3, 2], [100, 0], [4000, 7]], np.int32)
    floats = np.array([[1.3, 0.8], [0.2, 0.1], [0.5, -0.5]], np.float32).view(np.int32)
    packed = torch.from_numpy(np.concatenate([penalties, floats, np.full((1, 2), 2, np.int32)])).to(device)
    values = np.array([0.5, -np.inf, 3.0], np.float32).view(np.int32)
    entries = torch.from_numpy(np.array([[0, 7, 8], [3, 3, 3], values], np.int32)).to(device)
    words = torch.tensor([[2, 3, 8], [60, 61, 62]], dtype=torch.int32, device=device)
    heads = torch.tensor([[0, 0, 1, 3], [3] * 4, [10, 11, 10, 0], [*generated, generated[0] + 1, 0]], dtype=torch.int32)
    bits = torch.randint(-(2**31), 2**31, (1, -(-vocab // 32)), generator=generator).int().to(device)
    masked = torch.tensor([4], dtype=torch.int32, device=device)
    edited = []
    for use_kernel in (bench.use_kernel, False):
        logits = make_logits("flat", 8, vocab, device)
        edit_logits.penalise(logits, history, packed, use_kernel=use_kernel)
        edit_logits.add(logits, entries, use_kernel=use_kernel)
        edit_logits.ban_words(logits, history, words, heads.to(device), use_kernel=use_kernel)
        edit_logits.mask(logits, masked, bits, use_kernel=use_kernel)
        edited.append(logits.double())
    edited[0] = bench.spoiled(edited[0])
    return bool(torch.allclose(*edited, rtol=1e-5, atol=1e-5)) and bool(torch.isneginf(edited[0][2, 60]))


def by_sort(logits: Tensor, rules: CudaSamplingRules) -> Tensor:
    """Sample with min-p, top-k and top-p in the usual way: int64 [R]."""
    values, ids = (logits / rules.temperature.clamp(min=1e-5)[:, None]).sort(-1, descending=True)
    order = torch.arange(logits.shape[1], device=logits.device)
    limit = torch.where(rules.top_k > 0, rules.top_k, logits.shape[1])
    lowest = values[:, :1] + rules.min_p.clamp(max=1).log()[:, None]
    values = values.masked_fill((order >= limit[:, None]) | (values < lowest), -torch.inf)
    chance = values.softmax(-1)
    before = chance.cumsum(-1) - chance
    chance = chance.masked_fill(before >= rules.top_p[:, None], 0.0)
    drawn = (chance / torch.empty_like(chance).exponential_()).argmax(-1, keepdim=True)
    return ids.gather(1, drawn)[:, 0]


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield microseconds of sampling, by rows, kind and logits; `sort`: the usual way, for filtered."""
    for rows in bench.choose(ROWS, (2,)):
        for spread in ("peaked", "flat"):
            for kind in KINDS:
                yield Number(f"{kind}_{spread}_{rows}", partial(speed, bench, rows, spread, kind))
        yield Number(f"sort_{rows}", partial(sort_speed, bench, rows))


def speed(bench: Bench, rows: int, spread: str, kind: str) -> dict[str, float]:
    last, _ = memory(rows, bench.device)
    logits = make_logits(spread, rows, bench.choose(VOCAB, 600), bench.device)
    packed = make_rules(rows, [kind], bench.device)
    replay = bench.recorded([partial(sample_tokens, logits, packed, last, use_kernel=bench.use_kernel)])
    return {"us": 1e3 * bench.median_ms(lambda _: replay())}


def sort_speed(bench: Bench, rows: int) -> dict[str, float]:
    logits = make_logits("peaked", rows, bench.choose(VOCAB, 600), bench.device)
    rules = CudaSamplingRules.unpack(make_rules(rows, ["filtered"], bench.device))
    return {"us": 1e3 * bench.median_ms(lambda _: by_sort(logits, rules))}
