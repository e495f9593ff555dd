"""Multi-head latent attention: in the step loop, against the oracle, refused elsewhere; and interleaved RoPE."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.backend_options import make_options, make_pooling_options
from support.paged_model import PagedModel
from support.reference_driver import random_weights, tiny_spec
from support.reference_engine import LIMITS, engine, generate

from pagoda.backends.reference.model.naive import NaiveModel
from pagoda.backends.registry import load_backend
from pagoda.common.engine.kv_cache.spec import KvGroup, kv_layout
from pagoda.common.errors import ModelError
from pagoda.common.models.caches import LatentCache
from pagoda.common.models.mixers import Attention, LatentAttention, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.rope import Rope, YarnScaling
from pagoda.common.models.spec import ModelSpec, Pooler

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


@pytest.mark.parametrize("blocks", [20, 90])
def test_chunked_prefill_preemption_and_prefix_hits_give_the_naive_models_tokens(blocks: int) -> None:
    prompts = [PROMPT + [(7 * i + j * j) % 96 for j in range(3 + 4 * i)] for i in range(6)]
    core = engine(SPEC, blocks)
    naive = NaiveModel(SPEC, random_weights(SPEC), max_len=LIMITS.max_model_len)
    assert generate(core, prompts, 9) == [naive.greedy(prompt, 9) for prompt in prompts]
    assert (core.stats.preemptions > 0) == (blocks == 20)
    assert core.stats.prefix_hits > 0


def test_the_cache_holds_one_latent_and_one_rotary_key_per_token() -> None:
    layout = kv_layout(SPEC, 4)
    assert layout.groups == (KvGroup(LatentCache(16, 8), (0, 1)),)
    assert layout.pools[0].block_elements == 2 * 4 * (16 + 8)


def test_layers_of_both_kinds_of_attention() -> None:
    spec = model(LATENT, tiny_spec().layers[0].attention, LATENT)
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


@pytest.mark.parametrize("backend", ["torch_cuda", "jax_tpu"])
def test_other_backends_refuse_it_by_name(backend: str) -> None:
    pytest.importorskip("triton" if backend == "torch_cuda" else "flax")
    words = f"layer 0 has a mixer of kind LatentAttention, which {backend} does not support; use --backend reference"
    with pytest.raises(ModelError, match=words):
        load_backend(backend).create(make_options(SPEC, limits=LIMITS))
    interleaved = model(Attention(4, 2, 16, 0.25, Rope(1e4, 12, interleaved=True)))
    with pytest.raises(ModelError, match=f"RoPE on interleaved channels, which {backend} does not support"):
        load_backend(backend).create(make_options(interleaved, limits=LIMITS))


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


def test_mixture_of_experts_layers_of_the_family_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="first_k_dense_replace is 3 of 61 layers"):
        spec_from_config(V3)


def test_the_published_config_with_dense_layers() -> None:
    spec, _ = spec_from_config({**V3, "first_k_dense_replace": 61})
    (mixer,) = set(spec.mixers)
    assert isinstance(mixer, LatentAttention)
    assert mixer.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert mixer.rope == Rope(1e4, 64, YarnScaling(40.0, 4096), interleaved=True)
    assert spec.max_positions == 163840


def test_pooling_elsewhere_is_refused_by_name() -> None:
    pytest.importorskip("triton")
    from pagoda.backends.torch_cuda import pooling

    spec = replace(SPEC, pooler=Pooler("last"), tied=True)
    with pytest.raises(ModelError, match="LatentAttention, which torch_cuda does not support"):
        pooling.create(make_pooling_options(spec, limits=LIMITS))
