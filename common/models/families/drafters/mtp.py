"""Layers for multi-token prediction that a model's own checkpoint has after its last layer (arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagoda.common.models.drafters import FeatureDrafter, JoinedInputs
from pagoda.common.models.families.drafters.family import DrafterFamily
from pagoda.common.models.family import Family, Rename, Rule
from pagoda.common.models.spec import ModelSpec

_IN_LAYER: Final[tuple[Rule, ...]] = (
    Rename("[model.]layers.0.enorm.weight", "inputs.embed_norm"),
    Rename("[model.]layers.0.hnorm.weight", "inputs.hidden_norm"),
    Rename("[model.]layers.0.eh_proj.weight", "inputs.project"),
    Rename("[model.]layers.0.shared_head.norm.weight", "final_norm"),
)
_SHARED: Final = ("*.embed_tokens.weight", "*.shared_head.head.weight", "*.rotary_emb.inv_freq")
"""Copies of the model's own embedding and head."""

_BESIDE: Final[tuple[Rule, ...]] = (
    Rename("[model.]layers.0.token_layernorm.weight", "inputs.embed_norm"),
    Rename("[model.]layers.0.hidden_layernorm.weight", "inputs.hidden_norm"),
    Rename("[model.]layers.0.input_proj.weight", "inputs.project"),
    Rename("[model.]layers.0.final_layernorm.weight", "final_norm"),
)


def numbered_after(target: ModelSpec, family: Family, count: int) -> DrafterFamily:
    """Return the first of `count` layers that are numbered after the last one, with the structure of the last one."""
    prefix, *others = (f"model.layers.{len(target.layers) + number}." for number in range(count))
    drafter = _drafter(target, JoinedInputs(target.final_norm, target.final_norm, blank_first=True), normed=False)
    rules = (*_IN_LAYER, *family.rules)
    unread = tuple(f"{other}*" for other in others)
    return DrafterFamily(drafter, rules, _SHARED, renames=((prefix, "model.layers.0."),), only=prefix, unread=unread)


def in_mtp_layers(target: ModelSpec, family: Family, count: int) -> DrafterFamily:
    """Return the first of `model.mtp_layers`, which reads the hidden state first."""
    inputs = JoinedInputs(target.final_norm, target.final_norm, hidden_first=True, blank_first=True)
    prefix = "model.mtp_layers.0."
    rules = (*_BESIDE, *family.rules)
    drafter = _drafter(target, inputs, normed=True)
    return DrafterFamily(drafter, rules, _SHARED, renames=((prefix, "model.layers.0."),), only=prefix)


def _drafter(target: ModelSpec, inputs: JoinedInputs, *, normed: bool) -> FeatureDrafter:
    model = replace(target, layers=target.layers[-1:], head_bias=False)
    return FeatureDrafter(model, inputs, source_width=target.width, chains_normed=normed)
