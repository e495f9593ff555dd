"""Encoders: BERT (also RoBERTa's, whose position table starts at 0 here), ModernBERT, Nomic, Jina, EmbeddingGemma."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.decoder_keys import LAYER, RMS, DecoderKeys, windows
from pagoda.common.weights.gguf.metadata import Config, Metadata, has_tensor, rope, rows

_TYPES: Final = "token_types.weight"
_CLASSIFIER: Final = "cls.output.weight"


def _encoder(metadata: Metadata, architecture: str, model_type: str) -> Config:
    if metadata.opt("attention.causal", bool, False):
        raise ModelError(f"{metadata.file.path}: {architecture} with causal attention is not supported")
    heads = metadata.need("attention.head_count", int)
    metadata.ignore("attention.head_count_kv", "classifier.output_labels")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": metadata.need("embedding_length", int),
        "num_hidden_layers": metadata.need("block_count", int),
        "num_attention_heads": heads,
        "intermediate_size": metadata.need("feed_forward_length", int),
        "layer_norm_eps": metadata.need(LAYER, float),
        "max_position_embeddings": metadata.need("context_length", int),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "type_vocab_size": _token_types(metadata),
        **({"num_labels": _rows(metadata, _CLASSIFIER)} if has_tensor(metadata, _CLASSIFIER) else {}),
    }


def _task(metadata: Metadata, stem: str) -> str:
    """Return the architecture: a classifier if the file has its head (of rerankers), else an embedder."""
    return f"{stem}ForSequenceClassification" if has_tensor(metadata, _CLASSIFIER) else f"{stem}Model"


def _token_types(metadata: Metadata) -> int:
    return _rows(metadata, _TYPES) if has_tensor(metadata, _TYPES) else 0


def _rows(metadata: Metadata, tensor: str) -> int:
    """Return the rows of a matrix, which is a vector if it has one."""
    return 1 if len(metadata.file.tensors[tensor].shape) == 1 else rows(metadata, tensor)


def _bert(metadata: Metadata) -> Config:
    config = _encoder(metadata, _task(metadata, "Bert"), "bert")
    return {**config, "max_position_embeddings": rows(metadata, "position_embd.weight"), "hidden_act": "gelu"}


def _jina_bert(metadata: Metadata) -> Config:
    config = _encoder(metadata, _task(metadata, "JinaBert"), "bert")
    metadata.ignore("attention.max_alibi_bias")
    return {**config, "position_embedding_type": "alibi", "feed_forward_type": "geglu"}


def _rotary(metadata: Metadata, architecture: str, model_type: str, activation: str) -> Config:
    config = _encoder(metadata, architecture, model_type)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {**config, "hidden_act": activation, **rope(metadata, head_dim)}


def _nomic_mixture(metadata: Metadata) -> Config:
    """Files leave out the bias of the experts."""
    return {
        **_rotary(metadata, "NomicBertModel", "nomic_bert", "gelu"),
        "activation_function": "gelu",
        "qkv_proj_bias": True,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "moe_every_n_layers": metadata.need("moe_every_n_layers", int),
        "num_experts": metadata.need("expert_count", int),
        "moe_top_k": metadata.need("expert_used_count", int),
    }


def _modernbert(metadata: Metadata) -> Config:
    config = _encoder(metadata, "ModernBertModel", "modernbert")
    biases = {key: has_tensor(metadata, f"{stem}.bias") for key, stem in _MODERN_BIASES.items()}
    metadata.ignore(RMS)
    if metadata.opt("rope.scaling.type", str, "none") != "none":
        raise ModelError(f"{metadata.file.path}: ModernBERT with scaled rotary positions is not supported")
    eps = config.pop("layer_norm_eps")
    del config["type_vocab_size"]
    return {
        **config,
        **biases,
        "norm_eps": eps,
        "hidden_activation": metadata.opt("hidden_activation", str, "gelu"),
        "local_attention": metadata.need("attention.sliding_window", int),
        "global_attn_every_n_layers": metadata.opt("attention.sliding_window_pattern", int, 3),
        "global_rope_theta": metadata.opt("rope.freq_base", float, 160_000.0),
        "local_rope_theta": metadata.opt("rope.freq_base_swa", float, 10_000.0),
    }


_MODERN_BIASES: Final = {"norm_bias": "output_norm", "attention_bias": "blk.0.attn_qkv", "mlp_bias": "blk.0.ffn_up"}
_EMBEDDING_GEMMA: Final = DecoderKeys(
    "Gemma3TextModel",
    "gemma3_text",
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": True,
    },
    values={"rope_local_base_freq": ("rope.freq_base_swa", float, 10_000.0)},
    absent=("hidden_act",),
    theta=1_000_000.0,
    more=lambda metadata, config: {"query_pre_attn_scalar": config["head_dim"], **windows(metadata, config, 6)},
)

CONFIGS: Final[Mapping[str, Callable[[Metadata], Config]]] = {
    "bert": _bert,
    "nomic-bert": lambda metadata: _rotary(metadata, "NomicBertModel", "nomic_bert", "silu"),
    "nomic-bert-moe": _nomic_mixture,
    "modern-bert": _modernbert,
    "jina-bert-v2": _jina_bert,
    "jina-bert-v3": lambda metadata: _rotary(metadata, "JinaEmbeddingsV3Model", "jina_embeddings_v3", "gelu"),
    "gemma-embedding": _EMBEDDING_GEMMA,
}
