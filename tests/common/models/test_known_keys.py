"""Unread keys of config.json are accepted or refused by what transformers' classes and the checkpoint's code know."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest
from support.checkpoints.real_models import FOUND, OTHERS, REAL
from support.servers.hub_configs import GENERATORS, SAVED
from support.suite.rows import each_row

from pagoda.common.errors import ModelError
from pagoda.common.models.hf_config.known_keys import NO_TYPE, known_type, only_stored
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.spec import ModelSpec
from pagoda.tools import known_keys

CONFIGURATION = '''
class SwirlConfig(PretrainedConfig):
    """swirl: how often the model swirls."""

    def __init__(self, hidden_size=4, swirl=1.0, **kwargs):
        self.hidden_size = hidden_size
        self.swirl = swirl  # swirl
        super().__init__(swirl=swirl, **kwargs)
'''
MODELLING = '"""Swirls."""\ndef forward(config):\n    return config.hidden_size  # not config.swirl\n'
FILES = {"configuration_swirl.py": CONFIGURATION, "modeling_swirl.py": MODELLING}
AUTO_MAP = {"AutoConfig": "configuration_swirl.SwirlConfig", "AutoModelForCausalLM": "modeling_swirl.SwirlModel"}


def spec(name: str, extra: dict[str, Any], **files: str) -> ModelSpec:
    """Return the spec of a published config with `extra` keys; `files`: changes to the checkpoint's code."""
    config = {**SAVED, **GENERATORS[name], **extra}
    code = {f"{stem}_swirl.py": text for stem, text in files.items()}
    return spec_from_config(config, code=lambda: {**FILES, **code})[0]


@pytest.mark.slow_matrix
def test_the_table_is_what_the_installed_transformers_says() -> None:
    assert json.loads(known_keys.TABLE.read_text())["transformers"] == version("transformers")
    assert known_keys.TABLE.read_text() == known_keys.table(known_keys.installed())


@each_row(
    ("kind", "defaults"),
    [
        ("llama", {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "attention_bias": False}),
        ("gemma2", {"head_dim": 256, "attn_logit_softcapping": 50.0, "tie_word_embeddings": True}),
        ("qwen3_vl_text", {"head_dim": 128, "rope_theta": 500_000.0}),
        ("phimoe", {"rope_theta": 1e6, "max_position_embeddings": 4096 * 32}),
        ("ministral3", {"head_dim": 128, "sliding_window": ..., "num_key_value_heads": 8}),
        ("gpt2", {"n_embd": 768, "hidden_size": 768, "scale_attn_weights": True}),
        ("deepseek_v32", {"head_dim": ...}),  # transformers computes it from others.
        ("exaone", {"num_hidden_layers": 32, "num_layers": 32, "rms_norm_eps": 1e-5}),  # Llama's class computes it.
        ("sarvam_mla", {"q_lora_rank": None, "moe_intermediate_size": 2048}),  # DeepSeek-V3's, with its own defaults.
    ],
)
def test_defaults_of_classes(kind: str, defaults: dict[str, Any]) -> None:
    known = known_type(kind).defaults
    assert {key: known.get(key, ...) for key in defaults} == defaults
    if kind == "ministral3":
        assert known["rope_parameters"]["factor"] == 16.0


def test_types_that_transformers_does_not_have() -> None:
    assert known_type("swirl") is NO_TYPE


@each_row(
    ("extra", "problem"),
    [
        ({"swirl": 3}, None),  # No class reads it.
        ({"activation": "swiglu", "_from_model_config": True, "max_window_layers": 28}, None),  # As Falcon 3 has.
        ({"qkv_bias": False, "embedding_multiplier": 1}, None),  # What other types have is off.
        ({"qkv_bias": True}, "qkv_bias is True; only False is supported"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0; only 1.0 is supported"),
        ({"swirl": [3]}, "swirl unknown key that could"),
        ({"swirl": 3, "transformers_version": "99.0.0"}, "swirl unknown key that could"),
        ({"swirl": 3, "transformers_version": "main"}, "swirl unknown key that could"),
        ({"swirl": False, "transformers_version": "99.0.0"}, None),  # Whoever wrote it, it is off.
        ({"rope_interleaved": False, "swirls": 0, "transformers_version": None}, None),  # As converters write them.
        ({"swirl": 3, "transformers_version": None}, "swirl unknown key that could"),
        ({"swirl": 3, "architectures": ["AquilaForCausalLM"]}, "swirl unknown key that could"),
        ({"swirl": 3, "model_type": "aquila"}, "swirl unknown key that could"),
        ({"is_decoder": True}, "is_decoder is True; only False is supported"),
        ({"pruned_heads": {"1": [2]}}, "pruned_heads is {'1': .2.}; only {} is supported"),
        ({"attention_chunk_size": 64}, "attention_chunk_size unknown key"),  # transformers' masks read it in any file.
    ],
)
def test_unknown_keys_where_transformers_alone_computes_the_checkpoint(
    extra: dict[str, Any], problem: str | None
) -> None:
    if problem is None:
        assert spec("Llama-2-7b-hf", extra) == spec("Llama-2-7b-hf", {})
    else:
        with pytest.raises(ModelError, match=problem):
            spec("Llama-2-7b-hf", extra)


def test_known_keys_have_the_default_of_their_class() -> None:
    name = "gemma-2-9b"
    assert spec(name, {"use_bidirectional_attention": None}) == spec(name, {})
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        spec(name, {"use_bidirectional_attention": True})


CHATGLM = GENERATORS["chatglm3-6b"]
OWN = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}


