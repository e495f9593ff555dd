"""Convert GGUF metadata to the model's Hugging Face config, per architecture.

Strict: an unread key of the architecture is an error, as it may change the maths. Values missing from GGUF (Gemma's
query scale and window pattern) follow llama.cpp: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-model.cpp
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from typing import Any, TypeVar

import numpy as np

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.file import GgufFile

Config = dict[str, Any]
T = TypeVar("T", int, float, str, bool)

# These do not change the computation: they repeat a tensor's shape or describe the file.
_HARMLESS = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})
# Zero or false: the mechanism is off.
_ABSENT_WHEN_ZERO = frozenset(
    {
        "expert_count",
        "expert_used_count",
        "expert_shared_count",
        "expert_shared_feed_forward_length",
        "attention.max_alibi_bias",
        "use_parallel_residual",
    }
)
_SOFTMAX = 1  # of expert_gating_func


class _Metadata:
    """The keys of one architecture; `finish` rejects those that were not read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self._prefix = f"{architecture}."
        self._read: set[str] = set()

    def need(self, key: str, kind: type[T]) -> T:
        """A required value."""
        value = self._get(key, kind)
        if value is None:
            raise ModelError(f"{self.file.path}: metadata {self._prefix}{key} is missing")
        return value

    def opt(self, key: str, kind: type[T], default: T) -> T:
        """An optional value."""
        value = self._get(key, kind)
        return default if value is None else value

    def flags(self, key: str, default: list[bool]) -> list[bool]:
        """One bool per layer, or `default`."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self._prefix}{key}", default)
        if not isinstance(value, list) or len(value) != len(default) or not all(type(flag) is bool for flag in value):
            raise ModelError(f"{self.file.path}: metadata {self._prefix}{key} is not one bool per layer")
        return value

    def has(self, key: str) -> bool:
        return f"{self._prefix}{key}" in self.file.metadata

    def _get(self, key: str, kind: type[T]) -> T | None:
        self._read.add(key)
        value = self.file.metadata.get(f"{self._prefix}{key}")
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one value per layer, all equal
        if value is None or type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise ModelError(f"{self.file.path}: metadata {self._prefix}{key} is {value!r}, expected one {kind.__name__}")

    def finish(self) -> None:
        """Raise ModelError for a key that was not read."""
        for full, value in self.file.metadata.items():
            key = full.removeprefix(self._prefix)
            if key == full or key in self._read or key in _HARMLESS or (key in _ABSENT_WHEN_ZERO and not value):
                continue
            raise ModelError(f"{self.file.path}: metadata {full} = {value!r} is not supported for this architecture")


def hf_config(file: GgufFile) -> Config:
    """Return the Hugging Face config. Raises ModelError for an unsupported architecture, key or value."""
    architecture = file.metadata.get("general.architecture")
    build = _ARCHITECTURES.get(str(architecture))
    if build is None:
        raise ModelError(
            f"{file.path}: GGUF architecture {architecture} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    metadata = _Metadata(file, str(architecture))
    config = build(metadata)
    metadata.finish()
    return {**config, "dtype": _dtype(file), **_token_ids(file)}


def generation_config(file: GgufFile) -> Config:
    """Return the end-of-text ids: those in the metadata, and control tokens known to end a chat message."""
    metadata = file.metadata
    named = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    ends = dict.fromkeys(token for token in named if isinstance(token, int))
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    ends.update(dict.fromkeys(i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_OF_MESSAGE))
    ids = _token_ids(file)
    ids.pop("eos_token_id", None)
    return {**ids, "eos_token_id": list(ends)} if ends else ids


_CONTROL = 3  # of tokenizer.ggml.token_type
_END_OF_MESSAGE = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})


def _token_ids(file: GgufFile) -> Config:
    keys = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in keys.items()}
    return {name: value for name, value in ids.items() if isinstance(value, int)}


def _dtype(file: GgufFile) -> str:
    """The smallest lossless dtype of the matrices; bfloat16 if they are quantised."""
    types = {info.type.name for info in file.tensors.values() if len(info.shape) > 1}
    if types <= {"F32", "F64"}:
        return "float32"
    return "float16" if types <= {"F32", "F16"} else "bfloat16"


def _has(metadata: _Metadata, tensor: str) -> bool:
    return tensor in metadata.file.tensors


def _rows(metadata: _Metadata, tensor: str) -> int:
    info = metadata.file.tensors.get(tensor)
    if info is None:
        raise ModelError(f"{metadata.file.path}: tensor {tensor} is missing")
    return info.shape[0]


def _decoder(metadata: _Metadata, architecture: str, model_type: str) -> Config:
    """Config keys common to all decoders with RoPE."""
    width, heads = metadata.need("embedding_length", int), metadata.need("attention.head_count", int)
    if not heads:
        raise ModelError(f"{metadata.file.path}: metadata attention.head_count is 0")
    head_dim = metadata.opt("attention.key_length", int, width // heads)
    if metadata.opt("attention.value_length", int, head_dim) != head_dim:
        raise ModelError(f"{metadata.file.path}: heads whose keys and values differ in length are not supported")
    if not metadata.opt("attention.causal", bool, True):
        raise ModelError(f"{metadata.file.path}: non-causal attention is not supported")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": width,
        "num_hidden_layers": metadata.need("block_count", int),
        "intermediate_size": metadata.need("feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.opt("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": metadata.need("context_length", int),
        "vocab_size": _rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not _has(metadata, "output.weight"),
    }


def _rope(metadata: _Metadata, head_dim: int, default_theta: float = 10000.0) -> Config:
    """RoPE base and scaling over whole heads."""
    if metadata.opt("rope.dimension_count", int, head_dim) != head_dim:
        raise ModelError(f"{metadata.file.path}: rotary positions on a part of each head are not supported here")
    scaling, factors = _scaling(metadata), _frequency_factors(metadata)
    if scaling and factors:
        raise ModelError(f"{metadata.file.path}: both rope.scaling and rope_freqs.weight scale the rotary positions")
    scaling = scaling or factors
    theta = {"rope_theta": metadata.opt("rope.freq_base", float, default_theta)}
    return {**theta, "rope_scaling": scaling} if scaling else theta


def _scaling(metadata: _Metadata) -> Config | None:
    linear = metadata.opt("rope.scale_linear", float, 1.0)  # the older spelling
    kind = metadata.opt("rope.scaling.type", str, "none" if linear == 1.0 else "linear")
    factor = metadata.opt("rope.scaling.factor", float, linear)
    attention = metadata.opt("rope.scaling.attn_factor", float, 1.0)
    if kind != "yarn" and attention != 1.0:
        raise ModelError(f"{metadata.file.path}: metadata rope.scaling.attn_factor is not supported without yarn")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ModelError(f"{metadata.file.path}: rope scaling {kind} is not supported for this architecture")
    if metadata.opt("rope.scaling.yarn_ext_factor", float, 1.0) not in (1.0, -1.0):
        raise ModelError(f"{metadata.file.path}: metadata rope.scaling.yarn_ext_factor other than 1 is not supported")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.need("rope.scaling.original_context_length", int),
        "beta_fast": metadata.opt("rope.scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": metadata.opt("rope.scaling.yarn_beta_slow", float, 1.0),
    }
    attention *= metadata.opt("rope.scaling.yarn_attn_factor", float, 1.0)
    if attention != 1.0:
        scaling["attention_factor"] = attention * (0.1 * log(factor) + 1.0)
    return scaling


def _frequency_factors(metadata: _Metadata) -> Config | None:
    """RoPE scaling from the frequency divisors in `rope_freqs.weight`: Llama 3.1's scaling if they match it.

    Any other divisors are expressed as LongRoPE with equal short and long factors and no attention factor.
    """
    if not _has(metadata, "rope_freqs.weight"):
        return None
    factors = metadata.file.tensor("rope_freqs.weight").astype(np.float64)
    if np.all(factors == 1.0):
        return None
    theta = metadata.opt("rope.freq_base", float, 10000.0)
    for original in (8192, metadata.need("context_length", int)):
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        if np.allclose(factors, _llama3_factors(len(factors), theta, scaling), rtol=1e-5):
            return scaling
    return {
        "rope_type": "longrope",
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "original_max_position_embeddings": metadata.need("context_length", int),
        "attention_factor": 1.0,
    }


def _llama3_factors(pairs: int, theta: float, scaling: Config) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Frequency divisors that llama.cpp's converter writes for Llama 3.1's scaling, float64 [pairs]."""
    wavelength = 2 * np.pi * theta ** (np.arange(pairs) / pairs)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    result: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return result


