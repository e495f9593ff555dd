"""Scheduler settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagoda.common.config.fields import human_readable_int, need_not_negative, need_positive, option
from pagoda.common.errors import ConfigError

_NO_LIMIT: Final = "partial prefills are limited by tokens, not by number; use --long-prefill-token-threshold"


MAX_REQUEST_COST: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Batch limits and scheduling policy."""

    max_num_batched_tokens: int | None = option(
        None,
        "Maximum number of tokens per step (suffixes: 2k, 2K); default: by platform and use.",
        parse=human_readable_int,
    )
    max_num_seqs: int | None = option(None, "Maximum number of sequences per step; default: by platform and use.")
    max_num_queued_reqs: int | None = option(
        None,
        "Maximum in-flight sequences (running + queued); further requests get HTTP 429. Default of a server: 8 times "
        "--max-num-seqs, at least 2048; in Python: unlimited.",
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Maximum prompt tokens of in-flight sequences; further requests get HTTP 429. Default of a server: 4194304, or "
        "twice the context length if that is more; in Python: unlimited.",
        parse=human_readable_int,
    )
    max_overload_seconds: float | None = option(
        None,
        "Load shedding. If more requests than half of --max-num-seqs (at least 64) wait for longer than this many "
        "seconds, new requests get HTTP 429 until the queue is shorter. Under sustained overload the queue limit "
        "falls to a quarter, and requests that already wait are refused too, newest first, from the API keys with "
        "most of them. A request counts once, however many sequences it has. Default of a server: 2, or unlimited "
        "with --max-num-queued-reqs; in Python: unlimited.",
    )
    max_key_share: float = option(
        0.5,
        "On servers with several API keys, the largest share that one key may use of --max-num-queued-reqs, "
        "--max-num-queued-tokens, the queue of grammar checks and the files of /v1/files. 1: no limit per key.",
    )
    max_request_cost: int = option(
        MAX_REQUEST_COST,
        "Maximum cost of a request, in tokens: n x prompts x (prompt + max_tokens). Long lists in logit_bias, "
        "allowed_token_ids and bad_words raise the cost of each generated token.",
        parse=human_readable_int,
    )
    max_num_partial_prefills: int = option(1, "Maximum number of concurrent partial prefills.", refused=_NO_LIMIT)
    max_long_partial_prefills: int = option(
        1, "Maximum number of concurrent partial prefills of long prompts.", refused=_NO_LIMIT
    )
    long_prefill_token_threshold: int = option(
        0, "Maximum tokens of one prompt per step, for chunked prefill; 0: unlimited."
    )
    policy: Literal["fcfs", "priority"] = option(
        "fcfs",
        "Scheduling policy: fcfs (first come, first served) or priority (lower values first, then arrival time).",
        flag="scheduling-policy",
    )
    enable_chunked_prefill: bool | None = option(
        None, "Split the prefill of long prompts over several steps; default: on if the model supports it."
    )
    scheduler_cls: str | None = option(
        None, "Scheduler class to use, as package.module.Class or entry point name; default: the built-in scheduler."
    )
    disable_hybrid_kv_cache_manager: bool = option(
        False,
        "Keep the KV cache of all tokens in every layer. Otherwise sliding-window layers free blocks that have left "
        "their window.",
    )
    async_scheduling: bool = option(True, "Schedule the next step while the current one runs.")
    stream_interval: int = option(1, "Number of tokens per streamed event; the first token is sent immediately.")

    def __post_init__(self) -> None:
        queue = ("max_num_queued_reqs", "max_num_queued_tokens", "max_request_cost")
        need_positive(self, "max_num_batched_tokens", "max_num_seqs", *queue, remedy="use 1 or more, or drop it")
        need_not_negative(self, "max_overload_seconds", remedy="use 0 to refuse requests at once, or drop it")
        if not 0.0 < self.max_key_share <= 1.0:
            raise ConfigError("--max-key-share", f"{self.max_key_share} is not in (0, 1]")
        need_positive(self, "stream_interval", remedy="use 1 for every token")
        need_not_negative(self, "long_prefill_token_threshold", remedy="use 0 for unlimited")
