"""Datasets that are read from a file: ShareGPT, JSON Lines of prompts, Spec-Bench, BurstGPT, traces with timestamps."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from pagoda.common.config.groups.bench.dataset import DatasetConfig
from pagoda.common.errors import ConfigError
from pagoda.common.text.chat_template import render_chat
from pagoda.server.bench.datasets.samples import DatasetSample, PromptVocabulary

MIN_TOKENS: Final = 4
MAX_PROMPT_TOKENS: Final = 1024
MAX_TOKENS: Final = 2048
"""Limits of ShareGPT's conversations, in tokens; others are left out, as by vLLM."""

_PATH: Final = "--dataset-path"


def sharegpt(config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator) -> list[DatasetSample]:
    """Return the first messages of conversations, with the length of the recorded answer unless one is set."""
    wanted = config.output_len or config.sharegpt_output_len
    samples: list[DatasetSample] = []
    for messages in _shuffled(config, rng, _conversations(config)):
        if len(samples) == config.num_prompts:
            break
        sample = vocabulary.sample_of_text(messages[0], wanted or len(vocabulary.counted(messages[1])))
        if sample.prompt_len < MIN_TOKENS or (wanted is None and sample.output_len < MIN_TOKENS):
            continue
        if sample.prompt_len <= MAX_PROMPT_TOKENS and sample.prompt_len + sample.output_len <= MAX_TOKENS:
            samples.append(sample)
    return _oversampled(config, samples)


def sharegpt_turns(
    config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator
) -> list[DatasetSample]:
    """Return the users' messages of conversations, up to --multi-turn-num-turns each; answers are the server's."""
    output = config.output_len or config.multi_turn_output_len
    samples: list[DatasetSample] = []
    for messages in cycle(_shuffled(config, rng, _conversations(config))):
        for turn, message in enumerate(messages[::2][: config.multi_turn_num_turns]):
            if len(samples) == config.num_prompts:
                return samples
            follows = len(samples) - 1 if turn else None
            samples.append(vocabulary.sample_of_text(message, output, follows=follows))
    return samples


def custom(config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator) -> list[DatasetSample]:
    """Return the prompts of JSON Lines {"prompt": ..., "output_tokens": ...}."""
    rows = list(_json_lines(config))
    for line, row in enumerate(rows, 1):
        if not isinstance(row.get("prompt"), str):
            raise ConfigError(_PATH, f"{config.dataset_path}:{line}: has no prompt that is a text")
    wanted = config.output_len or (None if config.custom_output_len == -1 else config.custom_output_len)
    lengths = [wanted or _positive(config, row, "output_tokens", line) for line, row in enumerate(rows, 1)]
    pairs = _shuffled(config, rng, list(zip([row["prompt"] for row in rows], lengths)))
    return _texts(config, vocabulary, pairs)


def spec_bench(config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator) -> list[DatasetSample]:
    """Return the first turns of Spec-Bench's questions, of --spec-bench-category if set."""
    output = config.output_len or config.spec_bench_output_len
    prompts = []
    for line, row in enumerate(_json_lines(config), 1):
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ConfigError(_PATH, f"{config.dataset_path}:{line}: has no turns")
        if config.spec_bench_category in (None, row.get("category")):
            prompts.append((turns[0], output))
    if not prompts:
        raise ConfigError("--spec-bench-category", f"{config.dataset_path} has no {config.spec_bench_category}")
    return _texts(config, vocabulary, _shuffled(config, rng, prompts))


def burstgpt(config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator) -> list[DatasetSample]:
    """Return random prompts of the recorded lengths of GPT-4 requests that were answered, by arrival time."""
    names = ("Timestamp", "Request tokens", "Response tokens")
    rows = [
        (float(row[names[0]]), int(row[names[1]]), int(row[names[2]]))
        for row in _csv_rows(config, ("Model", *names))
        if row["Model"] == "GPT-4" and int(row[names[2]]) > 0
    ]
    if not rows:
        raise ConfigError(_PATH, f"{config.dataset_path} has no answered requests of GPT-4")
    count = min(config.num_prompts, len(rows)) if config.no_oversample else config.num_prompts
    chosen = sorted(rows[i] for i in rng.choice(len(rows), count, replace=count > len(rows)))
    return [
        vocabulary.sample(
            vocabulary.random_ids(rng, max(1, inputs - vocabulary.added)),
            config.output_len or outputs,
            arrival=arrival - chosen[0][0],
        )
        for arrival, inputs, outputs in chosen
    ]


