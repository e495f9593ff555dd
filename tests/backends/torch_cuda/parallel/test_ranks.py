"""Ranks that share a model answer what one rank answers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.devices.thread_ranks import on_ranks
from support.devices.torch_cuda_model import TorchCudaModel
from support.engines.reference_driver import random_weights, tiny_spec

from pagoda.backends.torch_cuda.model.parts import most_likely
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, Comm
from pagoda.common.models.mixers import (
    Attention,
    BlockIndexer,
    GatedDelta,
    Indexer,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    QueryGrowth,
    ShortConvolution,
)
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import (
    AltUp,
    Embedding,
    ExpertGroups,
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
)

RMS, LAYER = Norm(1e-5), Norm(1e-5, "layer", bias=True)
EVERY_BIAS = Mlp(24, "gelu", gated=False, bias=True)
TOKENS = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90, 1, 0, 94]


def spec(mixer: Mixer, ffn: Mlp | Moe, norms: Norms, *, vocab: int = 97, tied: bool = False, **more) -> ModelSpec:
    """Two layers; a vocabulary that no rank's rows divide."""
    forms = {name: more.pop(name) for name in ("norm_after_add", "parallel", "residual_scale") if name in more}
    layer = Layer((mixer,), ffn, norms, **forms)
    return ModelSpec(vocab, 32, (layer, layer), more.pop("final_norm", RMS), tied, max_positions=64, **more)


BEFORE, AFTER = Norms(before_mixer=RMS, before_ffn=RMS), Norms(after_mixer=RMS, after_ffn=RMS)
GATED = Mlp(24, "silu", gated=True)
CORRECTED = Router(2, True, "sigmoid", correction=True, groups=ExpertGroups(3, 2, "best_two"), scale=1.5)

LATENT = LatentAttention(4, None, 20, 10, 6, 0.3, Rope(1e4, 8, interleaved=True), RMS)


def side_by_side() -> ModelSpec:
    """Two layers of two gated mixers; the second reads the K and V of an earlier layer and has no ffn."""
    mixer = Attention(4, 2, 8, 0.3, Rope(1e4, 8), output_gate=True, qkv_bias=True, qk_norm=RMS, qk_norm_over="full")
    first, _ = spec(mixer, GATED, BEFORE).layers
    reader = Layer((replace(mixer, shares_cache_of=0), mixer), None, Norms(before_mixer=RMS))
    return replace(spec(mixer, GATED, BEFORE), layers=(first, reader))


def with_streams() -> ModelSpec:
    """Two layers with per-layer embeddings of a smaller table, sparse gates, low-rank residuals, two streams."""
    mixer = Attention(4, 1, 8, 0.3, Rope(1e4, 8), value_norm=Norm(1e-5, scale=False), values_are_keys=True)
    model = spec(mixer, replace(GATED, sparsity=0.6), BEFORE)
    layers = tuple(replace(layer, low_rank=LowRankResidual(4, RMS)) for layer in model.layers)
    part = PerLayerEmbedding(70, 6, "gelu_tanh", RMS)
    return replace(model, layers=layers, per_layer=part, alt_up=AltUp(2, 1, RMS, scaled=True))


def with_side_mixtures() -> ModelSpec:
    """A mixture beside the ffn and a scaled output; then one around an ffn alone, added to normalised values."""
    first, _ = spec(Attention(4, 2, 8, 0.3, None), GATED, BEFORE).layers
    side = SideMoe(Moe(3, Mlp(20, "silu", gated=True), Router(2, True)), RMS)
    around = Shortcut(Moe(3, Mlp(20, "silu", gated=True, clip=0.3), Router(2, True)), RMS)
    alone = Layer((), GATED, Norms(before_ffn=RMS), norm_residual=True, shortcut=around)
    model = spec(Attention(4, 2, 8, 0.3, None), GATED, BEFORE)
    return replace(model, layers=(replace(first, side_moe=side, output_scale=True), alone))


