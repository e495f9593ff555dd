"""What the routes of one server share: the engine, the configuration, the metrics, and whether work is taken."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import cached_property
from pathlib import Path

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.engine.sleep import ASLEEP
from pagoda.common.errors import ConfigError, EngineDeadError, SleepError
from pagoda.common.observe.logs import stats_line
from pagoda.common.observe.metrics import Metrics
from pagoda.common.text.chat_template import BUILT_IN_TEMPLATES, template_kwargs_error
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.http.fields.errors import ModelNotFoundError, UnavailableError
from pagoda.server.http.response_store import ResponseStore
from pagoda.server.http.stream import Stopping
from pagoda.server.parsers.delimiters import DelimiterSet
from pagoda.server.parsers.parser import ReasoningFormat, ToolFormat
from pagoda.server.parsers.registry import reasoning_format, tool_format

logger = logging.getLogger(__name__)


class ServerState:
    """One server. `llm` may still be loading; `stopping` ends all running requests when set. Raises ConfigError."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, metrics: Metrics) -> None:
        fault = template_kwargs_error(config.default_chat_template_kwargs)
        if fault:
            raise ConfigError("--default-chat-template-kwargs", f"it {fault}; leave that to the server")
        self.config = config
        self.metrics = metrics
        self.created = int(time.time())
        self.chat_template = read_chat_template(config.chat_template)
        self.responses = ResponseStore(config.max_stored_responses, config.max_stored_response_bytes)
        self.draining = False
        self.stopping = Stopping()
        self.running = 0
        self._llm = llm

    @property
    def names(self) -> tuple[str, ...]:
        """The names the model is served under; the first is the default."""
        return self._llm.names

    @property
    def engine(self) -> AsyncLLM:
        """The engine, dead or alive, for those who only look."""
        return self._llm

    def llm(self) -> AsyncLLM:
        """The engine, ready for a request. Raises UnavailableError, or EngineDeadError with the cause."""
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if self._llm.errored:
            raise self._llm.dead_error
        if not self._llm.is_running:
            raise UnavailableError("the model is still loading")
        return self._llm

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None when it is switched off."""
        return None if self._llm.config.model.skip_tokenizer_init else self._llm.get_tokenizer()

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls, if the server was told."""
        name = self.config.tool_call_parser
        return tool_format(name, self.config.tool_parser_plugin) if name else None

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How the model thinks aloud, if the server was told."""
        config = self._llm.config.structured_outputs
        name = config.reasoning_parser
        return reasoning_format(name, config.reasoning_parser_plugin) if name else None

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The special tokens as text."""
        tokenizer = self.tokenizer()
        return frozenset(() if tokenizer is None else filter(None, map(tokenizer.token_text, tokenizer.special_ids)))

    @cached_property
    def special_marks(self) -> DelimiterSet:
        """The special tokens as text, which answers do not show unless they are asked to."""
        return DelimiterSet(self.special_texts)

    def model_name(self, asked: str | None) -> str:
        """The name to answer under. Raises ModelNotFoundError for a name that is not served."""
        if not asked:
            return self.names[0]
        if asked not in self.names:
            raise ModelNotFoundError(f"the model {asked[:200]!r} does not exist; served here: {', '.join(self.names)}")
        return asked

    async def check_health(self) -> None:
        """Raise EngineDeadError or UnavailableError unless the engine is loaded and makes progress."""
        if self._llm.errored:
            raise self._llm.dead_error
        if not self._llm.is_running:
            raise UnavailableError("the model is still loading")
        await self._llm.check_health()

    async def check_ready(self) -> None:
        """As check_health, and new requests are welcome: not while the engine sleeps."""
        if self.draining:
            raise UnavailableError("the server is shutting down")
        await self.check_health()
        if await self._llm.is_sleeping():
            raise SleepError(ASLEEP)

    async def sleep(self, level: int, mode: str) -> None:
        """Put the engine to sleep. Raises what AsyncLLM.sleep raises."""
        await self.llm().sleep(level, mode)
        self.metrics.sleep_level = level

    async def wake_up(self, tags: list[str]) -> None:
        """Wake the engine, or parts of it, up; none named: all. Raises what AsyncLLM.wake_up raises."""
        llm = self.llm()
        await llm.wake_up(tags)
        if not await llm.is_sleeping():
            self.metrics.sleep_level = 0

    async def wait_until_ready(self) -> None:
        """Wait for the engine, then publish what is known about it. Raises what kept it from starting."""
        info, cache = await self._llm.wait_until_ready(), self._llm.config.cache
        self.metrics.set_cache_info(
            {
                "block_size": info.limits.block_size,
                "cache_dtype": info.dtype if cache.cache_dtype == "auto" else cache.cache_dtype,
                "enable_prefix_caching": info.limits.prefix_caching,
                "gpu_memory_utilization": cache.gpu_memory_utilization,
                "num_gpu_blocks": info.num_blocks,
            }
        )

    async def log_stats(self) -> None:
        """Log a line about the engine every so many seconds, for ever."""
        before = self.metrics.totals()
        while True:
            await asyncio.sleep(self._llm.config.observability.log_stats_interval)
            now = self.metrics.totals()
            line = stats_line(before, now, self._llm.stats)
            if line is not None:
                logger.info("%s", line)
            before = now

    async def drain(self) -> None:
        """Take no more requests, wait for the running ones as long as configured, then end the rest."""
        self.draining = True
        deadline = time.monotonic() + self.config.shutdown_timeout
        while self.running and time.monotonic() < deadline and not self._llm.errored:
            await asyncio.sleep(0.02)
        self.stopping.set()

    async def until_dead(self) -> EngineDeadError:
        """Wait for the engine's death; its cause."""
        while not self._llm.errored:
            await asyncio.sleep(0.1)
        return self._llm.dead_error


def read_chat_template(value: str | None) -> str | None:
    """Return a built-in template, the one in a file, or the text itself when it holds jinja. Raises ConfigError."""
    if value is None:
        return None
    try:
        return BUILT_IN_TEMPLATES.get(value, Path(value)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if any(mark in value for mark in ("{{", "{%", "{#")):
            return value
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise ConfigError(
            "--chat-template",
            f"{value[:200]}: {reason}; give a file, a template with jinja marks, or {' or '.join(BUILT_IN_TEMPLATES)}",
        ) from None
