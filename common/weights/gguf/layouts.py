"""Names and layouts of the tensors of each GGUF architecture, and the way back to Hugging Face's.

Undoes llama.cpp's conversion (https://github.com/ggml-org/llama.cpp/tree/master/conversion): renaming, interleaved
rotary pairs (Llama), norm weights + 1 (Gemma, Nemotron), transposed projections (GPT-2), q, k and v of all heads apart
(GPT-NeoX, Bloom, Falcon), stacked experts, latent projections apart (DeepSeek).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import to_float32
from pagoda.common.weights.gguf.dequantize import BlockType
from pagoda.common.weights.quantization.tensors import QuantizedTensor, Value

Array = npt.NDArray[np.generic]
Change = Callable[[Array, Mapping[str, Any]], Array]
"""A tensor as GGUF stores it, and the Hugging Face config -> the tensor in Hugging Face's layout."""


@dataclass(frozen=True, slots=True)
class RowChange:
    """A `Change` that keeps rows whole, so that it applies to rows of blocks [..., O, bytes], too.

    `of_blocks`: the change of those where it differs. Blocks run along the inputs: a tensor of them is [..., O, I] even
    where Hugging Face stores the transposed matrix.
    """

    change: Change
    of_blocks: Change | None = None

    def __call__(self, array: Array, config: Mapping[str, Any]) -> Array:
        return self.change(array, config)

    def apply(self, tensor: QuantizedTensor, config: Mapping[str, Any]) -> QuantizedTensor:
        """Return the changed blocks."""
        return replace(tensor, data=(self.of_blocks or self.change)(tensor.data, config))


@dataclass(frozen=True, slots=True)
class Join:
    """Two tensors that Hugging Face stores as one."""

    partner: str  # stem of the second one
    combine: Callable[[Array, Array], Array]
    of_blocks: Callable[[Array, Array], Array] | None = None  # of rows of blocks; None: it changes rows

    def __call__(self, first: Value, second: Value) -> Value:
        """Return the joined tensor. Blocks are of one type, and `of_blocks` is set."""
        if isinstance(first, QuantizedTensor) and isinstance(second, QuantizedTensor):
            assert self.of_blocks is not None
            return replace(first, data=self.of_blocks(first.data, second.data))
        assert not isinstance(first, QuantizedTensor)
        assert not isinstance(second, QuantizedTensor)
        return self.combine(first, second)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Names and layouts of one architecture: GGUF name stem -> Hugging Face stem (without `.weight` and `.bias`).

    A name with its suffix takes precedence over its stem, and is then mapped to a whole name.
    """

    root: Mapping[str, str]
    block: Mapping[str, str]  # stems after `blk.N.` and `{prefix}.N.`; stacked experts have `{e}`
    prefix: str = "model.layers"
    changes: Mapping[str, Change] = field(default_factory=dict)
    joined: Mapping[str, Join] = field(default_factory=dict)  # stem of the first -> the second
    whole: Mapping[str, str] = field(default_factory=dict)  # names in a block that have no suffix
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # fused q, k and v -> a stem for each
    numbers: Mapping[str, str] = field(default_factory=dict)  # name in a block -> metadata with a number per layer
    variant: tuple[str, Mapping[str, str]] | None = None  # block stems that are named otherwise if a tensor is present
    norm_plus_one: bool = False  # norms are stored as weight + 1
    plain_norms: frozenset[str] = frozenset()  # but not these
    in_config: frozenset[str] = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})  # not weights

    def for_file(self, tensors: Mapping[str, object]) -> TensorLayout:
        """Return the layout of a file with these tensors."""
        joined = {stem: join for stem, join in self.joined.items() if any(f".{stem}." in name for name in tensors)}
        layout = replace(self, joined=joined)
        if self.variant is None or self.variant[0] not in tensors:
            return layout
        return replace(layout, block={**self.block, **self.variant[1]}, variant=None)

    def rename(self, name: str) -> str | None:
        """Return a tensor's Hugging Face name, with `{e}` for stacked experts; None if it is part of the config.

        Raises KeyError for an unknown name.
        """
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            head, inner, _ = _parts(name)
            return f"{self.prefix}.{head.removeprefix('blk.')}{self.whole[inner]}"
        if stem.rpartition(".")[2] in self.in_config:
            return None
        if not stem.startswith("blk."):
            return f"{self.root[stem]}.{suffix}"
        _, index, inner = stem.split(".", 2)
        if whole := self.block.get(f"{inner}.{suffix}"):
            return f"{self.prefix}.{index}.{whole}"
        if inner in self.split:
            return f"{self.prefix}.{index}.{self.split[inner][0]}.{suffix}"
        return f"{self.prefix}.{index}.{self.block[inner]}.{suffix}"

    def shifts_norm(self, name: str) -> bool:
        """Whether a tensor is a norm stored as weight + 1."""
        return self.norm_plus_one and name.endswith("norm.weight") and _parts(name)[1] not in self.plain_norms

    def partner(self, name: str) -> str | None:
        """Return the tensor that Hugging Face stores behind this one, if any."""
        head, inner, suffix = _parts(name)
        join = self.joined.get(inner)
        return None if join is None else f"{head}{join.partner}.{suffix}"

    def is_partner(self, name: str) -> bool:
        """Whether another tensor yields this one, too."""
        return _parts(name)[1] in {join.partner for join in self.joined.values()}

    def keeps_blocks(self, name: str, kinds: Iterable[BlockType]) -> bool:
        """Whether `restore` yields blocks of a tensor of blocks. `kinds`: its type, and its partner's."""
        _, inner, suffix = _parts(name)
        change = self.changes.get(inner)
        join = self.joined.get(inner)
        if suffix == "bias" or not (change is None or isinstance(change, RowChange)) or self.shifts_norm(name):
            return False
        return len(set(kinds)) == 1 and (join is None or join.of_blocks is not None)

    def targets(self, name: str, experts: int) -> tuple[str, ...]:
        """Return the names of the tensors that `restore` yields. `experts`: length of the tensor's first axis."""
        target = self.rename(name)
        if target is None:
            return ()
        _, inner, suffix = _parts(name)
        if inner in self.split:
            first, *_ = stems = self.split[inner]
            base = target.removesuffix(f"{first}.{suffix}")
            return tuple(f"{base}{stem}.{suffix}" for stem in stems)
        return tuple(target.replace("{e}", str(e)) for e in range(experts if "{e}" in target else 1))

    def restore(
        self, name: str, tensor: Value, config: Mapping[str, Any], partner: Value | None = None
    ) -> Iterator[tuple[str, Value]]:
        """Yield the Hugging Face tensors of one GGUF tensor. `config`: the Hugging Face config.

        Tensors of blocks, and their partners, are such as `keeps_blocks`.
        """
        _, inner, _ = _parts(name)
        if partner is not None:
            tensor = self.joined[inner](tensor, partner)
        if (change := self.changes.get(inner)) is not None:
            if isinstance(tensor, QuantizedTensor):
                assert isinstance(change, RowChange)
                tensor = change.apply(tensor, config)
            else:
                tensor = change(tensor, config)
        if self.shifts_norm(name):
            assert not isinstance(tensor, QuantizedTensor)
            tensor = to_float32(tensor) - np.float32(1)
        rows = tensor.data if isinstance(tensor, QuantizedTensor) else tensor
        targets = self.targets(name, len(rows) if rows.ndim else 1)
        if inner in self.split:
            sizes = np.array([config[key] for key in ("num_attention_heads", *["num_key_value_heads"] * 2)])
            parts: Iterable[Array] = np.split(rows, np.cumsum(sizes * config["head_dim"])[:-1])
        else:
            parts = rows if "{e}" in str(self.rename(name)) else (rows,)
        for target, part in zip(targets, parts):
            yield target, replace(tensor, data=part) if isinstance(tensor, QuantizedTensor) else part