def _llama(metadata: _Metadata) -> Config:
    experts = metadata.opt("expert_count", int, 0)
    window = metadata.opt("attention.sliding_window", int, 0)
    if experts:
        config = _decoder(metadata, "MixtralForCausalLM", "mixtral")
        if not _has(metadata, "blk.0.ffn_gate_exps.weight"):
            raise ModelError(f"{metadata.file.path}: keeps its experts in separate tensors; convert it again")
        config |= {"num_local_experts": experts, "num_experts_per_tok": metadata.need("expert_used_count", int)}
    elif window:
        config = _decoder(metadata, "MistralForCausalLM", "mistral")
    else:
        config = _decoder(metadata, "LlamaForCausalLM", "llama")
        config["attention_bias"] = _has(metadata, "blk.0.attn_q.bias")
        config["mlp_bias"] = _has(metadata, "blk.0.ffn_up.bias")
    if window:
        config["sliding_window"] = window
    if metadata.has("rope.dimension_count") and not metadata.has("attention.key_length"):
        config["head_dim"] = metadata.need("rope.dimension_count", int)
    return config | _rope(metadata, config["head_dim"])


def _qwen2(metadata: _Metadata) -> Config:
    config = _decoder(metadata, "Qwen2ForCausalLM", "qwen2")
    return config | _rope(metadata, config["head_dim"])


