"""Requests of the dataset that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from pagoda.common.config.groups.bench.dataset import DatasetConfig
from pagoda.server.bench.datasets import files, synthetic
from pagoda.server.bench.datasets.samples import DatasetSample, PromptVocabulary

Draw = Callable[[DatasetConfig, PromptVocabulary, np.random.Generator], list[DatasetSample]]

DATASETS: Final[Mapping[str, Draw]] = {
    "random": synthetic.random,
    "random-rerank": synthetic.rerank,
    "prefix_repetition": synthetic.prefix_repetition,
    "sonnet": synthetic.sonnet,
    "multi_turn": synthetic.conversations,
    "sharegpt": files.sharegpt,
    "custom": files.custom,
    "spec_bench": files.spec_bench,
    "burstgpt": files.burstgpt,
    "timed_trace": files.timed_trace,
}
"""--dataset-name -> its function."""


def draw_samples(config: DatasetConfig, vocabulary: PromptVocabulary, rng: np.random.Generator) -> list[DatasetSample]:
    """Return the requests in arrival order, determined by the settings and the state of `rng`.

    Raises ConfigError for an unusable file.
    """
    if config.dataset_name == "multi_turn" and config.dataset_path:
        return files.sharegpt_turns(config, vocabulary, rng)
    return DATASETS[config.dataset_name](config, vocabulary, rng)
