"""A GGUF file as a Hugging Face checkpoint: config, and tensors under Hugging Face names and in its layouts.

Undoes llama.cpp's conversion: renaming, interleaved rotary pairs (Llama), norm weights + 1 (Gemma), transposed
projections (GPT-2), stacked experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import to_float32
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.gguf.config import generation_config, hf_config
from pagoda.common.weights.gguf.dequantize import stored_dtype
from pagoda.common.weights.gguf.file import GgufFile, GgufTensor


class GgufCheckpoint:
    """A model in one GGUF file. Quantised tensors are dequantised to float32, others keep their dtype.

    `weights`: False yields no tensors, only the config.
    """

    def __init__(self, file: GgufFile, weights: bool = True) -> None:
        self.file = file
        self.folder: Path = file.path.parent
        self.gguf_metadata: Mapping[str, Any] | None = file.metadata
        self._config = hf_config(file)
        self._layout = LAYOUTS[file.metadata["general.architecture"]]
        self._tensors = self._known_tensors() if weights else ()

    def _known_tensors(self) -> tuple[GgufTensor, ...]:
        """Tensors that are Hugging Face weights. Raises WeightError for one unknown in this architecture."""
        result = []
        for name, info in self.file.tensors.items():
            try:
                target = self._layout.rename(name)
            except (KeyError, ValueError):
                architecture = self.file.metadata["general.architecture"]
                raise WeightError(f"{self.file.path}: tensor {name} is unknown in a {architecture} model") from None
            if target is not None:
                result.append(info)
        return tuple(result)

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def num_tensors(self) -> int:
        """Number of tensors that `tensors` yields; stacked experts count individually."""
        return sum(info.shape[0] if "{e}" in str(self._layout.rename(info.name)) else 1 for info in self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that `tensors` yields."""
        return sum(prod(info.shape) * self._itemsize(info) for info in self._tensors)

    def _itemsize(self, info: GgufTensor) -> int:
        shifted = self._layout.norm_plus_one and info.name.endswith("norm.weight")
        return 4 if shifted else stored_dtype(info.type).itemsize

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        """Return the end-of-text ids; GGUF has no sampling defaults."""
        return generation_config(self.file)

    def tensors(self) -> Iterator[NamedTensor]:
        """Yield every tensor under its Hugging Face name, in file order."""
        for info in self._tensors:
            yield from self._layout.restore(info.name, self.file.tensor(info.name), self._config)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Names and layouts of one architecture: GGUF name stem -> Hugging Face stem (without `.weight` and `.bias`)."""

    root: Mapping[str, str]
    block: Mapping[str, str]  # stems after `blk.N.` and `{prefix}.N.`; stacked experts have `{e}`
    prefix: str = "model.layers"
    interleaved: Mapping[str, str] = field(default_factory=dict)  # stem of interleaved rotary pairs -> key of its heads
    norm_plus_one: bool = False  # norms are stored as weight + 1
    transposed: frozenset[str] = frozenset()
    in_config: frozenset[str] = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})  # not weights

    def rename(self, name: str) -> str | None:
        """Return a tensor's Hugging Face name, with `{e}` for stacked experts; None if it is part of the config.

        Raises KeyError for an unknown name.
        """
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            raise KeyError(name)
        if stem.rpartition(".")[2] in self.in_config:
            return None
        if not stem.startswith("blk."):
            return f"{self.root[stem]}.{suffix}"
        _, index, inner = stem.split(".", 2)
        return f"{self.prefix}.{index}.{self.block[inner]}.{suffix}"

    def restore(self, name: str, array: npt.NDArray[np.generic], config: Mapping[str, Any]) -> Iterator[NamedTensor]:
        """Yield the Hugging Face tensors of one GGUF tensor. `config`: the Hugging Face config."""
        target = self.rename(name)
        if target is None:
            return
        inner = name.rpartition(".")[0].split(".", 2)[-1]
        if inner in self.interleaved:
            array = _half_split(array, config[self.interleaved[inner]])
        if self.norm_plus_one and target.endswith("norm.weight"):
            array = to_float32(array) - np.float32(1)
        if inner in self.transposed and array.ndim == 2:
            array = array.T
        if "{e}" in target:
            yield from ((target.replace("{e}", str(e)), expert) for e, expert in enumerate(array))
        else:
            yield target, array


def _half_split(array: npt.NDArray[np.generic], heads: int) -> npt.NDArray[np.generic]:
    """Reorder the rows of each head from interleaved to half-split rotary pairs, [N*H, ...]."""
    if len(array) % (2 * heads):
        raise WeightError(f"{len(array)} rows of a rotary projection do not divide into {heads} heads of pairs")
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


_ROOT = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_AROUND_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_PLAIN = {**_ATTENTION, **_GATED, **_PRE_NORMS}
_ROTARY = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
}
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
}

LAYOUTS: Mapping[str, TensorLayout] = {
    "llama": TensorLayout(_ROOT, {**_PLAIN, **_MIXTRAL_EXPERTS}, interleaved=_ROTARY),
    "qwen2": TensorLayout(_ROOT, _PLAIN),
    "qwen3": TensorLayout(_ROOT, {**_PLAIN, **_QK_NORM}),
    "qwen3moe": TensorLayout(_ROOT, {**_PLAIN, **_QK_NORM, **_QWEN_EXPERTS}),
    "gemma2": TensorLayout(_ROOT, {**_ATTENTION, **_GATED, **_AROUND_NORMS}, norm_plus_one=True),
    "gemma3": TensorLayout(_ROOT, {**_ATTENTION, **_GATED, **_AROUND_NORMS, **_QK_NORM}, norm_plus_one=True),
    "olmo2": TensorLayout(_ROOT, {**_ATTENTION, **_GATED, **_POST_NORMS, **_QK_NORM}),
    "phi3": TensorLayout(
        _ROOT,
        {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
            **_PRE_NORMS,
        },
    ),
    "gpt2": TensorLayout(
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        prefix="transformer.h",
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
}
"""Supported architectures by their GGUF name."""
