"""`DrafterFamily`: a drafter model and the names of its checkpoint's tensors; `drafter_of` reads one.

`read_speculators` reads config.json of a checkpoint in the speculators format: it has the drafter's own within it.

In the order of this file: the speculators format; EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840) with Llama's
block; layers for multi-token prediction that a model's own checkpoint has beside its layers (arXiv 2412.19437);
Medusa's heads (arXiv 2401.10774) and IBM's MLP speculators (arXiv 2404.19124).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from pagoda.common.errors import ModelError, reading
from pagoda.common.models.drafters import (
    AttendedInputs,
    DrafterSpec,
    FeatureDrafter,
    HeadsDrafter,
    JoinedInputs,
    LanguageDrafter,
    StagesDrafter,
)
from pagoda.common.models.families.llama_block import LLAMA_RULES, llama
from pagoda.common.models.family import Family, Rename, Rule, linear, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.registry import architecture_of, spec_from_config
from pagoda.common.models.spec import Layer, ModelSpec, Norms
from pagoda.common.models.towers import text_model

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class DrafterFamily:
    """What a drafter's checkpoint holds."""

    drafter: DrafterSpec
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()  # Patterns of tensors that are dropped if no rule matches them.
    renames: tuple[tuple[str, str], ...] = ()  # Prefixes of names, and what the rules call them.
    only: str = ""  # Prefix of the drafter's tensors among those of the model.
    most: int | None = None  # Maximum number of guesses; None: any number.
    unread: tuple[str, ...] = ()  # Patterns of the model's tensors of further drafting layers, which are not read.

    def own_tensors(self, tensors: Iterable[tuple[str, ValueT]]) -> Iterator[tuple[str, ValueT]]:
        """Yield the drafter's tensors under the names that the rules know."""
        for name, tensor in tensors:
            if name.startswith(self.only):
                yield self.known_name(name), tensor

    def known_name(self, name: str) -> str:
        """Return the name that the rules know a tensor by."""
        for prefix, rule_prefix in self.renames:
            if name.startswith(prefix):
                return rule_prefix + name.removeprefix(prefix)
        return name


def implied_method(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Return the method of a drafter's checkpoint that is given without one. `names`: of its tensors."""
    kind = config.get("model_type")
    if kind in ("medusa", "mlp_speculator"):
        return str(kind)
    if "medusa_num_heads" in config:
        return "medusa"
    if "fc.weight" in names or "model.fc.weight" in names:
        return "eagle3" if any(name.startswith(("midlayer.", "model.midlayer.")) for name in names) else "eagle"
    return "draft_model"


def language_drafter(
    config: Mapping[str, Any], vocab: int, named: Callable[[Family], Family] = lambda family: family
) -> DrafterFamily:
    """Return the language model of a config.json as the drafter of a model with `vocab` tokens. Raises ModelError.

    `named`: returns the family with the rules for the names of its checkpoint.
    """
    spec, family = spec_from_config(config)
    family = named(family)
    if spec.vocab != vocab:
        raise ModelError(
            f"the drafter's vocabulary has {spec.vocab} tokens, the model's {vocab}; use a drafter with the same "
            "tokenizer"
        )
    return DrafterFamily(LanguageDrafter(spec), family.rules, family.ignored)


# Checkpoints in the speculators format.

_TYPE_KEY: Final = "speculators_model_type"
_TYPE: Final = "eagle3"

_SECTION: Final = "transformer_layer_config"
_OWN_KEYS: Final = (
    "draft_vocab_size",
    "norm_before_residual",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
)
"""Keys of an EAGLE-3 drafter beside those of its layers."""

_BOOKKEEPING: Final = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type", "_name_or_path"),
    *("speculators_version", "speculators_config", "tie_word_embeddings", "has_no_defaults_at_init"),
    *("transformer_layer_architecture", "embed_requires_grad", _TYPE_KEY, _SECTION),
)


@dataclass(frozen=True, slots=True)
class SpeculatorsConfig:
    """What a config.json in the format states."""

    method: str
    config: Mapping[str, Any]  # The configuration that a drafter of that method has.
    num_tokens: int | None  # Number of drafts per step that it was made for.


