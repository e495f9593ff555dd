"""How many product files name a mixer, a quantisation scheme or a metric. The lists of exceptions may only shrink."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from rooms import SCHEMES, files_by_name, metric_names, mixers, outside_rooms
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


def test_a_metric_is_named_in_few_files(files: Mapping[str, set[str]]) -> None:
    names = metric_names(files)
    assert len(names) > 40
    assert {name: files[name] for name in names if len(files[name]) > FILES_OF_A_METRIC} == {}
