"""Mixers with recurrent state: chunks against tokens one by one, and in the step loop with snapshots."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import get_args

import pytest
import torch
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.reference_engine import LIMITS, engine, generate
from torch import Tensor

from pagoda.backends.reference.model.mixers.rotary import RotaryTables
from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.reference.model.numerics import numerics
from pagoda.backends.reference.weights.load import Packer
from pagoda.backends.torch_decoder.mixers.kimi_delta import KDA_CHUNK, channel_rule
from pagoda.backends.torch_decoder.mixers.mamba2 import SSD_CHUNK, chunked_scan, recurrent_scan
from pagoda.backends.torch_decoder.mixers.recurrence import Mix
from pagoda.common.errors import ModelError
from pagoda.common.models.mixers import (
    Attention,
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    Recurrent,
    ShortConvolution,
)
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.supported import check_mixers

NORM = Norm(1e-6)
MIXERS: dict[str, Recurrent] = {
    "mamba2": Mamba2(heads=6, head_dim=4, groups=2, state_dim=8, taps=4, norm=NORM),
    "mamba2-without-norm": Mamba2(heads=2, head_dim=4, groups=1, state_dim=8, taps=3, norm=None, step_limit=(0.1, 0.9)),
    "mamba": Mamba(channels=20, state_dim=6, step_rank=3, taps=4, part_norm=NORM),
    "kimi-delta": KimiDelta(heads=3, head_dim=8, rank=5, taps=4, norm=NORM),
    "short-convolution": ShortConvolution(channels=24, taps=3, bias=True),
    "lightning": LightningAttention(head_dim=8, slopes=(0.5, 0.1, 0.01), norm=NORM),
    "lightning-rotated": LightningAttention(
        8, (0.5, 0.1, 0.01, 0.2), NORM, groups=2, scale=0.3, silu=False, qk_norm=NORM, rope=Rope(1e4, 4)
    ),
    "gated-delta-scaled": GatedDelta(2, 2, key_dim=4, value_dim=6, taps=4, norm=NORM, beta_scale=2.0),
}
ELEMENTS = {
    "mamba2": 3 * (24 + 2 * 16) + 24 * 8,
    "mamba2-without-norm": 2 * (8 + 2 * 8) + 8 * 8,
    "mamba": 3 * 20 + 20 * 6,
    "kimi-delta": 3 * 3 * 24 + 3 * 8 * 8,
    "short-convolution": 2 * 24,
    "lightning": 3 * 8 * 8,
    "lightning-rotated": 4 * 8 * 8,
    "gated-delta-scaled": 3 * (2 * 8 + 12) + 2 * 4 * 6,
}
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
PROMPTS = [PROMPT + [(7 * i + j * j) % 96 for j in range(3 + 4 * i)] for i in range(5)]
TOKENS = 2 * SSD_CHUNK + 5


def model(mixer: Recurrent) -> ModelSpec:
    """A layer of the mixer alone, one beside attention, one of attention and one of an ffn alone."""
    spec = tiny_spec()
    layer = spec.layers[0]
    layers = (
        replace(layer, mixers=(mixer,), ffn=None),
        replace(layer, mixers=(mixer, layer.attention)),
        layer,
        replace(layer, mixers=(), norms=replace(layer.norms, before_mixer=None)),
    )
    return replace(spec, layers=layers)


def naive(spec: ModelSpec, prompts: list[list[int]], count: int = 9) -> list[list[int]]:
    oracle = NaiveModel(spec, random_weights(spec), max_len=LIMITS.max_model_len)
    return [oracle.greedy(prompt, count) for prompt in prompts]


@pytest.mark.parametrize("name", MIXERS)
def test_the_cache_holds_the_last_inputs_and_the_states(name: str) -> None:
    (cache,) = MIXERS[name].caches()
    assert cache.block_elements(16) == ELEMENTS[name]


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("cuts", [(TOKENS,), (1, 2, TOKENS - 3), (SSD_CHUNK, 1, SSD_CHUNK + 4)])
def test_any_cut_of_a_sequence_gives_the_outputs_of_tokens_one_by_one(name: str, cuts: tuple[int, ...]) -> None:
    """And the same state after it, for two sequences at a time."""
    spec = model(MIXERS[name])
    layer = Packer(spec, numerics("float32")).pack(random_weights(spec)).parts["layers.0.mixers.0"]
    x = torch.randn(2 * TOKENS, spec.width, generator=torch.Generator().manual_seed(0))
    rotations = RotaryTables(spec.ropes, TOKENS, torch.float32).at(torch.arange(TOKENS).repeat(2))
    (cache,) = MIXERS[name].caches()
    recorded: list[tuple[tuple[Tensor, ...], Mix]] = []

    class Recorder:
        """Takes the place of a step's states."""

        def __init__(self) -> None:
            self.rotations = rotations

        def update(self, inputs: tuple[Tensor, ...], mix: Mix) -> Tensor:
            recorded.append((inputs, mix))
            mixed, _ = mix(tuple(part[None] for part in inputs), torch.zeros(1, cache.block_elements(1)))
            return mixed[0]

    layer(x, Recorder())
    ((flat, mix),) = recorded
    inputs = tuple(part.unflatten(0, (2, TOKENS)) for part in flat)

    def run(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        state, outputs, begin = (
            torch.randn(2, cache.block_elements(1), generator=torch.Generator().manual_seed(1)),
            [],
            0,
        )
        for length in lengths:
            mixed, state = mix(tuple(part[:, begin : begin + length] for part in inputs), state)
            outputs.append(mixed)
            begin += length
        return torch.cat(outputs, 1), state

    for ours, expected in zip(run(cuts), run((1,) * TOKENS)):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("tokens", [1, SSD_CHUNK - 1, SSD_CHUNK, 3 * SSD_CHUNK + 7])
def test_chunks_of_the_scan_equal_tokens_one_by_one(tokens: int, decay: float) -> None:
    generator = torch.Generator().manual_seed(tokens)
    v, state = torch.randn(2, 4, tokens, 6, generator=generator), torch.randn(2, 4, 8, 6, generator=generator)
    b, c = (torch.randn(2, 2, tokens, 8, generator=generator) / 3 for _ in range(2))
    parts = v, b, c, -decay * torch.rand(2, 4, tokens, generator=generator)
    heads, after = chunked_scan(*parts, state)
    for token in range(tokens):
        one, state = recurrent_scan(*(part[:, :, token : token + 1] for part in parts), state)
        torch.testing.assert_close(heads[:, :, token : token + 1], one, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(after, state, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("tokens", [KDA_CHUNK - 1, KDA_CHUNK, 3 * KDA_CHUNK + 7])
def test_chunks_of_the_channel_rule_equal_tokens_one_by_one(tokens: int, decay: float) -> None:
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 3, tokens, 8, generator=generator), dim=-1) for _ in "qk")
    v, state = torch.randn(2, 3, tokens, 6, generator=generator), torch.randn(2, 3, 8, 6, generator=generator)
    beta, log_decay = torch.rand(2, 3, tokens, generator=generator), torch.rand(2, 3, tokens, 8, generator=generator)
    parts = q, k, v, beta, -decay * log_decay
    heads, after = channel_rule(*parts, state)
    for token in range(tokens):
        one, state = channel_rule(*(part[:, :, token : token + 1] for part in parts), state)
        torch.testing.assert_close(heads[:, :, token : token + 1], one, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MIXERS)
