"""The names of tensors in GGUF files, and the parameters that they fill: nearly the same for all architectures.

llama.cpp names a tensor after what it does (https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py).
Where a name has several meanings the model decides: the first rule counts whose parameters it has. What remains is an
exception of an architecture.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final, TypeAlias

from pagoda.common.models.family import Family, Rename, Rule, Shift, Split, TokenRows, Zeros, fused_linear, linear

CONFIG_TENSORS: Final = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Stems of tensors that are part of the configuration, not weights."""

_Layers: TypeAlias = tuple[tuple[str, str | tuple[str, ...]], ...]

_ROOT_LAYERS: Final = (
    ("token_embd", "embed"),
    ("token_embd_norm", "embed_norm"),
    ("token_embd_norm", "final_norm"),  # LFM2 names its final norm so.
    ("token_types", "token_types"),
    ("position_embd", "positions"),
    ("per_layer_token_embd", "per_layer.table"),
    ("per_layer_model_proj", "per_layer.projection"),
    ("per_layer_proj_norm", "per_layer.norm"),
    ("altup_proj", "alt_up.in"),
    ("altup_unembd_proj", "alt_up.out"),
    ("output_norm", "final_norm"),
    ("output", "head"),
)
"""Stem -> parameter, each with a weight and perhaps a bias."""

_MIXER_LAYERS: Final[_Layers] = (
    *((f"attn_{part}", part) for part in "qkv"),
    ("attn_qkv", ("q", "k", "v")),
    ("attn_output", "o"),
    ("attn_gate", "gate"),
    ("attn_q_norm", "q_norm"),
    ("attn_k_norm", "k_norm"),
    # Latent attention.
    ("attn_q_a", "q_a"),
    ("attn_q_a_norm", "q_a_norm"),
    ("attn_q_b", "q_b"),
    ("attn_kv_a_mqa", "kv_a"),
    ("attn_kv_a_norm", "kv_a_norm"),
    ("attn_kv_b", "kv_b"),
    ("attn_k_b", "kv_b"),  # GgufCheckpoint joins it with attn_v_b.
    ("indexer.attn_q_b", "indexer.q"),
    ("indexer.attn_k", "indexer.k"),
    ("indexer.k_norm", "indexer.k_norm"),
    ("indexer.proj", "indexer.weights"),
    # Mamba, Mamba 2 and the delta rule.
    ("ssm_in", ("gate", "v", "b", "c", "step")),
    ("ssm_x", ("step_a", "b", "c")),
    ("ssm_conv1d", ("v_conv", "b_conv", "c_conv")),
    ("ssm_conv1d", ("q_conv", "k_conv", "v_conv")),
    ("ssm_conv1d", "v_conv"),
    *((f"ssm_conv1d_{part}", f"{part}_conv") for part in "qkv"),
    ("ssm_dt", "step"),
    ("ssm_dt_norm", "step_a_norm"),
    ("ssm_b_norm", "b_norm"),
    ("ssm_c_norm", "c_norm"),
    ("ssm_beta", "beta"),
    ("ssm_alpha", "decay"),
    *((f"ssm_{stem}_{part}", f"{name}_{part}") for stem, name in (("f", "decay"), ("g", "gate")) for part in "ab"),
    ("ssm_norm", "norm"),
    ("ssm_out", "o"),
    # Short convolutions.
    ("shortconv.in_proj", ("b", "c", "v")),
    ("shortconv.conv", "conv"),
    ("shortconv.out_proj", "o"),
)
"""Stem in a block -> parameter of the mixer, or the parameters whose rows follow each other in the tensor."""

