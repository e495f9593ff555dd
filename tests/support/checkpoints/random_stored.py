"""Random matrices as checkpoints hold them, in every scheme."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pagoda.common.weights.dtypes import FLOAT8_E4M3FN
from pagoda.common.weights.gguf.dequantize import dequantize
from pagoda.common.weights.quantization.schemes import (
    Activations,
    Blocks,
    Codes4,
    Float8,
    Int4,
    Int8,
    Mxfp4,
    Nvfp4,
    Scheme,
)
from pagoda.common.weights.quantization.tensors import QuantizedTensor


@dataclass(frozen=True)
class Stored:
    """A scheme, and what of a matrix in it varies."""

    scheme: Scheme
    offsets: Literal["integers", "floats"] | None = None

    def tensor(self, outputs: int, inputs: int, seed: int = 0) -> QuantizedTensor:
        """Return a random matrix."""
        noise, scheme = np.random.default_rng(seed), self.scheme
        if isinstance(scheme, Blocks):
            return _blocks(scheme, outputs, inputs, noise)
        four = not isinstance(scheme, Float8 | Int8)
        data = noise.integers(256, size=(outputs, inputs // 2 if four else inputs), dtype=np.uint8)
        if isinstance(scheme, Float8):
            data = (data & 0xBF).view(FLOAT8_E4M3FN)
        elif isinstance(scheme, Int8):
            data = data.view(np.int8)
        group = {"tensor": (outputs, inputs), "channel": (1, inputs)}.get(str(scheme.group), scheme.group)
        assert isinstance(group, tuple)
        shape = -(-outputs // group[0]), -(-inputs // group[1])
        step = 0.01 if isinstance(scheme, Int8) else 0.1
        scales = (step * noise.uniform(0.5, 1.5, shape)).astype(np.float16).astype(np.float32)
        if isinstance(scheme, Mxfp4):
            scales = np.exp2(noise.integers(-4, 0, shape)).astype(np.float32)
        tensor = QuantizedTensor(scheme, data, scales, group)
        if isinstance(scheme, Nvfp4):
            eighths = (noise.integers(8, 16, shape) / 8 * 16).astype(np.float32)
            rows = (0.01 * noise.uniform(0.5, 1.5, outputs)).astype(np.float32)
            tensor = replace(tensor, scales=eighths, row_scales=rows)
        if self.offsets == "integers":
            tensor = replace(tensor, offsets=noise.integers(-7, 9, shape).astype(np.float32) * scales)
        elif self.offsets == "floats":
            tensor = replace(tensor, offsets=noise.standard_normal(shape).astype(np.float32) * step)
        if isinstance(scheme, Int4) and scheme.ordered:
            tensor = replace(tensor, order=np.random.default_rng(5).permutation(inputs).astype(np.int32))
        if scheme.activations is not None and scheme.activations.static:
            tensor = replace(tensor, input_scale=np.float32(noise.uniform(0.02, 0.03)) * np.ones((), np.float32))
        return tensor


def _blocks(scheme: Blocks, outputs: int, inputs: int, noise: np.random.Generator) -> QuantizedTensor:
    kind = scheme.kind
    count = outputs * inputs // kind.elements
    blocks = noise.integers(256, size=(max(count, 64), kind.bytes), dtype=np.uint8)
    halves = (noise.uniform(0.01, 0.02, (len(blocks), 2)) * [1, 4]).astype(np.float16)
    blocks[:, :4] = halves.view(np.uint8)  # float16 factors begin a block of most types
    with np.errstate(all="ignore"):
        peaks = np.abs(dequantize(blocks.reshape(-1), kind, (len(blocks), kind.elements))).max(-1)
    sane = blocks[(peaks > 0.01) & (peaks < 100)]
    assert len(sane)
    data = np.resize(sane, (count, kind.bytes)).reshape(outputs, -1)
    return QuantizedTensor(scheme, data, np.empty(0, np.float32), ())


ROW, BLOCK = Activations("float8", "row"), Activations("float8", 128)

FLOAT8_STORED = {
    "fp8-tensor": Stored(Float8("tensor", Activations("float8", "tensor", static=True))),
    "fp8-channel": Stored(Float8("channel", ROW)),
    "fp8-blocks": Stored(Float8((128, 128), BLOCK)),
    "fp8-small-blocks": Stored(Float8((16, 32), Activations("float8", 32))),
    "fp8-blocks-rows": Stored(Float8((128, 128), ROW)),
}
INT8_STORED = {
    "int8-channel": Stored(Int8("channel", Activations("int8", "row"))),
    "int8-static": Stored(Int8("tensor", Activations("int8", "tensor", static=True))),
}
WEIGHT_ONLY_STORED = {
    "fp8-weight-only": Stored(Float8("channel")),
    "int8-groups": Stored(Int8((1, 32)), "floats"),
    "int8-zeros": Stored(Int8("channel", Activations("int8", "row")), "integers"),
    "int4": Stored(Int4((1, 128))),
    "int4-zeros": Stored(Int4((1, 32)), "integers"),
    "int4-offsets": Stored(Int4((1, 64)), "floats"),
    "int4-channel": Stored(Int4((1, 384))),
    "int4-ordered": Stored(Int4((1, 128), ordered=True), "integers"),
    "mxfp4": Stored(Mxfp4()),
    "nvfp4": Stored(Nvfp4()),
    "nf4": Stored(Codes4("nf4", (1, 64))),
    "fp4": Stored(Codes4("fp4", (1, 64))),
}
STORED = FLOAT8_STORED | INT8_STORED | WEIGHT_ONLY_STORED
"""Every scheme that torch_cuda multiplies."""
