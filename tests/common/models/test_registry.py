"""Architectures by name, and published configs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.servers.hub_configs import GENERATORS
from support.suite.rows import each_row

from pagoda.common.errors import ModelError, WeightError
from pagoda.common.models.mixers import Attention, GatedDelta
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.registry import ARCHITECTURES, family, spec_from_config
from pagoda.common.models.rope import Llama3Scaling, LongRopeScaling, Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Mlp, ModelSpec, Moe
from pagoda.common.weights.rules import apply_rules, with_equal_head

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "vocab_size": 11,
}

# Published configs, in the words of the transformers that wrote them; sizes theirs.
LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}

QWEN2_5_0_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

GEMMA_2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}

GEMMA_3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}

PHI_4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "bos_token_id": 199999,
    "embd_pdrop": 0.0,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 200064,
}

OPT_350M: dict[str, Any] = {
    "_name_or_path": "opt-350m",
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": False,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "transformers_version": "4.20.0.dev0",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 512,
}

GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}

PARAMETERS = {
    "llama-3.1-8b": (LLAMA_3_1_8B, 8_030_261_248),
    "qwen2.5-0.5b": (QWEN2_5_0_5B, 494_032_768),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, 30_532_122_624),
    "qwen3-next-80b-a3b": ({**GENERATORS["Qwen3-Next-80B-A3B-Instruct"], "num_hidden_layers": 48}, 79_674_391_296),
    "gemma-2-2b": (GEMMA_2_2B, 2_614_341_888),
    "gemma-3-1b": (GEMMA_3_1B, 999_885_952),
    "phi-4-mini": (PHI_4_MINI, 3_836_021_760),
    "opt-350m": (OPT_350M, 331_196_416),
    "gpt2": (GPT2, 124_439_808),
}


def spec(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config(config)[0]


@each_row("name", PARAMETERS)
def test_published_configs_have_the_published_parameter_count(name: str):
    config, count = PARAMETERS[name]
    assert sum(param.size for param in params(spec(config)).values()) == count


def test_every_architecture_has_its_family():
    for architecture in ARCHITECTURES:
        assert family(architecture).rules


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("Llama7ForCausalLM", "LlamaForCausalLM"),
        ("StarCoder2ForCausalLM", "Starcoder2ForCausalLM"),
        ("BertForTokenisation", "BertForSequenceClassification"),
    ],
)
def test_an_unknown_architecture_names_the_three_nearest(unknown: str, nearest: str):
    words = (
        rf"architecture {unknown} is not supported; the nearest supported ones are {nearest}, \w+, \w+; --model-impl"
    )
    with pytest.raises(ModelError, match=words):
        spec({**LLAMA, "architectures": [unknown]})


@each_row("architectures", [None, [], ["LlamaForCausalLM", "OPTForCausalLM"], "LlamaForCausalLM"])
def test_exactly_one_architecture_is_required(architectures: object):
    with pytest.raises(ModelError, match="must name one architecture"):
        spec({**LLAMA, "architectures": architectures})


@each_row(
    ("extra", "message"),
    [
        ({"attention_sinks": 4}, r"attention_sinks unknown key that could change the result \(model type 'llama'\)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config unknown key that could change"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_attention_heads": 3}, "3 does not divide hidden_size 8"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"num_attention_heads": 1 << 31}, "num_attention_heads is 2147483648; it must be at most 10000"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000; it must be at most 16777216"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; it must be at most 16777216"),
        (
            {"max_position_embeddings": 10**12},
            "max_position_embeddings is 1000000000000; it must be at most 1073741824",
        ),
        ({"head_dim": 1 << 20}, "head_dim is 1048576; it must be at most 65536"),
    ],
)
def test_invalid_configs_name_the_key(extra: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        spec({**LLAMA, **extra})


def test_specs_are_hashable_and_equal_when_configs_are():
    assert hash(spec(LLAMA)) == hash(spec({**LLAMA, "transformers_version": "5"}))
    assert spec(LLAMA) != spec({**LLAMA, "tie_word_embeddings": True})


def test_mechanisms_of_published_configs():
    llama, gemma2, gemma3 = spec(LLAMA_3_1_8B), spec(GEMMA_2_2B), spec(GEMMA_3_1B)
    assert isinstance(llama.layers[0].attention.rope.scaling, Llama3Scaling)
    assert [layer.attention.window for layer in gemma2.layers[:4]] == [4096, None, 4096, None]
    assert [layer.attention.window for layer in gemma3.layers[:7]] == [512] * 5 + [None, 512]
    assert gemma3.layers[5].attention.rope.theta == 1e6
    assert gemma3.layers[6].attention.rope.theta == 1e4
    phi = spec(PHI_4_MINI).layers[0].attention.rope
    assert phi is not None
    assert phi.dim == 96
    assert isinstance(phi.scaling, LongRopeScaling)
    assert all(isinstance(layer.ffn, Moe) for layer in spec(QWEN3_30B_A3B).layers)


def test_three_layers_of_linear_attention_to_one_of_softmax_attention():
    config = {**GENERATORS["Qwen3-Next-80B-A3B-Instruct"], "num_hidden_layers": 5}
    mixers = spec(config).mixers
    assert [type(mixer) for mixer in mixers] == [GatedDelta] * 3 + [Attention, GatedDelta]
    assert mixers[0].caches() == (StateCache(32 * 128 * 128 + 3 * 8192, inputs=8192 + 2 * 32),)
    rope = Rope(1e7, 64)
    assert mixers[3].ropes() == (rope,)
    assert spec({key: value for key, value in config.items() if key != "partial_rotary_factor"}).ropes == (rope,)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
    assert spec({**config, "rope_scaling": yarn}).max_positions == 4 * 262144
    others = spec({**config, "full_attention_interval": 2, "mlp_only_layers": [4], "decoder_sparse_step": 2}).layers
    assert [isinstance(layer.mixers[0], Attention) for layer in others] == [False, True, False, True, False]
    assert [isinstance(layer.ffn, Moe) for layer in others] == [False, True, False, True, False]


def test_dense_layers_among_moe_layers():
    ffns = [layer.ffn for layer in spec({**QWEN3_30B_A3B, "mlp_only_layers": [0], "decoder_sparse_step": 2}).layers]
    assert [type(ffn) for ffn in ffns[:4]] == [Mlp, Moe, Mlp, Moe]
    ffns = [layer.ffn for layer in spec({**QWEN3_30B_A3B, "mlp_only_layers": [1]}).layers]
    assert [type(ffn) for ffn in ffns[:3]] == [Moe, Mlp, Moe]


def llama_tensors() -> dict[str, np.ndarray]:
    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    tensors = {"model.embed_tokens.weight": zeros(11, 8), "model.norm.weight": zeros(8), "lm_head.weight": zeros(11, 8)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.self_attn.{part}_proj.weight": zeros(8, 8) for part in "qkvo"}
        tensors |= {f"{prefix}.mlp.{part}_proj.weight": zeros(12, 8) for part in ("gate", "up")}
        tensors |= {f"{prefix}.mlp.down_proj.weight": zeros(8, 12)}
        tensors |= {f"{prefix}.{part}_layernorm.weight": zeros(8) for part in ("input", "post_attention")}
        tensors |= {f"{prefix}.self_attn.rotary_emb.inv_freq": zeros(2)}
    return tensors


def load(tensors: dict[str, np.ndarray], **extra: Any) -> set[str]:
    model, llama = spec_from_config({**LLAMA, **extra})
    return {name for name, _ in apply_rules(llama.rules, params(model), tensors.items(), llama.ignored)}


def test_strict_loading_takes_a_whole_checkpoint():
    assert load(llama_tensors()) == set(params(spec(LLAMA)))


def test_a_head_beside_a_tied_embedding_is_ignored():
    assert "head" not in load(llama_tensors(), tie_word_embeddings=True)


@pytest.mark.parametrize("first", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_head_of_other_values_than_a_tied_embedding_is_refused(first: str):
    """transformers uses it then; nothing must drop it in silence."""
    _, llama = spec_from_config({**LLAMA, "tie_word_embeddings": True})
    tensors = llama_tensors()
    ordered = {first: tensors[first], **tensors}
    assert dict(with_equal_head(llama.rules, ordered.items(), ordered)).keys() == tensors.keys()
    ordered["lm_head.weight"] = ordered["lm_head.weight"].copy()
    ordered["lm_head.weight"][10, 7] = 1
    message = r"^tensor lm_head.weight differs from model.embed_tokens.weight, .*pass --hf-overrides '\{.*: false\}'$"
    with pytest.raises(WeightError, match=message):
        dict(with_equal_head(llama.rules, ordered.items(), ()))
    with pytest.raises(WeightError, match=r"lm_head\.weight differs"):
        dict(with_equal_head(llama.rules, {**ordered, "lm_head.weight": np.zeros((11, 9), np.float32)}.items(), ()))


def test_heads_that_equal_a_tied_embedding():
    """In another dtype, with rows of zeros behind, with what is no number."""
    _, llama = spec_from_config({**LLAMA, "tie_word_embeddings": True})
    table = np.arange(88, dtype=np.float32).reshape(11, 8)
    table[3, 2] = np.nan
    for head in (table, table.astype(np.float16), np.concatenate([table, np.zeros((2, 8), np.float32)])):
        tensors = {"model.embed_tokens.weight": table, "lm_head.weight": head}
        assert len(dict(with_equal_head(llama.rules, tensors.items(), tensors))) == 2


def test_a_tied_embedding_alone_is_not_kept():
    _, llama = spec_from_config({**LLAMA, "tie_word_embeddings": True})
    tensors = iter([("model.embed_tokens.weight", np.zeros((11, 8), np.float32))])
    assert with_equal_head(llama.rules, tensors, ["model.embed_tokens.weight"]) is tensors


def test_missing_extra_and_misshapen_tensors_are_named():
    tensors = llama_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightError, match=r"layers.1.ffn.up \[12, 8\]: .* lacks model.layers.1.mlp.up_proj.weight"):
        load(tensors)
    with pytest.raises(WeightError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias"):
        load({**llama_tensors(), "model.layers.0.self_attn.q_proj.bias": np.zeros(8, np.float32)})
    with pytest.raises(WeightError, match=r"model.norm.weight has shape \[7\], parameter final_norm needs \[8\]"):
        load({**llama_tensors(), "model.norm.weight": np.zeros(7, np.float32)})
    with pytest.raises(WeightError, match="head"):
        load({name: tensor for name, tensor in llama_tensors().items() if name != "lm_head.weight"})