def with_second_halves() -> ModelSpec:
    """Layers of two halves, whose mixtures have experts that return their input."""
    moe = Moe(3, GATED, Router(4, False, correction=True, scale=1.7), identity=3)
    mixer = Attention(4, 2, 8, 0.3, Rope(1e4, 8))
    first, second = spec(mixer, moe, BEFORE).layers
    half = SecondHalf(GATED, moe, RMS)
    layers = (replace(layer, mixers=(mixer, LATENT), second=half) for layer in (first, replace(second, ffn=GATED)))
    return replace(spec(mixer, moe, BEFORE), layers=tuple(layers))


def with_blocks() -> ModelSpec:
    """Two layers after the same transformer block, with adapters of different ranks."""
    mixer = Attention(4, 2, 8, 0.3, Rope(1e4, 8))
    model, mlp = spec(mixer, GATED, BEFORE), Mlp(20, "gelu", gated=True, bias=True)

    def layer(rank: int) -> Layer:
        attention = replace(mixer, beside_embedding=True, adapter_rank=rank)
        return Layer((attention, mixer), None, Norms(before_mixer=RMS), block=InputBlock(mlp, RMS, 1, rank))

    return replace(model, layers=(model.layers[0], layer(3), layer(4)))


SPECS = {
    "grouped heads": tiny_spec(window=6, softcap=2.0),
    "a KV head for two ranks": spec(Attention(4, 1, 8, 0.3, Rope(1e4, 8)), GATED, BEFORE),
    "a shared block before mixers": with_blocks(),
    "experts": tiny_spec(moe=True),
    "biased experts": spec(Attention(2, 2, 8, 0.3, None), Moe(3, EVERY_BIAS, Router(2, False, bias=True)), BEFORE),
    "ALiBi": spec(Attention(4, 4, 8, 0.3, None, alibi_slopes=(0.5, 0.25, 0.1, 0.7)), GATED, BEFORE),
    "sinks": spec(Attention(4, 1, 8, 0.3, None, sinks=True), GATED, BEFORE),
    "shared and corrected experts": spec(
        Attention(2, 2, 8, 0.3, None),
        Moe(6, GATED, CORRECTED, shared=Mlp(40, "silu", True, bias=True), shared_gate=True),
        BEFORE,
    ),
    "tied, all biased": spec(
        Attention(4, 2, 8, 0.3, None, qkv_bias=True, out_bias=True),
        EVERY_BIAS,
        Norms(before_mixer=LAYER, before_ffn=LAYER),
        tied=True,
        final_norm=LAYER,
        embedding=Embedding(positions=64, position_offset=2, scale=1.7),
    ),
    "norm after add, narrow table, biased head": spec(
        Attention(4, 4, 8, 0.3, None),
        EVERY_BIAS,
        Norms(after_mixer=LAYER, after_ffn=LAYER),
        norm_after_add=True,
        final_norm=None,
        embedding=Embedding(width=20),
        head_bias=True,
        logit_scale=0.5,
        logit_softcap=3.0,
    ),
    "norm of the whole projections": spec(
        Attention(4, 2, 8, 0.3, Rope(1e4, 8), qk_norm=RMS, qk_norm_over="full"), GATED, AFTER
    ),
    "norms of heads with own weights, interleaved RoPE, clamped": spec(
        Attention(
            4, 2, 8, 0.3, Rope(1e4, 6, interleaved=True), qk_norm=LAYER, qk_norm_over="own_weights", qkv_clip=0.4
        ),
        GATED,
        BEFORE,
    ),
    "norm of heads after RoPE, a KV head for two ranks": spec(
        Attention(4, 1, 8, 0.3, Rope(1e4, 8), qk_norm=RMS, qk_norm_after_rope=True), GATED, BEFORE
    ),
    "output gates, two mixers, no ffn": side_by_side(),
    "several streams, per-layer embedding, sparse gates": with_streams(),
    "mixture beside the ffn, ffn alone": with_side_mixtures(),
    "second halves, identity experts": with_second_halves(),
    "norms of heads and hidden values": spec(
        Attention(4, 2, 8, 0.3, None, out_norm=RMS), Mlp(24, "relu2", gated=True, inner_norm=RMS), BEFORE
    ),
    "latents, low-rank queries, biases": spec(replace(LATENT, query_rank=12, bias=True), GATED, BEFORE),
    "latents, growing queries, gated heads": spec(
        replace(LATENT, query_growth=QueryGrowth(0.3, 4), gate_per_head=True), GATED, BEFORE
    ),
    "a gate per head": spec(
        Attention(4, 2, 8, 0.3, None, qkv_bias=True, output_gate=True, gate_per_head=True), GATED, BEFORE
    ),
    "latents with an indexer": spec(
        replace(LATENT, query_rank=12, indexer=Indexer(3, 12, 5, Rope(1e4, 8, interleaved=True), LAYER)), GATED, BEFORE
    ),
    "blocks that an indexer selects": spec(
        Attention(4, 2, 8, 0.3, None, blocks=BlockIndexer(12, 2, 3, 1, Rope(1e4, 8), RMS)), GATED, BEFORE
    ),
    "states": spec(GatedDelta(4, 8, 8, 6, 4, RMS), GATED, BEFORE),
    "state space, norm over heads of several ranks": spec(Mamba2(8, 6, 2, 10, 4, RMS, bias=True), GATED, BEFORE),
    "state space, norm before the gate": spec(Mamba2(4, 6, 4, 10, 3, RMS, norm_before_gate=True), GATED, BEFORE),
    "selective state space": spec(Mamba(24, 6, 5, 4, RMS), GATED, BEFORE),
    "a decay per channel": spec(KimiDelta(4, 6, 5, 4, RMS), GATED, BEFORE),
    "lightning attention with RoPE": spec(
        LightningAttention(
            8, (0.9, 0.5, 0.2, 0.1), RMS, groups=2, scale=0.3, silu=False, qk_norm=RMS, rope=Rope(1e4, 4)
        ),
        GATED,
        BEFORE,
    ),
    "a direct decay per channel, bounded": spec(KimiDelta(4, 6, None, 4, RMS, -5.0), GATED, BEFORE),
    "lightning attention": spec(LightningAttention(8, (0.9, 0.5, 0.2, 0.1), RMS), GATED, BEFORE),
    "short convolution": spec(ShortConvolution(32, 3, bias=True), GATED, BEFORE),
    "parallel, scaled": spec(
        Attention(4, 2, 8, 0.3, Rope(1e4, 4), qkv_bias=True, out_bias=True),
        EVERY_BIAS,
        Norms(before_mixer=Norm(1e-5, kind="layer", scale=False)),
        parallel=True,
        residual_scale=0.6,
    ),
}


