"""Models that only the reference backend runs."""

from __future__ import annotations

import pytest

from pagoda.common.errors import ModelError
from pagoda.common.models.spec import ModelSpec, check_attention_only

REFERENCE_ONLY = ("Deepseek", "Qwen3Next")
"""First parts of the names of architectures whose mixers only the reference backend has."""


def is_refused(architecture: str, spec: ModelSpec, implementation: str) -> bool:
    """Return whether a model is refused; check that the refusal names the layer. Others must run."""
    if implementation not in ("torch_cuda", "jax_tpu") or not architecture.startswith(REFERENCE_ONLY):
        return False
    with pytest.raises(ModelError, match=rf"^layer \d+ has .*, which {implementation} does not support"):
        check_attention_only(spec, implementation)
    return True
