"""LLMEngine: an engine in this process, driven step by step by its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Self

from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.core import ASLEEP, check_sleep, check_wake_up
from pagoda.common.engine.messages import EngineStats
from pagoda.common.errors import ConfigError, RequestError, SleepError
from pagoda.common.observe.logs import configure_unless_done
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.common.text.hf_tokenizer import HfTokenizer
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.core_client import check_first_host
from pagoda.server.ipc_messages import EngineInfo
from pagoda.server.outputs import RawPoolingOutput, RequestOutput
from pagoda.server.processing.inputs import (
    InputProcessor,
    PreparedRequest,
    PromptType,
    check_extras,
    max_prompt_tokens,
    text_options,
)
from pagoda.server.processing.output_processor import OutputProcessor
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.startup.engine import BuiltEngine, build_engine


class LLMEngine:
    """Add requests, then call step() until has_unfinished_requests() is False.

    Raises ConfigError, ModelError or WeightError if the engine cannot start. `build` builds the engine and `open_text`
    opens the tokenizer, for tests.
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
        check_first_host(config)
        self.config = config
        with ThreadPoolExecutor(1, "pagoda-tokenizer") as executor:
            opening = executor.submit(open_text, config)
            self._built = build(config, usage)
            tokenizer = opening.result()
        self.info: EngineInfo = self._built.info
        if tokenizer is not None:
            tokenizer = tokenizer.with_vocab(self.info.vocab_size).with_context(max_prompt_tokens(self.info))
        self.tokenizer = tokenizer
        self._core = self._built.core
        self._sleeper = self._built.sleeper
        self.inputs = InputProcessor(config.model, self.info, self.tokenizer, config.structured_outputs)
        self._outputs = OutputProcessor(self.tokenizer, config.scheduler.stream_interval)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build an engine from its arguments."""
        return cls(engine_args.create_engine_config())

    @property
    def stats(self) -> EngineStats:
        """A snapshot: running, waiting, cache usage and totals."""
        return self._core.stats

    @property
    def text(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise ConfigError("--skip-tokenizer-init", "the tokenizer is switched off; drop this flag")
        return self.tokenizer

    def get_tokenizer(self) -> HfTokenizer:
        """Return the model's tokenizer, with Hugging Face's interface. Raises ConfigError with skip_tokenizer_init."""
        return self._hf_tokenizer

    @cached_property
    def _hf_tokenizer(self) -> HfTokenizer:
        return HfTokenizer(self.text, str(self.config.model.model), self.info.limits.max_model_len)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with what generation_config.json sets."""
        return SamplingParams.from_optional(**{"max_tokens": SamplingParams.max_tokens} | self.info.sampling_defaults)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a prompt to generate or to pool. Raises RequestError naming the field.

        `arrival_time`: Unix seconds; None: now. `tokenization_kwargs`: add_special_tokens, truncate_prompt_tokens,
        truncation_side. `trace_headers` have no effect: requests are not traced.
        """
        check_extras(lora_request=lora_request)
        text = text_options(tokenization_kwargs)
        self.add_prepared(
            self.inputs.prepare(request_id, prompt, params, priority, text=text, arrival_time=arrival_time)
        )

    def add_prepared(self, prepared: PreparedRequest, kind: RequestOutputKind | None = None) -> None:
        """Queue a request that `inputs` prepared; `kind` overrides its params' output_kind.

        Raises RequestError, or SleepError while the engine is asleep. Compiles the request's grammar.
        """
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

    def step(self) -> list[RequestOutput | RawPoolingOutput]:
        """Run one engine step and return the new outputs."""
        if not self._core.has_work:
            return []
        outputs, stopped = self._outputs.process(self._core.step().outputs)
        if stopped:
            self._core.abort(stopped)
        return outputs

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> list[RequestOutput]:
        """End requests and free their blocks. Return their last outputs (none for pooling); unknown ids are skipped.

        `internal` has no effect: a request has one id.
        """
        outputs, children = self._outputs.abort([request_ids] if isinstance(request_ids, str) else request_ids)
        self._core.abort(children)
        return outputs

    def abort_all(self) -> None:
        """End every request."""
        self.abort_request(self._outputs.request_ids)

    def has_unfinished_requests(self) -> bool:
        """Return True while a step may produce outputs."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests."""
        return len(self._outputs)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes; running requests keep their blocks. Returns True.

        Both parameters have no effect: blocks in use need not be free for it, and there is no KV connector.
        """
        return self._core.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the device's memory; the KV cache, prefixes included, is dropped.

        `level` 1 keeps the weights in host memory, 2 reads them again from the checkpoint on wake-up. With `mode`
        "abort" running requests end; "wait" is an error while there are any, because step() returns their outputs.
        Raises RequestError, ConfigError without enable_sleep_mode, SleepError if host memory is too small.
        """
        check_sleep(self.config.model, level, mode)
        assert self._sleeper is not None, "the engine was built with it"
        if mode == "wait" and self.has_unfinished_requests():
            raise RequestError("mode", "requests are unfinished; step() until they end, or use mode abort")
        self.abort_all()
        while self._core.has_work:
            self._core.step()
        self._sleeper.sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Restore the memory, or only the named parts of `weights` and `kv_cache`; requests need both.

        Raises RequestError, ConfigError without enable_sleep_mode, SleepError if memory is short: the part stays
        asleep, and may be woken up later.
        """
        checked = check_wake_up(self.config.model, tags)
        assert self._sleeper is not None, "the engine was built with it"
        self._sleeper.wake_up(checked)

    def is_sleeping(self) -> bool:
        """Return True while a part of the memory is offloaded."""
        return self._sleeper is not None and bool(self._sleeper.asleep)

    def shutdown(self) -> None:
        """End all requests and release the device. Idempotent."""
        self.abort_all()
        self._built.backend.close()
