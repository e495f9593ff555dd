"""What llama.cpp's converter writes for encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np

Config = dict[str, Any]
Pieces = list[tuple[str, np.ndarray]]


def _nomic(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_context_length(config["max_trained_positions"])
    writer.add_rope_freq_base(config["rotary_emb_base"])


def _embedding_gemma(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _nomic_mixture(writer: gguf.GGUFWriter, config: Config) -> None:
    _nomic(writer, config)
    writer.add_moe_every_n_layers(config["moe_every_n_layers"])
    writer.add_expert_used_count(config["moe_top_k"])


def _modernbert(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["local_attention"])
    writer.add_sliding_window_pattern(3)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_layer_norm_eps(config["norm_eps"])


SPECIAL: dict[str, Any] = {
    "nomic-bert": _nomic,
    "nomic-bert-moe": _nomic_mixture,
    "modern-bert": _modernbert,
    "gemma-embedding": _embedding_gemma,
}
"""What the converter's class of an architecture writes beyond the keys of all."""


def _bert_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    """RoBERTa's positions without those of padding, and names without its own."""
    offset = config["pad_token_id"] + 1 if config["model_type"].endswith("roberta") else 0
    cut = offset if name.endswith("position_embeddings.weight") else 0
    return [(name.removeprefix("roberta."), array[cut:])]


def _nomic_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    """Without the bias of the experts."""
    if name.endswith("mlp.experts.bias"):
        return []
    if name.endswith(("mlp.w1", "mlp.w2")):
        stack = array.reshape(config["num_experts"], config["n_inner"], -1)
        return [(f"{name}.weight", stack if name.endswith("w1") else stack.swapaxes(1, 2))]
    return None


PIECES: dict[str, Callable[[Config, str, np.ndarray], Pieces | None]] = {
    "bert": _bert_pieces,
    "nomic-bert-moe": _nomic_pieces,
}
"""None: the tensor as it is."""
