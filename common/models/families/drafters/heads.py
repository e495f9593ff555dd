"""Medusa's heads (arXiv 2401.10774) and IBM's MLP speculators (arXiv 2404.19124)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pagoda.common.models.drafters import HeadsDrafter, StagesDrafter
from pagoda.common.models.families.drafters.family import DrafterFamily
from pagoda.common.models.family import Rename, Rule, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec


def medusa(config: HfConfig, names: Collection[str], target: ModelSpec) -> DrafterFamily:
    """Return the heads, as vLLM's files name them, or the first ones (`0.0.linear.weight`)."""
    for key, first in (("num_heads", "medusa_num_heads"), ("num_hidden_layers", "medusa_num_layers")):
        config.alias(key, first)
    config.default("hidden_size", target.width)
    config.default("vocab_size", target.vocab)
    config.expect("truncated_vocab_size", target.vocab)
    config.expect("original_lm_head", False)
    config.ignore("max_paths", "topk", "max_seq_len", "version", "medusa_fc_bias")
    heads = config.size("num_heads")
    blocks = config.opt_size("num_hidden_layers", 1)
    bias = any(name.endswith(".bias") for name in names)
    drafter = HeadsDrafter(config.size("vocab_size"), config.size("hidden_size"), heads, blocks, bias)
    _check(config, drafter.vocab, drafter.width, target)
    first_names = tuple((f"{head}.", f"medusa_heads.{head}.") for head in range(heads))
    rules: tuple[Rule, ...] = (
        *linear("[medusa_heads.]blocks.{h}.layers.{b}", "heads.{h}.blocks.{b}"),
        Rename("[medusa_heads.]lm_heads.{h}.weight", "heads.{h}.head"),
        *linear("medusa_heads.{h}.{b}.linear", "heads.{h}.blocks.{b}"),
        Rename(f"medusa_heads.{{h}}.{blocks}.weight", "heads.{h}.head"),
    )
    return DrafterFamily(drafter, rules, renames=first_names, most=heads)


_STAGE_RULES: Final[tuple[Rule, ...]] = (
    Rename("[speculator.]emb.{i}.weight", "stages.{i}.embed"),
    Rename("[speculator.]proj.{i}.weight", "stages.{i}.project"),
    Rename("[speculator.]head.{i}.weight", "stages.{i}.head"),
    *linear("[speculator.]ln.{i}", "stages.{i}.norm"),
)


def mlp_speculator(config: HfConfig, names: Collection[str], target: ModelSpec) -> DrafterFamily:
    """Return the stages. Those that share weights are in the checkpoint once, or once for each."""
    config.ignore("n_candidates", "top_k_tokens_per_head", "num_lookahead_tokens")
    width = config.opt_size("emb_dim", target.width)
    drafter = StagesDrafter(
        vocab=config.opt_size("vocab_size", target.vocab),
        width=width,
        inner=config.opt("inner_dim", int, 0) or width,
        stages=config.size("n_predict"),
        tied=config.opt("tie_weights", bool, False),
        scales_input=config.opt("scale_input", bool, False),
    )
    _check(config, drafter.vocab, drafter.width, target)
    copies = ("emb", "head", "ln", "proj") if drafter.tied else ()
    ignored = tuple(
        f"*{part}.{stage}.*" for part in copies for stage in range(2 if part == "proj" else 1, drafter.stages)
    )
    return DrafterFamily(drafter, _STAGE_RULES, ignored, most=drafter.stages)


def _check(config: HfConfig, vocab: int, width: int, target: ModelSpec) -> None:
    if vocab != target.vocab:
        raise config.error("vocab_size", f"is {vocab}, but the model's is {target.vocab}; use its drafter")
    if width != target.hidden_width:
        raise config.error("hidden_size", f"is {width}, but the model's is {target.hidden_width}; use its drafter")