_BLOCK_LAYERS: Final[_Layers] = (
    ("attn_norm", "norms.before_mixer"),
    ("attn_norm", "norms.before_ffn"),  # A layer without a mixer has only this norm.
    ("attn_output_norm", "norms.after_mixer"),
    ("attn_output_norm", "norms.before_ffn"),
    ("post_attention_norm", "norms.after_mixer"),
    ("post_attention_norm", "norms.before_ffn"),
    ("ffn_norm", "norms.before_ffn"),
    ("layer_output_norm", "norms.after_ffn"),
    ("post_ffw_norm", "norms.after_ffn"),
    *((f"ffn_{part}", f"ffn.{part}") for part in ("gate", "up", "down")),
    *((f"ffn_{part}", f"ffn.shared.{part}") for part in ("gate", "up", "down")),
    *((f"ffn_{part}_shexp", f"ffn.shared.{part}") for part in ("gate", "up", "down")),
    ("ffn_gate_inp_shexp", "ffn.shared_gate"),
    *((f"ffn_{part}_exps", f"ffn.experts.{part}") for part in ("gate", "up", "down")),
    ("ffn_gate_inp", "ffn.router"),
    # Experts beside the feed-forward block: Arctic and Gemma 4.
    *((f"ffn_{part}_exps", f"shortcut.moe.experts.{part}") for part in ("gate", "up", "down")),
    ("ffn_gate_inp", "shortcut.moe.router"),
    ("ffn_norm_exps", "shortcut.norm"),
    ("ffn_down_exps", "side.moe.experts.down"),
    ("ffn_gate_inp", "side.moe.router"),
    ("post_ffw_norm_1", "side.ffn_norm"),
    ("pre_ffw_norm_2", "side.input_norm"),
    ("post_ffw_norm_2", "side.output_norm"),
    # Gemma 3n and 4.
    ("inp_gate", "per_layer.gate"),
    ("proj", "per_layer.out"),
    ("post_norm", "per_layer.norm"),
    ("altup_router", "alt_up.router"),
    ("altup_router_norm", "alt_up.norm"),
    ("altup_predict_coef", "alt_up.prediction"),
    ("altup_correct_coef", "alt_up.correction"),
    ("laurel_l", "low_rank.left"),
    ("laurel_r", "low_rank.right"),
    ("laurel_post_norm", "low_rank.norm"),
)
"""Stem in a block -> parameter of the layer."""

_BLOCK_TENSORS: Final = (
    ("attn_sinks.weight", "mixers.0.sinks"),
    ("ssm_a", "mixers.0.decay_rate"),
    ("ssm_d", "mixers.0.skip"),
    ("ssm_dt.bias", "mixers.0.step_offset"),
    ("ssm_dt.bias", "mixers.0.decay_offset"),
    ("exp_probs_b.bias", "ffn.router_correction"),
    ("ffn_gate_inp.scale", "side.router_norm"),
    ("ffn_down_exps.scale", "side.expert_scale"),
    ("altup_correct_scale.weight", "alt_up.scale"),
    ("layer_output_scale.weight", "output_scale"),
    # Norms whose names some converters leave without a suffix.
    ("ffn_norm", "norms.before_ffn"),
    ("post_attention_norm", "norms.after_mixer"),
    ("post_ffw_norm", "norms.after_ffn"),
    # Numbers that are metadata, see `NUMBERS`.
    ("xielu.alpha_p", "ffn.curvature_p"),
    ("xielu.alpha_n", "ffn.curvature_n"),
)
"""Whole name in a block -> parameter of the layer."""

NUMBERS: Final = ("xielu.alpha_p", "xielu.alpha_n")
"""Metadata with a number per layer that is a parameter."""


def _in_block(layers: _Layers, within: str = "") -> Iterator[Rule]:
    """Yield the rules of linear layers and norms, whose parameters are those of `within` a layer."""
    for stem, target in layers:
        names = (target,) if isinstance(target, str) else target
        yield from _linear(stem, *(f"{within}{name}" for name in names))


def _linear(stem: str, *targets: str, interleaved: bool = False) -> tuple[Rule, ...]:
    """Return the rules of a tensor of each block with its bias, which has the rows of all targets."""
    source = f"blk.{{l}}.{stem}"
    names = [f"layers.{{l}}.{target}" for target in targets]
    return linear(source, names[0]) if len(names) == 1 else fused_linear(source, *names, interleaved=interleaved)


_COMMON: Final[tuple[Rule, ...]] = (
    *(rule for stem, target in _ROOT_LAYERS for rule in linear(stem, target)),
    *(Rename(f"blk.{{l}}.{name}", f"layers.{{l}}.{target}") for name, target in _BLOCK_TENSORS),
    *_linear("ssm_in", *(f"mixers.0.{part}" for part in ("q", "k", "v", "gate")), interleaved=True),
    *_linear("ssm_ba", "mixers.0.beta", "mixers.0.decay", interleaved=True),
    *_in_block(_MIXER_LAYERS, "mixers.0."),
    *_in_block(_BLOCK_LAYERS),
)

