"""pagoda: LLM inference and serving with vLLM's interface. The public names are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pagoda.server.vllm.modules import find, public_object

if TYPE_CHECKING:
    from pagoda.common.beam_search import BeamSearchParams as BeamSearchParams
    from pagoda.common.models.registry import ModelRegistry as ModelRegistry
    from pagoda.common.pooling_params import PoolingParams as PoolingParams
    from pagoda.common.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
    from pagoda.common.sampling_params import RequestOutputKind as RequestOutputKind
    from pagoda.common.sampling_params import SamplingParams as SamplingParams
    from pagoda.common.sampling_params import StructuredOutputsParams as StructuredOutputsParams
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
    from pagoda.server.processing.inputs import PromptType as PromptType
    from pagoda.server.settings.flags import AsyncEngineArgs as AsyncEngineArgs
    from pagoda.server.settings.flags import EngineArgs as EngineArgs
    from pagoda.server.settings.flags import ScriptParser
    from pagoda.server.vllm.request_types import EmbedsPrompt as EmbedsPrompt
    from pagoda.server.vllm.request_types import LoRARequest as LoRARequest
    from pagoda.server.vllm.request_types import TextPrompt as TextPrompt
    from pagoda.server.vllm.request_types import TokensPrompt as TokensPrompt

    AsyncLLMEngine = AsyncLLM
    FlexibleArgumentParser = ScriptParser

__version__ = "0.1.0"

_NAMES = (
    *("LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine", "EngineArgs", "AsyncEngineArgs", "ModelRegistry"),
    *("SamplingParams", "BeamSearchParams", "StructuredOutputsParams", "RepetitionDetectionParams"),
    *("RequestOutputKind", "PoolingParams", "LoRARequest", "FlexibleArgumentParser"),
    *("PromptType", "TextPrompt", "TokensPrompt", "EmbedsPrompt"),
    *("RequestOutput", "CompletionOutput", "PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput"),
    *("EmbeddingRequestOutput", "ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput"),
    "ScoringRequestOutput",
)

__all__ = [*_NAMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
    return public_object(name)


class _VllmPaths:
    """A finder of sys.meta_path."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        return find(fullname) if fullname.startswith(f"{__name__}.") else None


sys.meta_path.append(_VllmPaths)
