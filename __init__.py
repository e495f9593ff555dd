"""pagoda: LLM inference and serving with vLLM's interface. The public names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.common.beam_search import BeamSearchParams as BeamSearchParams
    from pagoda.common.models.registry import ModelRegistry as ModelRegistry
    from pagoda.common.pooling_params import PoolingParams as PoolingParams
    from pagoda.common.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
    from pagoda.common.sampling_params import RequestOutputKind as RequestOutputKind
    from pagoda.common.sampling_params import SamplingParams as SamplingParams
    from pagoda.server.async_llm import AsyncLLM as AsyncLLM
    from pagoda.server.llm import LLM as LLM
    from pagoda.server.llm_engine import LLMEngine as LLMEngine
    from pagoda.server.outputs import ClassificationOutput as ClassificationOutput
    from pagoda.server.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from pagoda.server.outputs import CompletionOutput as CompletionOutput
    from pagoda.server.outputs import EmbeddingOutput as EmbeddingOutput
    from pagoda.server.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from pagoda.server.outputs import PoolingOutput as PoolingOutput
    from pagoda.server.outputs import PoolingRequestOutput as PoolingRequestOutput
    from pagoda.server.outputs import RequestOutput as RequestOutput
    from pagoda.server.outputs import ScoringOutput as ScoringOutput
    from pagoda.server.outputs import ScoringRequestOutput as ScoringRequestOutput
    from pagoda.server.settings.flags import AsyncEngineArgs as AsyncEngineArgs
    from pagoda.server.settings.flags import EngineArgs as EngineArgs

__version__ = "0.1.0"

_NAMES = {
    "LLM": "pagoda.server.llm",
    "LLMEngine": "pagoda.server.llm_engine",
    "AsyncLLM": "pagoda.server.async_llm",
    "EngineArgs": "pagoda.server.settings.flags",
    "AsyncEngineArgs": "pagoda.server.settings.flags",
    "ModelRegistry": "pagoda.common.models.registry",
    "SamplingParams": "pagoda.common.sampling_params",
    "BeamSearchParams": "pagoda.common.beam_search",
    "RepetitionDetectionParams": "pagoda.common.sampling_params",
    "RequestOutputKind": "pagoda.common.sampling_params",
    "RequestOutput": "pagoda.server.outputs",
    "CompletionOutput": "pagoda.server.outputs",
    "PoolingParams": "pagoda.common.pooling_params",
    "PoolingOutput": "pagoda.server.outputs",
    "PoolingRequestOutput": "pagoda.server.outputs",
    "EmbeddingOutput": "pagoda.server.outputs",
    "EmbeddingRequestOutput": "pagoda.server.outputs",
    "ClassificationOutput": "pagoda.server.outputs",
    "ClassificationRequestOutput": "pagoda.server.outputs",
    "ScoringOutput": "pagoda.server.outputs",
    "ScoringRequestOutput": "pagoda.server.outputs",
}

__all__ = [*_NAMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NAMES[name]), name)