@each_row(
    ("name", "extra"),
    [
        ("Llama-3.1-8B-Instruct", {"activation": "swiglu", "_from_model_config": True, "max_window_layers": 28}),
        ("chatglm3-6b", {"num_hidden_layers": CHATGLM["num_layers"], "classifier_dropout": None, "auto_map": OWN}),
        ("ERNIE-4.5-21B-A3B-PT", {"compression_ratio": 1.0, "use_rmsnorm": True, "rope_3d": False, "auto_map": OWN}),
        ("ERNIE-4.5-0.3B-PT", {"compression_ratio": 1.0, "use_rmsnorm": True, "freq_allocation": 20, "auto_map": OWN}),
        ("ERNIE-4.5-0.3B-PT", {"rope_3d": False, "weight_share_add_bias": True, "auto_map": OWN}),
        ("Hunyuan-A13B-Instruct", {"vit_patch": 1, "anyres_vit_two_views": False, "skip_cls_token": False}),
        ("Hunyuan-A13B-Instruct", {"position_embedding_xdrope": False, "vit_add_patchemb_bias": False}),
        ("Ling-mini-2.0", {"moe_aux_loss_lambda": 0.0, "use_sliding_window": False, "auto_map": OWN}),
    ],
)
def test_keys_of_published_files_that_are_harmless(name: str, extra: dict[str, Any]) -> None:
    """As Falcon 3, Baichuan 2, GLM-4, Ernie 4.5, Hunyuan-A13B and Ling-mini have them."""
    config = {**SAVED, **(GENERATORS[name] if name in GENERATORS else REAL[name].config)}
    assert spec_from_config({**config, **extra})[0] == spec_from_config(config)[0]


def test_baichuan_2_as_it_is_published() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32}
    text = {"vocab_size": 125696, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 4096}
    other = {"_from_model_config": True, "model_max_length": 4096, "z_loss_weight": 0, "auto_map": OWN}
    config = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", **SAVED, **sizes, **text, **other}
    assert spec_from_config(config)[0].width == 4096


USES = "\nclass SwirlModel:\n    def __init__(self, config):\n        self.factor = config.swirl\n"


@each_row(
    ("files", "harmless"),
    [
        ({}, True),
        ({"modeling": MODELLING + USES}, False),
        ({"modeling": MODELLING + "factor = getattr(config, 'swirl', 1)\n"}, False),
        ({"helpers": "def helper(config):\n    return config.swirl\n"}, False),
        ({"configuration": CONFIGURATION + "        self.hidden_size = hidden_size * swirl\n"}, False),
        ({"configuration": CONFIGURATION + "        if swirl:\n            pass\n"}, False),
        ({"configuration": CONFIGURATION.replace("hidden_size=4", "hidden_size=swirl")}, False),
        ({"modeling": "def broken(:\n  '''"}, False),
    ],
)
def test_the_code_of_a_checkpoint_is_searched(files: dict[str, str], harmless: bool) -> None:
    for name in ("Llama-2-7b-hf", "Orion-14B-Chat"):
        extra = {"swirl": 3, "auto_map": AUTO_MAP}
        if harmless:
            assert spec(name, extra, **files) == spec(name, {})
        else:
            with pytest.raises(ModelError, match="swirl unknown key"):
                spec(name, extra, **files)


def test_code_that_is_not_there_could_read_any_key() -> None:
    config = {**SAVED, **GENERATORS["Llama-2-7b-hf"], "swirl": 3, "auto_map": AUTO_MAP}
    for code in (None, dict, lambda: {"configuration_swirl.py": CONFIGURATION}):
        with pytest.raises(ModelError, match="swirl unknown key"):
            spec_from_config(config, code=code)
    elsewhere = {**AUTO_MAP, "AutoModelForCausalLM": "org/other--modeling_swirl.SwirlModel"}
    with pytest.raises(ModelError, match="swirl unknown key"):
        spec_from_config({**config, "auto_map": elsewhere}, code=lambda: FILES)
    assert only_stored("hidden_size", list(FILES), FILES) is False