def read_speculators(config: Mapping[str, Any]) -> SpeculatorsConfig | None:
    """Return the drafter that a config describes; None if it is not in the format. Raises ModelError."""
    kind = config.get(_TYPE_KEY)
    if kind is None:
        return None
    if kind != _TYPE:
        raise ModelError(f"{_TYPE_KEY} {kind!r} is not supported; use {_TYPE}")
    layers = config.get(_SECTION)
    if not isinstance(layers, dict):
        raise ModelError(f"{_TYPE_KEY} {kind}: {_SECTION} is missing")
    unknown = config.keys() - {*_OWN_KEYS, *_BOOKKEEPING}
    if unknown:
        raise ModelError(f"{_TYPE_KEY} {kind}: key {min(unknown)} is unknown and could change the drafter")
    keys = {key: config[key] for key in _OWN_KEYS if config.get(key) is not None}
    keys.setdefault("norm_before_residual", True)
    return SpeculatorsConfig(_TYPE, {**layers, **keys}, _num_tokens(config))


def _num_tokens(config: Mapping[str, Any]) -> int | None:
    """Return the number of drafts of the default proposal method, if it is stated."""
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    number = proposals[0].get("speculative_tokens")
    return number if isinstance(number, int) and number > 0 else None


# EAGLE.

_IGNORED: Final = ("*.rotary_emb.inv_freq",)

_JOINED_RULES: Final[tuple[Rule, ...]] = (
    *linear("[model.]fc", "inputs.project"),
    Rename("[model.]embedding_layernorm.weight", "inputs.embed_norm"),
    Rename("[model.]hidden_states_layernorm.weight", "inputs.hidden_norm"),
    *LLAMA_RULES,
)


def eagle(config: HfConfig, names: Collection[str], target: ModelSpec) -> DrafterFamily:
    """Return EAGLE's drafter: the first layer has no norm before its attention, and the head reads no final norm."""
    config.opt("bias", bool, True)  # This is the bias of fc, which the checkpoint has or lacks.
    config.set("tie_word_embeddings", False)
    config.default("vocab_size", target.vocab)
    normed = config.opt("add_para_norm", bool, False)
    config.expect("truncated_vocab_size", target.vocab)
    norm = rms_norm(config, 1e-6) if normed else None
    llama_spec = llama(config)
    _check_sizes(config, llama_spec, target, width=target.hidden_width)
    first, *others = llama_spec.layers
    layers = (replace(first, norms=replace(first.norms, before_mixer=None)), *others)
    model = replace(target, layers=layers, final_norm=None, max_positions=llama_spec.max_positions)
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
    *LLAMA_RULES,
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
    llama_spec = llama(config)
    own_embedding = _has(names, "embed_tokens.weight")
    _check_sizes(config, llama_spec, target, width=llama_spec.width if own_embedding else target.hidden_width)
    norm = rms_norm(config, 1e-6)
    first, *others = llama_spec.layers
    layers = (Layer((), first.ffn, Norms(before_ffn=norm)), *others)
    attention = replace(first.attention, beside_embedding=True)
    drafter = FeatureDrafter(
        _plain(config, replace(target, layers=layers, final_norm=norm, width=llama_spec.width)),
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


def _check_sizes(config: HfConfig, drafter: ModelSpec, target: ModelSpec, *, width: int) -> None:
    if drafter.vocab != target.vocab:
        raise config.error("vocab_size", f"is {drafter.vocab}, but the model's is {target.vocab}; use its drafter")
    if drafter.width != width:
        raise config.error("hidden_size", f"is {drafter.width}, but the model's is {width}; use its drafter")


def _has(names: Collection[str], name: str) -> bool:
    return name in names or f"model.{name}" in names


# Multi-token prediction.

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


_MODULE: Final[tuple[Rule, ...]] = (
    Rename("[model.]pre_fc_norm_embedding.weight", "inputs.embed_norm"),
    Rename("[model.]pre_fc_norm_hidden.weight", "inputs.hidden_norm"),
    Rename("[model.]fc.weight", "inputs.project"),
)


def in_mtp_module(target: ModelSpec, family: Family, count: int) -> DrafterFamily:
    """Return the module `mtp`: a layer as those of the model with full attention, whatever its last one is.

    Raise ModelError if it has several layers.
    """
    if count > 1:
        raise ModelError(f"method mtp: the module mtp has {count} layers, and one is supported; use another method")
    attending = [layer for layer in target.layers if all(isinstance(mixer, Attention) for mixer in layer.mixers)]
    if not attending:
        raise ModelError("method mtp: the model has no layer with full attention, as its module mtp has")
    inputs = JoinedInputs(target.final_norm, target.final_norm)
    drafter = _drafter(replace(target, layers=(attending[-1],)), inputs, normed=True)
    return DrafterFamily(drafter, (*_MODULE, *family.rules), renames=(("mtp.", "model."),), only="mtp.")


def _drafter(target: ModelSpec, inputs: JoinedInputs, *, normed: bool) -> FeatureDrafter:
    """Return a drafter with the last layer of `target` that shares no selection of another one."""
    alone = [layer for layer in target.layers if not any(mixer.shares_selection for mixer in layer.mixers)]
    model = replace(target, layers=tuple(alone[-1:]), head_bias=False)
    return FeatureDrafter(model, inputs, source_width=target.width, chains_normed=normed)


# Medusa and MLP speculators.


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


# The drafter of a method.

Builder = Callable[[HfConfig, Collection[str], ModelSpec], DrafterFamily]
"""(config.json, names of the tensors, the target) -> the drafter"""

_BUILDERS: Final[Mapping[str, Builder]] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "medusa": medusa,
    "mlp_speculator": mlp_speculator,
}
"""Method -> what reads its drafter."""


