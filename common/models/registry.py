"""Hugging Face architecture name -> family, and config.json -> spec.

To add a model: write a `Family` in the file of its kind of block in `families`, and list its architectures here.
`ModelRegistry` and the entry point group `pagoda.models` add families of other packages.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Final

from pagoda.common.config.groups.nested.pooler import PoolerConfig, PoolingKind
from pagoda.common.config.settings import merge_json
from pagoda.common.errors import ModelError, reading
from pagoda.common.models.family import Family, PoolUse, Rename, Rule, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.hf_config.known_keys import Code
from pagoda.common.models.mixers.caches import WindowCache
from pagoda.common.models.spec import Dense, ModelSpec, Pooler, TokenSelection
from pagoda.common.models.token_classifier import TokenClassifier, text_keys
from pagoda.common.models.towers import text_model

ARCHITECTURES: Final[dict[str, tuple[str, str]]] = {
    "AXK1ForCausalLM": ("latent", "AXK1"),
    "AfmoeForCausalLM": ("sigmoid_mixtures", "AFMOE"),
    "ApertusForCausalLM": ("llama_block", "APERTUS"),
    "AquilaForCausalLM": ("llama_block", "LLAMA"),
    "ArceeForCausalLM": ("gpt_block", "ARCEE"),
    "ArcticForCausalLM": ("mixtures", "ARCTIC"),
    "BaiChuanForCausalLM": ("llama_block_fused", "BAICHUAN_7B"),
    "BaichuanForCausalLM": ("llama_block_fused", "BAICHUAN"),
    "BailingMoeForCausalLM": ("sigmoid_mixtures", "BAILING"),
    "BailingMoeV2ForCausalLM": ("sigmoid_mixtures", "BAILING_V2"),
    "BailingMoeV2_5ForCausalLM": ("linear_attention", "LING25"),
    "BailingMoeV3ForCausalLM": ("linear_attention", "LING3"),
    "BambaForCausalLM": ("state_space", "BAMBA"),
    "BitNetForCausalLM": ("llama_block", "BITNET"),
    "BloomForCausalLM": ("gpt_block", "BLOOM"),
    "ChatGLMForConditionalGeneration": ("llama_block_fused", "CHATGLM"),
    "ChatGLMModel": ("llama_block_fused", "CHATGLM"),
    "Cohere2ForCausalLM": ("gpt_block", "COHERE2"),
    "Cohere2MoeForCausalLM": ("mixtures", "COHERE2_MOE"),
    "CohereForCausalLM": ("gpt_block", "COHERE"),
    "CwmForCausalLM": ("llama_block", "CWM"),
    "DbrxForCausalLM": ("mixtures", "DBRX"),
    "DeciLMForCausalLM": ("llama_block", "NEMOTRON_NAS"),
    "DeepseekForCausalLM": ("latent", "DEEPSEEK"),
    "DeepseekV2ForCausalLM": ("latent", "DEEPSEEK_V2"),
    "DeepseekV32ForCausalLM": ("latent", "DEEPSEEK_V32"),
    "DeepseekV3ForCausalLM": ("latent", "DEEPSEEK_V3"),
    "Dots1ForCausalLM": ("sigmoid_mixtures", "DOTS1"),
    "DotsOCRForCausalLM": ("qwen", "DOTS_OCR"),
    "Ernie4_5ForCausalLM": ("llama_block", "ERNIE"),
    "Ernie4_5_ForCausalLM": ("llama_block", "ERNIE"),
    "Ernie4_5_MoeForCausalLM": ("mixtures", "ERNIE_MOE"),
    "Exaone4ForCausalLM": ("llama_block", "EXAONE4"),
    "ExaoneForCausalLM": ("llama_block", "EXAONE"),
    "ExaoneMoEForCausalLM": ("sigmoid_mixtures", "EXAONE_MOE"),
    "ExaoneMoeForCausalLM": ("sigmoid_mixtures", "EXAONE_MOE"),
    "Fairseq2LlamaForCausalLM": ("llama_block", "FAIRSEQ2"),
    "FalconForCausalLM": ("gpt_block", "FALCON"),
    "FalconH1ForCausalLM": ("state_space", "FALCON_H1"),
    "FalconMambaForCausalLM": ("state_space", "FALCON_MAMBA"),
    "FlexOlmoForCausalLM": ("mixtures", "FLEX_OLMO"),
    "GPT2LMHeadModel": ("gpt_block", "GPT2"),
    "GPTBigCodeForCausalLM": ("gpt_block", "GPT_BIGCODE"),
    "GPTJForCausalLM": ("gpt_block", "GPTJ"),
    "GPTNeoXForCausalLM": ("gpt_block", "GPT_NEOX"),
    "Gemma2ForCausalLM": ("gemma", "GEMMA2"),
    "Gemma3ForCausalLM": ("gemma", "GEMMA3"),
    "Gemma3nForCausalLM": ("gemma", "GEMMA3N"),
    "Gemma4ForCausalLM": ("gemma", "GEMMA4"),
    "GemmaForCausalLM": ("gemma", "GEMMA"),
    "Glm4ForCausalLM": ("llama_block_fused", "GLM4"),
    "Glm4MoeForCausalLM": ("sigmoid_mixtures", "GLM4_MOE"),
    "Glm4MoeLiteForCausalLM": ("latent", "GLM4_MOE_LITE"),
    "GlmForCausalLM": ("llama_block_fused", "GLM"),
    "GlmMoeDsaForCausalLM": ("latent", "GLM5"),
    "GptOssForCausalLM": ("mixtures", "GPT_OSS"),
    "GraniteForCausalLM": ("llama_block", "GRANITE"),
    "GraniteMoeForCausalLM": ("mixtures", "GRANITE_MOE"),
    "GraniteMoeHybridForCausalLM": ("state_space", "GRANITE_HYBRID"),
    "GraniteMoeSWAForCausalLM": ("mixtures", "GRANITE_MOE_SWA"),
    "GraniteMoeSharedForCausalLM": ("mixtures", "GRANITE_MOE"),
    "GraniteSWAForCausalLM": ("mixtures", "GRANITE_SWA"),
    "GritLM": ("llama_block", "MISTRAL"),
    "HYV3ForCausalLM": ("sigmoid_mixtures", "HY3"),
    "HeliumForCausalLM": ("llama_block", "HELIUM"),
    "HunYuanDenseV1ForCausalLM": ("llama_block", "HUNYUAN"),
    "HunYuanMoEV1ForCausalLM": ("mixtures", "HUNYUAN_MOE"),
    "HyperCLOVAXForCausalLM": ("llama_block", "HYPERCLOVAX"),
    "IQuestCoderForCausalLM": ("llama_block", "IQUESTCODER"),
    "InternLM2ForCausalLM": ("llama_block_fused", "INTERNLM2"),
    "InternLM3ForCausalLM": ("llama_block", "INTERNLM3"),
    "InternLMForCausalLM": ("llama_block", "PANGU"),
    "Jais2ForCausalLM": ("gpt_block", "JAIS2"),
    "JambaForCausalLM": ("state_space", "JAMBA"),
    "KimiLinearForCausalLM": ("linear_attention", "KIMI_LINEAR"),
    "LLaMAForCausalLM": ("llama_block", "LLAMA"),
    "Lfm2ForCausalLM": ("linear_attention", "LFM2"),
    "Lfm2MoeForCausalLM": ("linear_attention", "LFM2_MOE"),
    "Lfm3ForCausalLM": ("linear_attention", "LFM3"),
    "Llama4ForCausalLM": ("mixtures", "LLAMA4"),
    "LlamaForCausalLM": ("llama_block", "LLAMA"),
    "LongcatFlashForCausalLM": ("latent", "LONGCAT_FLASH"),
    "MPTForCausalLM": ("gpt_block", "MPT"),
    "Mamba2ForCausalLM": ("state_space", "MAMBA2"),
    "MambaForCausalLM": ("state_space", "MAMBA"),
    "MellumForCausalLM": ("qwen", "MELLUM"),
    "MiMoForCausalLM": ("qwen", "MIMO"),
    "MiMoV2FlashForCausalLM": ("sigmoid_mixtures", "MIMO_V2"),
    "MiMoV2ForCausalLM": ("sigmoid_mixtures", "MIMO_V2"),
    "MiniCPM3ForCausalLM": ("latent", "MINICPM3"),
    "MiniCPMForCausalLM": ("llama_block", "MINICPM"),
    "MiniMaxForCausalLM": ("linear_attention", "MINIMAX"),
    "MiniMaxM2ForCausalLM": ("sigmoid_mixtures", "MINIMAX_M2"),
    "MiniMaxM3ForCausalLM": ("sigmoid_mixtures", "MINIMAX_M3"),
    "MiniMaxM3SparseForCausalLM": ("sigmoid_mixtures", "MINIMAX_M3"),
    "MiniMaxText01ForCausalLM": ("linear_attention", "MINIMAX"),
    "Ministral3ForCausalLM": ("llama_block", "MINISTRAL3"),
    "Mistral4ForCausalLM": ("latent", "MISTRAL_LARGE3"),
    "MistralForCausalLM": ("llama_block", "MISTRAL"),
    "MistralLarge3ForCausalLM": ("latent", "MISTRAL_LARGE3"),
    "MixtralForCausalLM": ("mixtures", "MIXTRAL"),
    "MptForCausalLM": ("gpt_block", "MPT"),
    "MuseGlimmerForCausalLM": ("llama_block", "MUSE_GLIMMER"),
    "NemotronForCausalLM": ("gpt_block", "NEMOTRON"),
    "NemotronHForCausalLM": ("state_space", "NEMOTRON_H"),
    "OPTForCausalLM": ("gpt_block", "OPT"),
    "Olmo2ForCausalLM": ("llama_block", "OLMO2"),
    "Olmo3ForCausalLM": ("llama_block", "OLMO3"),
    "OlmoForCausalLM": ("llama_block", "OLMO"),
    "OlmoHybridForCausalLM": ("linear_attention", "OLMO_HYBRID"),
    "OlmoeForCausalLM": ("mixtures", "OLMOE"),
    "OrionForCausalLM": ("gpt_block", "ORION"),
    "PanguEmbeddedForCausalLM": ("llama_block", "PANGU"),
    "PanguUltraMoEForCausalLM": ("latent", "PANGU_ULTRA"),
    "Param2MoEForCausalLM": ("sigmoid_mixtures", "PARAM2"),
    "PersimmonForCausalLM": ("gpt_block", "PERSIMMON"),
    "Phi3ForCausalLM": ("llama_block_fused", "PHI3"),
    "PhiForCausalLM": ("llama_block_fused", "PHI"),
    "PhiMoEForCausalLM": ("mixtures", "PHIMOE"),
    "PhimoeForCausalLM": ("mixtures", "PHIMOE"),
    "Plamo3ForCausalLM": ("llama_block", "PLAMO3"),
    "QWenLMHeadModel": ("llama_block_fused", "QWEN1"),
    "Qwen2ForCausalLM": ("qwen", "QWEN2"),
    "Qwen2MoeForCausalLM": ("qwen", "QWEN2_MOE"),
    "Qwen3ForCausalLM": ("qwen", "QWEN3"),
    "Qwen3MoeForCausalLM": ("qwen", "QWEN3_MOE"),
    "Qwen3NextForCausalLM": ("linear_attention", "QWEN3_NEXT"),
    "Qwen3_5ForCausalLM": ("linear_attention", "QWEN3_5"),
    "Qwen3_5MoeForCausalLM": ("linear_attention", "QWEN3_5_MOE"),
    "RWForCausalLM": ("gpt_block", "FALCON"),
    "Rnj1ForCausalLM": ("gemma", "RNJ1"),
    "SarvamMLAForCausalLM": ("latent", "SARVAM_MLA"),
    "SarvamMoEForCausalLM": ("sigmoid_mixtures", "BAILING_V2"),
    "SeedOssForCausalLM": ("llama_block", "SEED_OSS"),
    "SmolLM3ForCausalLM": ("llama_block", "SMOLLM3"),
    "SolarForCausalLM": ("llama_block", "SOLAR"),
    "SolarOpenForCausalLM": ("sigmoid_mixtures", "SOLAR_OPEN"),
    "StableLMEpochForCausalLM": ("gpt_block", "STABLELM"),
    "StableLmForCausalLM": ("gpt_block", "STABLELM"),
    "Starcoder2ForCausalLM": ("gpt_block", "STARCODER2"),
    "Step1ForCausalLM": ("llama_block", "STEP1"),
    "Step3p5ForCausalLM": ("sigmoid_mixtures", "STEP3P5"),
    "TeleChat2ForCausalLM": ("llama_block_fused", "TELECHAT2"),
    "TeleChat3ForCausalLM": ("llama_block", "LLAMA"),
    "TeleChatForCausalLM": ("llama_block_fused", "TELECHAT2"),
    "TeleFLMForCausalLM": ("llama_block", "TELEFLM"),
    "VaultGemmaForCausalLM": ("gemma", "VAULTGEMMA"),
    "XverseForCausalLM": ("llama_block", "LLAMA"),
    "Zamba2ForCausalLM": ("state_space", "ZAMBA2"),
}
"""Architecture -> (module in `families`, name of its Family)."""

POOLERS: Final[dict[str, tuple[str, str, PoolUse]]] = {
    "BgeM3EmbeddingModel": ("encoders", "BGE_M3", "embed"),
    "ColBERTJinaRobertaModel": ("encoders", "JINA_COLBERT", "embed"),
    "ColBERTModernBertModel": ("encoders", "MODERNBERT", "embed"),
    "HF_ColBERT": ("encoders", "COLBERT", "embed"),
    "InternLM2ForRewardModel": ("llama_block_fused", "INTERNLM2_REWARD", "token_classify"),
    "Qwen2ForProcessRewardModel": ("qwen", "QWEN2_PROCESS_REWARD", "token_classify"),
    "Qwen2ForRewardModel": ("qwen", "QWEN2_REWARD", "token_classify"),
}
"""Pooling architecture with a head of its own -> (module in `families`, name of its Family, its task)."""

ENCODERS: Final[dict[str, tuple[str, str]]] = {
    "Bert": ("encoders", "BERT"),
    "Camembert": ("encoders", "ROBERTA"),
    "Gte": ("encoders", "GTE"),
    "GteNew": ("encoders", "NEW"),
    "JinaBert": ("encoders", "JINA_BERT"),
    "JinaEmbeddingsV3": ("encoders", "JINA_V3"),
    "ModernBert": ("encoders", "MODERNBERT"),
    "New": ("encoders", "NEW"),
    "NomicBert": ("encoders", "NOMIC"),
    "Roberta": ("encoders", "ROBERTA"),
    "XLMRoberta": ("encoders", "XLM_ROBERTA"),
}
"""Name stem of encoder architectures, which only pool -> (module in `families`, name of its Family)."""

_GENERATORS: Final = ("ForCausalLM", "LMHeadModel")
_POOLING_SUFFIXES: Final[dict[str, PoolUse]] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForMaskedLM": "embed",
    "TextForSequenceClassification": "classify",
    "TextModel": "embed",
    "Model": "embed",
}
"""Suffix of a pooling architecture -> its task."""

FLOAT16_OVERFLOWS: Final = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Values of model_type whose activations exceed float16's range."""


