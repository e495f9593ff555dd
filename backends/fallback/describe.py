"""Models of transformers described for the engine: config.json -> TransformersSpec, without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
)

from pagoda.backends.fallback.attention import TracedLayers
from pagoda.backends.fallback.classes import (
    code_of,
    has_custom_code,
    in_one_line,
    is_text_encoder,
    make_config,
    max_positions_of,
    model_class,
    text_config,
)
from pagoda.backends.fallback.traced_encoder_decoder import trace_encoder_decoder
from pagoda.backends.fallback.tracing import TRACED_TOKENS, MetaValues, trace_layers, vocab_of
from pagoda.common.config.groups.nested.pooler import PoolingKind
from pagoda.common.errors import ModelError
from pagoda.common.models.family import PoolUse, classifier
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.registry import architecture_of
from pagoda.common.models.spec import Pooler
from pagoda.common.models.transformers_spec import TransformersSource, TransformersSpec


def describe(folder: Path, config: Mapping[str, Any], *, trust_remote_code: bool) -> TransformersSpec:
    """Return the spec of the causal language model that `config` describes. Raises ModelError for one that cannot run.

    `trust_remote_code`: the folder's Python files may be executed.
    """
    architecture = architecture_of(config)
    source = TransformersSource(folder, config, has_custom_code(architecture, config, trust_remote_code, None))
    built = make_config(source)
    _check_config(architecture, built)
    max_positions = max_positions_of(architecture, built)
    start = _decoder_start(architecture, source, built) if built.is_encoder_decoder else None
    try:
        if start is not None:
            return trace_encoder_decoder(source, built, max_positions, start)
        return _trace(source, built, max_positions)
    except ModelError as error:
        raise ModelError(f"{architecture} cannot run on the paged KV cache: {error}") from None
    except Exception as error:  # The code of transformers or of the model may raise anything.
        raise ModelError(f"{architecture}: transformers cannot build or run it: {in_one_line(error)}") from error


def _trace(source: TransformersSource, config: PretrainedConfig, max_positions: int) -> TransformersSpec:
    """Build the model on the meta device and record a forward pass."""
    traced = trace_layers(source, config, max_positions, both_ways=False)
    return TransformersSpec(
        vocab=vocab_of(traced.model),
        width=traced.width,
        max_positions=max_positions,
        attention=traced.attention,
        source=source,
    )


def _decoder_start(architecture: str, source: TransformersSource, config: PretrainedConfig) -> tuple[int, ...]:
    """Return the token ids that the decoder starts from: the start token, and the one that all outputs begin with.

    They are keys of config.json or generation_config.json. Raise ModelError without a start token.
    """
    generation = source.folder / "generation_config.json"
    generation_keys = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    generation_keys |= {key: value for key, value in source.config.items() if value is not None}
    start = generation_keys.get("decoder_start_token_id", getattr(config, "decoder_start_token_id", None))
    forced = generation_keys.get("forced_bos_token_id")
    if not isinstance(start, int):
        raise ModelError(
            f"{architecture}: config.json states no decoder_start_token_id; use --hf-overrides "
            "'{\"decoder_start_token_id\": ...}'"
        )
    return (start, forced) if isinstance(forced, int) else (start,)


def _check_config(architecture: str, config: PretrainedConfig) -> None:
    """Raise ModelError for what a configuration alone rules out."""
    if bool(config.is_encoder_decoder) != (architecture in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()):
        raise ModelError(
            f"{architecture}: is_encoder_decoder is {config.is_encoder_decoder}; of encoder-decoder models those for "
            "text run that transformers has, not multimodal ones or custom code"
        )


def describe_pooling(
    folder: Path, config: Mapping[str, Any], use: PoolUse, *, trust_remote_code: bool
) -> TransformersSpec:
    """Return the spec of the model that `config` describes, to be pooled. Raises ModelError for one that cannot run."""
    architecture = architecture_of(config)
    source = TransformersSource(folder, config, has_custom_code(architecture, config, trust_remote_code, use), use=use)
    built = make_config(source)
    if getattr(built, "is_encoder_decoder", False) and not is_text_encoder(architecture):
        remedy = "use an encoder or a decoder"
        if type(built) in MODEL_FOR_TEXT_ENCODING_MAPPING:
            encoder = _get_model_class(built, MODEL_FOR_TEXT_ENCODING_MAPPING).__name__
            remedy = f'use --hf-overrides \'{{"architectures": ["{encoder}"]}}\' for its encoder'
        raise ModelError(f"{architecture} is an encoder-decoder model, which is not supported; {remedy}")
    try:
        return _measure(source, built, max_positions_of(architecture, built))
    except ModelError:
        raise
    except Exception as error:  # The code of transformers or of the model may raise anything.
        raise ModelError(f"{architecture}: transformers cannot build or run it: {in_one_line(error)}") from error


def _measure(source: TransformersSource, config: PretrainedConfig, max_positions: int) -> TransformersSpec:
    """Build the model on the meta device and read the shapes of its outputs."""
    with torch.device("meta"):
        kind: Any = model_class(source, config)
        model: PreTrainedModel = kind._from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.zeros(1, TRACED_TOKENS, dtype=torch.int64)
        with torch.no_grad(), MetaValues():
            output: Tensor = model(input_ids=ids)[0]
    table: Any = model.get_input_embeddings()
    embeds = source.use in ("embed", "reward")
    outputs = output.shape[-1]
    labels = None if embeds else classifier(HfConfig(source.config), labels=outputs)
    traced = _packable(source, config, max_positions)
    return TransformersSpec(
        vocab=table.num_embeddings,
        width=int(outputs) if embeds else int(text_config(config).hidden_size),
        max_positions=max_positions - first_position(model),
        attention=() if traced is None else traced.attention,
        source=source,
        pooler=Pooler(_pooling_kind(source, config), classifier=labels),
    )


def first_position(model: nn.Module) -> int:
    """Return the position of the first token: after those of padding if the table of positions has a row for it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and name.endswith("position_embeddings"):
            return module.padding_idx + 1
    return 0


def _packable(source: TransformersSource, config: PretrainedConfig, max_positions: int) -> TracedLayers | None:
    """Return the traced layers of a model that pools; None unless the prompts of a step can be concatenated."""
    try:
        return trace_layers(source, config, max_positions, both_ways=True)
    except Exception:  # The code of transformers may raise anything; the model then runs with its own attention.
        return None


def _pooling_kind(source: TransformersSource, config: PretrainedConfig) -> PoolingKind:
    """Return the pooling of embeddings unless the model's files name one: a decoder's last token, else the first."""
    if source.use in ("reward", "token_classify"):
        return "all"
    decodes = type(config) in AutoModelForCausalLM._model_mapping or "AutoModelForCausalLM" in code_of(source.config)
    return "last" if decodes and type(config) not in AutoModelForMaskedLM._model_mapping else "first"
