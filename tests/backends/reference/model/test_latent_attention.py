"""Multi-head latent attention: in the step loop, against the oracle, refused elsewhere; and interleaved RoPE."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.backend_options import make_options, make_pooling_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.reference_engine import LIMITS, assert_naive_tokens, engine, generate
from support.kernels.paged_model import PagedModel

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.reference.model.numerics import numerics
from pagoda.backends.reference.pooling import Encoder, make_packed
from pagoda.backends.reference.weights.load import Packer
from pagoda.backends.registry import load_backend
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import KvGroup, kv_layout
from pagoda.common.engine.pooling.values import PoolPlan
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.mixers import Attention, Indexer, LatentAttention, Mixer
from pagoda.common.models.mixers.caches import IndexCache, LatentCache
from pagoda.common.models.primitives import Norm
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.rope import Rope, YarnScaling
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Mlp, ModelSpec, Moe, Pooler, Router, SecondHalf

LATENT = LatentAttention(
    heads=4,
    query_rank=24,
    latent_dim=16,
    nope_dim=12,
    value_dim=10,
    scale=0.2,
    rope=Rope(1e4, 8, interleaved=True),
    norm=Norm(1e-6),
)
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]


def model(*mixers: Mixer) -> ModelSpec:
    spec = tiny_spec()
    return replace(spec, layers=tuple(replace(spec.layers[0], mixers=(mixer,)) for mixer in mixers))


SPEC = model(LATENT, replace(LATENT, query_rank=None))
INDEXER = Indexer(heads=16, head_dim=12, top_k=9, rope=Rope(1e4, 8), norm=Norm(1e-6, kind="layer", bias=True))
SPARSE = model(replace(LATENT, indexer=INDEXER), LATENT, replace(LATENT, indexer=replace(INDEXER, top_k=5)))
SHARED = model(
    replace(LATENT, indexer=INDEXER),
    replace(LATENT, shared_top_k=9),
    replace(LATENT, indexer=replace(INDEXER, top_k=5)),
    replace(LATENT, shared_top_k=5),
    replace(LATENT, shared_top_k=5),
)


def test_the_cache_holds_one_latent_and_one_rotary_key_per_token() -> None:
    layout = kv_layout(SPEC, 4)
    assert layout.groups == (KvGroup(LatentCache(16, 8), (0, 1)),)
    assert layout.pools[0].block_elements == 2 * 4 * (16 + 8)


FULL = tiny_spec().layers[0].attention
EVERY_CACHE = model(
    replace(LATENT, indexer=INDEXER),
    replace(FULL, window=6),
    FULL,
    replace(FULL, window=6, shares_cache_of=1),
    replace(FULL, shares_cache_of=2),
)

_PLAIN = replace(SPEC.layers[0], mixers=(LATENT, LATENT))
_MOE = Moe(3, Mlp(24, "silu", gated=True), Router(4, renormalise=False, correction=True), identity=3)
HALVES = replace(SPEC, layers=(replace(_PLAIN, second=SecondHalf(Mlp(24, "silu", gated=True), _MOE, Norm(1e-6))),) * 2)


@pytest.mark.parametrize(
    "spec",
    [SPEC, SPARSE, SHARED, EVERY_CACHE, HALVES],
    ids=["latent", "with an indexer", "shared selections", "every cache", "layers of two halves"],
)
@pytest.mark.parametrize("blocks", [20, 90])
def test_chunked_prefill_preemption_and_prefix_hits(spec: ModelSpec, blocks: int) -> None:
    assert_naive_tokens(spec, PROMPT, blocks, preempts=blocks == 20)


def test_the_selection_matters_in_the_step_loop() -> None:
    prompt = PROMPT * 2
    sparse = generate(engine(SPARSE, 90), [prompt], 9)
    dense = model(LATENT, LATENT, LATENT)
    weights = ((name, array) for name, array in random_weights(SPARSE) if name in params(dense))
    assert [NaiveModel(dense, weights, max_len=LIMITS.max_model_len).greedy(prompt, 9)] != sparse


@pytest.mark.parametrize("selected", [(5, 20), (20, 5), (9, 9)])
def test_a_prompt_has_the_selection_of_the_last_indexer_alone(selected: tuple[int, int]) -> None:
    """Within whole prompts, as pooling computes them."""
    spec = model(*(replace(LATENT, indexer=replace(INDEXER, top_k=number)) for number in selected))
    ids = [(7 * number + 3) % 90 for number in range(15)]
    numbers = numerics("float32")
    encoder = Encoder(spec, Packer(spec, numbers).pack(random_weights(spec)), numbers, 32)
    plan = PoolPlan(np.array(ids, np.int32), np.array([0, len(ids)], np.int32), None, ())
    with torch.inference_mode():
        logits = encoder.hidden(make_packed(plan)) @ torch.from_numpy(dict(random_weights(spec))["head"]).T
    torch.testing.assert_close(logits, NaiveModel(spec, random_weights(spec)).logits(ids), atol=1e-5, rtol=1e-5)


def test_the_keys_of_an_indexer_have_a_cache_of_their_own() -> None:
    layout = kv_layout(SPARSE, 4)
    assert SPARSE.cache_numbers == (((0, 1),), ((2,),), ((3, 4),))
    assert layout.groups == (KvGroup(LatentCache(16, 8), (0, 2, 3)), KvGroup(IndexCache(12), (1, 4), pool=1))
    assert [pool.block_elements for pool in layout.pools] == [3 * 4 * (16 + 8), 2 * 4 * 12]


def test_layers_that_share_a_selection_keep_no_index_keys() -> None:
    assert SHARED.cache_numbers == (((0, 1),), ((2,),), ((3, 4),), ((5,),), ((6,),))
    assert not [name for name in params(SHARED) if name.startswith("layers.1.mixers.0.indexer")]
    with pytest.raises(ModelError, match=r"layer 1 shares the selection of 7 tokens .* the last indexer selects 9"):
        model(SHARED.mixers[0], replace(LATENT, shared_top_k=7))


def test_an_indexer_that_selects_every_token_changes_nothing() -> None:
    spec = model(replace(LATENT, indexer=replace(INDEXER, top_k=len(PROMPT))))
    weights = dict(random_weights(spec))
    dense = NaiveModel(model(LATENT), weights.items()).logits(PROMPT)
    torch.testing.assert_close(PagedModel(spec, weights.items(), 64).logits(PROMPT), dense, atol=3e-5, rtol=0)
    fewer = model(replace(LATENT, indexer=replace(INDEXER, top_k=len(PROMPT) - 1)))
    narrow = PagedModel(fewer, weights.items(), 64).logits(PROMPT)
    torch.testing.assert_close(narrow[:-1], dense[:-1], atol=3e-5, rtol=0)
    assert not torch.allclose(narrow[-1], dense[-1], atol=1e-3)


def test_layers_of_both_kinds_of_attention() -> None:
    spec = model(LATENT, tiny_spec().layers[0].attention, replace(LATENT, indexer=INDEXER))
    paged = PagedModel(spec, random_weights(spec), 64).logits(PROMPT)
    torch.testing.assert_close(paged, NaiveModel(spec, random_weights(spec)).logits(PROMPT), atol=3e-5, rtol=0)


@pytest.mark.parametrize("implementation", [NaiveModel, PagedModel])
def test_interleaved_rope_equals_half_split_rope_of_reordered_channels(implementation: Any) -> None:
    rope = Rope(1e4, 12)
    mixer = Attention(4, 2, 16, 0.25, rope)
    halves, pairs = model(mixer), model(replace(mixer, rope=replace(rope, interleaved=True)))
    order = [*range(0, 12, 2), *range(1, 12, 2), *range(12, 16)]
    weights = dict(random_weights(pairs))
    moved = {
        name: array.reshape(-1, 16, 32)[:, order].reshape(-1, 32) if name.endswith((".q", ".k")) else array
        for name, array in weights.items()
    }
    ours = implementation(pairs, weights.items(), max_len=64).logits(PROMPT)
    torch.testing.assert_close(
        ours, implementation(halves, moved.items(), max_len=64).logits(PROMPT), atol=1e-5, rtol=0
    )
    other = implementation(halves, weights.items(), max_len=64).logits(PROMPT)
    assert not torch.allclose(ours, other, atol=1e-2)


@pytest.mark.parametrize("spec", [SPEC, SHARED], ids=["latent", "shared selections"])
def test_an_engine_on_torch_cuda_gives_the_naive_models_tokens(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    prompts = [[(7 * i + j * j) % 96 for j in range(3 + 8 * i)] for i in range(4)]
    oracle = NaiveModel(spec, random_weights(spec), max_len=LIMITS.max_model_len)
    core = engine(spec, 60, name="torch_cuda")
    assert generate(core, prompts, 6) == [oracle.greedy(prompt, 6) for prompt in prompts]


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"cache": CacheConfig(cache_dtype="fp8")}, "--kv-cache-dtype"),
        ({"attention": "FLASH_ATTN"}, "--attention-backend"),
    ],
)
def test_torch_cuda_refuses_settings_of_other_attention(
    change: dict[str, Any], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    with pytest.raises(ConfigError, match=flag):
        load_backend("torch_cuda").create(make_options(SPEC, limits=LIMITS, **change))


V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""deepseek-ai/DeepSeek-V3 without its quantization_config."""