def find(architecture: str) -> tuple[Family, PoolUse | None]:
    """Return the family of an architecture and its pooling task (None: it generates).

    Every generating family also has pooling architectures: XModel and XForSequenceClassification share the layers of
    XForCausalLM. Families of `ModelRegistry` and of installed packages take precedence over pagoda's own.
    Raises ModelError naming the nearest supported architectures, or for a family of somebody else that cannot be
    loaded.
    """
    family_and_use = _find(architecture)
    if family_and_use is None:
        raise ModelError(f"{unsupported(architecture)}; --model-impl transformers runs those that transformers knows")
    return family_and_use


def abilities(architecture: str, *, by_name: bool) -> tuple[PoolUse | None, bool]:
    """Return its pooling task (None: it generates), and whether models of its kind generate.

    `by_name`: an unknown architecture is judged by its suffix; otherwise ModelError is raised as by `find`.
    """
    if not by_name or is_supported(architecture):
        family, use = find(architecture)
        return use, family.generates
    if architecture.endswith(_GENERATORS):
        return None, True
    use = next((use for suffix, use in _POOLING_SUFFIXES.items() if architecture.endswith(suffix)), None)
    return use, use is None


def is_supported(architecture: str) -> bool:
    """Return whether a family computes the architecture. Raises ModelError if it cannot be loaded."""
    return _find(architecture) is not None


