"""Shared by the offline benchmarks: settings, engine, random prompts and the results file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pagoda.common.config.commands import OWN_SETTINGS
from pagoda.common.config.defaults import Usage
from pagoda.common.config.groups.bench import LatencyConfig, ThroughputConfig
from pagoda.common.config.settings import ENGINE_SETTINGS, ResolvedSettings, build
from pagoda.common.engine.messages import DraftStats
from pagoda.common.errors import ConfigError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.llm import LLM
from pagoda.server.settings.flags import EngineArgs, FlagParser, add_explain_config, add_settings, resolve_settings
from pagoda.server.settings.resolve import Resolved
from pagoda.server.startup.engine import check_engine

LoadT = TypeVar("LoadT")


def add_load_arguments(parser: FlagParser, command: str) -> None:
    """Add the flags of a benchmark and of the engine."""
    add_settings(parser, OWN_SETTINGS[command].values())
    EngineArgs.add_cli_args(parser)
    add_explain_config(parser)


def resolve_load(args: argparse.Namespace, command: str, config: type[LoadT]) -> tuple[LoadT, ResolvedSettings]:
    """Return the load and all settings. Raises ConfigError."""
    own = OWN_SETTINGS[command]
    settings = resolve_settings(args, ENGINE_SETTINGS, own)
    return build(config, settings.values, own.values()), settings


def check_load(
    args: argparse.Namespace, command: str, config: type[LoadT], usage: Usage = "llm"
) -> tuple[ResolvedSettings, Resolved]:
    """Return the settings and the resolved engine.

    Raises every error that the benchmark raises before it loads a model.
    """
    _, settings = resolve_load(args, command, config)
    return settings, check_engine(EngineArgs.from_resolved(settings).create_engine_config(), usage, settings.sources)


def start_llm(engine_args: EngineArgs) -> LLM:
    return LLM.from_engine_args(engine_args)


def check_fits(llm: LLM, load: LatencyConfig | ThroughputConfig) -> None:
    """Raise ConfigError if a request exceeds the engine's context."""
    limit = llm.llm_engine.info.limits.max_model_len
    if load.input_len + load.output_len > limit:
        raise ConfigError(
            "--output-len",
            f"{load.input_len} + {load.output_len} tokens exceed the context of {limit}; lower one of them",
        )


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[Any]:
    """Return prompts of random token ids without special tokens, determined by the seed."""
    vocab = llm.llm_engine.info.vocab_size
    special = set() if llm.llm_engine.config.model.skip_tokenizer_init else set(llm.llm_engine.text.special_ids)
    ids = np.random.default_rng(seed).choice(ordinary_tokens(vocab, special), size=(count, length))
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def ordinary_tokens(vocab_size: int, special: set[int]) -> np.ndarray:
    """Return the token ids that are not special: int64 [V - special]."""
    return np.setdiff1d(np.arange(vocab_size), np.array(sorted(special), np.int64))


def sampling_params(load: LatencyConfig | ThroughputConfig) -> SamplingParams:
    """Return parameters that generate exactly `output_len` tokens at temperature 1."""
    return SamplingParams(
        n=load.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=load.output_len,
        detokenize=not load.disable_detokenize,
    )


def acceptance(before: DraftStats | None, now: DraftStats | None) -> dict[str, Any]:
    """Return the acceptance of drafts between two snapshots; empty without speculative decoding."""
    if now is None:
        return {}
    drafts = now if before is None else now.since(before)
    return {
        "spec_decode_num_drafts": drafts.drafts,
        "spec_decode_draft_tokens": drafts.tokens,
        "spec_decode_accepted_tokens": drafts.num_accepted,
        "spec_decode_acceptance_rate": 100.0 * drafts.num_accepted / drafts.tokens if drafts.tokens else 0.0,
        "spec_decode_acceptance_length": drafts.mean_length,
        "spec_decode_per_position_acceptance_rates": [
            count / drafts.drafts if drafts.drafts else 0.0 for count in drafts.accepted
        ],
    }


def acceptance_rows(results: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the label and value of each line about drafts; none without speculative decoding."""
    if "spec_decode_num_drafts" not in results:
        return []
    return [
        ("Acceptance rate (%):", results["spec_decode_acceptance_rate"]),
        ("Acceptance length:", results["spec_decode_acceptance_length"]),
        ("Drafts:", results["spec_decode_num_drafts"]),
        ("Draft tokens:", results["spec_decode_draft_tokens"]),
        ("Accepted tokens:", results["spec_decode_accepted_tokens"]),
        *(
            (f"Acceptance at position {position} (%):", 100.0 * rate)
            for position, rate in enumerate(results["spec_decode_per_position_acceptance_rates"])
        ),
    ]


def write_results(path: str | None, results: Mapping[str, Any], flag: str = "--output-json") -> None:
    """Write results as JSON. Raises ConfigError if the file cannot be written."""
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(results, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(flag, f"{path}: {error.strerror}") from None
