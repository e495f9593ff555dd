"""LLMEngine: an engine in this process, driven step by step by its caller.

Knows requests and steps; prompts and outputs are handled by inputs and output_processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Self

from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.messages import EngineStats
from pagoda.common.engine.sleep import ASLEEP, check_sleep, check_wake_up
from pagoda.common.errors import ConfigError, RequestError, SleepError
from pagoda.common.observe.logs import configure_unless_done
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.core_client.client import only_first_host
from pagoda.server.ipc_messages import EngineInfo
from pagoda.server.outputs import RequestOutput
from pagoda.server.processing.inputs import InputProcessor, PreparedRequest, PromptType, open_tokenizer
from pagoda.server.processing.output_processor import BaseOutput, OutputProcessor, PoolingProcessor
from pagoda.server.processing.pooling_inputs import NO_GENERATION, NO_POOLING, PoolingInputs, PreparedPooling
from pagoda.server.settings.args import EngineArgs
from pagoda.server.startup.engine import build_engine
from pagoda.server.startup.worker_group import BuiltEngine


class LLMEngine:
    """Add requests, call step() until has_unfinished_requests() is False.

    Raises ConfigError, ModelError or WeightError when the engine cannot start. `build` makes the engine and
    `open_text` the tokenizer, for tests.
    """

    def __init__(
        self,
        config: EngineConfig,
        usage: Usage = "llm",
        *,
        build: Callable[[EngineConfig, Usage], BuiltEngine] = build_engine,
        open_text: Callable[[EngineConfig], Tokenizer | None] = open_tokenizer,
    ) -> None:
        configure_unless_done(config.logging)
        only_first_host(config)
        self.config = config
        with ThreadPoolExecutor(1, "pagoda-tokenizer") as reader:
            reading = reader.submit(open_text, config)
            self._built = build(config, usage)
            tokenizer = reading.result()
        self.info: EngineInfo = self._built.info
        if tokenizer is not None:
            tokenizer = tokenizer.with_vocab(self.info.vocab_size).with_context(self.info.max_model_len)
        self.tokenizer = tokenizer
        self._core = self._built.core
        self._sleeper = self._built.sleeper
        self.inputs = InputProcessor(config.model, self.info, self.tokenizer, config.structured_outputs)
        self._outputs = OutputProcessor(self.tokenizer, config.scheduler.stream_interval)
        self._pooling = PoolingProcessor()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """The engine that the arguments describe."""
        return cls(engine_args.create_engine_config())

    @property
    def stats(self) -> EngineStats:
        """Running, waiting, cache use and totals, now."""
        return self._core.stats

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise ConfigError("--skip-tokenizer-init", "there is no tokenizer, because it was switched off")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json sets, on top of SamplingParams' own defaults."""
        return SamplingParams.from_optional(**{"max_tokens": SamplingParams.max_tokens} | self.info.sampling_defaults)

    @cached_property
    def pooling_inputs(self) -> PoolingInputs:
        """What prepares prompts for a pooling model. Raises RequestError when the model generates."""
        if self.info.pooling is None:
            raise RequestError("model", NO_POOLING)
        return PoolingInputs(self.info, self.tokenizer)

    def add_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams | PoolingParams, priority: int = 0
    ) -> None:
        """Queue a prompt, to be continued or to be pooled. Raises RequestError naming the field."""
        if isinstance(params, PoolingParams):
            self.add_pooling(self.pooling_inputs.prepare(request_id, prompt, params, priority))
        else:
            self.add_prepared(self.inputs.prepare(request_id, prompt, params, priority))

    def add_pooling(self, prepared: PreparedPooling) -> None:
        """Queue a request that `pooling_inputs` prepared. Raises RequestError, or SleepError while asleep."""
        if self.is_sleeping():
            raise SleepError(ASLEEP)
        self._pooling.add(prepared)
        try:
            self._core.add_request(prepared.child)
        except BaseException:
            self._pooling.drop([prepared.request_id])
            raise

    def add_prepared(self, prepared: PreparedRequest, kind: RequestOutputKind | None = None) -> None:
        """Queue a request that `inputs` prepared; `kind` overrides its params' output_kind.

        Raises RequestError, or SleepError while the engine is asleep. A grammar is compiled here and now.
        """
        if self.info.pooling is not None:
            raise RequestError("model", NO_GENERATION)
        if self.is_sleeping():
            raise SleepError(ASLEEP)
        if self._built.structured is not None and prepared.children[0].grammar is not None:
            self._built.structured.mask_state(prepared.children[0])
        self._outputs.add(prepared, kind)
        added: list[str] = []
        try:
            for child in prepared.children:
                self._core.add_request(child)
                added.append(child.request_id)
        except BaseException:
            self._core.abort(added)
            self._outputs.drop(prepared.request_id)
            raise

    def step(self) -> list[RequestOutput | BaseOutput]:
        """Run one engine step; what it brought, per request."""
        if not self._core.has_work:
            return []
        step = self._core.step()
        outputs, stopped = self._outputs.process(step.outputs)
        if stopped:
            self._core.abort(stopped)
        return [*outputs, *self._pooling.process(step.outputs)]

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests and free what they hold; their last outputs (pooling has none). Unknown ids are no error."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        outputs, children = self._outputs.abort(ids)
        self._core.abort([*children, *self._pooling.drop(ids)])
        return outputs

    def abort_all(self) -> None:
        """End every request."""
        self.abort_request([*self._outputs.request_ids, *self._pooling.request_ids])

    def has_unfinished_requests(self) -> bool:
        """True while a step may bring something."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """How many requests have not finished."""
        return len(self._outputs) + len(self._pooling)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests keep their blocks. Returns True."""
        self._core.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give the device's memory back; the KV cache, prefixes included, is forgotten.

        `level` 1 keeps the weights in host memory, 2 reads them again from the checkpoint on waking up. Requests under
        way end; with `mode` "wait" that is an error if there are any: their outputs come from step(). Raises
        RequestError, ConfigError without enable_sleep_mode, SleepError when the host has no room for the weights.
        """
        check_sleep(self.config.model, level, mode)
        assert self._sleeper is not None, "the engine was built with it"
        if mode == "wait" and self.has_unfinished_requests():
            raise RequestError("mode", "requests are under way; step() until they end, or use mode abort")
        self.abort_all()
        while self._core.has_work:
            self._core.step()
        self._sleeper.sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Have the memory again, or only the parts named of `weights` and `kv_cache`; requests need both.

        Raises RequestError, ConfigError without enable_sleep_mode, SleepError when there is not enough memory: the
        part stays asleep, and may be woken up later.
        """
        named = check_wake_up(self.config.model, tags)
        assert self._sleeper is not None, "the engine was built with it"
        self._sleeper.wake_up(named)

    def is_sleeping(self) -> bool:
        """True while a part of the memory is away."""
        return self._sleeper is not None and bool(self._sleeper.asleep)

    def shutdown(self) -> None:
        """End all requests and release the device. Idempotent."""
        self.abort_all()
        self._built.backend.close()
