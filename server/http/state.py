"""State shared by the routes of one server: engine, configuration, metrics, readiness."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, partial
from typing import Final, Protocol, cast

from fastapi import Request

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.scheduler import SchedulerConfig
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.engine.core import ASLEEP
from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.errors import ConfigError, EngineDeadError, RequestError, SleepError
from pagoda.common.observe.logs import Totals, stats_line
from pagoda.common.observe.metrics import Metrics
from pagoda.common.text.chat_template import read_chat_template, template_kwargs_error
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.core_client.client import QueueLimits
from pagoda.server.core_client.ipc_messages import EngineInfo
from pagoda.server.http.adapters import ServedAdapters
from pagoda.server.http.body import BodyT, read_body
from pagoda.server.http.errors import ModelNotFoundError, UnavailableError
from pagoda.server.http.peers import ApiPeers, PeerReport
from pagoda.server.http.stores.conversations import ConversationStore
from pagoda.server.http.stores.files import FileStore
from pagoda.server.http.stores.responses import ResponseStore
from pagoda.server.parsers.answer_formats import AnswerFormats, answer_formats
from pagoda.server.parsers.parser import DelimiterSet

logger = logging.getLogger(__name__)

MAX_ID_LENGTH = 256

OWNER: Final[ContextVar[bytes]] = ContextVar("OWNER", default=b"")
"""Digest of the API key of the request that the current task answers; empty on servers without keys."""

QUEUED_PER_RUNNING: Final = 8
MIN_QUEUED_SEQUENCES: Final = 2048
MIN_QUEUED_TOKENS: Final = 1 << 22
MIN_WAITING: Final = 64
OVERLOAD_SECONDS: Final = 2.0
"""Default limits of a server's queue, see `queue_limits`."""

_SHOWN_ADAPTERS: Final = 20

_LAST_WORDS_SECONDS: Final = 0.5
"""Time at the end of --shutdown-timeout for sending errors to the requests that it cuts."""