def timed_trace(config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator) -> list[DatasetSample]:
    """Return prompts of a trace, in its order: chunks of equal hash ids have equal tokens."""
    samples: list[DatasetSample] = []
    chunks: dict[Any, list[int]] = {}
    size = config.timed_trace_chunk_hash_size
    start: float | None = None
    for line, row in enumerate(islice(_json_lines(config), config.num_prompts), 1):
        inputs = _positive(config, row, config.timed_trace_label_input_length, line)
        outputs = _positive(config, row, config.timed_trace_label_output_length, line)
        arrival = _number(config, row, config.timed_trace_label_timestamp, line) * config.timed_trace_sec_multiplier
        start = arrival if start is None else start
        ids: list[int] = []
        for hashed in row.get(config.timed_trace_label_hash_ids) or ():
            if len(ids) >= inputs:
                break
            if hashed not in chunks:
                chunks[hashed] = rng.choice(vocabulary.ordinary, size).tolist()
            ids += chunks[hashed]
        rest = rng.choice(vocabulary.ordinary, max(0, inputs - len(ids))).tolist()
        samples.append(
            vocabulary.sample((ids + rest)[:inputs], config.output_len or outputs, arrival=max(0.0, arrival - start))
        )
    if not samples:
        raise ConfigError(_PATH, f"{config.dataset_path} has no requests")
    return samples


def _texts(
    config: DatasetConfig, vocabulary: PromptVocabulary, pairs: Sequence[tuple[str, int]]
) -> list[DatasetSample]:
    """Return (prompt, output length) pairs as samples, rendered by the chat template unless it is skipped."""
    samples = [
        vocabulary.sample_of_text(_rendered(config, vocabulary, prompt), length)
        for prompt, length in pairs[: config.num_prompts]
    ]
    return _oversampled(config, samples)


def _rendered(config: DatasetConfig, vocabulary: PromptVocabulary, prompt: str) -> str:
    tokenizer = vocabulary.tokenizer
    if config.skip_chat_template or tokenizer is None or tokenizer.chat_template is None:
        return prompt
    return render_chat(tokenizer, [{"role": "user", "content": prompt}], **config.chat_template_kwargs)


def _oversampled(config: DatasetConfig, samples: list[DatasetSample]) -> list[DatasetSample]:
    """Return --num-prompts samples, repeated if there are fewer and --no-oversample is not set."""
    if not samples:
        raise ConfigError(_PATH, f"{config.dataset_path} has no usable prompts")
    if config.no_oversample:
        return samples
    return [replace(sample) for sample in islice(cycle(samples), config.num_prompts)]


def _shuffled(config: DatasetConfig, rng: np.random.Generator, rows: list[Any]) -> list[Any]:
    return rows if config.disable_shuffle else [rows[i] for i in rng.permutation(len(rows))]


def _conversations(config: DatasetConfig) -> list[list[str]]:
    """Return the messages of ShareGPT's conversations that have an answer."""
    try:
        data = json.loads(_text(config))
    except ValueError as error:
        raise ConfigError(_PATH, f"{config.dataset_path}: invalid JSON: {error}") from None
    if not isinstance(data, list):
        raise ConfigError(_PATH, f"{config.dataset_path}: is not a list of conversations in ShareGPT's format")
    conversations = [
        [str(message.get("value", "")) for message in entry["conversations"]]
        for entry in data
        if isinstance(entry, dict) and len(entry.get("conversations") or ()) >= 2
    ]
    if not conversations:
        raise ConfigError(_PATH, f"{config.dataset_path} has no conversations in ShareGPT's format")
    return conversations


def _json_lines(config: DatasetConfig) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(_text(config).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(_PATH, f"{config.dataset_path}:{number}: invalid JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(_PATH, f"{config.dataset_path}:{number}: is not a JSON object")
        yield row


def _csv_rows(config: DatasetConfig, names: Sequence[str]) -> Iterator[Mapping[str, str]]:
    reader = csv.DictReader(_text(config).splitlines())
    missing = [name for name in names if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(_PATH, f"{config.dataset_path}: has no column {missing[0]!r}")
    yield from reader


def _text(config: DatasetConfig) -> str:
    path = config.dataset_path or ""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(_PATH, f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _number(config: DatasetConfig, row: Mapping[str, Any], key: str, line: int) -> float:
    try:
        return float(row[key])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(_PATH, f"{config.dataset_path}:{line}: has no number {key!r}") from None


def _positive(config: DatasetConfig, row: Mapping[str, Any], key: str, line: int) -> int:
    value = int(_number(config, row, key, line))
    if value < 1:
        raise ConfigError(_PATH, f"{config.dataset_path}:{line}: {key} is {value}; it must be 1 or more")
    return value
