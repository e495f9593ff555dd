"""Text models of multimodal checkpoints: where config.json describes them, and the names of their tensors.

transformers builds the text model of such a checkpoint from a nested section of config.json alone, so its other keys
cannot change the text model, except that some of them repeat keys of the section. Checkpoints of the first files of a
model type leave out keys with that type's default value; `TEXT_TYPES` has those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from pagoda.common.errors import ModelError
from pagoda.common.models.families.experts import FUSED_EXPERT_RULES
from pagoda.common.models.family import Family, Rule, Zeros
from pagoda.common.models.hf_config.known_keys import Code, Origin

_PREFIXES: Final = (
    ("", ""),
    ("language_model.", ""),
    ("model.language_model.", "model."),
    ("text_model.", ""),
    ("model.text_model.", "model."),
    ("thinker.", ""),
)
"""Prefix in the checkpoint -> prefix in a checkpoint of the text model alone; of transformers 4 and 5."""

_MEDIA_MODULES: Final = (
    *("visual", "vision*", "mlp1", "multi_modal_projector", "mm_projector", "connector", "image_newline"),
    *("patch_merge_mlp", "merger", "vit_large_projector", "perception_emb_norm"),
    *("audio_tower", "embed_vision", "embed_audio", "sound_*"),
)
MEDIA_TENSORS: Final = (
    *(
        f"{parent}{module}{rest}"
        for parent in ("", "model.", "thinker.")
        for module in _MEDIA_MODULES
        for rest in ("", ".*")
    ),
    *("talker.*", "token2wav.*", "code2wav.*"),
)
"""Patterns of tensors that only process media."""

_MEDIA_KEYS: Final = ("vision_*", "image_*", "video_*", "audio_*", "text_config")
"""Patterns of keys beside those of the text model in a config.json without nested section."""

_QUANTIZATION: Final = ("quantization_config", "compression_config")

_SHARED_KEYS: Final = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that the top of the file states for the text model too, if its section does not."""


@dataclass(frozen=True, slots=True)
class TextTower:
    """The text model of a multimodal architecture."""

    architecture: str | None = None  # None: the section's `architectures` or `model_type` names it.
    sections: tuple[str, ...] = ("text_config",)  # Keys of nested objects that lead to its config.
    renamed: tuple[str, ...] = ()  # Another name of that path, which other writers use.
    flat: bool = False  # Without the section, its keys are at the top of the file.
    rules: tuple[Rule, ...] = ()  # Rules beyond those of the text model's family.

    def family(self, family: Family) -> Family:
        """Return the text model's family with rules for the names of the multimodal checkpoint."""
        rules = (*family.rules, *self.rules)
        return replace(
            family,
            rules=tuple(renamed for rule in rules for renamed in _renamed(rule)),
            ignored=(*(name for pattern in family.ignored for name in _sources(pattern)), *MEDIA_TENSORS),
        )


def _renamed(rule: Rule) -> Iterator[Rule]:
    """Yield the rule once for each name that its tensors may have in a multimodal checkpoint."""
    if isinstance(rule, Zeros):
        yield rule
    else:
        yield from (replace(rule, source=source) for source in _sources(rule.source))


def _sources(source: str) -> Iterator[str]:
    """Yield the names in a multimodal checkpoint of a tensor that the text model alone has as `source`."""
    name = source.replace("[model.]", "model.").replace("[backbone.]", "backbone.")
    for prefix, replaced in _PREFIXES:
        if name.startswith(replaced):
            yield prefix + name.removeprefix(replaced)


_MODEL_TYPE: Final = TextTower()
_NEMOTRON_H: Final = TextTower("NemotronHForCausalLM", ("llm_config",), renamed=("text_config",))

