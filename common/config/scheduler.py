"""How work is handed out, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagoda.common.config.numbers import human_readable_int
from pagoda.common.config.option import option
from pagoda.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits. None: the platform's default (see defaults.py)."""

    max_num_batched_tokens: int | None = option(None, "Most tokens in one step.", parse=human_readable_int)
    max_num_seqs: int | None = option(None, "Most sequences in one step.")
    policy: Literal["fcfs", "priority"] = option("fcfs", "Order of the waiting queue.", flag="scheduling-policy")
    enable_chunked_prefill: bool | None = option(None, "Split long prompts over steps.")
    long_prefill_token_threshold: int = option(0, "Most tokens of one prompt in one step; 0: no such limit.")
    async_scheduling: bool = option(True, "Plan the next step while one runs.")

    def __post_init__(self) -> None:
        for flag, value in (
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-num-seqs", self.max_num_seqs),
        ):
            if value is not None and value < 1:
                raise ConfigError(flag, f"{value} is not positive")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError("--long-prefill-token-threshold", f"{self.long_prefill_token_threshold} is negative")

    @property
    def chunked_prefill(self) -> bool:
        """On unless switched off."""
        return self.enable_chunked_prefill is not False
