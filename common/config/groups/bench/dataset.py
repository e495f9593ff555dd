"""Settings of the prompts that benchmarks send: `bench serve`, `bench throughput` and `simulate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final

from pagoda.common.config.fields import flag_of, json_object, need_not_negative, need_positive, option
from pagoda.common.errors import ConfigError

SYNTHETIC: Final = ("random", "random-rerank", "prefix_repetition", "sonnet", "multi_turn")
"""Datasets that need no file."""

FROM_FILES: Final = ("sharegpt", "custom", "burstgpt", "timed_trace", "spec_bench")
"""Datasets that are read from --dataset-path."""

_USERS: Final[Mapping[str, tuple[str, ...]]] = {
    "input_len": ("random", "random-rerank"),
    "no_oversample": ("sharegpt", "custom", "spec_bench", "burstgpt"),
    "disable_shuffle": ("sharegpt", "custom", "spec_bench", "prefix_repetition", "multi_turn"),
    "skip_chat_template": ("custom", "spec_bench"),
    "chat_template_kwargs": ("custom", "spec_bench"),
    "random_output_len": ("random",),
    "random_prefix_len": ("random",),
    "random_": ("random", "random-rerank"),
    "prefix_repetition_": ("prefix_repetition",),
    "sonnet_": ("sonnet",),
    "multi_turn_": ("multi_turn",),
    "sharegpt_": ("sharegpt",),
    "custom_": ("custom",),
    "spec_bench_": ("spec_bench",),
    "timed_trace_": ("timed_trace",),
}
"""Beginning of a field's name -> the datasets that use it; the first that matches counts."""

_MEDIA: Final = "models here read text only; use --dataset-name random, or custom with text prompts"
_HUB: Final = (
    'datasets are not downloaded; write its prompts as JSON Lines {"prompt": ..., "output_tokens": ...} and use '
    "--dataset-name custom --dataset-path FILE"
)


