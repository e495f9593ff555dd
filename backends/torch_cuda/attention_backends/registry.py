"""Attention kernels by the names that vLLM has for them; one is imported only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final, cast

from pagoda.backends.torch_cuda.attention_backends.protocol import Needs, Prefill
from pagoda.common.config.groups.attention import AUTO

MODULES: Final[Mapping[str, str]] = {
    AUTO: "triton_attn",
    "TRITON_ATTN": "triton_attn",
    "TORCH_VARLEN": "torch_varlen",
    "FLASH_ATTN": "flash_attn",
    "FLASHINFER": "flashinfer",
}
"""Name -> module here with `create(needs) -> Prefill`."""


def find(name: str, needs: Needs) -> Prefill:
    """The kernel of that name, in capitals. Raises ConfigError saying what it lacks."""
    module = importlib.import_module(f"pagoda.backends.torch_cuda.attention_backends.{MODULES[name]}")
    return cast(Prefill, module.create(needs))