def logits(model: ModelSpec, comm: Comm = SINGLE_RANK) -> torch.Tensor:
    return torch.cat(TorchCudaModel(model, random_weights(model), len(TOKENS), comm).both(TOKENS, TOKENS[::-1]))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", SPECS)
def test_ranks_answer_as_one(kind: str, size: int) -> None:
    model = SPECS[kind]
    if any(mixer.indivisible(size) for mixer in model.mixers):
        size = 2
    want = logits(model)
    assert want.std() > 0.1, "a flat answer proves nothing"
    for rank_logits in on_ranks(size, lambda comm: logits(model, comm)):
        torch.testing.assert_close(rank_logits, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab", [70, 64, 130])
def test_ranks_take_the_first_of_equal_tokens_and_no_padding(vocab: int) -> None:
    """Of 130 tokens the third rank has two, of 70 none; padding would win against negative scores."""
    scores = torch.full((3, vocab), -2.0)
    scores[0, [20, 63]] = -1.0
    scores[1, [11, vocab - 1]] = -1.0
    scores[2, vocab - 1] = -0.5

    def own(comm: Comm) -> torch.Tensor:
        padded = torch.zeros(3, 3 * 64)
        padded[:, :vocab] = scores
        return most_likely(padded[:, 64 * comm.rank : 64 * (comm.rank + 1)], vocab, comm)

    assert [each.tolist() for each in on_ranks(3, own)] == [[20, 11, vocab - 1]] * 3
    assert most_likely(scores, vocab, SINGLE_RANK).tolist() == [20, 11, vocab - 1]


def test_shared_norm_with_unit_offset() -> None:
    mixer = replace(SPECS["norm of the whole projections"].layers[0].attention, qk_norm=Norm(1e-5, unit_offset=True))
    model = spec(mixer, GATED, AFTER)
    for rank_logits in on_ranks(2, lambda comm: logits(model, comm)):
        torch.testing.assert_close(rank_logits, logits(model), atol=1e-5, rtol=1e-5)
