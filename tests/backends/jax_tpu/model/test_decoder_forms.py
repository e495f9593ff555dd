"""Layers of the dense families, sharded over devices, against the naive model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.engines.reference_driver import random_weights, tiny_spec
from support.suite.slow_matrix import some

from pagoda.backends.jax_tpu.model.layout import segments
from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.models.mixers import (
    Attention,
    BlockIndexer,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    QueryGrowth,
    ShortConvolution,
)
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import (
    AltUp,
    ClampedGlu,
    InputBlock,
    Layer,
    LowRankResidual,
    Mlp,
    ModelSpec,
    Moe,
    Norms,
    PerLayerEmbedding,
    Router,
    SecondHalf,
    Shortcut,
    SideMoe,
    Xielu,
)

pytest.importorskip("flax")

PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8]
RMS, LAYER = Norm(1e-5), Norm(1e-5, "layer", bias=True)
ROPE = Rope(1e4, 8)
GATED = Mlp(24, "silu", gated=True)

LAYERS = {
    "norms of heads with own weights, interleaved RoPE, clamped": Layer(
        (
            Attention(
                4, 2, 8, 0.3, replace(ROPE, interleaved=True), qk_norm=LAYER, qk_norm_over="own_weights", qkv_clip=0.4
            ),
        ),
        GATED,
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "norms of heads with biases": Layer(
        (Attention(4, 2, 8, 0.3, ROPE, qk_norm=LAYER),), GATED, Norms(before_mixer=RMS, before_ffn=RMS)
    ),
    "norm of heads after RoPE": Layer(
        (Attention(4, 1, 8, 0.3, ROPE, qk_norm=RMS, qk_norm_after_rope=True),),
        GATED,
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "parallel, scaled, norm without weights": Layer(
        (Attention(4, 2, 8, 0.3, ROPE, qkv_bias=True, out_bias=True),),
        Mlp(20, "relu2", gated=False, bias=True),
        Norms(before_mixer=Norm(1e-5, "layer", scale=False)),
        parallel=True,
        residual_scale=0.6,
    ),
    "ALiBi": Layer(
        (Attention(4, 2, 8, 0.3, None, alibi_slopes=(0.5, 0.25, 0.1, 0.7)),),
        GATED,
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "sinks": Layer(
        (Attention(6, 2, 8, 0.3, ROPE, sinks=True),),
        Mlp(24, "silu", gated=True, clamped=ClampedGlu(0.5, 1.702)),
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "selected blocks": Layer(
        (Attention(6, 2, 8, 0.3, ROPE, qk_norm=RMS, blocks=BlockIndexer(12, 4, 2, 1, ROPE, RMS)),),
        GATED,
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "output gate": Layer(
        (Attention(6, 2, 8, 0.3, ROPE, qkv_bias=True, out_bias=True, qkv_clip=0.4, output_gate=True),),
        GATED,
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "latents of interleaved RoPE, with biases": Layer(
        (LatentAttention(6, 10, 20, 12, 6, 0.3, replace(ROPE, interleaved=True), RMS, bias=True),),
        GATED,
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "queries of latents from x, growing, gated heads": Layer(
        (LatentAttention(4, None, 20, 12, 6, 0.3, ROPE, RMS, query_growth=QueryGrowth(0.3, 4), gate_per_head=True),),
        GATED,
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "a gate per head, with biases, narrow values": Layer(
        (
            Attention(
                6, 2, 8, 0.3, ROPE, qkv_bias=True, output_gate=True, gate_per_head=True, qkv_clip=0.4, value_dim=6
            ),
        ),
        replace(GATED, clip=0.2),
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "recurrent state, key heads on several devices": Layer(
        (GatedDelta(key_heads=2, value_heads=6, key_dim=8, value_dim=6, taps=4, norm=RMS),),
        GATED,
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "mixers side by side, no ffn": Layer(
        (
            Attention(4, 2, 8, 0.3, ROPE),
            GatedDelta(key_heads=4, value_heads=4, key_dim=8, value_dim=6, taps=3, norm=RMS),
        ),
        None,
        Norms(before_mixer=RMS, after_mixer=RMS),
    ),
    "state spaces, groups and channels on several devices": Layer(
        (
            Mamba2(heads=6, head_dim=4, groups=2, state_dim=8, taps=4, norm=RMS, bias=True),
            Mamba2(heads=4, head_dim=6, groups=1, state_dim=8, taps=3, norm=RMS, norm_before_gate=True),
            Mamba(channels=22, state_dim=8, step_rank=3, taps=4, part_norm=RMS, bias=True),
            ShortConvolution(channels=22, taps=3, bias=True),
        ),
        GATED,
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "linear attention with padded heads": Layer(
        (
            KimiDelta(heads=6, head_dim=8, rank=5, taps=4, norm=RMS),
            KimiDelta(heads=6, head_dim=8, rank=None, taps=4, norm=RMS, decay_bound=-5.0),
            LightningAttention(8, (0.9, 0.5, 0.3, 0.2, 0.1, 0.05), RMS),
        ),
        GATED,
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "linear attention with RoPE and padded heads": Layer(
        (
            LightningAttention(
                *(8, (0.9, 0.5, 0.3, 0.2, 0.1, 0.05), RMS),
                **{"groups": 3, "scale": 0.3, "silu": False, "qk_norm": RMS, "rope": Rope(1e4, 4)},
            ),
        ),
        GATED,
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "norms of padded heads and hidden values": Layer(
        (Attention(6, 2, 8, 0.3, ROPE, out_norm=RMS, out_bias=True),),
        Mlp(22, "relu2", gated=True, inner_norm=RMS),
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
    "learned activation": Layer(
        (Attention(4, 4, 8, 0.3, ROPE),),
        Mlp(20, "silu", gated=False, learned=Xielu()),
        Norms(before_mixer=RMS, before_ffn=RMS),
    ),
}


def check_devices(spec: ModelSpec, tensor: int) -> None:
    """So many devices give the naive model's logits."""
    from support.devices.jax_model import JaxModel

    theirs = NaiveModel(spec, random_weights(spec), max_len=32).logits(PROMPT)
    ours = JaxModel(spec, random_weights(spec), 32, tensor).logits(PROMPT)
    assert theirs.std() > 0.1, "a flat answer proves nothing"
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=0)


