"""A small BERT on disk, as the hub would give it, without transformers: config, random weights, WordPiece tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

WORDS: Final = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "dog",
    "##s",
    *"abcdefghijklmnopq",
)
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}


def write_encoder(folder: Path, **config: Any) -> Path:
    """Write it; the folder. `config`: changes to CONFIG. A classifier has weights for its labels."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {**CONFIG, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(tensors(whole), folder / "model.safetensors", metadata={"format": "pt"})
    word_pieces().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    return folder


def write_modules(folder: Path, mode: str = "mean_tokens", *kinds: str, **bert: Any) -> Path:
    """Make a sentence-transformers folder of it; the folder. `bert`: its sentence_bert_config.json."""
    names = ["Transformer", "Pooling", *kinds]
    listed = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"x.models.{kind}"}
        for index, kind in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": CONFIG["hidden_size"], f"pooling_mode_{mode}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps(bert))
    return folder


def tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights, float32, the same for the same shapes."""
    noise = np.random.default_rng(0)
    width, ffn = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], width),
        "pooler.dense.weight": (width, width),
    }
    norms = ["embeddings.LayerNorm"]
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        shapes |= {f"{layer}.attention.self.{part}.weight": (width, width) for part in ("query", "key", "value")}
        shapes |= {f"{layer}.attention.output.dense.weight": (width, width)}
        shapes |= {f"{layer}.intermediate.dense.weight": (ffn, width), f"{layer}.output.dense.weight": (width, ffn)}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    if config["architectures"][0] != "BertModel":
        shapes = {f"bert.{name}": shape for name, shape in shapes.items()}
        norms = [f"bert.{name}" for name in norms]
        shapes["classifier.weight"] = (len(config.get("id2label", {})) or config["num_labels"], width)
    biases = {
        name.replace("weight", "bias"): (shape[0],) for name, shape in shapes.items() if "embeddings." not in name
    }
    random = {name: noise.normal(scale=shape[-1] ** -0.5, size=shape) for name, shape in (shapes | biases).items()}
    ones = {f"{name}.weight": np.ones(width) for name in norms} | {f"{name}.bias": np.zeros(width) for name in norms}
    return {name: value.astype(np.float32) for name, value in (random | ones).items()}


def word_pieces() -> tokenizers.Tokenizer:
    """BERT's: lower case, words, pieces of words, [CLS] a [SEP] b [SEP]."""
    ids = {word: index for index, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, ids[word]) for word in ("[CLS]", "[SEP]")],
    )
    return made