def _range_ratio(text: str) -> tuple[float, float]:
    """Parse a number, or {"input": number, "output": number}. Raise ValueError."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict) and set(value) <= {"input", "output"}:
        pair = value.get("input", 0.0), value.get("output", 0.0)
    else:
        pair = value, value
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in pair):
        raise ValueError('neither a number nor {"input": 0.3, "output": 0.5}')
    return float(pair[0]), float(pair[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """Prompts and output lengths of a benchmark."""

    dataset_name: str = option(
        "random",
        "Dataset of prompts. random, random-rerank, prefix_repetition, sonnet and multi_turn are generated; the "
        "others are read from --dataset-path.",
        choices=(*SYNTHETIC, *FROM_FILES),
        refused_values={
            **dict.fromkeys(("random-mm", "custom_audio", "custom_image"), _MEDIA),
            **dict.fromkeys(("hf", "speed_bench"), _HUB),
        },
    )
    dataset_path: str | None = option(
        None,
        "File of the dataset: ShareGPT's JSON (sharegpt, multi_turn), JSON Lines (custom, timed_trace, spec_bench), "
        "CSV (burstgpt) or lines of text (sonnet).",
    )
    num_prompts: int = option(1000, "Number of requests.")
    input_len: int | None = option(None, "Prompt length, in tokens, of random prompts; overrides --random-input-len.")
    output_len: int | None = option(None, "Output length, in tokens; overrides the output length of every dataset.")
    no_oversample: bool = option(
        False, "Send fewer requests than --num-prompts if the dataset is smaller. Otherwise its prompts are repeated."
    )
    disable_shuffle: bool = option(False, "Send the prompts in the order of the file.")
    skip_chat_template: bool = option(
        False, "Send prompts of custom and spec_bench without applying the chat template."
    )
    chat_template_kwargs: Mapping[str, Any] = option(
        {}, "Variables of the chat template that the benchmark applies to prompts, as JSON.", parse=json_object
    )
    random_input_len: int = option(1024, "Prompt length, in tokens.")
    random_output_len: int = option(128, "Output length, in tokens.")
    random_range_ratio: tuple[float, ...] = option(
        (0.0, 0.0),
        "Spread of the lengths: they are uniform between length * (1 - ratio) and length * (1 + ratio), with 0 <= "
        'ratio < 1. Separate ratios: {"input": 0.3, "output": 0.5}.',
        parse=_range_ratio,
    )
    random_prefix_len: int = option(0, "Length of a prefix shared by all prompts, in tokens; added to each prompt.")
    random_batch_size: int = option(
        1, "Number of prompts per request with embedding backends; number of documents per request with random-rerank."
    )
    no_reranker: bool = option(
        False, "The model is not a reranker.", no_effect="queries and documents are sent alike to all models"
    )
    prefix_repetition_prefix_len: int = option(256, "Length of each shared prefix, in tokens.")
    prefix_repetition_suffix_len: int = option(256, "Length of the rest of each prompt, in tokens.")
    prefix_repetition_num_prefixes: int = option(10, "Number of different prefixes; prompts are divided among them.")
    prefix_repetition_output_len: int = option(128, "Output length, in tokens.")
    sonnet_input_len: int = option(
        550, "Approximate prompt length, in tokens; prompts consist of whole lines of verse."
    )
    sonnet_output_len: int = option(150, "Output length, in tokens.")
    sonnet_prefix_len: int = option(
        200, "Length of the lines at the beginning of every prompt that all prompts share, in tokens."
    )
    multi_turn_num_turns: int = option(
        4,
        "Number of requests per conversation. Each request contains the conversation so far, with the server's "
        "answers.",
    )
    multi_turn_input_len: int = option(128, "Length of each user message, in tokens.")
    multi_turn_output_len: int = option(128, "Length of each answer, in tokens.")
    multi_turn_prefix_len: int = option(0, "Length of a prefix shared by all conversations, in tokens.")
    sharegpt_output_len: int | None = option(None, "Output length, in tokens; default: that of the recorded answer.")
    custom_output_len: int = option(
        256, "Output length, in tokens; -1: the value of output_tokens in each line of the file."
    )
    spec_bench_output_len: int = option(256, "Output length, in tokens.")
    spec_bench_category: str | None = option(None, "Category of questions; default: all.")
    timed_trace_chunk_hash_size: int = option(16, "Number of tokens in the chunk that one hash id stands for.")
    timed_trace_label_timestamp: str = option("timestamp", "Key of the arrival time.")
    timed_trace_label_input_length: str = option("input_length", "Key of the prompt length, in tokens.")
    timed_trace_label_output_length: str = option("output_length", "Key of the output length, in tokens.")
    timed_trace_label_hash_ids: str = option(
        "hash_ids",
        "Key of the hash ids of the prompt's chunks; chunks with equal ids get equal tokens. Without this key, "
        "prompts are random tokens.",
    )
    timed_trace_sec_multiplier: float = option(
        1.0, "Factor that converts timestamps to seconds: 0.001 for milliseconds."
    )

    def __post_init__(self) -> None:
        need_positive(
            self,
            *("num_prompts", "input_len", "output_len", "random_input_len", "random_output_len", "random_batch_size"),
            *("prefix_repetition_suffix_len", "prefix_repetition_num_prefixes", "prefix_repetition_output_len"),
            *("sonnet_input_len", "sonnet_output_len", "multi_turn_num_turns", "multi_turn_input_len"),
            *("multi_turn_output_len", "sharegpt_output_len", "spec_bench_output_len", "timed_trace_chunk_hash_size"),
        )
        need_not_negative(
            self, "random_prefix_len", "prefix_repetition_prefix_len", "sonnet_prefix_len", "multi_turn_prefix_len"
        )
        if self.custom_output_len != -1:
            need_positive(self, "custom_output_len", remedy="use 1 or more, or -1 for output_tokens of each line")
        if len(self.random_range_ratio) != 2 or not all(0 <= ratio < 1 for ratio in self.random_range_ratio):
            ratios = ", ".join(f"{ratio:g}" for ratio in sorted(set(self.random_range_ratio)))
            raise ConfigError("--random-range-ratio", f"{ratios} is not in [0, 1)")
        if self.dataset_name in FROM_FILES and not self.dataset_path:
            raise ConfigError("--dataset-path", f"is required by --dataset-name {self.dataset_name}; name its file")
        if self.dataset_path and self.dataset_name in ("random", "random-rerank", "prefix_repetition"):
            message = f"{self.dataset_name} prompts are made up; drop it, or use --dataset-name custom"
            raise ConfigError("--dataset-path", message)
        if self.dataset_name == "sonnet" and self.sonnet_prefix_len > self.sonnet_input_len:
            raise ConfigError("--sonnet-prefix-len", "exceeds --sonnet-input-len; lower it")
        if self.dataset_name == "prefix_repetition" and self.num_prompts < self.prefix_repetition_num_prefixes:
            raise ConfigError("--num-prompts", "is below --prefix-repetition-num-prefixes; raise it")
        for field in fields(self):
            users = next((users for name, users in _USERS.items() if field.name.startswith(name)), None)
            default = {} if field.default is MISSING else field.default
            if users is not None and self.dataset_name not in users and getattr(self, field.name) != default:
                message = f"is for --dataset-name {' and '.join(users)}, not {self.dataset_name}; drop it"
                raise ConfigError(flag_of(field.name), message)
        if self.timed_trace_sec_multiplier <= 0:
            raise ConfigError("--timed-trace-sec-multiplier", "must be positive; use 1 for seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDatasetsConfig:
    """Flags of vLLM's datasets of images, audio and Hub downloads."""

    enable_multimodal_chat: bool = option(False, "Send media in chat messages.", refused=_MEDIA)
    custom_ensure_client_side_data: bool = option(False, "Send images as base64 data.", refused=_MEDIA)
    random_mm_base_items_per_request: int = option(1, "Images per request.", refused=_MEDIA)
    random_mm_num_mm_items_range_ratio: float = option(0.0, "Range of images per request.", refused=_MEDIA)
    random_mm_limit_mm_per_prompt: str | None = option(None, "Most images per request.", refused=_MEDIA)
    random_mm_bucket_config: str | None = option(None, "Image sizes.", refused=_MEDIA)
    asr_min_audio_len_sec: float = option(0.0, "Shortest audio.", refused=_MEDIA)
    asr_max_audio_len_sec: float = option(float("inf"), "Longest audio.", refused=_MEDIA)
    hf_name: str | None = option(None, "Hub dataset.", refused=_HUB)
    hf_subset: str | None = option(None, "Subset of the Hub dataset.", refused=_HUB)
    hf_split: str | None = option(None, "Split of the Hub dataset.", refused=_HUB)
    hf_output_len: int | None = option(None, "Output length for a Hub dataset.", refused=_HUB)
    no_stream: bool = option(False, "Download a Hub dataset whole.", refused=_HUB)
    bfcl_categories: str | None = option(None, "Categories of the BFCL dataset.", refused=_HUB)
    blazedit_min_distance: float = option(0.0, "Least distance in the blazedit dataset.", refused=_HUB)
    blazedit_max_distance: float = option(1.0, "Most distance in the blazedit dataset.", refused=_HUB)
    speed_bench_dataset_subset: str = option("qualitative", "Subset of SPEED-Bench.", refused=_HUB)
    speed_bench_category: str | None = option(None, "Category of SPEED-Bench.", refused=_HUB)
    speed_bench_output_len: int = option(4096, "Output length for SPEED-Bench.", refused=_HUB)
