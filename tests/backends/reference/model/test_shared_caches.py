"""Layers that read the K and V of an earlier layer: against transformers and the oracle, in the step loop, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models.cases import tiny
from support.engines.backend_options import make_options, make_pooling_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.reference_engine import LIMITS, assert_naive_tokens
from support.kernels.paged_model import PagedModel

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.registry import load_backend, load_pooling
from pagoda.common.engine.kv_cache.spec import KvGroup, kv_layout
from pagoda.common.engine.pooling.values import PoolingRules, PoolPlan
from pagoda.common.errors import ModelError
from pagoda.common.models.mixers import QueryGrowth
from pagoda.common.models.mixers.caches import FullCache, WindowCache
from pagoda.common.models.registry import spec_from_config, without_windows
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Layer, ModelSpec, Pooler
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.rules import apply_rules

PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
FULL, WINDOWED = tiny_spec(window=6).layers


def sharing(spec: ModelSpec, owners: dict[int, int]) -> ModelSpec:
    """The model whose layers read the caches of others. `owners`: layer -> layer that keeps K and V."""
    layers = list(spec.layers)
    for index, owner in owners.items():
        mixer = replace(layers[index].attention, shares_cache_of=owner)
        layers[index] = replace(layers[index], mixers=(mixer,))
    return replace(spec, layers=tuple(layers))


SPEC = sharing(replace(tiny_spec(), layers=(FULL, WINDOWED, FULL, FULL, WINDOWED, FULL)), {3: 2, 4: 1, 5: 2})


class SharingCache(transformers.DynamicCache):
    """A cache of transformers in which some layers read the K and V of others."""

    def __init__(self, owners: dict[int, int]) -> None:
        super().__init__()
        self.owners, self.kept = owners, {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        if layer_idx not in self.owners:
            self.kept[layer_idx] = keys, values
        return self.kept[self.owners.get(layer_idx, layer_idx)]


def torch_cuda(spec: ModelSpec, weights: Any, max_len: int) -> Any:
    pytest.importorskip("triton")
    from support.devices.torch_cuda_model import TorchCudaModel

    return TorchCudaModel(spec, weights, max_len)


@pytest.mark.parametrize("implementation", [NaiveModel, PagedModel, torch_cuda])
@pytest.mark.parametrize("family", ["gemma3", "olmo2", "llama-biased"])
def test_transformers_agrees(implementation: Any, family: str, tmp_path: Path) -> None:
    """Of norms per head, norms of whole projections, and biases; full attention and windows."""
    (case,) = (case for case in tiny.TINY if case.name == family)
    owners = {3: 1, 4: 1, 5: 2} if family == "gemma3" else {1: 0, 2: 0}
    model = replace(case, extra={**case.extra, "num_hidden_layers": 3 + len(owners)}).save(tmp_path)
    if family == "gemma3":  # every third layer is full
        assert model.config.layer_types == (["sliding_attention"] * 2 + ["full_attention"]) * 2
    checkpoint = open_checkpoint(tmp_path)
    whole, rules = spec_from_config(checkpoint.config())
    spec = sharing(whole, owners)
    dropped = params(whole).keys() - params(spec).keys()
    weights = apply_rules(rules.rules, params(whole), checkpoint.tensors(), rules.ignored)
    kept = ((name, array) for name, array in weights if name not in dropped)
    ours = implementation(spec, kept, max_len=64).logits(PROMPT)
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT]), past_key_values=SharingCache(owners), use_cache=True).logits[0]
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=0)
    assert not torch.allclose(theirs, tiny.logits(model, PROMPT), atol=1e-2)


@pytest.mark.parametrize("blocks", [34, 160])
def test_chunked_prefill_preemption_and_prefix_hits(blocks: int) -> None:
    assert_naive_tokens(SPEC, PROMPT, blocks, preempts=blocks == 34)


def test_a_layer_that_shares_a_cache_has_no_cache_and_no_key_and_value_parameters() -> None:
    assert SPEC.cache_numbers == (((0,),), ((1,),), ((2,),), ((2,),), ((1,),), ((2,),))
    layout = kv_layout(SPEC, 4)
    full, window = FullCache(2, 16), WindowCache(2, 16, 6)
    assert layout.groups == (KvGroup(full, (0,)), KvGroup(full, (2,)), KvGroup(window, (1,)))
    assert layout.pools[0].block_elements == full.block_elements(4)
    shared = {name.removeprefix("layers.4.mixers.0.") for name in params(SPEC) if name.startswith("layers.4.mixers")}
    assert shared == {"q", "q_bias", "q_norm", "o"}


def test_the_memory_plan_has_no_bytes_for_it() -> None:
    alone = replace(SPEC, layers=SPEC.layers[:3])
    plans = []
    for spec in (SPEC, alone):
        backend = load_backend("reference").create(make_options(spec, limits=LIMITS))
        backend.load(random_weights(spec))
        plans.append(backend.plan_memory())
        backend.close()
    assert plans[0].block_bytes == plans[1].block_bytes == (4 * FullCache(2, 16).block_elements(4),)


def test_without_windows_all_layers_see_everything() -> None:
    spec = without_windows(SPEC)
    assert {mixer.window for layer in spec.layers for mixer in (layer.attention,)} == {None}
    assert spec.layers[4].attention.shares_cache_of == 1


OTHER_WINDOW = replace(WINDOWED, mixers=(replace(WINDOWED.attention, window=5),))
OTHER_ROPE = replace(FULL, mixers=(replace(FULL.attention, rope=Rope(1e3, 12)),))


@pytest.mark.parametrize(
    ("layers", "owners", "problem"),
    [
        ((FULL, FULL), {0: 1}, "layer 0 shares the cache of layer 1, which does not come before it"),
        ((FULL, FULL), {1: 1}, "layer 1 shares the cache of layer 1, which does not come before it"),
        ((FULL, FULL), {1: -1}, "layer 1 shares the cache of layer -1, which does not come before it"),
        ((FULL, FULL, FULL), {1: 0, 2: 1}, "layer 2 .* layer 1, which does not keep the K and V of one Attention"),
        ((replace(FULL, mixers=FULL.mixers * 2), FULL), {1: 0}, "does not keep the K and V of one Attention"),
        ((FULL, WINDOWED), {1: 0}, "layer 1 .* layer 0, whose KV heads, head dim, window or RoPE differ from its own"),
        ((WINDOWED, OTHER_WINDOW), {1: 0}, "window or RoPE differ"),
        ((FULL, OTHER_ROPE), {1: 0}, "window or RoPE differ"),
    ],
)
def test_a_cache_that_the_layer_cannot_read_is_an_error(layers: Any, owners: dict[int, int], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        sharing(replace(tiny_spec(), layers=layers), owners)


def with_growth(layer: Layer) -> Layer:
    """The layer with queries that grow with their position."""
    return replace(layer, mixers=(replace(layer.attention, query_growth=QueryGrowth(1.0, 4)),))


GROWING = replace(SPEC, layers=tuple(with_growth(layer) for layer in SPEC.layers))


@pytest.mark.parametrize("spec", [SPEC, GROWING], ids=["plain", "growing queries"])
@pytest.mark.parametrize("backend", ["reference", "torch_cuda"])
def test_pooling_reads_them_too(backend: str, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "torch_cuda":
        pytest.importorskip("triton")
        monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    spec = replace(spec, tied=True)
    weights = dict(random_weights(spec))
    options = make_pooling_options(replace(spec, pooler=Pooler("all")), limits=LIMITS)
    pooling = load_pooling(backend).create(options)
    pooling.load(weights.items())
    rules = PoolingRules(task="token_embed", use_activation=False)
    plan = PoolPlan(np.array(PROMPT + PROMPT[:7], np.int32), np.array([0, 13, 20], np.int32), None, (rules, rules))
    vectors = pooling.execute(plan).result().vectors
    pooling.close()
    naive = NaiveModel(spec, weights.items(), max_len=LIMITS.max_model_len)
    for hidden, prompt in zip(vectors, (PROMPT, PROMPT[:7])):
        logits = torch.from_numpy(hidden @ weights["embed"].T)
        torch.testing.assert_close(logits, naive.logits(prompt), atol=3e-5, rtol=0)
