"""After the warm-up nothing is compiled: Triton is asked, in a process without its interpreter."""

from __future__ import annotations

import pytest
from support.warm_launches import compiled


@pytest.mark.parametrize("model", ["windows", "experts, int8", "full norms, int4"])
def test_serving_compiles_nothing(model: str) -> None:
    before, after = compiled(model)
    assert len(before) > 15
    assert not after
