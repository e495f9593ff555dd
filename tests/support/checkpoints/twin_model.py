"""A model folder with the tokenizer of another model and few random weights: it answers nonsense, in no time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from support.checkpoints import tiny_folder

from pagoda.common.text.tokenizer import load_tokenizer


def write_twin(folder: Path, model: Path, *, width: int = 64) -> Path:
    """Write a Llama of two layers with the tokenizer and the chat template of a GGUF file. Returns the folder."""
    text = load_tokenizer(model)
    config = {"vocab_size": text.vocab_size, "hidden_size": width, "max_position_embeddings": 8192}
    whole = tiny_folder.CONFIG | config | {"bos_token_id": text.bos_token_id, "eos_token_id": text.eos_token_id}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(whole))
    weights: dict[str, np.ndarray] = tiny_folder.tensors(whole)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text.backend.save(str(folder / "tokenizer.json"))
    own = {**text.special_tokens, "chat_template": text.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder
