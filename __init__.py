"""pagoda: LLM inference and serving with vLLM's interface. The public names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.common.beam_search import BeamSearchParams as BeamSearchParams
    from pagoda.common.pooling_params import PoolingParams as PoolingParams
    from pagoda.common.repetition import RepetitionDetectionParams as RepetitionDetectionParams
    from pagoda.common.sampling_params import RequestOutputKind as RequestOutputKind
    from pagoda.common.sampling_params import SamplingParams as SamplingParams
    from pagoda.server.offline.llm import LLM as LLM
    from pagoda.server.offline.llm_engine import LLMEngine as LLMEngine
    from pagoda.server.online.async_llm import AsyncLLM as AsyncLLM
    from pagoda.server.outputs import CompletionOutput as CompletionOutput
    from pagoda.server.outputs import RequestOutput as RequestOutput
    from pagoda.server.requests.pooling_outputs import ClassificationOutput as ClassificationOutput
    from pagoda.server.requests.pooling_outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from pagoda.server.requests.pooling_outputs import EmbeddingOutput as EmbeddingOutput
    from pagoda.server.requests.pooling_outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from pagoda.server.requests.pooling_outputs import PoolingOutput as PoolingOutput
    from pagoda.server.requests.pooling_outputs import PoolingRequestOutput as PoolingRequestOutput
    from pagoda.server.requests.pooling_outputs import ScoringOutput as ScoringOutput
    from pagoda.server.requests.pooling_outputs import ScoringRequestOutput as ScoringRequestOutput
    from pagoda.server.settings.args import AsyncEngineArgs as AsyncEngineArgs
    from pagoda.server.settings.args import EngineArgs as EngineArgs

__version__ = "0.1.0"

_NAMES = {
    "LLM": "pagoda.server.offline.llm",
    "LLMEngine": "pagoda.server.offline.llm_engine",
    "AsyncLLM": "pagoda.server.online.async_llm",
    "EngineArgs": "pagoda.server.settings.args",
    "AsyncEngineArgs": "pagoda.server.settings.args",
    "SamplingParams": "pagoda.common.sampling_params",
    "BeamSearchParams": "pagoda.common.beam_search",
    "RepetitionDetectionParams": "pagoda.common.repetition",
    "RequestOutputKind": "pagoda.common.sampling_params",
    "RequestOutput": "pagoda.server.outputs",
    "CompletionOutput": "pagoda.server.outputs",
    "PoolingParams": "pagoda.common.pooling_params",
    "PoolingOutput": "pagoda.server.requests.pooling_outputs",
    "PoolingRequestOutput": "pagoda.server.requests.pooling_outputs",
    "EmbeddingOutput": "pagoda.server.requests.pooling_outputs",
    "EmbeddingRequestOutput": "pagoda.server.requests.pooling_outputs",
    "ClassificationOutput": "pagoda.server.requests.pooling_outputs",
    "ClassificationRequestOutput": "pagoda.server.requests.pooling_outputs",
    "ScoringOutput": "pagoda.server.requests.pooling_outputs",
    "ScoringRequestOutput": "pagoda.server.requests.pooling_outputs",
}

__all__ = [*_NAMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NAMES[name]), name)
