"""The table of defaults that depend on platform, use and model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.errors import ConfigError

Usage = Literal["llm", "server"]


@dataclass(frozen=True, slots=True)
class BatchDefaults:
    """Default max_num_batched_tokens and max_num_seqs."""

    tokens: int
    seqs: int


BATCH_DEFAULTS: dict[tuple[str, Usage], BatchDefaults] = {
    ("cpu", "llm"): BatchDefaults(4096, 256),
    ("cpu", "server"): BatchDefaults(2048, 128),
    ("other", "llm"): BatchDefaults(8192, 256),
    ("other", "server"): BatchDefaults(2048, 256),
}


def resolve_limits(config: EngineConfig, *, device: str, usage: Usage, block_size: int, model_max_len: int) -> Limits:
    """Fill every None of the configuration. `block_size`: the backend's preference. `model_max_len`: tokens.

    Raises ConfigError naming the flag and a value that works.
    """
    stated = config.model.max_model_len
    if stated is not None and stated > model_max_len:
        raise ConfigError(
            "--max-model-len",
            f"{stated} exceeds the {model_max_len} positions of the model; use {model_max_len} or less",
        )
    max_len = stated or model_max_len
    scheduler = config.scheduler
    table = BATCH_DEFAULTS.get((device, usage)) or BATCH_DEFAULTS["other", usage]
    seqs = scheduler.max_num_seqs or table.seqs
    tokens = scheduler.max_num_batched_tokens
    if tokens is None:
        tokens = table.tokens if scheduler.chunked_prefill else max(max_len, table.tokens)
        tokens = min(seqs * max_len, tokens)
    if scheduler.max_num_seqs is None:
        seqs = min(seqs, tokens)
    if not scheduler.chunked_prefill and tokens < max_len:
        raise ConfigError(
            "--max-num-batched-tokens",
            f"{tokens} cannot hold a prompt of {max_len} tokens without chunked prefill; "
            f"raise it to {max_len}, lower --max-model-len, or drop --no-enable-chunked-prefill",
        )
    if tokens < seqs:
        raise ConfigError("--max-num-batched-tokens", f"{tokens} is below --max-num-seqs {seqs}; raise it to {seqs}")
    return Limits(
        max_model_len=max_len,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        block_size=config.cache.block_size or block_size,
        chunked_prefill=scheduler.chunked_prefill,
        prefix_caching=config.cache.prefix_caching,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        policy=scheduler.policy,
        async_scheduling=scheduler.async_scheduling,
    )
