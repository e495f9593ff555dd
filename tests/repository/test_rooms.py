"""How many product files name a mixer, a quantisation scheme, a request field or a metric.

The lists of exceptions may only shrink.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from rooms import SCHEMES, files_by_name, files_of_field, metric_names, mixers, outside_rooms, request_fields
from structure import ROOT, Tree

OUTSIDE = {
    "Attention": (
        "backends/fallback/attention.py",
        *("common/models/family.py", "common/models/spec.py", "common/models/transformers_spec.py"),
    ),
}
"""Mixer -> files outside its rooms that name it: models of transformers attend and nothing else."""

FILES_OF_A_SCHEME = 6
"""Its definition, a reader of checkpoints' methods, GGUF's groups, and a file per backend."""

FILES_OF_A_FIELD = 6

FILES_OF_FIELDS = {
    **{"request_id": 53, "max_tokens": 44, "top_k": 30, "cache_salt": 21, "prompt_logprobs": 21},
    **{"structured_outputs": 20, "max_length": 18, "skip_special_tokens": 18, "chat_template": 15},
    **{"chat_template_kwargs": 16, "extra_args": 15, "top_p": 15, "add_special_tokens": 14, "output_kind": 14},
    **{"json_schema": 12, "min_tokens": 12, "stop_token_ids": 11, "truncate_prompt_tokens": 11, "bad_words": 10},
    **{"ignore_eos": 10, "min_p": 10, "add_generation_prompt": 9, "logit_bias": 9, "allowed_token_ids": 8},
    **{"continue_final_message": 8, "include_stop_str_in_output": 8, "logprob_token_ids": 8, "repetition_penalty": 8},
    **{"stream_interval": 8, "stream_options": 8, "tool_choice": 7, "top_logprobs": 8, "frequency_penalty": 7},
    **{"presence_penalty": 7, "return_tokens_as_token_ids": 7, "thinking_token_budget": 7, "truncation_side": 7},
}
"""Request field -> product files that name it, where they are more. Several names are also those of something else."""

FILES_OF_A_METRIC = 3


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(ROOT)


@pytest.fixture(scope="module")
def files(tree: Tree) -> Mapping[str, set[str]]:
    return files_by_name(tree)


def test_mixers_are_named_in_their_rooms_alone(tree: Tree, files: Mapping[str, set[str]]) -> None:
    outside = outside_rooms(tree, files)
    assert len(outside) == 8
    assert {mixer: tuple(paths) for mixer, paths in outside.items() if paths} == OUTSIDE


def test_every_mixer_has_a_file_of_its_own(tree: Tree) -> None:
    paths = [path for mixer in mixers(tree) for path in tree.classes[mixer] if path.startswith("common/models/mixers/")]
    assert len(paths) == len(set(paths)) == len(mixers(tree))


def test_schemes_are_named_in_few_files(files: Mapping[str, set[str]]) -> None:
    assert {scheme: sorted(files[scheme]) for scheme in SCHEMES if len(files[scheme]) > FILES_OF_A_SCHEME} == {}
    assert all(files[scheme] for scheme in SCHEMES)


def test_a_request_field_is_named_in_few_files(files: Mapping[str, set[str]]) -> None:
    counts = {name: len(files_of_field(name, files)) for name in request_fields()}
    assert len(counts) > 60
    assert {name: count for name, count in counts.items() if count > FILES_OF_A_FIELD} == FILES_OF_FIELDS


def test_a_metric_is_named_in_few_files(files: Mapping[str, set[str]]) -> None:
    names = metric_names(files)
    assert len(names) > 40
    assert {name: files[name] for name in names if len(files[name]) > FILES_OF_A_METRIC} == {}