def _parts(name: str) -> tuple[str, str, str]:
    """`blk.N.` (empty outside blocks), the stem after it, and the suffix (empty if it has none)."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem = name
        suffix = ""
    if not stem.startswith("blk."):
        return "", stem, suffix
    block, index, inner = stem.split(".", 2)
    return f"{block}.{index}.", inner, suffix


def half_split(heads_key: str) -> RowChange:
    """Reorder the rows of each head from interleaved to half-split rotary pairs, [N*H, ...]."""

    def change(array: Array, config: Mapping[str, Any]) -> Array:
        heads = config[heads_key]
        if len(array) % (2 * heads):
            raise WeightError(f"{len(array)} rows of a rotary projection do not divide into {heads} heads of pairs")
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return RowChange(change)


def as_row(array: Array, config: Mapping[str, Any]) -> Array:
    return array.reshape(1, -1)


def log_rate(array: Array, config: Mapping[str, Any]) -> Array:
    """A = -exp(A_log), one column per head in Mamba 2 -> A_log."""
    rates = np.log(-to_float32(array))
    return rates[:, 0] if rates.shape[1:] == (1,) else rates


def taps(array: Array, config: Mapping[str, Any]) -> Array:
    """Taps of a convolution [C, K] -> [C, 1, K]."""
    return array[:, None] if array.ndim == 2 else array


@RowChange
def flat_experts(array: Array, config: Mapping[str, Any]) -> Array:
    """[E, F, D] -> [E*F, D]."""
    return array.reshape(-1, array.shape[-1])


def _flat_transposed_experts(array: Array, config: Mapping[str, Any]) -> Array:
    """[E, D, F] -> [E*F, D]."""
    return array.swapaxes(1, 2).reshape(-1, array.shape[1])


def unchanged(array: Array, config: Mapping[str, Any]) -> Array:
    """Rows of blocks that Hugging Face stores transposed."""
    return array


flat_transposed_experts: Final = RowChange(_flat_transposed_experts, flat_experts)


def rows_together(first: Array, second: Array) -> Array:
    """Concatenate two projections, or two stacks of them, along their rows."""
    return np.concatenate([first, second], axis=-2)


ROOT: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
FUSED_QKV: Final = {"attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
QK_NORM: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
PLAIN_MLP: Final = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
GATED: Final = {"ffn_gate": "mlp.gate_proj", **PLAIN_MLP}
PRE_NORMS: Final = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
AROUND_NORMS: Final = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PLAIN: Final = {**ATTENTION, **GATED, **PRE_NORMS}
UNGATED: Final = {**ATTENTION, **PLAIN_MLP, **PRE_NORMS}
ROTARY: Final = {"attn_q": half_split("num_attention_heads"), "attn_k": half_split("num_key_value_heads")}
BLOCK_SPARSE: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
EXPERT_NAMES: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
SHARED: Final = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
TRANSFORMER: Final = {"token_embd": "transformer.wte", "output_norm": "transformer.ln_f", "output": "lm_head"}
