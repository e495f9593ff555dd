"""Config keys that the decoders in GGUF files have in common, and `DecoderKeys`, which describes most of them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.metadata import Config, Metadata, has_tensor, rope, rows

SIGMOID: Final = 2  # The value of expert_gating_func for a sigmoid.
RMS: Final = "attention.layer_norm_rms_epsilon"
LAYER: Final = "attention.layer_norm_epsilon"
KV_HEADS: Final = "attention.head_count_kv"
OF_IMAGES: Final = ("rope.dimension_sections", "n_deepstack_layers")  # Text has the same position in all three axes.


def decoder(
    metadata: Metadata, architecture: str, model_type: str, epsilon: tuple[str, str], *, bidirectional: bool = False
) -> Config:
    """Config keys common to all decoders with RoPE. `epsilon`: the norms' config key and metadata key.

    `bidirectional`: tokens may attend to later ones.
    """
    width = metadata.need("embedding_length", int)
    heads = metadata.need("attention.head_count", int)
    if not heads:
        raise ModelError(f"{metadata.file.path}: metadata attention.head_count is 0")
    head_dim = metadata.opt("attention.key_length", int, width // heads)
    if metadata.opt("attention.value_length", int, head_dim) != head_dim:
        raise ModelError(f"{metadata.file.path}: heads whose keys and values differ in length are not supported")
    if not (metadata.opt("attention.causal", bool, True) or bidirectional):
        raise ModelError(f"{metadata.file.path}: non-causal attention is not supported")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": width,
        "num_hidden_layers": metadata.need("block_count", int) - metadata.opt("nextn_predict_layers", int, 0),
        "intermediate_size": metadata.need("feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.opt("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        epsilon[0]: metadata.need(epsilon[1], float),
        "max_position_embeddings": metadata.need("context_length", int),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not has_tensor(metadata, "output.weight"),
    }


Value = tuple[str, type[Any], Any]
"""Metadata key, its type, and the default (None: required)."""


@dataclass(frozen=True, slots=True)
class DecoderKeys:
    """An architecture described by the keys that all decoders have, and a few more."""

    architecture: str
    model_type: str
    epsilon: tuple[str, str] = ("rms_norm_eps", RMS)  # Config key and metadata key of the norms' epsilon.
    fixed: Mapping[str, Any] = field(default_factory=dict)  # Config values that the architecture implies.
    values: Mapping[str, Value] = field(default_factory=dict)  # Config key -> the metadata that has its value.
    present: Mapping[str, str] = field(default_factory=dict)  # Config key -> the tensor whose presence makes it true.
    absent: tuple[str, ...] = ()  # Config keys that the architecture does not have.
    ignored: tuple[str, ...] = ()  # Metadata keys that say nothing new.
    partial: bool = False  # RoPE may cover a part of each head.
    theta: float = 10000.0  # Base of RoPE if the file states none.
    some_layers: bool = False  # Values per layer are 0 for layers without the mechanism.
    more: Callable[[Metadata, Config], Config] | None = None  # Returns further config keys from those so far.

    def __call__(self, metadata: Metadata) -> Config:
        metadata = metadata.of_some_layers() if self.some_layers else metadata
        bidirectional = bool(self.fixed.get("use_bidirectional_attention"))
        config = decoder(metadata, self.architecture, self.model_type, self.epsilon, bidirectional=bidirectional)
        config |= self.fixed
        for key, (name, kind, default) in self.values.items():
            config[key] = metadata.need(name, kind) if default is None else metadata.opt(name, kind, default)
        for key, tensor in self.present.items():
            config[key] = has_tensor(metadata, tensor)
        metadata.ignore(*self.ignored)
        if self.more is not None:
            config |= self.more(metadata, config)
        config |= rope(metadata, config["head_dim"], self.theta, partial=self.partial)
        return {key: value for key, value in config.items() if key not in self.absent}


ATTENTION_BIAS: Final = {"attention_bias": "blk.0.attn_q.bias"}
BIASES: Final = {**ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"}
LAYER_NORM: Final = ("layer_norm_eps", LAYER)
EXPERTS: Final[Mapping[str, Value]] = {
    "num_experts": ("expert_count", int, None),
    "num_experts_per_tok": ("expert_used_count", int, None),
}
EXPERT_WIDTH: Final[Mapping[str, Value]] = {"moe_intermediate_size": ("expert_feed_forward_length", int, None)}
EVERY_LAYER: Final = {"decoder_sparse_step": 1, "mlp_only_layers": []}
MULTIPLIERS: Final[Mapping[str, Value]] = {
    "embedding_multiplier": ("embedding_scale", float, 1.0),
    "residual_multiplier": ("residual_scale", float, 1.0),
    "logits_scaling": ("logit_scale", float, 1.0),
}
ROUTED: Final[Mapping[str, Value]] = {
    "n_routed_experts": ("expert_count", int, None),
    "num_experts_per_tok": ("expert_used_count", int, None),
    **EXPERT_WIDTH,
    "n_shared_experts": ("expert_shared_count", int, 0),
    "norm_topk_prob": ("expert_weights_norm", bool, False),
    "routed_scaling_factor": ("expert_weights_scale", float, 1.0),
    "first_k_dense_replace": ("leading_dense_block_count", int, 0),
    "n_group": ("expert_group_count", int, 1),
    "topk_group": ("expert_group_used_count", int, 1),
}


def expect_gating(metadata: Metadata, function: int, default: int) -> None:
    if metadata.opt("expert_gating_func", int, default) != function:
        scores = "sigmoid" if function == SIGMOID else "softmax"
        raise ModelError(f"{metadata.file.path}: only {scores} over the experts is supported")


def softmax_experts(metadata: Metadata, config: Config) -> Config:
    expect_gating(metadata, 1, 1)
    return {}


def sigmoid_experts(metadata: Metadata, config: Config) -> Config:
    expect_gating(metadata, SIGMOID, SIGMOID)
    return {}


def layer_types(windowed: list[bool]) -> list[str]:
    return ["sliding_attention" if slides else "full_attention" for slides in windowed]


def windows(metadata: Metadata, config: Config, period: int) -> Config:
    """The window of some layers. `period`: distance of full-attention layers if the file does not state the pattern."""
    pattern = [(i + 1) % period != 0 for i in range(config["num_hidden_layers"])]
    return {
        "sliding_window": metadata.need("attention.sliding_window", int),
        "layer_types": layer_types(metadata.flags("attention.sliding_window_pattern", pattern)),
    }


def as_float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def any_layer(metadata: Metadata, config: Config, tensor: str) -> bool:
    return any(has_tensor(metadata, f"blk.{layer}.{tensor}") for layer in range(config["num_hidden_layers"]))
