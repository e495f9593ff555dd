"""What the API's side knows and has once the engine is warm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pagoda.common.config.engine import EngineConfig
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.grammars.grammars import check_of
from pagoda.server.online.async_generation import AsyncGeneration
from pagoda.server.online.async_inputs import AsyncInputs
from pagoda.server.requests.inputs import InputProcessor
from pagoda.server.requests.output_processor import OutputProcessor
from pagoda.server.requests.pooling_inputs import PoolingInputs
from pagoda.server.wire import EngineInfo


@dataclass(frozen=True, slots=True)
class WarmEngine:
    """What an AsyncLLM needs for requests. `pooling_inputs`: None for a model that generates."""

    info: EngineInfo
    tokenizer: Tokenizer | None
    inputs: AsyncInputs
    generation: AsyncGeneration
    pooling_inputs: PoolingInputs | None

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer | None) -> Self:
        """Built from what the engine says about itself. `tokenizer`: None with skip_tokenizer_init."""
        tokenizer = None if tokenizer is None else tokenizer.with_context(info.max_model_len)
        processor = InputProcessor(config.model, info, tokenizer, config.structured_outputs)
        return cls(
            info=info,
            tokenizer=tokenizer,
            inputs=AsyncInputs(processor, check_of(tokenizer, info)),
            generation=AsyncGeneration(OutputProcessor(tokenizer, config.scheduler.stream_interval)),
            pooling_inputs=None if info.pooling is None else PoolingInputs(info, tokenizer),
        )
