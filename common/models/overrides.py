"""Changes to a model before it is built: --hf-overrides, the check for quantised weights, --disable-sliding-window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pagoda.common.config.settings import merge_json
from pagoda.common.errors import ModelError
from pagoda.common.models.spec import ModelSpec

_ROPE_KINDS: Final = ("rope_type", "type")
_FULL: Final = "full_attention"


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with `overrides` merged into it recursively.

    `rope_scaling` and `rope_theta` are moved into `rope_parameters` if the config has that key. A rope section that
    names its type replaces the old section, whose factors belong to the old type.
    """
    changes = dict(overrides)
    base = dict(config)
    parameters = base.get("rope_parameters")
    if isinstance(parameters, Mapping) and "rope_parameters" not in changes:
        scaling = changes.pop("rope_scaling", {})
        moved: dict[str, Any] = {"rope_type": "default"} if scaling is None else dict(scaling)
        if "rope_theta" in changes:
            moved["rope_theta"] = changes.pop("rope_theta")
        if moved:
            changes["rope_parameters"] = {_FULL: moved} if isinstance(parameters.get(_FULL), Mapping) else moved
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(base.get(key), Mapping) and isinstance(changes.get(key), Mapping):
            base[key] = _without_old_kind(base[key], changes[key])
    return merge_json(base, changes)


def _without_old_kind(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The old rope section to merge under the new one: only theta and partial factor if the new one names a type."""
    if isinstance(old.get(_FULL), Mapping) and isinstance(new.get(_FULL), Mapping):
        return {**old, _FULL: _without_old_kind(old[_FULL], new[_FULL])}
    if any(kind in new for kind in _ROPE_KINDS):
        return {key: value for key, value in old.items() if key in ("rope_theta", "partial_rotary_factor")}
    return dict(old)


def refuse_quantised(config: Mapping[str, Any]) -> None:
    """Raise ModelError naming the method if the config describes quantised weights."""
    for key in ("quantization_config", "compression_config"):
        section = config.get(key)
        if section is None:
            continue
        details = section if isinstance(section, Mapping) else {}
        method = details.get("quant_method") or "a method it does not name"
        kind = f" ({details['format']})" if details.get("format") else ""
        raise ModelError(
            f"config.json: {key}: the weights are quantised by {method}{kind}, which this version does not read; "
            "serve a GGUF file of the model (org/name:Q4_K_M), or its unquantised weights"
        )


def without_windows(spec: ModelSpec) -> ModelSpec:
    """Return the spec without sliding windows, its context limited to the narrowest one (exact up to that length)."""
    windows = [layer.mixer.window for layer in spec.layers if layer.mixer.window is not None]
    if not windows:
        return spec
    layers = tuple(replace(layer, mixer=replace(layer.mixer, window=None)) for layer in spec.layers)
    return replace(spec, layers=layers, max_positions=min(spec.max_positions, *windows))
