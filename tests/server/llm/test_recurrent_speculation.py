"""Speculative decoding of models with recurrent state through the Python API: the same answers as without."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from models.oracles.kept_logits import read_cases
from support.checkpoints.byte_text import byte_tokenizer
from support.checkpoints.tiny_folder import write_model
from support.suite.slow_matrix import thinned

from pagoda import LLM, SamplingParams
from pagoda.common.errors import ConfigError

SETTINGS: dict[str, Any] = {
    "backend": "reference",
    "dtype": "float32",
    "load_format": "dummy",
    "block_size": 8,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 1 << 25,
}
PROMPTS = ["The capital of", "abababab", "the cat and the cat", "x"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=4, frequency_penalty=-1.5, max_tokens=48),
    SamplingParams(n=2, temperature=0.6, seed=5, frequency_penalty=-1.5, max_tokens=48),
]


def write_recurrent(folder: Path, name: str) -> Path:
    """Write the files of a small model but for its weights, which are made up."""
    folder.mkdir()
    config = read_cases()[name].config | {"vocab_size": 257, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def answers(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[list[int]]]]]:
    """Returns a model's folder, and what it answers without drafts."""

    @cache
    def of(name: str) -> tuple[Path, list[list[list[int]]]]:
        folder = write_recurrent(tmp_path_factory.mktemp("models") / name, name)
        return folder, answers(LLM(folder, **SETTINGS))

    return of


@pytest.mark.setting("--speculative-config")
@thinned(
    lambda name, method: (name, method) in (("nemotron-h", "suffix"), ("kimi-linear", "ngram")) or name == "qwen3-next",
    name=["qwen3-next", "nemotron-h", "kimi-linear"],
    method=["ngram", "suffix", "draft_model"],
)
def test_answers_are_those_without_speculation(
    name: str, method: str, plain: Callable[[str], tuple[Path, list[list[list[int]]]]], tmp_path: Path
) -> None:
    folder, want = plain(name)
    settings: dict[str, dict[str, Any]] = {
        "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "suffix": {"suffix_decoding_max_spec_factor": 2.0},
        "draft_model": {
            "model": str(write_model(tmp_path / "drafter", max_position_embeddings=2048)),
            "num_speculative_tokens": 2,
        },
    }
    llm = LLM(folder, speculative_config={"method": method, **settings[method]}, **SETTINGS)
    assert answers(llm) == want
    drafts = llm.llm_engine.stats.drafts
    assert drafts is not None
    assert drafts.tokens > 0
    if method != "draft_model":  # Its weights are made up, too.
        assert drafts.num_accepted > 0


def test_a_drafter_with_recurrent_state_is_refused(tmp_path: Path) -> None:
    drafter = write_recurrent(tmp_path / "drafter", "qwen3-next")
    target = write_model(tmp_path / "target", max_position_embeddings=2048)
    method = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"^--speculative-config: a drafter with recurrent state cannot take its own"):
        LLM(target, speculative_config=method, **SETTINGS)
