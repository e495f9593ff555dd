"""A GGUF file as a checkpoint: metadata as a Hugging Face config, tensors under Hugging Face names and layouts."""

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

# GGUF's tensor names and layouts, per architecture, back to those of Hugging Face checkpoints.
#
# GGUF's converters rename, store q and k of Llama-like models with rotary pairs interleaved, add one to Gemma's norms,
# transpose GPT-2's projections and stack experts; each of these is undone here. Knows nothing of metadata or bytes.


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One architecture: GGUF stems to Hugging Face stems (without `.weight` and `.bias`).

    `block` stems follow `blk.N.` and `{prefix}.N.`. Stacked experts have `{e}` in their name. `interleaved`: stems
    whose rows are rotary pairs, with the config key that counts their heads. `minus_one`: norms hold weight + 1.
    `transposed`: stems of matrices stored the other way round. `in_config`: tensors that the config already carries.
    """

    root: Mapping[str, str]
    block: Mapping[str, str]
    prefix: str = "model.layers"
    interleaved: Mapping[str, str] = field(default_factory=dict)
    minus_one: bool = False
    transposed: frozenset[str] = frozenset()
    in_config: frozenset[str] = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})

    def rename(self, name: str) -> str | None:
        """The Hugging Face name of a tensor (`{e}` open for stacked experts); None for one the config carries.

        Raises KeyError for a name this architecture does not have.
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
        """The tensor or tensors that Hugging Face stores for this one. `config` is the Hugging Face config."""
        target = self.rename(name)
        if target is None:
            return
        inner = name.rpartition(".")[0].split(".", 2)[-1]
        if inner in self.interleaved:
            array = _half_split(array, config[self.interleaved[inner]])
        if self.minus_one and target.endswith("norm.weight"):
            array = to_float32(array) - np.float32(1)
        if inner in self.transposed and array.ndim == 2:
            array = array.T
        if "{e}" in target:
            yield from ((target.replace("{e}", str(e)), expert) for e, expert in enumerate(array))
        else:
            yield target, array


def _half_split(array: npt.NDArray[np.generic], heads: int) -> npt.NDArray[np.generic]:
    """Rows of each head from (0, 1) (2, 3) ... pairs to (0, H/2) (1, H/2+1) ... pairs; [N*H, ...] or [N*H]."""
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
    "gemma2": TensorLayout(_ROOT, {**_ATTENTION, **_GATED, **_AROUND_NORMS}, minus_one=True),
    "gemma3": TensorLayout(_ROOT, {**_ATTENTION, **_GATED, **_AROUND_NORMS, **_QK_NORM}, minus_one=True),
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
"""Every architecture whose GGUF files can be served, under GGUF's own name for it."""


class GgufCheckpoint:
    """One model in one file. Quantised tensors come as float32, others in their own dtype.

    `weights`: False yields no tensors (the config alone is wanted).
    """

    def __init__(self, file: GgufFile, weights: bool = True) -> None:
        self.file = file
        self.folder: Path = file.path.parent
        self.gguf_metadata: Mapping[str, Any] | None = file.metadata
        self._config = hf_config(file)
        self._layout = LAYOUTS[file.metadata["general.architecture"]]
        self._tensors = self._served() if weights else ()

    def _served(self) -> tuple[GgufTensor, ...]:
        """The tensors that Hugging Face has too. Raises WeightError for one that this architecture does not have."""
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
        """What opens it again: the file."""
        return self.file.path

    @property
    def num_tensors(self) -> int:
        """How many tensors `tensors` yields; stacked experts count one by one."""
        return sum(info.shape[0] if "{e}" in str(self._layout.rename(info.name)) else 1 for info in self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that `tensors` yields."""
        return sum(prod(info.shape) * self._itemsize(info) for info in self._tensors)

    def _itemsize(self, info: GgufTensor) -> int:
        shifted = self._layout.minus_one and info.name.endswith("norm.weight")
        return 4 if shifted else stored_dtype(info.type).itemsize

    def config(self) -> dict[str, Any]:
        """The config dict that Hugging Face would hold for this model."""
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        """End-of-text ids; GGUF carries no sampling defaults."""
        return generation_config(self.file)

    def tensors(self) -> Iterator[NamedTensor]:
        """Every tensor under its Hugging Face name, dequantised one by one in the order of the file."""
        for info in self._tensors:
            yield from self._layout.restore(info.name, self.file.tensor(info.name), self._config)
