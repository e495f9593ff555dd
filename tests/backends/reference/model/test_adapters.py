"""Adapters in slots compute what a model with merged weights computes: every kind of matrix, quantised ones too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import tiny_spec
from support.engines.reference_driver import random_weights
from support.kernels.paged_model import PagedModel

from pagoda.backends.reference.execution import TokenSlots
from pagoda.backends.reference.model.adapters import AdapterMatrices, SlotMatrices
from pagoda.backends.reference.model.linear import linear
from pagoda.backends.reference.model.numerics import Numerics, numerics
from pagoda.common.models.mixers import GatedDelta, LatentAttention
from pagoda.common.models.primitives import Norm, Param
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Mixer, Mlp, ModelSpec, Moe, Router, Shortcut, SideMoe
from pagoda.common.weights.dtypes import to_float32
from pagoda.common.weights.lora.weights import AdapterWeights, LoraOptions, LowRank, adaptable, has_factors
from pagoda.common.weights.quantization.on_the_fly import quantize
from pagoda.common.weights.quantization.schemes import Int8

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9]
OPTIONS = LoraOptions(slots=3, max_rank=8, dtype="float32")
DENSE = replace(tiny_spec(), tied=False)
LATENT = LatentAttention(
    heads=2,
    query_rank=12,
    latent_dim=8,
    nope_dim=8,
    value_dim=8,
    scale=0.25,
    rope=Rope(10_000.0, 4),
    norm=Norm(1e-5),
)
DELTA = GatedDelta(key_heads=1, value_heads=2, key_dim=8, value_dim=8, taps=4, norm=Norm(1e-5))


def mixed(spec: ModelSpec, mixer: Mixer) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, mixers=(mixer,)) for layer in spec.layers))


def experts(spec: ModelSpec) -> ModelSpec:
    moe = Moe(4, Mlp(24, "silu", gated=True), Router(2, True), Mlp(40, "silu", gated=True))
    return replace(spec, layers=tuple(replace(layer, ffn=moe) for layer in spec.layers))


def adapter(matrices: dict[str, Param], rank: int, seed: int, *, dora: bool = False) -> AdapterWeights:
    numbers = np.random.default_rng(seed)

    def factor(param: Param) -> np.ndarray | None:
        channels = param.shape[1 if param.name == "embed" else 0]
        return numbers.uniform(0.5, 1.5, channels).astype(np.float32) if dora and has_factors(param) else None

    def draw(*shape: int) -> np.ndarray:
        return numbers.standard_normal(shape, np.float32) * np.float32(0.2)

    factors = {
        name: LowRank(draw(*param.shape[:-2], rank, param.shape[-1]), draw(*param.shape[:-1], rank), factor(param))
        for name, param in matrices.items()
    }
    return AdapterWeights(rank, factors)


def changed(name: str, weight: np.ndarray, matrix: LowRank) -> np.ndarray:
    if matrix.factor is not None:
        weight = weight * (matrix.factor if name == "embed" else matrix.factor[:, None])
    return weight + matrix.b @ matrix.a


def experts_beside(spec: ModelSpec) -> ModelSpec:
    """Mixtures beside the feed-forward block of the first layer and around the second."""
    moe = Moe(4, Mlp(24, "silu", gated=True), Router(2, True))
    first, second, *others = spec.layers
    first = replace(first, side_moe=SideMoe(moe, Norm(1e-5)))
    return replace(spec, layers=(first, replace(second, shortcut=Shortcut(moe, Norm(1e-5))), *others))


SPECS = {
    "dense": DENSE,
    "tied": tiny_spec(),
    "experts": experts(tiny_spec()),
    "latent": mixed(tiny_spec(), LATENT),
    "recurrent": mixed(tiny_spec(), DELTA),
}


@pytest.mark.parametrize("name", SPECS)
@torch.inference_mode()
def test_adapters_equal_merged_weights(name: str) -> None:
    spec = SPECS[name]
    matrices = adaptable(spec)
    slots = AdapterMatrices(OPTIONS, matrices, numerics("float32"))
    model = PagedModel(spec, random_weights(spec), 64, adapters=slots)
    plain = PagedModel(spec, random_weights(spec), 64).logits(PROMPT)
    torch.testing.assert_close(model.logits(PROMPT), plain, atol=1e-6, rtol=0)
    if spec.tied:  # merged, the table would change both the embeddings and the head
        del matrices["embed"], matrices["head"]
    for slot, rank in ((0, 8), (2, 4), (0, 1)):
        weights = adapter(matrices, rank, seed=slot + rank, dora=rank == 8)
        slots.fill(slot, weights)
        merged = [
            (each, changed(each, to_float32(value), weights.matrices[each]) if each in weights.matrices else value)
            for each, value in random_weights(spec)
        ]
        model.slot = slot
        expected = PagedModel(spec, merged, 64).logits(PROMPT)
        torch.testing.assert_close(model.logits(PROMPT), expected, atol=3e-5, rtol=1e-4)
        assert (expected - plain).abs().max() > 0.01
    model.slot = 1  # never filled
    torch.testing.assert_close(model.logits(PROMPT), plain, atol=1e-6, rtol=0)
    model.slot = None
    torch.testing.assert_close(model.logits(PROMPT), plain, atol=1e-6, rtol=0)


@torch.inference_mode()
def test_experts_beside_a_feed_forward_block_run_with_the_adapters_of_their_tokens() -> None:
    """Files with such adapters are refused; the decoder gives those experts the tokens' slots all the same."""
    spec = experts_beside(DENSE)
    matrices = {name: param for name, param in params(spec).items() if ".moe.experts." in name}
    slots = AdapterMatrices(OPTIONS, matrices, numerics("float32"))
    first, second, *_ = PagedModel(spec, random_weights(spec), 64, adapters=slots).decoder.stack.layers
    for slot in (0, 2):
        slots.fill(slot, adapter(matrices, 8, seed=slot))
    x = torch.randn(9, spec.width, generator=torch.Generator().manual_seed(0))
    owners = torch.tensor([0, 2, -1, 2, 0, 1, -1, 2, 0])
    for block in (lambda rows: first.side(rows, rows), second.shortcut):
        with slots.active.of(TokenSlots(owners)):
            together = block(x)
        for token in range(len(x)):
            with slots.active.of(TokenSlots(owners[token : token + 1])):
                torch.testing.assert_close(together[token], block(x[token : token + 1])[0], atol=1e-5, rtol=1e-5)
        assert (together - block(x))[owners == 2].abs().max() > 0.01