def unsupported(architecture: str) -> str:
    """Return the beginning of an error message, with the three supported architectures of the most similar names."""
    pooling = (f"{stem}{suffix}" for stem in ENCODERS for suffix in ("Model", "ForSequenceClassification"))
    nearest = get_close_matches(architecture, sorted({*_supported(), *POOLERS, *pooling}), n=3, cutoff=0.0)
    return f"architecture {architecture} is not supported; the nearest supported ones are {', '.join(nearest)}"


def _find(architecture: str) -> tuple[Family, PoolUse | None] | None:
    if (family := _generator(architecture)) is not None:
        return family, None
    if architecture in POOLERS:
        module, name, task = POOLERS[architecture]
        return _load(module, name), task
    for suffix, use in _POOLING_SUFFIXES.items():
        if not architecture.endswith(suffix):
            continue
        stem = architecture.removesuffix(suffix)
        if stem in ENCODERS:
            module, name = ENCODERS[stem]
            return _load(module, name), use
        for generator in _GENERATORS if suffix != "ForMaskedLM" else ():
            if (family := _generator(stem + generator)) is not None:
                return family, use
    return None


MODELS: Final = "pagoda.models"
"""Entry point group of families: the name is an architecture, the value `module:FAMILY`."""


class ModelRegistry:
    """Families that a program adds, as vLLM's class of this name.

    They are known in the process that registers them; the engine's own process registers them in a general plugin.
    Installed packages use the entry point group `pagoda.models`, which every process reads.
    """

    _families: ClassVar[dict[str, Family | str]] = {}

    @classmethod
    def register_model(cls, architecture: str, family: Family | str) -> None:
        """Use `family`, or the one that `module:FAMILY` names, for checkpoints of `architecture` that generate text.

        The name is imported when it is first needed. Raises ModelError for anything else.
        """
        if not isinstance(family, Family) and not (isinstance(family, str) and ":" in family):
            raise ModelError(f"architecture {architecture}: {family!r} is neither a Family nor a name module:FAMILY")
        cls._families[architecture] = family

    @classmethod
    def get_supported_archs(cls) -> set[str]:
        """Return the architectures that generate text: pagoda's own, registered and installed ones."""
        return _supported()

    @classmethod
    def added(cls) -> dict[str, Family | str]:
        """Return the families of installed packages and of this process by architecture."""
        return {point.name: point.value for point in entry_points(group=MODELS)} | cls._families


