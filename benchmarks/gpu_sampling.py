"""Sampling on a GPU: right against the definition, and how fast against sampling by a sort.

`measure(device)`: which checks hold (`right`: all do), and microseconds of choosing a token for R rows, recorded in a
CUDA graph as the engine records it. Logits are `peaked`, as a language model's are, or `flat`, the hardest to filter.
"""

from __future__ import annotations

import numpy as np
import torch
from gpu_measure import median_ms
from torch import Tensor

from pagoda.backends.torch_cuda.choose import Rules, choose
from pagoda.backends.torch_cuda.kernels import edit_logits
from pagoda.backends.torch_cuda.kernels.gumbel_max import gumbel_max
from pagoda.backends.torch_cuda.kernels.logprobs import logprobs
from pagoda.common.engine.sampling import gumbel, noise_keys

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
    """float32 [R, V]: a power law over tokens in random order, or a normal distribution."""
    generator = torch.Generator().manual_seed(rows)
    noise = torch.randn(rows, vocab, generator=generator)
    if spread == "flat":
        return (noise * 2).to(device)
    ranks = torch.rand(rows, vocab, generator=generator).argsort(-1).float()
    return (-2.0 * torch.log1p(ranks) + 0.5 * noise).to(device)


def make_rules(rows: int, kinds: list[str], device: torch.device) -> Tensor:
    """int32 [7, R] as `Chosen.pack` makes it, the kinds in turn."""
    packed = np.zeros((7, rows), np.int32)
    packed[0], packed[1] = np.arange(rows), 5
    packed[2] = noise_keys(np.arange(rows), np.full(rows, 5)).view(np.int32)
    each = [KINDS[kinds[row % len(kinds)]] for row in range(rows)]
    packed[4] = [rule[1] for rule in each]
    real = packed.view(np.float32)
    for field, place in ((3, 0), (5, 2), (6, 3)):
        real[field] = [rule[place] for rule in each]
    return torch.from_numpy(packed).to(device)