@dataclass(frozen=True, slots=True)
class _MtpLayers:
    """How checkpoints of an architecture store layers for multi-token prediction."""

    read: Callable[[ModelSpec, Family, int], DrafterFamily]  # (model, its family, number of layers) -> the drafter
    key: str = "num_nextn_predict_layers"  # Key of config.json with the number of layers.
    unstated: int = 0  # Number of layers of a config.json without the key.


_QWEN_MTP: Final = _MtpLayers(in_mtp_module, "mtp_num_hidden_layers", unstated=1)

_MTP: Final[Mapping[str, _MtpLayers]] = {
    "DeepseekV3ForCausalLM": _MtpLayers(numbered_after),
    "DeepseekV32ForCausalLM": _MtpLayers(numbered_after),
    "Glm4MoeForCausalLM": _MtpLayers(numbered_after),
    "Glm4MoeLiteForCausalLM": _MtpLayers(numbered_after),
    "GlmMoeDsaForCausalLM": _MtpLayers(numbered_after),
    "MiMoForCausalLM": _MtpLayers(in_mtp_layers),
    "Qwen3NextForCausalLM": _QWEN_MTP,
    "Qwen3_5ForCausalLM": _QWEN_MTP,
    "Qwen3_5MoeForCausalLM": _QWEN_MTP,
}
"""Architectures whose checkpoints have layers for multi-token prediction."""


def drafter_of(method: str, config: Mapping[str, Any], names: Collection[str], target: ModelSpec) -> DrafterFamily:
    """Return the drafter that a checkpoint's config.json and tensor names describe. Raises ModelError.

    `method`: one whose drafter reads hidden states of the target.
    """
    reader = HfConfig(text_model(config).config, label=f"drafter of method {method}")
    with reading("the drafter's config.json", "download it again"):
        drafter = _BUILDERS[method](reader, names, target)
        reader.finish()
    return drafter


def mtp_drafter(config: Mapping[str, Any], names: Collection[str], target: ModelSpec, family: Family) -> DrafterFamily:
    """Return the layer for multi-token prediction of a model's own checkpoint. Raises ModelError if it has none.

    Of several layers the first one makes all guesses, each after the one before.
    `names`: of all its tensors; empty if they are not known yet.
    """
    text = text_model(config).config
    architecture = architecture_of(text)
    if architecture not in _MTP:
        raise ModelError(
            f"method mtp: architecture {architecture} has no supported layers for multi-token prediction; "
            f"those of {', '.join(_MTP)} are, or use another method"
        )
    layers = _MTP[architecture]
    count = text.get(layers.key, layers.unstated) or 0
    if count < 1:
        raise ModelError(f"method mtp: {layers.key} is {count}: the checkpoint has no such layers; use another method")
    if text.get("mtp_use_dedicated_embeddings"):
        raise ModelError("method mtp: mtp_use_dedicated_embeddings is true, which is unsupported; use another method")
    drafter = layers.read(target, family, count)
    if names and not any(name.startswith(drafter.only) for name in names):
        raise ModelError(f"method mtp: the checkpoint has no tensors {drafter.only}*; use one that has, or drop it")
    return drafter