def _supported() -> set[str]:
    return {*ARCHITECTURES, *ModelRegistry.added()}


def _generator(architecture: str) -> Family | None:
    """Return the family of a generating architecture, None if it is unknown."""
    added = ModelRegistry.added().get(architecture)
    if added is None:
        if architecture not in ARCHITECTURES:
            return None
        module, name = ARCHITECTURES[architecture]
        return _load(module, name)
    if isinstance(added, Family):
        return added
    try:
        family = pkgutil.resolve_name(added)
    except Exception as error:
        problem = f"{added} of {MODELS} cannot be imported: {type(error).__name__}: {error}"
        raise ModelError(f"architecture {architecture}: {problem}; fix or uninstall it") from error
    if not isinstance(family, Family):
        raise ModelError(f"architecture {architecture}: {added} is not a Family, it is {type(family).__name__}")
    return family


def family(architecture: str) -> Family:
    """Return the family of an architecture. Raises ModelError naming the nearest supported ones."""
    return find(architecture)[0]


_ROTARY: Final = {"XLMRobertaModel": "JinaEmbeddingsV3Model"}
"""Architecture -> the one meant by a config that replaces its positions by RoPE."""


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the single entry of `architectures`. Raises ModelError unless there is exactly one."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ModelError(f"config.json: architectures is {architectures!r}; it must name one architecture")
    name = str(architectures[0])
    return _ROTARY.get(name, name) if config.get("position_embedding_type") == "rotary" else name