@pytest.mark.parametrize("tokens", [7, 200])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_fused_layer_in_a_mixed_batch(kind: str, tokens: int) -> None:
    """Each token gets its own slot's products, whichever way they are computed; quantised weights stay as they are."""
    numbers = Numerics(torch.bfloat16, torch.bfloat16) if kind == "bfloat16" else numerics("float32")
    parts = {name: Param(name, (rows, 64), "..") for name, rows in (("q", 32), ("k", 16), ("v", 48))}
    slots = AdapterMatrices(OPTIONS, parts, numbers)
    noise = torch.Generator().manual_seed(0)
    dense = [torch.randn(param.shape, generator=noise) for param in parts.values()]
    weights = [quantize(each.numpy(), Int8("channel")) for each in dense] if kind == "int8" else dense
    narrow = [each.to(numbers.weights) if isinstance(each, torch.Tensor) else each for each in weights]
    bias = torch.randn(96, generator=noise).to(numbers.weights)
    base = linear(narrow, bias, numbers)
    layer = slots.adapted(base, list(parts), [32, 16, 48], 64, bias=bias)
    held = {0: adapter(parts, 8, 1), 2: AdapterWeights(4, {"k": adapter(parts, 4, 2, dora=True).matrices["k"]})}
    for slot, each in held.items():
        slots.fill(slot, each)
    x = torch.randn(tokens, 64, generator=noise).to(numbers.compute)
    owners = torch.randint(-1, 3, (tokens,), generator=noise)
    expected = base(x).float()
    for token, slot in enumerate(owners.tolist()):
        begin = 0
        for name, param in parts.items():
            end = begin + param.shape[0]
            if slot in held and name in held[slot].matrices:
                factors = held[slot].matrices[name]
                if factors.factor is not None:
                    constant = bias[begin:end].float()
                    product = (expected[token, begin:end] - constant) * torch.from_numpy(factors.factor)
                    expected[token, begin:end] = product + constant
                expected[token, begin:end] += torch.from_numpy(factors.b @ factors.a) @ x[token].float()
            begin = end
    close = {"atol": 0.15, "rtol": 0.03} if kind == "bfloat16" else {"atol": 1e-4, "rtol": 1e-4}
    with slots.active.of(TokenSlots(owners)):
        torch.testing.assert_close(layer(x).float(), expected, **close)
    torch.testing.assert_close(layer(x), base(x))


def test_what_another_slot_holds_cannot_harm_a_token() -> None:
    parts = {"o": Param("o", (8, 8), "..")}
    slots = AdapterMatrices(OPTIONS, parts, numerics("float32"))
    layer = slots.adapted(linear(torch.eye(8), None, numerics("float32")), ["o"], [8], 8, bias=None)
    slots.fill(0, adapter(parts, 4, 1))
    huge = np.full((4, 8), 3e38, np.float32)
    slots.fill(1, AdapterWeights(4, {"o": LowRank(huge, huge.T.copy())}))
    x = torch.ones(2, 8)
    with slots.active.of(TokenSlots(torch.tensor([0, 1]))):
        both = layer(x)
    with slots.active.of(TokenSlots(torch.tensor([0]))):
        torch.testing.assert_close(both[:1], layer(x[:1]))
    assert not both[1].isfinite().all()


def test_adapters_of_16_bits_are_rounded_once() -> None:
    rng = np.random.default_rng(0)
    pair = LowRank(rng.standard_normal((2, 6)).astype(np.float32), rng.standard_normal((5, 2)).astype(np.float32))
    options = replace(OPTIONS, dtype="bfloat16")
    matrices = SlotMatrices([5], 6, options, numerics("float32"))
    matrices.fill(1, [pair])
    assert torch.equal(matrices.a[0, 1, :2], torch.from_numpy(pair.a).bfloat16().float())
    assert torch.equal(matrices.b[0][:, 1, :2], torch.from_numpy(pair.b).bfloat16().float())
    assert not torch.equal(matrices.a[0, 1, :2], torch.from_numpy(pair.a))
