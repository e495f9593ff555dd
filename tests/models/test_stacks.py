"""The model code of the accelerators' backends on models that have every feature, and every two used together."""

from __future__ import annotations

import pytest
import torch
from models.cases import stacks
from models.cases.features import Pair, pairs_of
from models.oracles.implementations import ACCELERATED, naive
from models.oracles.kept_logits import read_cases

from pagoda.common.models.spec import ModelSpec

TOLERANCE = 3e-5
CASES = read_cases()
STACKS = stacks.read_stacks()


@pytest.fixture(scope="module")
def specs() -> dict[str, ModelSpec]:
    return stacks.specs_of(CASES)


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("implementation", ACCELERATED)
def test_layers_of_many_families(name: str, implementation: str, specs: dict[str, ModelSpec]) -> None:
    spec = STACKS[name].spec(specs)
    weights, ids = STACKS[name].weights(CASES, spec), stacks.prompt()
    expected = naive(spec, weights, len(ids))(ids)
    deviation = float(expected.std())
    assert deviation > 0.1, "a flat answer proves nothing"
    ours = ACCELERATED[implementation](spec, weights, len(ids))(ids)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE * max(1.0, deviation), rtol=0)


def test_stacks_have_every_two_features_that_a_family_has(specs: dict[str, ModelSpec]) -> None:
    """`python tests/models/cases/choose_stacks.py` chooses the layers again."""
    done = set[Pair]().union(*(pairs_of(stack.spec(specs)) for stack in STACKS.values()))
    lacking = {name: sorted(found) for name, spec in specs.items() if (found := pairs_of(spec) - done)}
    assert not lacking, "\n".join(f"{name}: {found}" for name, found in lacking.items())