@pytest.mark.parametrize("part", range(4))
def test_devices_compute_what_the_naive_model_does(part: int) -> None:
    """A quarter of the forms in turn, in one model."""
    check_devices(replace(tiny_spec(), layers=tuple(LAYERS.values())[part::4]), tensor=4)


@pytest.mark.slow_matrix  # models/test_parity.py has layers on one device
@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("form", LAYERS)
def test_devices_compute_each_form_as_the_naive_model_does(form: str, tensor: int) -> None:
    check_devices(replace(tiny_spec(), layers=(LAYERS[form],) * 3), tensor)


def with_streams() -> ModelSpec:
    """Four layers with per-layer embeddings of a smaller table, sparse gates, low-rank residuals, two streams."""
    mixer = Attention(4, 2, 8, 0.3, ROPE, value_norm=Norm(1e-5, scale=False), values_are_keys=True, chunk=5)
    ffn, norms = Mlp(22, "gelu_tanh", gated=True, sparsity=0.6), Norms(before_mixer=RMS, before_ffn=RMS)
    layer = Layer((mixer,), ffn, norms, low_rank=LowRankResidual(4, RMS))
    part, alt_up = PerLayerEmbedding(70, 6, "gelu_tanh", RMS), AltUp(2, 1, RMS, scaled=True)
    return replace(tiny_spec(), layers=(layer,) * 4, per_layer=part, alt_up=alt_up)


def with_side_mixtures() -> ModelSpec:
    """A mixture beside the ffn and a scaled output, in turn with one around an ffn, added to normalised values."""
    side = SideMoe(Moe(3, Mlp(20, "silu", gated=True), Router(2, True)), RMS)
    both = Norms(before_mixer=RMS, before_ffn=RMS)
    first = Layer((Attention(4, 2, 8, 0.3, ROPE),), GATED, both, side_moe=side, output_scale=True)
    around = Shortcut(Moe(3, Mlp(20, "silu", gated=True, clip=0.3), Router(2, True)), RMS)
    alone = Layer((), GATED, Norms(before_ffn=RMS), norm_residual=True, shortcut=around)
    mixed = Layer((GatedDelta(4, 4, 8, 6, 3, RMS, beta_scale=2.0),), GATED, both, norm_residual=True)
    return replace(tiny_spec(), layers=(first, alone, first, alone, mixed))


def with_second_halves() -> ModelSpec:
    """Two equal layers of two halves, whose mixtures have experts that return their input."""
    moe = Moe(3, GATED, Router(4, False, correction=True, scale=1.7), identity=3)
    mixers = (Attention(4, 2, 8, 0.3, ROPE), GatedDelta(4, 4, 8, 6, 3, RMS))
    norms = Norms(before_mixer=RMS, before_ffn=RMS)
    return replace(tiny_spec(), layers=(Layer(mixers, moe, norms, second=SecondHalf(GATED, moe, RMS)),) * 2)


def with_blocks() -> ModelSpec:
    """Four layers after two transformer blocks in turn, with adapters, and one after the first without."""
    mixer, mlp = Attention(4, 2, 8, 0.3, ROPE), Mlp(22, "gelu", gated=True, bias=True)

    def layer(owner: int, rank: int | None = 3) -> Layer:
        attention = replace(mixer, beside_embedding=True, adapter_rank=rank)
        block = InputBlock(mlp, RMS, owner, rank)
        return Layer((attention, Mamba2(4, 6, 2, 8, 3, RMS)), None, Norms(before_mixer=RMS), block=block)

    return replace(tiny_spec(), layers=(layer(0), layer(1), layer(0), layer(1), layer(0, None)))


@pytest.mark.parametrize("make", [with_streams, with_side_mixtures, with_second_halves, with_blocks])
def test_what_lies_beyond_one_stream_is_sharded(make: Callable[[], ModelSpec]) -> None:
    check_devices(make(), tensor=4)


@pytest.mark.parametrize("tensor", some([1, 2], [2]))
def test_layers_over_an_earlier_layers_cache_repeat_with_it(tensor: int) -> None:
    own = Layer((Attention(4, 2, 8, 0.3, ROPE, qk_norm=RMS),), GATED, Norms(before_mixer=RMS, before_ffn=RMS))

    def reader(owner: int) -> Layer:
        return replace(own, mixers=(replace(own.mixers[0], shares_cache_of=owner),))

    spec = replace(tiny_spec(), layers=(own, reader(0), own, reader(2), own, reader(4)))
    assert [(len(part.block), part.repeats) for part in segments(spec.layers)] == [(2, 3)]
    check_devices(spec, tensor)