def test_the_published_config() -> None:
    spec, _ = spec_from_config(V3)
    assert [type(layer.ffn) for layer in spec.layers] == [Mlp] * 3 + [Moe] * 58
    (mixer,) = set(spec.mixers)
    assert isinstance(mixer, LatentAttention)
    assert mixer.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert mixer.rope == Rope(1e4, 64, YarnScaling(40.0, 4096), interleaved=True)
    assert spec.max_positions == 163840


V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}


def test_the_published_config_with_an_indexer() -> None:
    spec, _ = spec_from_config(V32)
    assert [type(layer.ffn) for layer in spec.layers] == [Mlp] * 3 + [Moe] * 58
    (mixer,) = set(spec.mixers)
    assert isinstance(mixer, LatentAttention)
    rope = Rope(1e4, 64, YarnScaling(40.0, 4096))
    assert mixer.indexer == Indexer(64, 128, 2048, rope, Norm(1e-6, kind="layer", bias=True))
    assert mixer.rope == replace(rope, interleaved=True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"index_topk": None}, "index_topk is missing"),
        ({"index_topk": 0}, "index_topk is 0; it must be at least 1"),
        ({"index_head_dim": 32}, "index_head_dim is 32; it must be at least qk_rope_head_dim, 64"),
        ({"q_lora_rank": None}, "q_lora_rank is null; the indexer needs low-rank queries"),
        ({"rope_interleave": False}, "rope_interleave is False; only True is supported"),
        ({"layer_types": ["full_attention"] * 61}, "layer_types is "),
        ({"mlp_layer_types": ["dense"] * 60}, "mlp_layer_types has "),
        ({"n_group": 7}, "4 of 7 groups cannot be formed of 256 experts"),
    ],
)
def test_configs_of_an_indexer_that_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        spec_from_config({**V32, **change})


def test_pooling_elsewhere_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from pagoda.backends.torch_cuda import pooling

    spec = replace(SPARSE, pooler=Pooler("last"), tied=True)
    monkeypatch.setattr(pooling, "MIXERS", {Attention})
    with pytest.raises(ModelError, match="a mixer of kind LatentAttention, which torch_cuda does not support"):
        pooling.create(make_pooling_options(spec, limits=LIMITS))