@each_row(
    ("name", "key", "value"),
    [
        ("Kimi-Linear-48B-A3B-Instruct", "attn_res_block_size", 12),
        ("Kimi-Linear-48B-A3B-Instruct", "routed_expert_hidden_size", 3584),
        ("Kimi-Linear-48B-A3B-Instruct", "mla_use_output_gate", True),
        ("Kimi-Linear-48B-A3B-Instruct", "swirl", 1),
        ("MiMo-V2-Flash", "swirl", 1),
        ("MiniMax-M2", "swirl", 1),
        ("Llama-2-7b-hf", "sliding_window", 4096),
        ("Llama-2-7b-hf", "alibi", True),
        ("Llama-2-7b-hf", "use_qk_norm", True),
        ("Llama-2-7b-hf", "is_encoder_decoder", True),
        ("Llama-2-7b-hf", "block_configs", [{}]),
        ("Llama-2-7b-hf", "per_layer_config", {"1": {"hidden_size": 2}}),
        ("Mistral-7B-v0.1", "parallel_attn", True),
        ("gemma-2-9b", "query_rescale_scalar", [2.0]),
        ("Qwen3-Coder-30B-A3B-Instruct", "qkv_bias", True),
        ("Mixtral-8x7B-v0.1", "attention_bias", True),
        ("Orion-14B-Chat", "rope_ratio", 4.0),
        ("Orion-14B-Chat", "alibi", True),
        ("Orion-14B-Chat", "attention_bias", True),
        ("MiMo-7B-Base", "use_mrope", True),
    ],
)
def test_keys_that_matter_are_refused_by_name(name: str, key: str, value: object) -> None:
    config = {**SAVED, **(GENERATORS[name] if name in GENERATORS else REAL[name].config)}
    spec_from_config(config)
    with pytest.raises(ModelError, match=rf"config\.json: {key} "):
        spec_from_config({**config, key: value})


WHOLE = {**FOUND, **OTHERS}


@each_row(
    ("name", "key", "value"),
    [
        ("Baichuan2-7B", "alibi", True),
        ("CodeLlama-34b-Instruct-hf", "pruned_heads", {"3": [1]}),
        ("DeepSeek-V2-Lite", "index_head_dim", 128),
        ("DeepSeek-V3", "index_topk", 2048),
        ("Devstral-2-123B-Instruct", "attention_bias", True),
        ("EXAONE-3.5-7.8B", "sliding_window", 4096),
        ("EXAONE-4.0-32B", "mlp_bias", True),
        ("K-EXAONE-236B-A23B", "swiglu_limit", 7.0),
        ("LFM2.5-VL-1.6B", "sliding_window", 4096),
        ("Llama-3.2-3B-Instruct", "attention_chunk_size", 8192),
        ("Llama-4-Scout-17B-16E-Instruct", "qk_layernorm", True),
        ("Meta-Llama-3-70B", "no_rope_layers", [0, 1]),
        ("MiniCPM3-4B", "index_topk", 64),
        ("MiniMaxAI/MiniMax-M2.5", "attn_type_list", [0] + [1] * 61),
        ("Mistral-7B-Instruct-v0.3", "attention_bias", True),
        ("Mistral-Nemo-Instruct-2407", "mlp_bias", True),
        ("Phi-3-mini", "lm_head_bias", True),
        ("Phi-3.5-MoE-instruct", "n_shared_experts", 1),
        ("Qwen-7B", "use_qk_norm", True),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "use_qk_norm", False),
        ("Qwen2.5-7B-Instruct", "dual_chunk_attention_config", {"chunk_size": 262144}),
        ("Qwen2.5-VL-7B-Instruct", "mlp_bias", True),
        ("Qwen3-4B", "mlp_bias", True),
        ("Qwen3.5-9B", "use_sliding_window", True),
        ("RedPajama-INCITE-Chat-3B-v1", "sliding_window", 512),
        ("SmolLM-1.7B", "residual_multiplier", 0.22),
        ("Trinity-Mini", "attention_sink", True),
        ("Yi-34B", "logits_scaling", 16.0),
        ("c4ai-command-r-v01", "sliding_window", 4096),
        ("chatglm3-6b", "use_qk_norm", True),
        ("deepseek-moe-16b-chat", "n_group", 8),
        ("falcon-40b", "qk_layernorm", True),
        ("gemma-2-9b", "use_bidirectional_attention", True),
        ("glm-4-9b-chat", "sliding_window", 1024),
        ("gpt2-medium", "add_cross_attention", True),
        ("internlm2-chat-7b", "attention_multiplier", 0.5),
        ("meta-llama/Meta-Llama-3.1-8B", "layer_types", ["sliding_attention"] * 32),
        ("moonshotai/Kimi-K2-Instruct", "attn_res_block_size", 12),
        ("openai/gpt-oss-20b", "attention_chunk_size", 64),
        ("stablelm-3b-4e1t", "mlp_bias", True),
        ("starcoder2-7b", "qk_layernorm", True),
        ("zai-org/GLM-5", "sliding_window", 4096),
    ],
)
def test_files_with_one_key_that_matters_are_refused_by_name(name: str, key: str, value: object) -> None:
    """The files alone are accepted in test_real_models.py."""
    config = WHOLE[name].config
    stated = {key: value}
    changed = {"text_config": {**config["text_config"], **stated}} if "text_config" in config else stated
    with pytest.raises(ModelError, match=rf"config\.json: {key} "):
        spec_from_config({**config, **changed})
