"""Datasets that need no file: random tokens, shared prefixes, verses, documents to rank, conversations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from pagoda.common.config.groups.bench.dataset import DatasetConfig
from pagoda.common.errors import ConfigError
from pagoda.server.bench.datasets.samples import DatasetSample, PromptVocabulary

_ADJECTIVES: Final = [
    "silent",
    "golden",
    "distant",
    "tender",
    "hollow",
    "bitter",
    "gentle",
    "restless",
    "early",
    "faded",
    "quiet",
    "silver",
]
_NOUNS: Final = [
    "river",
    "morning",
    "shadow",
    "garden",
    "harbour",
    "winter",
    "mountain",
    "lantern",
    "window",
    "orchard",
    "season",
    "evening",
]
_VERBS: Final = [
    "remembers",
    "follows",
    "carries",
    "forgets",
    "answers",
    "crosses",
    "gathers",
    "leaves",
    "holds",
    "mirrors",
    "finds",
    "keeps",
]
ROUNDING: Final = 1e-9
"""Error of a product of a length and a ratio."""

_VERSES: Final = 400
"""Lines of verse that are made up without --dataset-path."""


def random(config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator) -> list[DatasetSample]:
    """Return random prompts behind a common prefix; with --random-batch-size several of them are one request."""
    prefix = vocabulary.random_ids(rng, config.random_prefix_len)
    batch = config.random_batch_size
    inputs = _input_lengths(config, vocabulary, rng, config.num_prompts * batch)
    outputs = _output_lengths(config, rng)
    prompts = [vocabulary.sample(prefix + vocabulary.random_ids(rng, length), 1) for length in inputs]
    return [_joined(prompts[i * batch : (i + 1) * batch], outputs[i]) for i in range(config.num_prompts)]


def rerank(config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator) -> list[DatasetSample]:
    """Return a query and --random-batch-size documents for each request; all have --random-input-len tokens."""
    texts = 1 + config.random_batch_size
    lengths = _input_lengths(config, vocabulary, rng, config.num_prompts * texts)
    parts = [vocabulary.sample(vocabulary.random_ids(rng, length), 1) for length in lengths]
    return [_joined(parts[i * texts : (i + 1) * texts], 1) for i in range(config.num_prompts)]


def prefix_repetition(
    config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator
) -> list[DatasetSample]:
    """Return prompts that share a few prefixes, in random order unless --disable-shuffle."""
    output = config.output_len or config.prefix_repetition_output_len
    suffix = max(1, config.prefix_repetition_suffix_len - vocabulary.added)
    prefixes = [
        vocabulary.random_ids(rng, config.prefix_repetition_prefix_len)
        for _ in range(config.prefix_repetition_num_prefixes)
    ]
    order = np.arange(config.num_prompts) % len(prefixes)
    order = np.sort(order) if config.disable_shuffle else rng.permutation(order)
    return [vocabulary.sample(prefixes[which] + vocabulary.random_ids(rng, suffix), output) for which in order]


def sonnet(config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator) -> list[DatasetSample]:
    """Return requests for more verses after random lines of a poem, the first ones the same for all."""
    lines = _lines(config.dataset_path) if config.dataset_path else list(_verses(rng))
    lengths = [len(vocabulary.counted(line)) for line in lines]
    average = max(1.0, sum(lengths) / len(lines))
    shared = round(config.sonnet_prefix_len / average)
    rest = max(1, round(config.sonnet_input_len / average) - shared)
    if shared >= len(lines):
        raise ConfigError("--sonnet-prefix-len", f"{config.dataset_path} has {len(lines)} lines only; lower it")
    output = config.output_len or config.sonnet_output_len
    beginning = "Continue these lines of verse:\n" + "".join(lines[:shared])
    prompts = ("".join([beginning, *rng.choice(lines, rest).tolist()]) for _ in range(config.num_prompts))
    return [vocabulary.sample_of_text(prompt, output) for prompt in prompts]


def conversations(config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator) -> list[DatasetSample]:
    """Return random messages of conversations of --multi-turn-num-turns requests, turn by turn."""
    turns = config.multi_turn_num_turns
    output = config.output_len or config.multi_turn_output_len
    prefix = vocabulary.random_ids(rng, config.multi_turn_prefix_len)
    count = math.ceil(config.num_prompts / turns)
    samples = []
    for index in range(config.num_prompts):
        is_first = index < count
        ids = vocabulary.random_ids(rng, config.multi_turn_input_len)
        follows = None if is_first else index - count
        samples.append(vocabulary.sample(prefix + ids if is_first else ids, output, follows=follows))
    return samples


def _joined(parts: list[DatasetSample], output_len: int) -> DatasetSample:
    """Return one request of several texts."""
    first, *others = parts
    total = sum(part.prompt_len for part in parts)
    return DatasetSample(output_len, first.text, first.token_ids, total, tuple(other.text for other in others))


def _input_lengths(
    config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator, count: int
) -> list[int]:
    mean = config.input_len or config.random_input_len
    lengths = _lengths(rng, mean, config.random_range_ratio[0], count)
    if min(lengths) <= vocabulary.added:
        raise ConfigError("--random-input-len", f"{min(lengths)} tokens leave none beside those added; raise it")
    return [length - vocabulary.added for length in lengths]


def _output_lengths(config: DatasetConfig, rng: np.random.Generator) -> list[int]:
    mean = config.output_len or config.random_output_len
    return _lengths(rng, mean, config.random_range_ratio[1], config.num_prompts)


def _lengths(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    """Return integers uniform in mean * (1 - ratio) to mean * (1 + ratio), at least 1."""
    spread = mean * ratio
    least = max(1, mean - math.ceil(spread - ROUNDING))
    most = mean + math.ceil(spread - ROUNDING)
    lengths: list[int] = rng.integers(least, most + 1, count).tolist()
    return lengths


def _lines(path: str) -> list[str]:
    try:
        lines = [line + "\n" for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--dataset-path", f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not lines:
        raise ConfigError("--dataset-path", f"{path} has no lines of text")
    return lines


def _verses(rng: np.random.Generator) -> Iterator[str]:
    for _ in range(_VERSES):
        one, two, three = (str(rng.choice(_ADJECTIVES)) for _ in range(3))
        first, last = rng.choice(_NOUNS, 2)
        yield f"The {one} {first} {rng.choice(_VERBS)} the {two}, {three} {last}\n"
