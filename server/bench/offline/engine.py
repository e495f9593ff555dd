"""Shared by the offline benchmarks: settings, engine, random prompts and the results file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pagoda.common.config.commands import OWN_SETTINGS
from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.settings import ENGINE_SETTINGS, ResolvedSettings, build
from pagoda.common.engine.messages import DraftStats, EngineStats
from pagoda.common.errors import ConfigError
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.bench.datasets.samples import PromptVocabulary
from pagoda.server.core_client.ipc_messages import EngineInfo
from pagoda.server.llm import LLM
from pagoda.server.settings.flags import EngineArgs, resolve_settings
from pagoda.server.settings.resolve import Resolved
from pagoda.server.startup.engine import check_engine

LoadT = TypeVar("LoadT")


def resolve_load(args: argparse.Namespace, command: str, config: type[LoadT]) -> tuple[LoadT, ResolvedSettings]:
    """Return the load and all settings. Raises ConfigError."""
    own_settings = OWN_SETTINGS[command]
    settings = resolve_settings(args, ENGINE_SETTINGS, own_settings)
    return build(config, settings.values), settings


def check_load(
    args: argparse.Namespace, command: str, config: type[LoadT], usage: Usage = "llm"
) -> tuple[ResolvedSettings, Resolved]:
    """Return the settings and the resolved engine.

    Raises every error that the benchmark raises before it loads a model.
    """
    _, settings = resolve_load(args, command, config)
    return settings, check_engine(EngineArgs.from_resolved(settings).create_engine_config(), usage, settings.sources)


def engine_keywords(settings: ResolvedSettings) -> dict[str, Any]:
    """Return the engine settings that are given, by name."""
    return {
        name: settings.values[name]
        for name in settings.sources
        if name in ENGINE_SETTINGS and ENGINE_SETTINGS[name].option.deprecated is None
    }


def start_llm(engine_args: EngineArgs) -> LLM:
    return LLM.from_engine_args(engine_args)


def need_profiler(profile: bool, settings: ResolvedSettings) -> None:
    """Raise ConfigError if a trace is wanted and there is no folder for it."""
    if profile and not settings.values["profiler_config"]:
        raise ConfigError("--profile", "there is no folder for the trace; set --profiler-config, or drop it")


class EngineView(Protocol):
    """What benchmarks read of an engine."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def text_or_none(self) -> Tokenizer | None: ...


def check_fits(engine: EngineView, input_len: int, output_len: int) -> None:
    """Raise ConfigError if a request exceeds the engine's context."""
    limit = engine.info.limits.max_model_len
    if input_len + output_len > limit:
        raise ConfigError(
            "--output-len", f"{input_len} + {output_len} tokens exceed the context of {limit}; lower one of them"
        )


def vocabulary_of(engine: EngineView) -> PromptVocabulary:
    """Return the vocabulary of an engine's model, for prompts of token ids."""
    tokenizer = engine.text_or_none
    special = frozenset() if tokenizer is None else tokenizer.special_ids
    return PromptVocabulary(engine.info.vocab_size, tokenizer, special)


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


def write_results(path: str | None, results: Mapping[str, Any], flag: str = "--output-json") -> None:
    """Write results as JSON. Raises ConfigError if the file cannot be written."""
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(results, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(flag, f"{path}: {error.strerror}") from None
