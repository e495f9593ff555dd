"""bfloat16 and 8-bit float dtypes: conversions against ml_dtypes, supported and unsupported array operations."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.suite.rows import each_row

from pagoda.common.models.family import Rename, Split, Stack
from pagoda.common.models.primitives import Param
from pagoda.common.weights import dtypes
from pagoda.common.weights.gguf.names import weight_rules
from pagoda.common.weights.rules import apply_rules

TAGS = [getattr(dtypes, name) for name in dir(dtypes) if name.startswith(("BFLOAT", "FLOAT"))]
EVERY = np.arange(1 << 16, dtype=np.uint16)


@each_row("tag", TAGS, ids=dtypes.dtype_name)
def test_a_tag_names_a_type_of_its_size_and_no_other(tag: np.dtype) -> None:
    theirs = np.dtype(getattr(ml_dtypes, dtypes.dtype_name(tag)))
    assert (tag.itemsize, tag.alignment) == (theirs.itemsize, theirs.itemsize)
    assert [other for other in TAGS if other == tag] == [tag]
    assert dtypes.dtype_name(np.dtype("f4")) == "float32"


def test_every_bfloat16_to_float32() -> None:
    got, expected = dtypes.to_float32(EVERY.view(dtypes.BFLOAT16)), EVERY.view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(got, expected)  # NaN equals NaN


def test_float32_to_bfloat16_rounds_to_nearest_even() -> None:
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = ((EVERY.astype(np.uint32) << 16)[:, None] | low).view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    got = dtypes.to_bfloat16(values)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(dtypes.as_uint(got)[numbers], expected.view(np.uint16)[numbers])
    assert np.isnan(dtypes.to_float32(got)[~numbers]).all()


def test_float32_to_float8_rounds_to_nearest_even() -> None:
    low = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], np.uint32)
    values = ((EVERY.astype(np.uint32) << 16)[:, None] | low).view(np.float32)
    values = values[np.abs(values) <= 448]
    expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(dtypes.as_uint(dtypes.to_float8(values)), expected)


def test_scalars_and_other_types_convert_too() -> None:
    one = dtypes.to_bfloat16(np.array(1.0, np.float32))
    assert (one.shape, one.dtype) == ((), dtypes.BFLOAT16)
    assert dtypes.to_float32(one) == 1
    assert dtypes.to_float32(np.array([2.0], np.float16)).dtype == np.float32
    with pytest.raises(TypeError, match="float8_e5m2 cannot be converted"):
        dtypes.to_float32(np.zeros(1, dtypes.FLOAT8_E5M2))


def test_arithmetic_raises_instead_of_using_the_bits() -> None:
    with pytest.raises(TypeError):
        np.zeros(1, dtypes.BFLOAT16) + 1


def test_every_rule_carries_tagged_arrays() -> None:
    rules = (
        *(Rename("a", "a", transpose=True), Split("b", ("x", "y"), transpose=True)),
        Stack("e.{e}.w", "e"),
    )
    shapes = {"a": (3, 2), "x": (1, 2), "y": (4, 2), "e": (2, 2, 3)}
    values = {"a": (2, 3), "b": (2, 5), "e.1.w": (2, 3), "e.0.w": (2, 3)}
    wide = {
        name: np.random.default_rng(n).standard_normal(s).astype("f4") for n, (name, s) in enumerate(values.items())
    }
    tagged = {name: dtypes.to_bfloat16(value) for name, value in wide.items()}
    params = {name: Param(name, shape, "." * len(shape)) for name, shape in shapes.items()}
    got = dict(apply_rules(rules, params, tagged.items()))
    rounded = {name: value.astype(ml_dtypes.bfloat16).astype(np.float32) for name, value in wide.items()}
    for name, expected in apply_rules(rules, params, rounded.items()):
        assert got[name].dtype == dtypes.BFLOAT16
        np.testing.assert_array_equal(dtypes.to_float32(got[name]), expected)
    assert np.shares_memory(got["a"], tagged["a"])
    assert np.shares_memory(got["y"], tagged["b"])


def test_a_shifted_norm_is_read_as_a_number() -> None:
    norm = dtypes.to_bfloat16(np.array([1.5, 0.25], np.float32))
    params = {"layers.0.norms.before_mixer": Param("layers.0.norms.before_mixer", (2,), "D")}
    ((_, got),) = apply_rules(weight_rules("gemma3", ()), params, [("blk.0.attn_norm.weight", norm)])
    assert dtypes.to_float32(got).tolist() == [0.5, -0.75]