def _qwen3(metadata: _Metadata) -> Config:
    config = _decoder(metadata, "Qwen3ForCausalLM", "qwen3")
    config["attention_bias"] = _has(metadata, "blk.0.attn_q.bias")
    return config | _rope(metadata, config["head_dim"])


def _qwen3moe(metadata: _Metadata) -> Config:
    if metadata.opt("expert_gating_func", int, _SOFTMAX) != _SOFTMAX:
        raise ModelError(f"{metadata.file.path}: only softmax over the experts is supported")
    config = _decoder(metadata, "Qwen3MoeForCausalLM", "qwen3_moe")
    config |= {
        "attention_bias": _has(metadata, "blk.0.attn_q.bias"),
        "num_experts": metadata.need("expert_count", int),
        "num_experts_per_tok": metadata.need("expert_used_count", int),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length", int),
        "norm_topk_prob": metadata.opt("expert_weights_norm", bool, True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return config | _rope(metadata, config["head_dim"])


def _gemma(metadata: _Metadata, architecture: str, model_type: str, period: int, widest: int) -> Config:
    """`period`: distance of full-attention layers. `widest`: layer count of the size scaled by width / heads."""
    config = _decoder(metadata, architecture, model_type)
    del config["hidden_act"]
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    windowed = metadata.flags("attention.sliding_window_pattern", [(i + 1) % period != 0 for i in range(layers)])
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": config["hidden_size"] // heads if layers == widest else config["head_dim"],
        "sliding_window": metadata.need("attention.sliding_window", int),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in windowed],
    }


def _gemma2(metadata: _Metadata) -> Config:
    config = _gemma(metadata, "Gemma2ForCausalLM", "gemma2", period=2, widest=46)
    config["attn_logit_softcapping"] = metadata.opt("attn_logit_softcapping", float, 50.0)
    config["final_logit_softcapping"] = metadata.opt("final_logit_softcapping", float, 30.0)
    return config | _rope(metadata, config["head_dim"])


def _gemma3(metadata: _Metadata) -> Config:
    config = _gemma(metadata, "Gemma3ForCausalLM", "gemma3_text", period=6, widest=62)
    config["attn_logit_softcapping"] = None
    config["final_logit_softcapping"] = metadata.opt("final_logit_softcapping", float, 0.0) or None
    config["rope_local_base_freq"] = metadata.opt("rope.freq_base_swa", float, 10000.0)
    return config | _rope(metadata, config["head_dim"], default_theta=1_000_000.0)


def _olmo2(metadata: _Metadata) -> Config:
    config = _decoder(metadata, "Olmo2ForCausalLM", "olmo2")
    config["attention_bias"] = False
    return config | _rope(metadata, config["head_dim"])


def _phi3(metadata: _Metadata) -> Config:
    config = _decoder(metadata, "Phi3ForCausalLM", "phi3")
    head_dim, original = config["head_dim"], config["max_position_embeddings"]
    config["partial_rotary_factor"] = metadata.opt("rope.dimension_count", int, head_dim) / head_dim
    config["rope_theta"] = metadata.opt("rope.freq_base", float, 10000.0)
    config["original_max_position_embeddings"] = metadata.opt("rope.scaling.original_context_length", int, original)
    config["sliding_window"] = metadata.opt("attention.sliding_window", int, 0) or None
    attention = metadata.opt("rope.scaling.attn_factor", float, 1.0)
    kind = "longrope" if _has(metadata, "rope_factors_long.weight") else "none"
    if kind == "longrope":
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": metadata.file.tensor("rope_factors_short.weight").tolist(),
            "long_factor": metadata.file.tensor("rope_factors_long.weight").tolist(),
            "attention_factor": attention,
        }
    if metadata.opt("rope.scaling.type", str, kind) != kind or (kind == "none" and attention != 1.0):
        raise ModelError(f"{metadata.file.path}: rope scaling without rope_factors_long.weight is not supported here")
    return config


def _gpt2(metadata: _Metadata) -> Config:
    width, heads = metadata.need("embedding_length", int), metadata.need("attention.head_count", int)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": metadata.need("block_count", int),
        "n_head": heads,
        "n_inner": metadata.need("feed_forward_length", int),
        "n_positions": metadata.need("context_length", int),
        "layer_norm_epsilon": metadata.need("attention.layer_norm_epsilon", float),
        "activation_function": "gelu_new",
        "vocab_size": _rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not _has(metadata, "output.weight"),
    }


_ARCHITECTURES: Mapping[str, Callable[[_Metadata], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
