"""Models that a backend does not run yet."""

from __future__ import annotations

import pytest

from pagoda.backends.jax_tpu.supported import SUPPORTED as JAX_TPU
from pagoda.backends.torch_cuda.supported import SUPPORTED as TORCH_CUDA
from pagoda.common.errors import ModelError
from pagoda.common.models.spec import ModelSpec

SUPPORTED = {"jax_tpu": JAX_TPU, "torch_cuda": TORCH_CUDA}
LATENT = ("AXK1", "DeepseekV", "Glm4MoeLite", "GlmMoeDsa", "MiniCPM3", "PanguUltra", "Sarvam")
REFUSED = {
    "jax_tpu": (),
    "torch_cuda": (),
}
"""Backend -> first parts of the names of architectures with mixers that it does not have."""


def is_refused(architecture: str, spec: ModelSpec, backend: str) -> bool:
    """Return whether a model is refused; check that the refusal names the layer. Others must run."""
    if backend not in SUPPORTED or not architecture.startswith(REFUSED[backend]):
        return False
    with pytest.raises(ModelError, match=rf"^(layer \d+|the model) has .*, which {backend} does not support"):
        SUPPORTED[backend].check(spec)
    return True
