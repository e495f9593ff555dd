"""How work is handed out, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagoda.common.config.fields import human_readable_int, option
from pagoda.common.errors import ConfigError

_NO_LIMIT: Final = "every prompt that fits a step takes part; use --long-prefill-token-threshold to hold one back"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits; what nobody says follows from platform and model."""

    max_num_batched_tokens: int | None = option(None, "Most tokens in one step (2k, 2K).", parse=human_readable_int)
    max_num_seqs: int | None = option(None, "Most sequences in one step.")
    max_num_queued_reqs: int | None = option(
        None, "Most answers of a server under way, running or waiting; what comes beyond is answered 429, to try later."
    )
    max_num_partial_prefills: int = option(1, "Most prompts in parts at once.", refused=_NO_LIMIT)
    max_long_partial_prefills: int = option(1, "Most long prompts in parts at once.", refused=_NO_LIMIT)
    long_prefill_token_threshold: int = option(0, "Most tokens of one prompt in one step; 0: no such limit.")
    policy: Literal["fcfs", "priority"] = option("fcfs", "Order of the waiting queue.", flag="scheduling-policy")
    enable_chunked_prefill: bool | None = option(None, "Split long prompts over steps.")
    scheduler_cls: str | None = option(
        None, "Scheduler by qualified name, package.module.Class, in place of the engine's own."
    )
    disable_hybrid_kv_cache_manager: bool = option(
        False, "One KV group for all layers: layers with a window keep everything, and one block table serves all."
    )
    async_scheduling: bool = option(True, "Plan the next step while one runs.")
    stream_interval: int = option(1, "Tokens between two messages of a stream; the first token never waits.")

    def __post_init__(self) -> None:
        for flag, value in (
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-num-queued-reqs", self.max_num_queued_reqs),
        ):
            if value is not None and value < 1:
                raise ConfigError(flag, f"{value} is not positive; use 1 or more, or drop it")
        if self.stream_interval < 1:
            raise ConfigError("--stream-interval", f"{self.stream_interval} is not positive; use 1 for every token")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                "--long-prefill-token-threshold",
                f"{self.long_prefill_token_threshold} is negative; use 0 for no such limit",
            )

    @property
    def chunked_prefill(self) -> bool:
        """On unless switched off."""
        return self.enable_chunked_prefill is not False