def memory(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What `choose` writes: last and history."""
    zeros = torch.zeros((rows + 1, 9), dtype=torch.int32, device=device)
    return zeros[:, 0].clone(), zeros


def right_choice(spread: str, rows: int, vocab: int, device: torch.device) -> bool:
    """Every kind of row: thresholds keep what a sort keeps, but for rounding; tokens are the reference's."""
    logits, packed = make_logits(spread, rows, vocab, device), make_rules(rows, list(KINDS), device)
    rules = Rules.unpack(packed)
    floor, want = (rules.lowest_kept(logits, use_kernel=use_kernel) for use_kernel in (True, False))
    scaled = logits.double() / rules.temperature.clamp(min=1e-3)[:, None]
    chance = (scaled - scaled.amax(-1, keepdim=True)).exp()
    mass, wanted = (((logits >= x[:, None]) * chance).sum(-1) for x in (floor, want))
    kept = bool(((mass - wanted).abs() <= 1e-4 * wanted).all())
    last, history = memory(rows, device)
    tokens = choose(logits, packed, last, history, use_kernel=True)
    same = gumbel_max(logits, rules.keys, rules.temperature, floor, use_kernel=False) == tokens
    written = torch.equal(last[:rows], tokens) and torch.equal(history[:rows, 5], tokens)
    return kept and written and float(same.float().mean()) >= 0.99  # a tie of rounding may fall either way


def right_noise(vocab: int, device: torch.device) -> bool:
    """The token with the highest noise is numpy's, so the hash is."""
    keys = noise_keys(np.arange(16), np.arange(16))
    want = gumbel(keys, np.arange(vocab, dtype=np.uint32)).argmax(-1)
    ones = torch.ones(16, device=device)
    sent = torch.from_numpy(keys.view(np.int32)).to(device)
    found = gumbel_max(torch.zeros(16, vocab, device=device), sent, ones, -ones, use_kernel=True)
    return found.tolist() == want.tolist()


def right_logprobs(vocab: int, device: torch.device) -> bool:
    """Against float64."""
    logits = make_logits("peaked", 8, vocab, device)
    targets = torch.arange(8, dtype=torch.int32, device=device) * 11
    ids, values, ranks = logprobs(logits, targets, 20, use_kernel=True)
    want = logits.double().log_softmax(-1).gather(1, ids.long())
    better = (logits > logits.gather(1, targets[:, None].long())).sum(-1) + 1
    return bool((values - want).abs().max() < 1e-4) and ranks.tolist() == better.tolist()


def right_edits(vocab: int, device: torch.device) -> bool:
    """Each edit by its kernel against its reference: penalties, additions, banned words, masks."""
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 50, (9, 4097), generator=generator, dtype=torch.int32).to(device)
    penalties = np.array([[1, 5], [3, 2], [100, 0], [4000, 7]], np.int32)
    floats = np.array([[1.3, 0.8], [0.2, 0.1], [0.5, -0.5]], np.float32).view(np.int32)
    packed = torch.from_numpy(np.concatenate([penalties, floats, np.full((1, 2), 2, np.int32)])).to(device)
    values = np.array([0.5, -np.inf, 3.0], np.float32).view(np.int32)
    entries = torch.from_numpy(np.array([[0, 7, 8], [3, 3, 3], values], np.int32)).to(device)
    words = torch.tensor([[2, 3, 8], [60, 61, 62]], dtype=torch.int32, device=device)
    said = history[3, 10:12].tolist()
    heads = torch.tensor([[0, 0, 1, 3], [3] * 4, [10, 11, 10, 0], [*said, said[0] + 1, 0]], dtype=torch.int32)
    bits = torch.randint(-(2**31), 2**31, (1, -(-vocab // 32)), generator=generator).int().to(device)
    masked = torch.tensor([4], dtype=torch.int32, device=device)
    found = []
    for use_kernel in (True, False):
        logits = make_logits("flat", 8, vocab, device)
        edit_logits.penalise(logits, history, packed, use_kernel=use_kernel)
        edit_logits.add(logits, entries, use_kernel=use_kernel)
        edit_logits.ban_words(logits, history, words, heads.to(device), use_kernel=use_kernel)
        edit_logits.mask(logits, masked, bits, use_kernel=use_kernel)
        found.append(logits)
    return bool(torch.allclose(*found, rtol=1e-5, atol=1e-5)) and bool(torch.isneginf(found[0][2, 60]))


def correctness(device: torch.device, vocab: int = VOCAB, rows: int = 250) -> dict[str, bool]:
    """Each check, by name."""
    return {
        **{f"choice_{spread}": right_choice(spread, rows, vocab, device) for spread in ("peaked", "flat")},
        "noise": right_noise(vocab, device),
        "logprobs": right_logprobs(vocab, device),
        "edits": right_edits(vocab, device),
    }


def by_sort(logits: Tensor, rules: Rules) -> Tensor:
    """Sampling with top-k and top-p as it is usually written: int64 [R]."""
    values, ids = (logits / rules.temperature.clamp(min=1e-5)[:, None]).sort(-1, descending=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    limit = torch.where(rules.top_k > 0, rules.top_k, logits.shape[1])
    values = values.masked_fill(places >= limit[:, None], -torch.inf)
    chance = values.softmax(-1)
    before = chance.cumsum(-1) - chance
    chance = chance.masked_fill(before >= rules.top_p[:, None], 0.0)
    drawn = (chance / torch.empty_like(chance).exponential_()).argmax(-1, keepdim=True)
    return ids.gather(1, drawn)[:, 0]


def recorded_us(run) -> float:
    """Microseconds of one replay of what `run` starts."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return round(1e3 * median_ms(lambda _: graph.replay()), 2)


def speeds(device: torch.device, rows: int) -> dict[str, float]:
    """Microseconds for so many rows, by kind and logits; `sort`: what the usual way takes, which knows no kinds."""
    last, history = memory(rows, device)
    found = {}
    for spread in ("peaked", "flat"):
        logits = make_logits(spread, rows, VOCAB, device)
        for kind in KINDS:
            packed = make_rules(rows, [kind], device)
            us = recorded_us(lambda: choose(logits, packed, last, history, use_kernel=True))  # noqa: B023
            found[f"{kind}_{spread}"] = us
    rules = Rules.unpack(make_rules(rows, ["filtered"], device))
    found["sort"] = round(1e3 * median_ms(lambda _: by_sort(logits, rules)), 2)
    return found


def measure(device: torch.device) -> dict:
    """Checks and times."""
    checks = correctness(device)
    times = {str(rows): speeds(device, rows) for rows in ROWS}
    against = {rows: round(found["sort"] / found["filtered_peaked"], 1) for rows, found in times.items()}
    return {"checks": checks, "right": all(checks.values()), "us": times, "faster_than_sort": against}