TEXT_TOWERS: Final[dict[str, TextTower]] = {
    "AyaVisionForConditionalGeneration": _MODEL_TYPE,
    "Cohere2VisionForConditionalGeneration": _MODEL_TYPE,
    "Exaone4_5_ForConditionalGeneration": _MODEL_TYPE,
    "Gemma3ForConditionalGeneration": TextTower("Gemma3ForCausalLM"),
    "Gemma3nForConditionalGeneration": TextTower("Gemma3nForCausalLM"),
    "Gemma4ForConditionalGeneration": TextTower("Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": TextTower("Gemma4ForCausalLM"),
    "Glm4vForConditionalGeneration": TextTower("Glm4ForCausalLM"),
    "Glm4vMoeForConditionalGeneration": TextTower("Glm4MoeForCausalLM"),
    "Idefics3ForConditionalGeneration": _MODEL_TYPE,
    "InternVLChatModel": TextTower(sections=("llm_config",)),
    "InternVLForConditionalGeneration": _MODEL_TYPE,
    "KimiK25ForConditionalGeneration": TextTower("DeepseekV3ForCausalLM"),
    "Kimi_K25ForConditionalGeneration": TextTower("DeepseekV3ForCausalLM"),
    "KimiVLForConditionalGeneration": TextTower("DeepseekV3ForCausalLM"),
    "Lfm2VlForConditionalGeneration": _MODEL_TYPE,
    "Lfm3VlForConditionalGeneration": _MODEL_TYPE,
    "Llama4ForConditionalGeneration": TextTower("Llama4ForCausalLM"),
    "LlavaForConditionalGeneration": _MODEL_TYPE,
    "LlavaNextForConditionalGeneration": _MODEL_TYPE,
    "LlavaOnevisionForConditionalGeneration": _MODEL_TYPE,
    "MiniCPMV4_6ForConditionalGeneration": _MODEL_TYPE,
    "MiniCPMV4_7ForConditionalGeneration": _MODEL_TYPE,
    "MiniMaxM3SparseForConditionalGeneration": TextTower("MiniMaxM3SparseForCausalLM"),
    "Mistral3ForConditionalGeneration": _MODEL_TYPE,
    "MuseGlimmerForConditionalGeneration": TextTower("MuseGlimmerForCausalLM"),
    "NemotronH_Nano_VL_V2": _NEMOTRON_H,
    "NemotronH_Omni_Reasoning_V3": _NEMOTRON_H,
    "Qwen2VLForConditionalGeneration": TextTower("Qwen2ForCausalLM", flat=True),
    "Qwen2_5OmniForConditionalGeneration": TextTower("Qwen2ForCausalLM", ("thinker_config", "text_config")),
    "Qwen2_5OmniModel": TextTower("Qwen2ForCausalLM", ("thinker_config", "text_config")),
    "Qwen2_5_VLForConditionalGeneration": TextTower("Qwen2ForCausalLM", flat=True),
    "Qwen3OmniMoeForConditionalGeneration": TextTower("Qwen3MoeForCausalLM", ("thinker_config", "text_config")),
    "Qwen3VLForConditionalGeneration": TextTower("Qwen3ForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": TextTower("Qwen3MoeForCausalLM", rules=FUSED_EXPERT_RULES),
    "Qwen3_5ForConditionalGeneration": TextTower("Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": TextTower("Qwen3_5MoeForCausalLM"),
    "SmolVLMForConditionalGeneration": _MODEL_TYPE,
    "Step3p7ForConditionalGeneration": TextTower("Step3p5ForCausalLM"),
    "VoxtralForConditionalGeneration": _MODEL_TYPE,
}
"""Multimodal architecture -> its text model."""

CROSS_ATTENTION: Final = ("MllamaForConditionalGeneration",)
"""Multimodal architectures whose text layers attend to an image through layers of their own."""


@dataclass(frozen=True, slots=True)
class TextType:
    """A `model_type` of a text section: its architecture, and the default values of keys that files leave out."""

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _sizes(
    vocab: int, width: int, inner: int, layers: int, heads: int, kv_heads: int | None, positions: int
) -> dict[str, int | None]:
    """`kv_heads`: None for as many as query heads."""
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


TEXT_TYPES: Final[dict[str, TextType]] = {
    "cohere2": TextType("Cohere2ForCausalLM"),
    "deepseek_v3": TextType("DeepseekV3ForCausalLM"),
    "exaone4": TextType("Exaone4ForCausalLM"),
    "gemma3_text": TextType("Gemma3ForCausalLM", _sizes(262_208, 2304, 9216, 26, 8, 4, 131_072)),
    "gemma4_unified_text": TextType("Gemma4ForCausalLM", {"hidden_size_per_layer_input": 0, "sliding_window": 1024}),
    "gpt_oss": TextType("GptOssForCausalLM"),
    "internlm2": TextType("InternLM2ForCausalLM"),
    "internlm3": TextType("InternLM3ForCausalLM"),
    "lfm2": TextType("Lfm2ForCausalLM"),
    "lfm3": TextType("Lfm3ForCausalLM"),
    "llama": TextType("LlamaForCausalLM", _sizes(32_000, 4096, 11_008, 32, 32, None, 2048)),
    "ministral3": TextType("Ministral3ForCausalLM"),
    "mistral": TextType("MistralForCausalLM", _sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072)),
    "mistral4": TextType("Mistral4ForCausalLM"),
    "phi3": TextType("Phi3ForCausalLM"),
    "qwen2": TextType("Qwen2ForCausalLM", _sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768)),
    "qwen3": TextType("Qwen3ForCausalLM"),
    "qwen3_5_text": TextType("Qwen3_5ForCausalLM"),
    "qwen3_moe": TextType("Qwen3MoeForCausalLM"),
    "qwen3_omni_moe_text": TextType("Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3_vl_moe_text": TextType("Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
}
"""`model_type` of a text section -> its text model."""

_RENAMED_TYPES: Final = {"exaone4_5_text": "exaone4"}
"""`model_type` of a text section in a release's first files -> the one that transformers reads it as."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """What is loaded of a checkpoint: the text model of a multimodal one, else the whole."""

    config: Mapping[str, Any]  # The config of the text model, as if it were alone.
    path: tuple[str, ...] = ()  # Keys in config.json that lead to it.
    tower: TextTower | None = None  # None: the checkpoint is not multimodal.

    def family(self, family: Family) -> Family:
        """Return the family of the text model with the names of this checkpoint."""
        return family if self.tower is None else self.tower.family(family)

    def origin(self, file: Mapping[str, Any], code: Code | None) -> Origin:
        """Return where its keys come from, in a config.json and with the Python files of its checkpoint."""
        return Origin(file=file, text=self.config, section=bool(self.path), code=code)


def text_model(config: Mapping[str, Any]) -> TextModel:
    """Return the text model of a checkpoint, from its config.json.

    Raises ModelError for a multimodal architecture whose text model is not supported.
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    if name in CROSS_ATTENTION:
        raise ModelError(
            f"architecture {name} is not supported: its text model has cross-attention layers; serve a model of the "
            "same family without images, such as meta-llama/Llama-3.1-8B-Instruct"
        )
    if name not in TEXT_TOWERS:
        return TextModel(config)
    tower = TEXT_TOWERS[name]
    for path in (tower.sections, tower.renamed):
        if path and (text := _nested(config, name, tower, path)) is not None:
            return TextModel(text, path, tower)
    if not tower.flat:
        raise ModelError(f"config.json: {'.'.join(tower.sections)} is missing (architecture {name})")
    flat = {key: value for key, value in config.items() if not any(fnmatchcase(key, media) for media in _MEDIA_KEYS)}
    return TextModel({**flat, "architectures": [tower.architecture]}, (), tower)


def with_text_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with what only its text section states of the whole checkpoint: dtype, tokens, quantisation.

    Raises ModelError as `text_model` does.
    """
    section: Any = config
    for key in text_model(config).path:
        section = section[key]
    keys = [key for key in (*_SHARED_KEYS, *_QUANTIZATION) if key != "tie_word_embeddings"]
    return {**config, **{key: section[key] for key in keys if section.get(key) is not None and config.get(key) is None}}


def _nested(config: Mapping[str, Any], name: str, tower: TextTower, path: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the config of the text model from its section at `path`; None if there is no such section."""
    outer: dict[str, Any] = {}
    section: Any = config
    for key in path:
        outer |= {shared: section[shared] for shared in _SHARED_KEYS if section.get(shared) is not None}
        section = section.get(key)
        if not isinstance(section, Mapping):
            return None
    kind = str(section.get("model_type"))
    section = {**section, "model_type": _RENAMED_TYPES[kind]} if kind in _RENAMED_TYPES else section
    architecture, defaults = _architecture(name, tower, section)
    text = {**section, **{key: value for key, value in outer.items() if section.get(key) is None}}
    if "tie_word_embeddings" in outer and _written_by_transformers_5(config):
        text["tie_word_embeddings"] = outer["tie_word_embeddings"]
    dense = {key: value for key, value in text.items() if key not in _QUANTIZATION}
    return {**defaults, **dense, "architectures": [architecture]}


def _architecture(name: str, tower: TextTower, section: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the architecture of a text section, and the default values of keys that it may leave out."""
    kind = TEXT_TYPES.get(str(section.get("model_type")))
    architectures = section.get("architectures")
    if tower.architecture is not None:
        return tower.architecture, {} if kind is None else kind.defaults
    if kind is not None:
        return kind.architecture, kind.defaults
    if isinstance(architectures, list) and architectures:
        return str(architectures[0]), {}
    raise ModelError(
        f"architecture {name} has a text model of type {section.get('model_type')!r}, which is not supported; "
        f"supported: {', '.join(sorted(TEXT_TYPES))}"
    )


def _written_by_transformers_5(config: Mapping[str, Any]) -> bool:
    """Return whether a key at the top of the file holds for the text model, whatever its section says."""
    major = str(config.get("transformers_version", "")).split(".")[0]
    return major.isdecimal() and int(major) >= 5
