"""The kept logits of transformers, computed anew by the transformers that is installed."""

from __future__ import annotations

import numpy as np
import pytest
from models.cases import tiny
from models.oracles.kept_logits import read_cases, read_logits
from models.oracles.write_logits import keep

TOLERANCE = 1e-5
CASES, LOGITS = read_cases(), read_logits()


@pytest.mark.slow_matrix
@pytest.mark.parametrize("case", tiny.TINY, ids=lambda case: case.name)
def test_transformers_gives_what_is_kept(case: tiny.Tiny) -> None:
    """`python tests/models/oracles/write_logits.py` writes the data of new cases."""
    kept, logits = keep(case)
    assert kept == CASES[case.name]
    np.testing.assert_allclose(logits, LOGITS[case.name].numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.slow_matrix
def test_every_case_is_kept() -> None:
    assert list(CASES) == list(LOGITS) == [case.name for case in tiny.TINY]
