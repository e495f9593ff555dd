"""Ranks that share a model answer what one rank answers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.reference_driver import random_weights, tiny_spec
from support.thread_ranks import on_ranks
from support.torch_cuda_model import TorchCudaModel

from pagoda.backends.torch_cuda.parallel import SINGLE_RANK, Comm
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Embedding, Layer, Mlp, ModelSpec, Moe, Norms, Router

RMS, LAYER = Norm(1e-5), Norm(1e-5, "layer", bias=True)
EVERY_BIAS = Mlp(24, "gelu", gated=False, bias=True)
TOKENS = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90, 1, 0, 94]


def spec(mixer: Attention, ffn: Mlp | Moe, norms: Norms, *, vocab: int = 97, tied: bool = False, **more) -> ModelSpec:
    """Two layers; a vocabulary that no rank's rows divide."""
    layer = Layer((mixer,), ffn, norms, norm_after_add=more.pop("norm_after_add", False))
    return ModelSpec(vocab, 32, (layer, layer), more.pop("final_norm", RMS), tied, max_positions=64, **more)


BEFORE, AFTER = Norms(before_mixer=RMS, before_ffn=RMS), Norms(after_mixer=RMS, after_ffn=RMS)
GATED = Mlp(24, "silu", gated=True)
SPECS = {
    "grouped heads": tiny_spec(window=6, softcap=2.0),
    "a KV head for two ranks": spec(Attention(4, 1, 8, 0.3, Rope(1e4, 8)), GATED, BEFORE),
    "experts": tiny_spec(moe=True),
    "biased experts": spec(Attention(2, 2, 8, 0.3, None), Moe(3, EVERY_BIAS, Router(2, False)), BEFORE),
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
}


def logits(model: ModelSpec, comm: Comm = SINGLE_RANK) -> torch.Tensor:
    return torch.cat(TorchCudaModel(model, random_weights(model), len(TOKENS), comm).both(TOKENS, TOKENS[::-1]))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", SPECS)
def test_ranks_answer_as_one(kind: str, size: int) -> None:
    model = SPECS[kind]
    if model.layers[0].attention.heads % size:
        size = 2
    want = logits(model)
    assert want.std() > 0.1, "a flat answer proves nothing"
    for rank_logits in on_ranks(size, lambda comm: logits(model, comm)):
        torch.testing.assert_close(rank_logits, want, atol=1e-5, rtol=1e-5)


def test_shared_norm_with_unit_offset() -> None:
    mixer = replace(SPECS["norm of the whole projections"].layers[0].attention, qk_norm=Norm(1e-5, unit_offset=True))
    model = spec(mixer, GATED, AFTER)
    for rank_logits in on_ranks(2, lambda comm: logits(model, comm)):
        torch.testing.assert_close(rank_logits, logits(model), atol=1e-5, rtol=1e-5)