_GATE_IN_UP: Final = frozenset({"chatglm", "glm4", "phi3", "plamo3", "modern-bert", "jina-bert-v2"})
"""Architectures whose ffn_up has the rows of gate and up, unless the file has ffn_gate, too."""
_GATED_QUERIES: Final = frozenset({"qwen3next", "qwen35", "qwen35moe"})
"""Architectures whose attn_q has the rows of each query head and its output gate."""
_FIRST_MAMBA: Final = frozenset({"mamba", "jamba"})
_NORM_PLUS_ONE: Final = _GATED_QUERIES | {"gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron"}
"""Architectures whose norms are stored as weight + 1."""
_SECOND_NORM: Final = "blk.0.attn_norm_2.weight"
"""Falcon's norm of the attention; attn_norm is that of the feed-forward block then."""


def _exceptions(architecture: str, tensors: Collection[str]) -> Iterator[Rule]:
    """Yield the rules that an architecture has instead of, or beside, those of all. `tensors`: the file's names."""
    if architecture in _GATE_IN_UP and not any(".ffn_gate." in name for name in tensors):
        yield from _linear("ffn_up", "ffn.gate", "ffn.up")
    if architecture in _GATED_QUERIES:
        yield from _linear("attn_q", "mixers.0.q", "mixers.0.gate", interleaved=True)
    if architecture in _FIRST_MAMBA:
        yield from _linear("ssm_in", "mixers.0.v", "mixers.0.gate")
    if architecture == "falcon" and _SECOND_NORM in tensors:
        yield from _linear("attn_norm", "norms.before_ffn")
        yield from _linear("attn_norm_2", "norms.before_mixer")
    if architecture == "falcon-h1":  # Its first mixer is Mamba 2.
        yield from _in_block(tuple(layer for layer in _MIXER_LAYERS if layer[0].startswith("attn_")), "mixers.1.")
    if architecture == "gemma4":
        names = (f"side.moe.experts.{part}" for part in ("gate", "up"))
        yield Split("blk.{l}.ffn_gate_up_exps.weight", tuple(f"layers.{{l}}.{name}" for name in names), axis=1)
    if architecture in ("bert", "jina-bert-v2"):
        yield from (*linear("cls", "pooler.dense.0"), *linear("cls.output", "pooler.classifier"))
    if architecture == "gemma-embedding":
        yield from (*linear("dense_2", "pooler.dense.0"), *linear("dense_3", "pooler.dense.1"))


def weight_rules(architecture: str, tensors: Collection[str]) -> tuple[Rule, ...]:
    """Return the rules from the tensors of a file to parameters. `tensors`: their names."""
    rules = (*_exceptions(architecture, tensors), *_COMMON)
    return tuple(map(_minus_one, rules)) if architecture in _NORM_PLUS_ONE else rules


def _minus_one(rule: Rule) -> Rule:
    """Return the rule of a norm that is stored as weight + 1, others as they are."""
    if isinstance(rule, Rename) and rule.source.endswith("norm.weight") and ".ssm_" not in rule.source:
        return Shift(rule.source, rule.target, -1.0)
    return rule


_HEAD: Final = "output.weight"
_TABLE: Final = "token_embd.weight"
_POOLING_HEADS: Final = ("output.*", "cls.*")


def with_rules(family: Family, rules: tuple[Rule, ...]) -> Family:
    """Return a family with the rules of a file in place of those for Hugging Face's names.

    What does not depend on names is kept: parameters that are zero if they are left out, and a classifier made of rows
    of the head or of the table.
    """
    kept: list[Rule] = []
    for rule in family.rules:
        if isinstance(rule, Zeros):
            kept.append(rule)
        elif isinstance(rule, TokenRows):
            kept.append(replace(rule, source=_HEAD if rule.table is None else _TABLE))
    pools = all(head in family.ignored for head in family.heads)
    return replace(family, rules=(*kept, *rules), ignored=_POOLING_HEADS if pools else (_HEAD,))


_BLOCK_NUMBER: Final = re.compile(r"^blk\.\d+\.")


def pattern(name: str) -> str:
    """Return the source of the rules that read a tensor."""
    return _BLOCK_NUMBER.sub("blk.{l}.", name)
