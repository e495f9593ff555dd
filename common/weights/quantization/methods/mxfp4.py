"""`mxfp4`: experts in MXFP4 as gpt-oss has them, one stack of blocks and one of exponents per matrix."""

from __future__ import annotations

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import dtype_name, powers_of_two
from pagoda.common.weights.quantization.config import LayerGroup, Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.fours import mxfp4_scheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section."""
    section.only("dequantize", "modules_to_not_convert")
    group = LayerGroup(("Linear",), mxfp4_scheme(), frozenset({"blocks", "scales"}))
    ignored = section.names("modules_to_not_convert")
    return QuantizationConfig("mxfp4", (group,), ignored, _join, separator="_", suffix="_blocks")


def _join(module: str, parts: Parts, group: LayerGroup, pieces: int) -> QuantizedTensor:
    """Join blocks uint8 [..., O, I / 32, 16] and exponents uint8 [..., O, I / 32]."""
    blocks = parts["blocks"]
    scales = parts["scales"]
    _, size = mxfp4_scheme().group
    fits = blocks.dtype == scales.dtype == np.uint8 and blocks.ndim >= 3 and blocks.shape == (*scales.shape, size // 2)
    if not fits:
        raise WeightError(
            f"tensor {module}_blocks {dtype_name(blocks.dtype)} {list(blocks.shape)} and its scales "
            f"{dtype_name(scales.dtype)} {list(scales.shape)} are not MXFP4: 16 bytes and one exponent per 32 inputs"
        )
    data = blocks.reshape(*blocks.shape[:-2], -1)
    return QuantizedTensor(group.scheme, data, powers_of_two(scales), (*[1] * (data.ndim - 1), size))
