"""`fbgemm_fp8`: float8 weights with a scale per output channel, activations rounded per token."""

from __future__ import annotations

from pagoda.common.weights.dtypes import FLOAT8_E4M3FN
from pagoda.common.weights.quantization.config import WEIGHT, LayerGroup, Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.scaled import join_scaled, scaled_scheme
from pagoda.common.weights.quantization.schemes import Activations
from pagoda.common.weights.quantization.tensors import QuantizedTensor

_SCALE = "weight_scale"


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section."""
    section.only("activation_scale_ub", "modules_to_not_convert")
    scheme = scaled_scheme("float8", "channel", Activations("float8", "row"))
    parts = frozenset({WEIGHT, _SCALE})
    bound = frozenset({"input_scale_ub"})
    group = LayerGroup(("Linear",), scheme, parts, FLOAT8_E4M3FN, bound)
    ignored = (*section.names("modules_to_not_convert"), "lm_head")
    return QuantizationConfig("fbgemm_fp8", (group,), ignored, _join)


def _join(module: str, parts: Parts, group: LayerGroup, pieces: int) -> QuantizedTensor:
    return join_scaled(module, parts[WEIGHT], parts[_SCALE], group.scheme, pieces, _SCALE)
