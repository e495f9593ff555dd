"""K and V scales of a checkpoint: an 8-bit KV cache holds value / scale.

They take no part in the rules of a family: a stream of tensors loses them (`without_kv_scales`), and they follow the
parameters of the model under names of their own, `layers.{l}.mixers.{m}.k_scale` and `.v_scale` (`kv_scale_weights`),
which a backend takes out again (`take_kv_scales`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.models.family import Rule
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.quantization.layouts.scaled import floats
from pagoda.common.weights.quantization.tensors import Array, Value, and_more

logger = logging.getLogger(__name__)

K_SCALE: Final = "k_scale"
V_SCALE: Final = "v_scale"

_TARGETS: Final[Mapping[str, tuple[str, ...]]] = {
    **{K_SCALE: (K_SCALE,), V_SCALE: (V_SCALE,), "kv_scale": (K_SCALE, V_SCALE)},
    **{"k_proj.output_scale": (K_SCALE,), "v_proj.output_scale": (V_SCALE,)},
}
"""How names end -> the scales of it."""

_OTHERS: Final = (
    *("q_scale", "prob_scale", "q_zero_point", "k_zero_point", "v_zero_point", "prob_output_scale"),
    *("q_proj.output_scale", "k_proj.output_zero_point", "v_proj.output_zero_point"),
)
"""Ends of names of what belongs to an 8-bit attention or is 0 in a cache of floats."""

_PROJECTIONS: Final = (".k_proj", ".v_proj", ".qkv_proj")
"""Modules inside of an attention module that have scales."""

Scales = dict[str, tuple[str, Array]]
"""`k_scale` or `v_scale` after the name of an attention module and a dot -> the tensor's name and values."""


def without_kv_scales(tensors: Iterable[tuple[str, Value]], scales: Scales) -> Iterator[tuple[str, Value]]:
    """Yield the tensors other than scales of K, V and attention; put those of K and V into `scales`."""
    for name, tensor in tensors:
        if any(name.endswith(f".{end}") for end in _OTHERS):
            continue
        end = next((end for end in _TARGETS if name.endswith(f".{end}")), None)
        if end is None or not isinstance(tensor, np.ndarray):
            yield name, tensor
            continue
        module = name[: -len(end) - 1]
        for inner in _PROJECTIONS:
            module = module.removesuffix(inner)
        for target in _TARGETS[end]:
            scales[f"{module}.{target}"] = name, tensor


def kv_scale_weights(
    scales: Scales, sources: Mapping[str, Sequence[tuple[Rule, str]]], *, used: bool
) -> Iterator[NamedTensor]:
    """Yield each scale, float32 [], under the name of its mixer; none but a log line if they are not `used`.

    `sources`: per parameter the rules that fill it and the tensor names that they read. Raises WeightError for scales
    of heads, or of a module that is no attention of this model.
    """
    if scales and not used:
        names = [name for name, _ in scales.values()]
        logger.info("%s: not used: --kv-cache-dtype is not fp8, or --calculate-kv-scales is set", and_more(names))
        return
    mixers = _mixers(sources) if scales else {}
    for target, (name, tensor) in scales.items():
        module, _, part = target.rpartition(".")
        modules = module, module.removesuffix(".attn")  # Checkpoints and vLLM name it differently.
        known_as = [full for short in modules for full in (short, f"model.{short}")]
        mixer = next((mixers[full] for full in known_as if full in mixers), None)
        if mixer is None:
            raise WeightError(f"tensor {name} belongs to no attention of this model; use --kv-cache-dtype auto")
        if tensor.size != 1:
            raise WeightError(
                f"tensor {name} has {tensor.size} scales, only one per layer is supported; use --calculate-kv-scales, "
                "or --kv-cache-dtype auto"
            )
        scale = floats(name, tensor).reshape(())
        if not np.isfinite(scale):
            raise WeightError(f"tensor {name} is {scale}, which is no scale; download it again")
        yield f"{mixer}.{part}", scale


def _mixers(sources: Mapping[str, Sequence[tuple[Rule, str]]]) -> dict[str, str]:
    """Return the name of each mixer with keys, by that of its module in the checkpoint."""
    return {
        source.removesuffix(".weight").rpartition(".")[0]: name.removesuffix(".k")
        for name, read in sources.items()
        if name.endswith(".k") and ".mixers." in name
        for _, source in read
    }


def take_kv_scales(weights: Iterable[tuple[str, Value]], taken: dict[str, float]) -> Iterator[tuple[str, Value]]:
    """Yield all parameters but the scales, which are put into `taken`."""
    for name, value in weights:
        if name.endswith((f".{K_SCALE}", f".{V_SCALE}")) and isinstance(value, np.ndarray):
            taken[name] = float(value)
        else:
            yield name, value


def scales_of_caches(
    numbers: Sequence[Sequence[Sequence[int]]], taken: Mapping[str, float]
) -> dict[int, tuple[float, float]]:
    """Return the scales of K and V by cache number; caches without any are left out. `numbers`: per layer and mixer."""
    scales: dict[int, tuple[float, float]] = {}
    for layer, mixers in enumerate(numbers):
        for mixer, caches in enumerate(mixers):
            names = [f"layers.{layer}.mixers.{mixer}.{part}" for part in (K_SCALE, V_SCALE)]
            if any(name in taken for name in names):
                k, v = (taken.get(name, 1.0) for name in names)
                scales |= dict.fromkeys(caches, (k, v))
    return scales
