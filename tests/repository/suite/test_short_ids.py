"""`support.suite.short_ids`: texts in the ids of tests are cut so that an id has at most 80 characters."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest
from support.suite import short_ids


class Kind(Enum):
    USUAL = 1


@pytest.mark.parametrize("values", [1, 2, 5])
def test_values_have_the_room_that_the_name_leaves(values: int) -> None:
    name = "test_a_name_of_forty_characters_________"
    value = "x" * short_ids.room(name, values)
    id_ = f"{name}[{'-'.join([value] * values)}99]"
    assert short_ids.MAX_ID - values <= len(id_) <= short_ids.MAX_ID


def test_texts_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_ids, "_left", 8)
    values = ("short", "a longer text", b"\0\1", "\n", Kind.USUAL, Path, 5, 10**30, None)
    texts = [short_ids.pytest_make_parametrize_id(value) for value in values]
    assert texts == ["short", "a longer", "\\x00\\x01", "\\n", "USUAL", "Path", None, "large", None]
