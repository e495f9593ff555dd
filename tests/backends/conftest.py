"""Fixtures of the backend tests."""

from __future__ import annotations

import pytest
from support.engines.reference_driver import Driver


@pytest.fixture
def driver():
    """A factory of drivers whose backends are closed at the end."""
    drivers: list[Driver] = []

    def make(*args, **kwargs) -> Driver:
        drivers.append(Driver(*args, **kwargs))
        return drivers[-1]

    yield make
    for one in drivers:
        one.backend.close()