_CONFIG_REMEDY: Final = "download it again, or correct them with --hf-overrides"


def spec_from_config(config: Mapping[str, Any], *, code: Code | None = None) -> tuple[ModelSpec, Family]:
    """Return the spec of a generating model described by a Hugging Face config, and its family.

    `code`: reads the Python files of the checkpoint, which are searched for keys that no reader consumed.

    Raises ModelError for an unknown or pooling-only architecture, and a missing, unknown or out-of-range key.
    """
    text = text_model(config)
    architecture = architecture_of(text.config)
    family, use = find(architecture)
    if use is not None:
        raise ModelError(f"architecture {architecture} only pools, it generates no text; use --runner pooling, or auto")
    reader = HfConfig(text.config, path=text.path, origin=text.origin(config, code))
    with reading("config.json", _CONFIG_REMEDY):
        spec = family.build(reader)
        family = family.configured(reader)
        reader.finish()
    if not all(mixer.causal for mixer in spec.mixers):
        raise ModelError(f"architecture {architecture} attends to later tokens, so it cannot generate text")
    return spec, text.family(family)


def _load(module: str, name: str) -> Family:
    family = getattr(import_module(f"{__package__}.families.{module}"), name)
    assert isinstance(family, Family)
    return family


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """Modules that follow the model in a sentence-transformers folder, see `common.weights.sentence_modules`."""

    kind: PoolingKind
    width: int  # Width of the hidden states that it pools.
    dense: tuple[Dense, ...] = ()
    normalise: bool = False  # Embeddings are L2-normalised.
    folders: tuple[Path, ...] = ()  # Folders with the weights of each dense layer.
    max_seq_length: int | None = None  # Maximum number of tokens; longer texts are truncated.
    prompts: Mapping[str, str] | None = None  # Name -> text that precedes the input.


