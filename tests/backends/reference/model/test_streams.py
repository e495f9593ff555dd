"""Per-layer embeddings, several residual streams and other parts of few models: in the step loop, pooled, refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.backend_options import make_pooling_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.reference_engine import LIMITS, assert_naive_tokens

from pagoda.backends.reference.model.decoder import Decoder
from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.reference.model.numerics import numerics
from pagoda.backends.reference.weights.load import Packer
from pagoda.backends.registry import load_pooling
from pagoda.common.engine.pooling.values import PoolingRules, PoolPlan
from pagoda.common.errors import ModelError
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import (
    AltUp,
    InputBlock,
    Layer,
    LowRankResidual,
    Mlp,
    Moe,
    PerLayerEmbedding,
    Pooler,
    Router,
    SideMoe,
)

PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8]
NORM = Norm(1e-5)
PER_LAYER = PerLayerEmbedding(50, 6, "silu", NORM)
FULL, WINDOWED = tiny_spec(window=6).layers
SPARSE = Mlp(48, "silu", gated=True, sparsity=0.7)
SIDE = SideMoe(Moe(4, Mlp(24, "silu", gated=True), Router(2, renormalise=True)), NORM)


def with_mixer(layer: Layer, **fields: Any) -> Layer:
    return replace(layer, mixers=(replace(layer.attention, **fields),))


LAYERS = {
    "attention with normed values": with_mixer(FULL, value_norm=replace(NORM, scale=False)),
    "attention whose values are its keys": with_mixer(FULL, values_are_keys=True),
    "a sparse gate": replace(FULL, ffn=SPARSE),
    "a mixture of experts beside its feed-forward block": replace(FULL, side_moe=SIDE),
    "a low-rank residual": replace(FULL, low_rank=LowRankResidual(3, NORM)),
    "a scaled output": replace(FULL, output_scale=True),
}
SCALED = replace(tiny_spec(), layers=(*LAYERS.values(), WINDOWED), per_layer=PER_LAYER)
ALT_UP = AltUp(3, 1, NORM, scaled=True)
STREAMS = replace(tiny_spec(), layers=(LAYERS["a low-rank residual"], WINDOWED), alt_up=ALT_UP, per_layer=PER_LAYER)


def with_block(layer: Layer, owner: int, rank: int | None) -> Layer:
    attention = replace(FULL.attention, beside_embedding=True, adapter_rank=rank)
    block = InputBlock(Mlp(20, "silu", gated=True, bias=True), NORM, owner, rank)
    return replace(layer, mixers=(attention, *layer.mixers), block=block)


BLOCKS = replace(tiny_spec(), layers=(WINDOWED, with_block(FULL, 1, 3), with_block(WINDOWED, 1, 4)))
MODELS = {"scaled": SCALED, "streams": STREAMS, "streams alone": replace(STREAMS, per_layer=None), "blocks": BLOCKS}


@pytest.mark.parametrize("name", MODELS)
def test_chunked_prefill_and_prefix_hits(name: str) -> None:
    assert_naive_tokens(MODELS[name], PROMPT, 400, preempts=False)


@pytest.mark.parametrize("name", MODELS)
def test_pooling_computes_the_same(name: str) -> None:
    spec = replace(MODELS[name], tied=True)
    weights = dict(random_weights(spec))
    backend = load_pooling("reference").create(make_pooling_options(replace(spec, pooler=Pooler("all")), limits=LIMITS))
    backend.load(weights.items())
    rules = PoolingRules(task="token_embed", use_activation=False)
    plan = PoolPlan(np.array(PROMPT + PROMPT[:7], np.int32), np.array([0, 12, 19], np.int32), None, (rules, rules))
    vectors = backend.execute(plan).result().vectors
    backend.close()
    naive = NaiveModel(spec, weights.items(), max_len=LIMITS.max_model_len)
    for hidden, prompt in zip(vectors, (PROMPT, PROMPT[:7])):
        logits = torch.from_numpy(hidden @ weights["embed"].T)
        torch.testing.assert_close(logits, naive.logits(prompt), atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", ["per_layer.table", "per_layer.norm", "alt_up.in"])
def test_parameters_outside_of_layers_are_updated_alone(name: str) -> None:
    numbers, new = numerics("float32"), dict(random_weights(STREAMS, seed=1))[name]
    with torch.inference_mode():
        old = Packer(STREAMS, numbers).pack(random_weights(STREAMS))
        updated = Packer(STREAMS, numbers).pack([(name, new)], old)
    before, after = old.parts, updated.parts
    assert after.keys() == before.keys()
    assert {key for key in before if after[key] is not before[key]} == {name}
    torch.testing.assert_close(after[name], torch.from_numpy(new), atol=0, rtol=0)


def test_a_shared_block_is_updated_in_every_layer() -> None:
    numbers = numerics("float32")
    new = {name: value for name, value in random_weights(BLOCKS, seed=1) if name.startswith("layers.1.")}
    with torch.inference_mode():
        updated = Packer(BLOCKS, numbers).pack(new.items(), Packer(BLOCKS, numbers).pack(random_weights(BLOCKS)))
    ours = Decoder(BLOCKS, updated, numbers, 64).stack.layers[2].block
    theirs = NaiveModel(BLOCKS, (dict(random_weights(BLOCKS)) | new).items())
    assert ours is not None
    h = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours.feed(h), theirs.block_ffn("layers.2", BLOCKS.layers[2], h), atol=1e-5, rtol=0)


def test_a_block_with_the_weights_of_another_kind_is_refused() -> None:
    narrow = replace(FULL.attention, kv_heads=1, beside_embedding=True, adapter_rank=3)
    other = replace(with_block(FULL, 1, 3), mixers=(narrow, FULL.attention))
    for layer in (with_block(FULL, 0, 3), with_block(FULL, 3, 3), other):
        with pytest.raises(ModelError, match="layer 2 shares the weights of layer"):
            replace(BLOCKS, layers=(*BLOCKS.layers[:2], layer, with_block(FULL, 1, 3)))


def test_tokens_beyond_the_table_read_its_first_row() -> None:
    weights = dict(random_weights(SCALED))
    weights["embed"][80] = weights["embed"][0]
    model = NaiveModel(SCALED, weights.items())
    torch.testing.assert_close(model.logits([3, 80, 5]), model.logits([3, 0, 5]), atol=0, rtol=0)
