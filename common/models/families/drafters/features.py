"""EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840) with Llama's block."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from pagoda.common.models.drafters import AttendedInputs, FeatureDrafter, JoinedInputs
from pagoda.common.models.families.drafters.family import DrafterFamily
from pagoda.common.models.families.llama_block.llama import RULES, llama
from pagoda.common.models.family import Rename, Rule, linear, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Layer, ModelSpec, Norms

_IGNORED: Final = ("*.rotary_emb.inv_freq",)

_JOINED_RULES: Final[tuple[Rule, ...]] = (
    *linear("[model.]fc", "inputs.project"),
    Rename("[model.]embedding_layernorm.weight", "inputs.embed_norm"),
    Rename("[model.]hidden_states_layernorm.weight", "inputs.hidden_norm"),
    *RULES,
)


def eagle(config: HfConfig, names: Collection[str], target: ModelSpec) -> DrafterFamily:
    """Return EAGLE's drafter: the first layer has no norm before its attention, and the head reads no final norm."""
    config.opt("bias", bool, True)  # of fc; as the checkpoint has it
    config.set("tie_word_embeddings", False)
    config.default("vocab_size", target.vocab)
    normed = config.opt("add_para_norm", bool, False)
    config.expect("truncated_vocab_size", target.vocab)
    norm = rms_norm(config, 1e-6) if normed else None
    own = llama(config)
    _check_sizes(config, own, target, width=target.hidden_width)
    first, *others = own.layers
    layers = (replace(first, norms=replace(first.norms, before_mixer=None)), *others)
    model = replace(target, layers=layers, final_norm=None, max_positions=own.max_positions)
    drafter = FeatureDrafter(
        _plain(config, model),
        JoinedInputs(norm, norm, bias=_has(names, "fc.bias")),
        source_width=target.width,
        own_embedding=_has(names, "embed_tokens.weight"),
        own_head=_has(names, "lm_head.weight"),
    )
    return DrafterFamily(drafter, _JOINED_RULES, _IGNORED)


_ATTENTION: Final = "[model.]layers.0.self_attn"
_ATTENDED_RULES: Final[tuple[Rule, ...]] = (
    *linear("[model.]fc", "inputs.project"),
    *(rule for part in "qkvo" for rule in linear(f"{_ATTENTION}.{part}_proj", f"inputs.attention.{part}")),
    Rename("[model.]layers.0.input_layernorm.weight", "inputs.embed_norm"),
    Rename("[model.]layers.0.hidden_norm.weight", "inputs.hidden_norm"),
    Rename("d2t", "target_ids"),
    *RULES,
)


def eagle3(config: HfConfig, names: Collection[str], target: ModelSpec) -> DrafterFamily:
    """Return EAGLE-3's drafter: three hidden states of the target, and often a vocabulary of its own."""
    captured = _captured_layers(config, target)
    source = config.opt_size("target_hidden_size", target.width)
    if source != target.width:
        raise config.error("target_hidden_size", f"is {source}; the model's hidden size is {target.width}")
    head_vocab = config.opt_size("draft_vocab_size", target.vocab)
    norms_residual = config.opt("norm_before_residual", bool, False)
    config.set("tie_word_embeddings", False)
    own = llama(config)
    own_embedding = _has(names, "embed_tokens.weight")
    _check_sizes(config, own, target, width=own.width if own_embedding else target.hidden_width)
    norm = rms_norm(config, 1e-6)
    first, *others = own.layers
    layers = (Layer((), first.ffn, Norms(before_ffn=norm)), *others)
    attention = replace(first.attention, beside_embedding=True)
    drafter = FeatureDrafter(
        _plain(config, replace(target, layers=layers, final_norm=norm, width=own.width)),
        AttendedInputs(attention, norm, norm, norms_residual),
        source_width=len(captured) * target.width,
        captured=captured,
        head_vocab=head_vocab if _has(names, "d2t") else None,
        own_embedding=own_embedding,
        own_head=_has(names, "lm_head.weight"),
    )
    if head_vocab != target.vocab and not drafter.head_vocab:
        raise config.error("draft_vocab_size", f"is {head_vocab}, but the checkpoint has no table d2t of token ids")
    return DrafterFamily(drafter, _ATTENDED_RULES, (*_IGNORED, "t2d"), renames=(("midlayer.", "layers.0."),))


def _captured_layers(config: HfConfig, target: ModelSpec) -> tuple[int, ...]:
    """Return the layers whose inputs are read: those of the checkpoint, or as EAGLE-3 is trained by default."""
    layers = len(target.layers)
    key = "eagle_aux_hidden_state_layer_ids"
    section = config.section("eagle_config")
    ids = (config if section is None else section).opt(key, list, [])
    if section is not None:
        section.expect("use_aux_hidden_state", True)
        section.finish()
    numbers = tuple(ids) or (2, layers // 2, layers - 3)
    if not all(isinstance(number, int) and 0 <= number < layers for number in numbers):
        raise config.error(key, f"are layers {list(numbers)}, but the model has {layers}; set others")
    if target.alt_up is not None or target.per_layer is not None:
        raise config.error(key, "name layers of a model with several residual streams, which cannot be captured")
    return numbers


def _plain(config: HfConfig, model: ModelSpec) -> ModelSpec:
    """Return the drafter's layers without what the target has beside its own. Raise ModelError for tables."""
    if model.embedding.positions is not None or model.embedding.token_types or model.per_layer is not None:
        raise config.error("model_type", "drafts for a model whose embedding has further tables, which is unsupported")
    return replace(model, alt_up=None, head_bias=False, weight_scales=())


def _check_sizes(config: HfConfig, own: ModelSpec, target: ModelSpec, *, width: int) -> None:
    if own.vocab != target.vocab:
        raise config.error("vocab_size", f"is {own.vocab}, but the model's is {target.vocab}; use its drafter")
    if own.width != width:
        raise config.error("hidden_size", f"is {own.width}, but the model's is {width}; use its drafter")


def _has(names: Collection[str], name: str) -> bool:
    return name in names or f"model.{name}" in names
