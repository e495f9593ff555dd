"""Products of test parameters of which `make test` runs some, and `make test-full` the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest


def thinned(usual: Callable[..., bool], /, indirect: Sequence[str] = (), **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize over the product of the axes; cases that are not `usual` have the marker `slow_matrix`.

    `usual` gets a value of each axis; those named in `indirect` go to fixtures. Raises ValueError if a value of an axis
    is in no usual case.
    """
    cases = [(case, usual(*case)) for case in product(*axes.values())]
    for place, (name, values) in enumerate(axes.items()):
        kept = [case[place] for case, is_usual in cases if is_usual]
        if never := [value for value in values if value not in kept]:
            raise ValueError(f"{name}: no usual case has {never}")
    params = [pytest.param(*case, marks=() if is_usual else pytest.mark.slow_matrix) for case, is_usual in cases]
    return pytest.mark.parametrize(list(axes), params, indirect=list(indirect))


def some(values: Sequence[Any], usual: Sequence[Any]) -> list[Any]:
    """The values as parameters; those that are not `usual` have the marker `slow_matrix`."""
    if unknown := [value for value in usual if value not in values]:
        raise ValueError(f"not among the values: {unknown}")
    return [value if value in usual else pytest.param(value, marks=pytest.mark.slow_matrix) for value in values]