_MODULE_RULES: Final[tuple[Rule, ...]] = linear("sentence_modules.{l}.linear", "pooler.dense.{l}")
_TOKEN_HEADS: Final = ("pooler.token_embed", "pooler.token_classify")


def pooling_spec(
    config: Mapping[str, Any],
    use: PoolUse,
    modules: SentenceModules | None,
    overrides: PoolerConfig,
    *,
    code: Code | None = None,
) -> tuple[ModelSpec, Family]:
    """Return the spec of a pooling model for the task `use`, and its family with the pooler's weight rules.

    The pooler is the family's, overridden by `modules`, overridden by `overrides`.
    Raises ModelError as `spec_from_config` does, and for modules that do not fit the model.
    """
    text = text_model(config)
    family, _ = find(architecture_of(text.config))
    keys = {**text.config, **text_keys(config)}
    reader = HfConfig(keys, path=text.path, origin=text.origin(config, code))
    with reading("config.json", _CONFIG_REMEDY):
        spec = family.build(reader)
        family = text.family(family.configured(reader))
        pooler = family.pooler(reader, use)
        rules = family.pooler_rules
        if use in ("classify", "token_classify") and (tokens := TokenClassifier.of(reader)) is not None:
            pooler = tokens.pooler(pooler)
            rules = tokens.rules(family, tied=spec.tied)
        reader.finish()
    if modules is not None and use == "embed":
        heads = tuple(rule for rule in rules if isinstance(rule, Rename) and rule.target.startswith(_TOKEN_HEADS))
        rules = (*_MODULE_RULES, *heads)
    if modules is not None and modules.max_seq_length is not None:
        spec = replace(spec, max_positions=min(spec.max_positions, modules.max_seq_length))
    pooler = configured_pooler(pooler, use, spec.hidden_width, modules, overrides)
    spec = replace(spec, pooler=pooler, tied=True, head_bias=False)
    return spec, replace(family, rules=(*rules, *family.rules), ignored=(*family.ignored, *family.heads))