def test_chunked_prefill_preemption_and_snapshots_give_the_naive_models_tokens(name: str) -> None:
    spec = model(MIXERS[name])
    expected = naive(spec, PROMPTS)
    limits = replace(LIMITS, max_num_batched_tokens=11, max_num_seqs=4)
    core = engine(spec, (30, 16), limits=limits, snapshot_tokens=8)
    assert generate(core, PROMPTS, 9) == expected
    assert core.stats.preemptions > 0
    hits = core.stats.prefix_hits
    assert generate(core, PROMPTS[-1:], 9) == expected[-1:]
    assert core.stats.prefix_hits >= hits + 8


def test_a_backend_without_a_kind_of_mixer_refuses_it_by_name() -> None:
    kinds = (Attention, KimiDelta)
    check_mixers(model(MIXERS["kimi-delta"]), kinds, "other")
    words = r"^layer \d+ has a mixer of kind GatedDelta, which other does not support; use --backend reference$"
    with pytest.raises(ModelError, match=words):
        check_mixers(model(MIXERS["gated-delta-scaled"]), kinds, "other")


@pytest.mark.parametrize("backend", ["reference", "torch_cuda"])
def test_every_kind_has_a_room(backend: str) -> None:
    pytest.importorskip("triton" if backend == "torch_cuda" else "torch")
    rooms = import_module(f"pagoda.backends.{backend}.model.mixers.registry").MIXERS
    assert set(rooms) == set(get_args(Mixer))


def test_ranks_share_whole_heads_and_groups() -> None:
    mixer = Mamba2(heads=12, head_dim=4, groups=4, state_dim=8, taps=4, norm=NORM)
    assert [mixer.indivisible(ranks) for ranks in (1, 2, 3, 8, 12)] == [
        None,
        None,
        "4 state space groups",
        "12 state space heads",
        None,
    ]
    assert [MIXERS["kimi-delta"].indivisible(ranks) for ranks in (1, 2, 3)] == [None, "3 linear attention heads", None]
    assert MIXERS["mamba"].indivisible(8) == "20 state space channels"
    assert MIXERS["short-convolution"].indivisible(5) == "24 channels of the convolution"
