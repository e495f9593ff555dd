"""--hf-overrides, quantised configs, and specs without sliding windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fakes import tiny_spec
from support.suite.rows import each_row

from pagoda.common.models.registry import overridden, without_windows

YARN = {"rope_type": "yarn", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "rope_theta": 5.0}
PER_LAYER = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}


@each_row(
    ("config", "overrides", "result"),
    [
        ({"a": 1}, {}, {"a": 1}),
        ({"a": 1}, {"a": 2, "b": 3}, {"a": 2, "b": 3}),
        ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 3}}}, {"a": {"b": {"c": 3, "d": 2}}}),
        ({"a": {"b": 1}}, {"a": None}, {"a": None}),
        # The older spelling of rotary positions.
        ({"rope_theta": 5.0}, {"rope_theta": 7.0}, {"rope_theta": 7.0}),
        ({"rope_scaling": None}, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
        ({"rope_scaling": LLAMA3}, {"rope_scaling": {"factor": 4.0}}, {"rope_scaling": {**LLAMA3, "factor": 4.0}}),
        ({"rope_scaling": LLAMA3}, {"rope_scaling": YARN}, {"rope_scaling": {**YARN, "rope_theta": 5.0}}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
        # The newer one, which is where either spelling of the change must arrive.
        ({"rope_parameters": LLAMA3}, {"rope_theta": 7.0}, {"rope_parameters": {**LLAMA3, "rope_theta": 7.0}}),
        (
            {"rope_parameters": LLAMA3},
            {"rope_scaling": None},
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}},
        ),
        ({"rope_parameters": LLAMA3}, {"rope_scaling": YARN}, {"rope_parameters": {**YARN, "rope_theta": 5.0}}),
        (
            {"rope_parameters": LLAMA3},
            {"rope_parameters": {"factor": 4.0}},
            {"rope_parameters": {**LLAMA3, "factor": 4.0}},
        ),
        (
            {"rope_parameters": PER_LAYER},
            {"rope_theta": 7.0, "rope_scaling": YARN},
            {"rope_parameters": {**PER_LAYER, "full_attention": {**YARN, "rope_theta": 7.0}}},
        ),
    ],
)
def test_overrides(config: dict[str, Any], overrides: dict[str, Any], result: dict[str, Any]) -> None:
    before = repr(config), repr(overrides)
    assert overridden(config, overrides) == result
    assert (repr(config), repr(overrides)) == before


def test_without_windows_limits_the_context_to_the_narrowest() -> None:
    spec = tiny_spec(layers=4, window=6)
    wider = replace(spec.layers[3], mixers=(replace(spec.layers[3].attention, window=9),))
    unlimited = without_windows(replace(spec, layers=(*spec.layers[:3], wider)))
    assert unlimited.max_positions == 6
    assert [layer.attention.window for layer in unlimited.layers] == [None] * 4
    assert without_windows(tiny_spec()) == tiny_spec()
    assert without_windows(replace(spec, max_positions=5)).max_positions == 5