def configured_pooler(
    pooler: Pooler, use: PoolUse, width: int, modules: SentenceModules | None, overrides: PoolerConfig
) -> Pooler:
    """Return a model's pooler, overridden by `modules`, overridden by `overrides`.

    Raise ModelError for modules that do not pool the model's hidden states of `width`.
    """
    if modules is not None and use == "embed":
        if modules.width != width:
            raise ModelError(f"1_Pooling/config.json: pools width {modules.width}, the model has {width}")
        pooler = replace(pooler, kind=modules.kind, dense=modules.dense)
    selection = pooler.selection if overrides.step_tag is None else TokenSelection(tag=overrides.step_tag)
    return replace(pooler, kind=overrides.kind or pooler.kind, selection=selection)


# Changes to a model before it is built: --hf-overrides, --disable-sliding-window.

_ROPE_KINDS: Final = ("rope_type", "type")
_FULL: Final = "full_attention"


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with `overrides` merged into it recursively.

    `rope_scaling` and `rope_theta` are moved into `rope_parameters` if the config has that key. A rope section that
    names its type replaces the old section, whose factors belong to the old type.
    """
    changes = dict(overrides)
    base = dict(config)
    parameters = base.get("rope_parameters")
    if isinstance(parameters, Mapping) and "rope_parameters" not in changes:
        scaling = changes.pop("rope_scaling", {})
        moved: dict[str, Any] = {"rope_type": "default"} if scaling is None else dict(scaling)
        if "rope_theta" in changes:
            moved["rope_theta"] = changes.pop("rope_theta")
        if moved:
            changes["rope_parameters"] = {_FULL: moved} if isinstance(parameters.get(_FULL), Mapping) else moved
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(base.get(key), Mapping) and isinstance(changes.get(key), Mapping):
            base[key] = _without_old_kind(base[key], changes[key])
    return merge_json(base, changes)


def _without_old_kind(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The old rope section to merge under the new one: only theta and partial factor if the new one names a type."""
    if isinstance(old.get(_FULL), Mapping) and isinstance(new.get(_FULL), Mapping):
        return {**old, _FULL: _without_old_kind(old[_FULL], new[_FULL])}
    if any(kind in new for kind in _ROPE_KINDS):
        return {key: value for key, value in old.items() if key in ("rope_theta", "partial_rotary_factor")}
    return dict(old)


def within_context(spec: ModelSpec, max_len: int) -> ModelSpec:
    """Return the spec for sequences of at most `max_len` tokens, without what makes no difference there."""
    layers = tuple(
        replace(layer, mixers=tuple(mixer.within(max_len) for mixer in layer.mixers)) for layer in spec.layers
    )
    return spec if layers == spec.layers else replace(spec, layers=layers)


def without_windows(spec: ModelSpec) -> ModelSpec:
    """Return the spec without sliding windows, its context limited to the narrowest one (exact up to that length)."""
    windows = [cache.window for cache in spec.caches if isinstance(cache, WindowCache)]
    if not windows:
        return spec
    layers = tuple(
        replace(layer, mixers=tuple(mixer.without_window() for mixer in layer.mixers)) for layer in spec.layers
    )
    return replace(spec, layers=layers, max_positions=min(spec.max_positions, *windows))
