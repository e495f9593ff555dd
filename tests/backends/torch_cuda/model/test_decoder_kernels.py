"""The whole decoder through the Triton kernels, interpreted: how it calls them is as they want to be called."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.devices.torch_cuda_model import TorchCudaModel
from support.engines.reference_driver import random_weights, tiny_spec

from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.kernels.linear.weight_only import pack
from pagoda.backends.torch_cuda.memory import cache
from pagoda.common.models.mixers import Attention, BlockIndexer, GatedDelta, Indexer, LatentAttention, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import (
    AltUp,
    ClampedGlu,
    Layer,
    LowRankResidual,
    Mlp,
    ModelSpec,
    Norms,
    PerLayerEmbedding,
)

TOKENS, OTHER = [5, 17, 3], [41, 2, 9, 60]


class Interpreted(Device):
    """A CPU that runs kernels."""

    @property
    def use_kernels(self) -> bool:
        return True


def one_layer(**change) -> ModelSpec:
    """The windowed layer of the tiny model."""
    spec = tiny_spec(window=2, softcap=2.0, moe=change.pop("moe", False))
    layer: Layer = spec.layers[1]
    return replace(spec, layers=(replace(layer, mixers=(replace(layer.attention, **change),)),))


def parallel() -> ModelSpec:
    """A layer with mixer and ffn in parallel."""
    spec = one_layer()
    layer = replace(
        spec.layers[0],
        ffn=Mlp(24, "relu2", gated=False, bias=True),
        norms=Norms(before_mixer=Norm(1e-5, "layer", scale=False)),
        parallel=True,
        residual_scale=0.6,
    )
    return replace(spec, layers=(layer,))


def sharing() -> ModelSpec:
    """A layer that reads the K and V of the first, and has an output gate."""
    spec = one_layer()
    layer = spec.layers[0]
    reader = replace(layer.attention, shares_cache_of=0, output_gate=True)
    return replace(spec, layers=(layer, replace(layer, mixers=(reader,))))


LATENT = LatentAttention(2, 12, 20, 10, 6, 0.3, Rope(1e4, 8, interleaved=True), Norm(1e-5), bias=True)


def with_mixer(mixer: Mixer) -> ModelSpec:
    spec = one_layer()
    return replace(spec, layers=(replace(spec.layers[0], mixers=(mixer,)),))


def clamped() -> ModelSpec:
    spec = one_layer()
    mlp = Mlp(24, "silu", gated=True, bias=True, clamped=ClampedGlu(0.3, 1.702))
    return replace(spec, layers=(replace(spec.layers[0], ffn=mlp),))


def with_streams() -> ModelSpec:
    """Two layers with a per-layer embedding, a low-rank residual and values that are keys, on two streams."""
    norm = Norm(1e-5)
    spec = one_layer(value_norm=Norm(1e-5, scale=False), values_are_keys=True, qkv_bias=False)
    layer = replace(spec.layers[0], low_rank=LowRankResidual(4, norm), ffn=Mlp(48, "silu", gated=True, sparsity=0.6))
    return replace(
        spec,
        layers=(layer, layer),
        per_layer=PerLayerEmbedding(60, 8, "gelu_tanh", norm),
        alt_up=AltUp(2, 1, norm, scaled=True),
    )


SPECS = {
    "window and soft cap": one_layer(),
    "experts": one_layer(moe=True),
    "shared K and V, output gate": sharing(),
    "latents": with_mixer(LATENT),
    "latents with an indexer": with_mixer(
        replace(
            LATENT, indexer=Indexer(2, 12, 2, replace(LATENT.rope, interleaved=False), Norm(1e-5, "layer", bias=True))
        )
    ),
    "blocks": with_mixer(
        Attention(4, 2, 8, 0.3, None, blocks=BlockIndexer(12, 2, 2, 1, Rope(1e4, 8), Norm(1e-5, unit_offset=True)))
    ),
    "sinks": one_layer(sinks=True),
    "ALiBi": one_layer(rope=None, softcap=None, alibi_slopes=(0.5, 0.25, 0.1, 0.7)),
    "root of ALiBi": one_layer(rope=None, softcap=None, alibi_slopes=(0.5, 0.25, 0.1, 0.7), alibi_root=True),
    "narrow values, chunks and those before them": one_layer(
        window=None, value_dim=6, value_norm=Norm(1e-5, scale=False), chunk=2, chunk_lookback=1
    ),
    "clamped gate": clamped(),
    "states": with_mixer(GatedDelta(2, 4, 8, 6, 4, Norm(1e-6))),
    "per-layer embedding, several streams, values that are keys": with_streams(),
    "norm of the whole projections": one_layer(qk_norm_over="full", rope=None),
    "norms of heads with own weights, clamped": one_layer(
        qk_norm=Norm(1e-5, "layer", bias=True), qk_norm_over="own_weights", qkv_clip=0.5
    ),
    "norm of heads after RoPE": one_layer(qk_norm=Norm(1e-5), qk_norm_after_rope=True),
    "parallel, scaled, norm without weights, relu^2": parallel(),
}


@pytest.mark.parametrize("kind", SPECS)
def test_kernels_answer_as_their_references(kind: str) -> None:
    spec, device = SPECS[kind], Interpreted(CPU.torch, CPU.chip, "interpreter")
    want = TorchCudaModel(spec, random_weights(spec), 8).both(TOKENS, OTHER)
    actual = TorchCudaModel(spec, random_weights(spec), 8, device=device).both(TOKENS, OTHER)
    assert want[1].std() > 0.1
    torch.testing.assert_close(actual, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4"])
def test_kernels_read_packed_matrices(scheme: str) -> None:
    spec, device = SPECS["experts"], Interpreted(CPU.torch, CPU.chip, "interpreter")
    make = partial(TorchCudaModel, spec, max_len=8, pack=partial(pack, scheme=scheme))
    want = make(random_weights(spec)).both(TOKENS, OTHER)
    actual = make(random_weights(spec), device=device).both(TOKENS, OTHER)
    torch.testing.assert_close(actual, want, atol=3e-5, rtol=1e-5)


def test_what_layers_prepare_goes_with_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second cache, as after memory was measured: layers write to it and keep nothing of the first."""
    keys: list[weakref.ref[torch.Tensor]] = []
    allocate = cache.allocate

    def watched(*args: Any) -> dict[int, cache.CudaCache]:
        caches = allocate(*args)
        keys.append(weakref.ref(caches[0].keys))
        return caches

    monkeypatch.setattr(cache, "allocate", watched)
    spec = tiny_spec()
    model = TorchCudaModel(spec, random_weights(spec), 16, device=Interpreted(CPU.torch, CPU.chip, CPU.name))
    first, second = (model.both(TOKENS, OTHER) for _ in range(2))
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    gc.collect()
    assert [each() for each in keys] == [None, None]
