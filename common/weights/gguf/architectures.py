"""The model's Hugging Face config from GGUF metadata, per architecture.

Values missing from GGUF (Gemma's query scale, window patterns, SmolLM3's layers without RoPE) follow llama.cpp:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-model.cpp. An architecture may become another one with the
same maths: Xverse, InternLM2 and EXAONE 3 are read as Llama, MiniCPM as Granite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.families import (
    encoders,
    gemma,
    gpt_block,
    latent,
    linear_attention,
    llama_block,
    mixtures,
    sigmoid_mixtures,
    state_space,
)
from pagoda.common.weights.gguf.file import GgufFile
from pagoda.common.weights.gguf.metadata import Config, Metadata


def hf_config(file: GgufFile) -> Config:
    """Return the Hugging Face config. Raises ModelError for an unsupported architecture, key or value."""
    architecture = file.metadata.get("general.architecture")
    build = ARCHITECTURES.get(str(architecture))
    if build is None:
        raise ModelError(
            f"{file.path}: GGUF architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    metadata = Metadata(file, str(architecture))
    config = build(metadata)
    metadata.finish()
    return {**config, "dtype": _dtype(file), **_token_ids(file)}


def generation_config(file: GgufFile) -> Config:
    """Return the end-of-text ids: those in the metadata, and control tokens known to end a chat message."""
    metadata = file.metadata
    token_ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    ends = dict.fromkeys(token for token in token_ids if isinstance(token, int))
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    control = {tokens[i]: i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_OF_MESSAGE}
    if control.keys() >= _HARMONY:
        control.pop("<|end|>", None)  # It ends one of several messages of a turn.
        ends = {token: None for token in ends if tokens[token] != "<|end|>"}
    ends.update(dict.fromkeys(sorted(control.values())))
    ids = _token_ids(file)
    ids.pop("eos_token_id", None)
    return {**ids, "eos_token_id": list(ends)} if ends else ids


_CONTROL: Final = 3  # The value of tokenizer.ggml.token_type for control tokens.
_HARMONY: Final = frozenset({"<|return|>", "<|call|>"})
_END_OF_MESSAGE: Final = _HARMONY | {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>"}


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


_KINDS: Final = (
    llama_block,
    gpt_block,
    gemma,
    mixtures,
    sigmoid_mixtures,
    latent,
    state_space,
    linear_attention,
    encoders,
)
ARCHITECTURES: Final[Mapping[str, Callable[[Metadata], Config]]] = {
    name: build for kind in _KINDS for name, build in kind.CONFIGS.items()
}
"""GGUF architecture -> builder of the Hugging Face config."""
