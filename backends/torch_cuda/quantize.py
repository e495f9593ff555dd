"""The matrices of the layers in fewer bits, made as they are read: which values of --quantization there are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from pagoda.backends.torch_cuda.kernels.weight_only import Scheme, pack
from pagoda.backends.torch_cuda.parameters import Pack
from pagoda.common.errors import ConfigError

SCHEMES: Final[Mapping[str, Scheme]] = {
    "fp8": "fp8",
    "fp8_per_channel": "fp8",
    "int8": "int8",
    "int8_per_channel_weight_only": "int8",
    "int4": "int4",
}


def packing(method: str | None) -> Pack | None:
    """How matrices of layers are packed; None: they stay as they are. `method`: a value of --quantization, or None.

    Raises ConfigError for what is another backend's.
    """
    if method is None:
        return None
    if method not in SCHEMES:
        raise ConfigError("--quantization", f"torch_cuda cannot make weights {method}; use {', '.join(SCHEMES)}")
    return partial(pack, scheme=SCHEMES[method])
