"""Fixtures of the backend tests."""

from __future__ import annotations

import pytest
from support.reference_driver import Driver


@pytest.fixture
def driver():
    """A factory of drivers whose backends are closed at the end."""
    made: list[Driver] = []

    def make(*args, **kwargs) -> Driver:
        made.append(Driver(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.backend.close()