class StopSignal:
    """Set once, when the server stops; calls the callbacks registered with `notifying`."""

    def __init__(self) -> None:
        self._is_set = False
        self._callbacks: set[Callable[[], None]] = set()
        self.num_called = 0  # Number of callbacks that were called: what the signal ended.

    def set(self) -> None:
        self._is_set = True
        for callback in list(self._callbacks):
            self.num_called += 1
            callback()

    @contextmanager
    def notifying(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` if the signal is set within this context, or has been set before."""
        self._callbacks.add(callback)
        if self._is_set:
            self.num_called += 1
            asyncio.get_running_loop().call_soon(callback)
        try:
            yield
        finally:
            self._callbacks.discard(callback)


class ServerState:
    """One server. `llm` may still be loading; setting `stopping` ends all running requests. Raises ConfigError."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, metrics: Metrics) -> None:
        fault = template_kwargs_error(config.default_chat_template_kwargs)
        if fault:
            raise ConfigError("--default-chat-template-kwargs", f"it {fault}; the server sets it")
        self.config = config
        self.metrics = metrics
        self.created = int(time.time())
        self.given_template = read_chat_template(config.chat_template)
        self.responses = ResponseStore(config.max_stored_responses, config.max_stored_response_bytes)
        share = key_share(llm.config.scheduler, len(set(config.api_key)))
        self.files = FileStore(config.files_dir, config.max_stored_files, config.max_stored_file_bytes, share)
        self.conversations = ConversationStore(config.max_stored_responses, config.max_stored_response_bytes)
        self.draining = False
        self.stopping = StopSignal()
        self.running = 0  # Number of HTTP requests in the engine.
        self._llm = llm
        self.adapters = ServedAdapters(llm, config.lora_modules)
        self.peers: ApiPeers | None = None  # It exists with several API server processes.

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The served model names; the first is the default."""
        return self._llm.names

    @property
    def engine(self) -> AsyncLLM:
        """The engine in whatever state it is; for a request use `llm`."""
        return self._llm

    def llm(self) -> AsyncLLM:
        """Return the engine, ready for a request. Raise UnavailableError, or EngineDeadError with the cause."""
        if self._llm.errored:
            raise self._llm.dead_error
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if not self._llm.is_running:
            raise UnavailableError("the model is still loading")
        self._llm.raise_if_unavailable()
        return self._llm

    def tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer; None with --skip-tokenizer-init."""
        return None if self._llm.config.model.skip_tokenizer_init else self._llm.text_or_none

    @cached_property
    def formats(self) -> AnswerFormats:
        """How the model writes tool calls and reasoning. Found at the start, see `wait_until_ready`."""
        llm = self._llm
        render = partial(llm.templates.render, lane="short")
        return answer_formats(self.config, llm.config, self.given_template, llm.info.answers, self.tokenizer(), render)

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The special tokens as text."""
        tokenizer = self.tokenizer()
        return frozenset(() if tokenizer is None else filter(None, map(tokenizer.token_text, tokenizer.special_ids)))

    @cached_property
    def special_delimiters(self) -> DelimiterSet:
        """The special tokens to strip from parsed output unless skip_special_tokens is false."""
        return DelimiterSet(self.special_texts)

    def model_name(self, requested: str | None) -> str:
        """Return the requested model name, by default the first. Raise ModelNotFoundError if it is not served."""
        if not requested:
            return self.names[0]
        if not self.serves(requested):
            served = [*self.names, *(adapter.adapter.name for adapter in self.adapters.served[:_SHOWN_ADAPTERS])]
            raise ModelNotFoundError(
                f"the model {requested[:200]!r} does not exist; served models: {', '.join(served)}"
            )
        return requested

    def adapter(self, model: str | None) -> Adapter | None:
        """Return the LoRA adapter that is served under a name; None for a model's name."""
        return None if model is None or model in self.names else self.adapters.find(model)

    def serves(self, name: str) -> bool:
        """Return whether requests may name this model or adapter."""
        return name in self.names or self.adapters.find(name) is not None

    async def check_health(self) -> None:
        """Raise EngineDeadError or UnavailableError unless the engine is loaded and makes progress."""
        if self._llm.errored:
            raise self._llm.dead_error
        if not self._llm.is_running:
            raise UnavailableError("the model is still loading")
        await self._llm.check_health()

    async def check_ready(self) -> None:
        """Raise as check_health does, and if the server is draining or the engine sleeps."""
        if self.draining:
            raise UnavailableError("the server is shutting down")
        await self.check_health()
        if await self._llm.is_sleeping():
            raise SleepError(ASLEEP)

    async def sleep(self, level: int, mode: str) -> None:
        """Put the engine to sleep. Raises as AsyncLLM.sleep does."""
        await self.llm().sleep(level, mode)
        self.metrics.sleep_level = level

    async def wake_up(self, tags: list[str]) -> None:
        """Wake up the engine or, with `tags`, parts of it. Raises as AsyncLLM.wake_up does."""
        llm = self.llm()
        await llm.wake_up(tags)
        if not await llm.is_sleeping():
            self.metrics.sleep_level = 0

    async def wait_until_ready(self) -> None:
        """Wait for the engine, then publish its cache configuration as a metric. Raises if it does not start."""
        info = await self._llm.wait_until_ready()
        tokenizer = self.tokenizer()
        if tokenizer is not None:
            await asyncio.to_thread(self._llm.templates.start, self.given_template or tokenizer.chat_template)
        formats = await asyncio.to_thread(lambda: self.formats)
        self._llm.read_reasoning_as(formats.reasoning)
        if self.peers is None or self.peers.index == 0:
            formats.log()
        self._llm.limit_queue(queue_limits(self._llm.config, info, len(set(self.config.api_key))))
        await self.adapters.load_modules()
        self.metrics.set_cache_info(cache_labels(self._llm.config, info))

    def report(self, metrics: bool) -> PeerReport:
        """Return what this process reports to the server's other API processes."""
        totals = self.metrics.totals()
        return PeerReport(
            running=self.running,
            prompted=totals.prompt_tokens,
            generated=totals.generation_tokens,
            metrics=self.metrics.snapshot() if metrics else [],
        )

    async def num_running(self) -> int:
        """Return the number of HTTP requests in the engine, of all API processes."""
        if self.peers is None:
            return self.running
        return sum(report.running for report in await self.peers.reports(metrics=False))

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics of all API processes and their content type, see Metrics.exposition."""
        if self.peers is None:
            return self.metrics.exposition(accept)
        reports = await self.peers.reports(metrics=True)
        return self.metrics.exposition(accept, [report.metrics for report in reports])

    async def _totals(self) -> Totals:
        totals = self.metrics.totals()
        if self.peers is None:
            return totals
        reports = await self.peers.reports(metrics=False)
        prompted = sum(report.prompted for report in reports)
        generated = sum(report.generated for report in reports)
        return replace(totals, prompt_tokens=prompted, generation_tokens=generated)

    async def log_stats(self) -> None:
        """Log throughput and load every --log-stats-interval seconds, forever."""
        before = await self._totals()
        while True:
            await asyncio.sleep(self._llm.config.observability.log_stats_interval)
            now = await self._totals()
            line = stats_line(before, now, self._llm.stats)
            if line is not None:
                logger.info("%s", line)
            before = now

    async def drain(self, in_progress: Callable[[], int] = lambda: 0, hurry: asyncio.Event | None = None) -> None:
        """Refuse new requests, wait for those in progress, then set `stopping`, which ends the others with an error.

        It is set in time for the errors to be sent by --shutdown-timeout, or as soon as `hurry` is set. `in_progress`:
        HTTP requests that are being answered.
        """
        self.draining = True
        timeout = self.config.shutdown_timeout
        deadline = time.monotonic() + timeout - min(_LAST_WORDS_SECONDS, timeout / 10)
        while (in_progress() or self.running) and time.monotonic() < deadline and not self._llm.errored:
            if hurry is not None and hurry.is_set():
                break
            await asyncio.sleep(0.02)
        self.stopping.set()

    async def until_dead(self) -> EngineDeadError:
        """Wait until the engine dies and return the cause."""
        while not self._llm.errored:
            await asyncio.sleep(0.1)
        return self._llm.dead_error


def key_share(scheduler: SchedulerConfig, num_keys: int) -> float:
    """Return the share of a limit that one of a server's API keys may use."""
    return scheduler.max_key_share if num_keys > 1 else 1.0


def queue_limits(config: EngineConfig, info: EngineInfo, num_keys: int) -> QueueLimits:
    """Return the limits of a server's queue: those that are set, else by what the engine runs."""
    scheduler = config.scheduler
    limits = info.limits
    running = limits.max_num_seqs * config.parallel.data_parallel_size
    seconds = scheduler.max_overload_seconds
    if seconds is None and scheduler.max_num_queued_reqs is None:
        seconds = OVERLOAD_SECONDS
    return QueueLimits(
        sequences=scheduler.max_num_queued_reqs or max(QUEUED_PER_RUNNING * running, MIN_QUEUED_SEQUENCES),
        tokens=scheduler.max_num_queued_tokens or max(2 * limits.max_model_len, MIN_QUEUED_TOKENS),
        waiting=max(running // 2, MIN_WAITING),
        overload_seconds=seconds,
        key_share=key_share(scheduler, num_keys),
    )


def cache_labels(config: EngineConfig, info: EngineInfo) -> dict[str, object]:
    """Return the KV cache configuration of a replica, under the names of vLLM's CacheConfig.

    What has no equivalent has the value that vLLM has when its feature is off.
    """
    cache = config.cache
    limits = info.limits
    tokens = int(info.max_concurrency * limits.max_model_len) or None
    configured: dict[str, object] = {
        "block_size": limits.block_size,
        "cache_dtype": info.dtype if cache.cache_dtype == "auto" else cache.cache_dtype,
        "enable_prefix_caching": limits.prefix_caching,
        "gpu_memory_utilization": cache.memory_share(),
        "hash_block_size": limits.block_size,
        "cache_hit_alignment_tokens": limits.block_size,
        "effective_attention_block_size": limits.block_size,
        "kv_cache_max_concurrency": round(info.max_concurrency, 2) or None,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "kv_cache_size_tokens": tokens,
        "num_gpu_blocks": info.num_blocks // config.parallel.data_parallel_size,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "prefix_caching_hash_algo": "sha256",
        "mamba_cache_dtype": "float32",
        "mamba_ssm_cache_dtype": "float32",
        "mamba_block_size": limits.snapshots.unit if info.keeps_states else None,
        "mamba_cache_mode": limits.snapshots.mode if info.keeps_states else "none",
        "prefix_cache_retention_interval": limits.snapshots.interval if info.keeps_states else 0,
        "user_specified_block_size": cache.block_size is not None,
        "_block_size_resolved": True,
    }
    return {**configured, **_WITHOUT_EQUIVALENT}


_WITHOUT_EQUIVALENT: Final[Mapping[str, object]] = {
    "enable_mamba_shared_prefix_checkpoint": False,
    "is_attention_free": False,
    "kv_cache_dtype_skip_layers": [],
    "kv_cache_layout": None,
    "kv_offloading_backend": None,
    "kv_offloading_size": None,
    "kv_sharing_fast_prefill": False,
    "mamba_page_size_padded": None,
    "num_cpu_blocks": None,
    "prefix_match_unit": None,
    "replayssm_buffer_len": 0,
    "skip_page_size_padded": None,
    "sliding_window": None,
    "swa_bounded_replay": False,
    "use_kda_recoverssm": False,
    "use_replayssm": False,
}


# Access from a request.


def server_of(request: Request) -> ServerState:
    """Return the state of the server that received the request."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state


class Identified(Protocol):
    """A body that may set its request id."""

    @property
    def request_id(self) -> str | None:
        """The id; None: random."""
        ...


class ToModel(Protocol):
    """A body addressed to a model."""

    @property
    def model(self) -> str | None:
        """The model name; None: the default."""
        ...

    def check(self) -> None:
        """Raise RequestError for an invalid combination of fields."""
        ...


async def read_for_model(request: Request, body_type: type[BodyT]) -> tuple[ServerState, BodyT, str]:
    """Return the server's state, the checked body of a request to a model, and the model's name.

    An unknown name may be a LoRA adapter's, which a resolver finds. Raise ModelNotFoundError, UnavailableError, or as
    `read_body` does.
    """
    state = server_of(request)
    body = await read_body(request, body_type, state.config)
    addressed = cast(ToModel, body)
    if addressed.model and not state.serves(addressed.model) and state.engine.is_running:
        await state.adapters.resolve(addressed.model)
    model = state.model_name(addressed.model)
    state.llm()
    addressed.check()
    return state, body, model


def request_id_of(request: Request, body: Identified, prefix: str) -> str:
    """Return `prefix` and the id of X-Request-Id, else of the body, by default a random one. Raise RequestError."""
    header = request.headers.get("x-request-id", "")
    if len(header) > MAX_ID_LENGTH:
        raise RequestError("request_id", f"the X-Request-Id header is longer than {MAX_ID_LENGTH} characters")
    return f"{prefix}-{header or body.request_id or uuid.uuid4().hex}"
