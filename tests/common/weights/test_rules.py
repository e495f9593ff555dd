"""Each weight-name rule, and strictness on both sides."""

from __future__ import annotations

import numpy as np
import pytest
from support.suite.rows import each_row

from pagoda.common.errors import WeightError
from pagoda.common.models.family import Normalise, Rename, Reshape, Rule, Shift, Split, Stack, fused_linear, linear
from pagoda.common.models.primitives import Param
from pagoda.common.weights.dtypes import BFLOAT16, dtype_name, to_bfloat16, to_float32
from pagoda.common.weights.quantization.schemes import Int8
from pagoda.common.weights.quantization.tensors import QuantizedTensor
from pagoda.common.weights.rules import apply_rules, check_names

RULES: tuple[Rule, ...] = (
    Rename("[model.]embed.weight", "embed"),
    *linear("layers.{l}.out", "layers.{l}.o"),
    *fused_linear("layers.{l}.qk", "layers.{l}.q", "layers.{l}.k"),
    Rename("layers.{l}.turned", "layers.{l}.t", transpose=True),
    Split("layers.{l}.both", ("layers.{l}.x", "layers.{l}.y"), transpose=True),
    Split("layers.{l}.pairs", ("layers.{l}.x", "layers.{l}.y"), interleaved=True),
    Stack("layers.{l}.experts.{e}.w", "layers.{l}.experts"),
    Split("layers.{l}.stacked", ("layers.{l}.x", "layers.{l}.y"), axis=1),
    Reshape("layers.{l}.rows", "layers.{l}.stack"),
    Reshape("layers.{l}.turned_rows", "layers.{l}.stack", transpose=True),
    Normalise("columns", "unit", axis=0),
    Normalise("rows", "unit", axis=1),
    Shift("layers.{l}.small", "layers.{l}.norm", 0.2),
    Rename("[model.]layers.{l}.parts.{i}.weight", "layers.{l}.mixers.{i}.p"),
    Rename("layers.{l}.others.{i}.weight", "layers.{l}.mixers.{i}.p"),
)


def array(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def run(shapes: dict[str, tuple[int, ...]], tensors: dict[str, np.ndarray], ignored: tuple[str, ...] = ()):
    params = {name: Param(name, shape, "." * len(shape)) for name, shape in shapes.items()}
    return dict(apply_rules(RULES, params, tensors.items(), ignored))


@pytest.mark.parametrize("name", ["embed.weight", "model.embed.weight"])
def test_rename_with_optional_prefix_shares_memory(name: str):
    tensor = array(3, 2)
    assert np.shares_memory(run({"embed": (3, 2)}, {name: tensor})["embed"], tensor)


def test_numbers_are_carried_over():
    filled = run(
        {"layers.0.o": (1, 2), "layers.12.o": (1, 2)}, {f"layers.{n}.out.weight": array(1, 2) + n for n in (12, 0)}
    )
    assert filled["layers.12.o"][0, 0] == 12
    assert filled["layers.0.o"][0, 0] == 0


def test_a_number_in_a_rule_stands_for_itself():
    rules = [Rename("layers.{l}.parts.1.weight", "layers.{l}.o"), Rename("[x.]layers.3.parts.0.weight", "layers.5.o")]
    params = {f"layers.{n}.o": Param(f"layers.{n}.o", (1, 2), "..") for n in (3, 5)}
    tensors = {"layers.3.parts.1.weight": array(1, 2), "x.layers.3.parts.0.weight": array(1, 2) + 9}
    filled = dict(apply_rules(rules, params, tensors.items()))
    assert (filled["layers.3.o"][0, 0], filled["layers.5.o"][0, 0]) == (0, 9)
    with pytest.raises(WeightError, match=r"tensor x\.layers\.4\.parts\.0\.weight .* belongs to no parameter"):
        dict(apply_rules(rules, params, [("x.layers.4.parts.0.weight", array(1, 2))]))


def test_split_takes_sizes_from_the_shapes():
    fused = array(5, 2)
    filled = run({"layers.0.q": (3, 2), "layers.0.k": (2, 2)}, {"layers.0.qk.weight": fused})
    np.testing.assert_array_equal(filled["layers.0.q"], fused[:3])
    np.testing.assert_array_equal(filled["layers.0.k"], fused[3:])


def test_split_along_another_axis():
    stacked = array(2, 5, 3)
    filled = run({"layers.0.x": (2, 1, 3), "layers.0.y": (2, 4, 3)}, {"layers.0.stacked": stacked})
    np.testing.assert_array_equal(filled["layers.0.x"], stacked[:, :1])
    np.testing.assert_array_equal(filled["layers.0.y"], stacked[:, 1:])
    with pytest.raises(WeightError, match=r"stacked has shape \[2, 4, 3\], .* needs \[2, 5, 3\]"):
        run({"layers.0.x": (2, 1, 3), "layers.0.y": (2, 4, 3)}, {"layers.0.stacked": array(2, 4, 3)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_are_changed_at_load_keep_their_dtype(dtype: str):
    tensor = np.array([[3.0, 0.0], [4.0, 0.0]], np.float32)
    stored = to_bfloat16(tensor) if dtype == "bfloat16" else tensor
    shapes = {"unit": (2, 2)}
    by_axis = [run(shapes, {name: stored})["unit"] for name in ("columns", "rows")]
    assert [dtype_name(values.dtype) for values in by_axis] == [dtype] * 2
    columns, rows = (to_float32(values) for values in by_axis)
    np.testing.assert_allclose(columns, [[0.6, 0.0], [0.8, 0.0]], rtol=4e-3)  # a vector of zeros stays one
    np.testing.assert_array_equal(rows, [[1.0, 0.0], [1.0, 0.0]])
    shifted = run({"layers.3.norm": (2, 2)}, {"layers.3.small": stored})["layers.3.norm"]
    np.testing.assert_allclose(to_float32(shifted), tensor + 0.2, rtol=4e-3)


@pytest.mark.parametrize(("tensor", "target"), [("rows", "unit"), ("layers.0.small", "layers.0.norm")])
def test_values_changed_at_load_are_not_quantised_and_have_the_shape(tensor: str, target: str):
    quantised = QuantizedTensor(Int8("tensor"), np.ones((2, 2), np.int8), np.ones((1, 1), np.float32), (2, 2))
    with pytest.raises(WeightError, match=rf"tensor {tensor} is quantised, which is not supported for {target}"):
        run({target: (2, 2)}, {tensor: quantised})
    with pytest.raises(WeightError, match=r"has shape \[1, 4\], .* needs \[2, 2\]"):
        run({target: (2, 2)}, {tensor: array(1, 4)})


def test_reshape_keeps_the_order_of_numbers():
    rows = array(6, 4)
    filled = run({"layers.0.stack": (2, 3, 4)}, {"layers.0.rows": rows})
    np.testing.assert_array_equal(filled["layers.0.stack"], [rows[:3], rows[3:]])
    filled = run({"layers.0.stack": (2, 4, 3)}, {"layers.0.turned_rows": rows})
    np.testing.assert_array_equal(filled["layers.0.stack"], [rows[:3].T, rows[3:].T])
    with pytest.raises(WeightError, match=r"layers.0.rows has shape \[5, 4\], .* needs 24 numbers"):
        run({"layers.0.stack": (2, 3, 4)}, {"layers.0.rows": array(5, 4)})


def test_reshape_of_a_quantised_tensor_is_refused():
    quantised = QuantizedTensor(Int8("tensor"), np.ones((6, 4), np.int8), np.ones((1, 1), np.float32), (6, 4))
    param = Param("layers.0.stack", (2, 3, 4), "EFD")
    with pytest.raises(WeightError, match="rows is quantised, which is not supported for layers"):
        list(apply_rules(RULES, {param.name: param}, [("layers.0.rows", quantised)]))


def test_interleaved_split_takes_the_groups_of_heads_from_the_parameters():
    """Two groups, each of one row of x and two of y."""
    params = {"layers.0.x": Param("layers.0.x", (2, 3), "ND", 2), "layers.0.y": Param("layers.0.y", (4, 3), "ND", 2)}
    pairs = array(6, 3)
    filled = dict(apply_rules(RULES, params, [("layers.0.pairs", pairs)]))
    np.testing.assert_array_equal(filled["layers.0.x"], pairs[[0, 3]])
    np.testing.assert_array_equal(filled["layers.0.y"], pairs[[1, 2, 4, 5]])


def test_interleaved_split_with_several_query_heads_per_group():
    """Two KV heads; each group has two rows of x (a query head each) and one of y."""
    params = {"layers.0.x": Param("layers.0.x", (4, 3), "ND", 4), "layers.0.y": Param("layers.0.y", (2, 3), "KD", 2)}
    pairs = array(6, 3)
    filled = dict(apply_rules(RULES, params, [("layers.0.pairs", pairs)]))
    np.testing.assert_array_equal(filled["layers.0.x"], pairs[[0, 1, 3, 4]])
    np.testing.assert_array_equal(filled["layers.0.y"], pairs[[2, 5]])


@each_row("rows", [1, 2, 3, 4, 12])
@each_row("columns", [1, 3])
def test_interleaved_split_of_quantised_rows_takes_their_scales(rows: int, columns: int):
    """`rows`, `columns`: of a scale. Two groups, each of two rows of x and four of y."""
    params = {"layers.0.x": Param("layers.0.x", (4, 3), "ND", 2), "layers.0.y": Param("layers.0.y", (8, 3), "ND", 2)}
    pairs = QuantizedTensor(
        Int8((rows, columns)), array(12, 3).astype(np.int8), array(12 // rows, 3 // columns) + 1, (rows, columns)
    )
    filled = dict(apply_rules(RULES, params, [("layers.0.pairs", pairs)]))
    for name, chosen in (("layers.0.x", [0, 1, 6, 7]), ("layers.0.y", [2, 3, 4, 5, 8, 9, 10, 11])):
        value = filled[name]
        assert isinstance(value, QuantizedTensor)
        np.testing.assert_array_equal(value.dequantize(), pairs.dequantize()[chosen])
        assert value.group_shape[0] == rows or rows > 2


def test_a_scaled_parameter_keeps_its_dtype_and_a_quantised_one_its_numbers() -> None:
    values = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
    quantised = QuantizedTensor(Int8("channel"), values.astype(np.int8), np.array([[0.5], [2.0]], np.float32), (1, 2))
    params = {name: Param(name, (2, 2), "..", scale=0.75) for name in ("a", "b", "c")}
    tensors = [("a", values.astype(np.float16)), ("b", to_bfloat16(values)), ("c", quantised)]
    ours = dict(apply_rules([Rename(name, name) for name in params], params, tensors))
    assert ours["a"].dtype == np.float16
    np.testing.assert_array_equal(ours["a"], (0.75 * values).astype(np.float16))
    assert ours["b"].dtype == BFLOAT16
    np.testing.assert_array_equal(to_float32(ours["b"]), 0.75 * values)
    assert isinstance(ours["c"], QuantizedTensor)
    assert ours["c"].data is quantised.data
    np.testing.assert_allclose(ours["c"].dequantize(), 0.75 * quantised.dequantize())


def test_transpose_and_transposed_split():
    turned, both = array(2, 3), array(2, 5)
    filled = run(
        {"layers.0.t": (3, 2), "layers.0.x": (1, 2), "layers.0.y": (4, 2)},
        {"layers.0.turned": turned, "layers.0.both": both},
    )
    np.testing.assert_array_equal(filled["layers.0.t"], turned.T)
    np.testing.assert_array_equal(filled["layers.0.y"], both.T[1:])


def test_stack_is_kept_until_complete_and_streams():
    seen: list[str] = []

    def tensors():
        for name in ("layers.0.experts.1.w", "layers.0.experts.0.w", "embed.weight"):
            seen.append(name)
            yield name, array(2, 2) + int(name.split(".")[-2] == "1")

    params = {
        name: Param(name, shape, "..") for name, shape in {"layers.0.experts": (2, 2, 2), "embed": (2, 2)}.items()
    }
    stream = apply_rules(RULES, params, tensors())
    name, stacked = next(stream)
    assert (name, len(seen)) == ("layers.0.experts", 2)
    np.testing.assert_array_equal(stacked, [array(2, 2), array(2, 2) + 1])
    assert next(stream)[0] == "embed"


def test_a_rule_wins_over_an_ignored_pattern():
    shapes: dict[str, tuple[int, ...]] = {"embed": (1,)}
    assert run(shapes, {"embed.weight": array(1)}, ignored=("embed.*",)).keys() == {"embed"}
    with pytest.raises(WeightError, match="tensor noise"):
        run(shapes, {"embed.weight": array(1), "noise": array(1)}, ignored=("nois",))
    run(shapes, {"embed.weight": array(1), "noise": array(1)}, ignored=("noi*",))


@each_row(
    ("shapes", "tensors", "message"),
    [
        ({"embed": (2, 2)}, {}, r"parameter embed \[2, 2\]: the checkpoint lacks model.embed.weight"),
        ({"layers.3.o": (2,), "layers.4.o": (2,)}, {}, "layers.3.o .* and 1 more .* lacks layers.3.out.weight"),
        ({}, {"layers.0.out.weight": array(1)}, r"tensor layers.0.out.weight \[1\] belongs to no parameter"),
        ({"layers.0.o": (1,)}, {"layers.1.out.weight": array(1)}, "layers.1.out.weight .* belongs to no parameter"),
        ({"layers.0.o": (2, 3)}, {"layers.0.out.weight": array(3, 2)}, r"shape \[3, 2\], .*layers.0.o needs \[2, 3\]"),
        ({"layers.0.t": (2, 3)}, {"layers.0.turned": array(2, 3)}, r"shape \[2, 3\], .*layers.0.t needs \[3, 2\]"),
        (
            {"layers.0.q": (1, 2), "layers.0.k": (1, 2)},
            {"layers.0.qk.weight": array(3, 2)},
            r"shape \[3, 2\], .*layers.0.q \+ layers.0.k needs \[2, 2\]",
        ),
        ({"embed": (1,)}, {"embed.weight": array(1), "model.embed.weight": array(1)}, "embed is already filled"),
        ({"layers.0.experts": (2, 1)}, {"layers.0.experts.1.w": array(1)}, "lacks layers.0.experts.0.w"),
        ({"layers.0.experts": (2, 1)}, {}, "lacks layers.0.experts.0.w$"),
        ({"layers.1.mixers.2.p": (2, 1)}, {}, "lacks model.layers.1.parts.2.weight or layers.1.others.2.weight$"),
        ({"unnamed": (2, 1)}, {}, "lacks any tensor for it$"),
        ({"layers.0.experts": (1, 1)}, {"layers.0.experts.1.w": array(1)}, "part 1 but there are 1"),
        ({"layers.0.experts": (1, 1)}, {"layers.0.experts.0.w": array(2)}, r"shape \[2\], .* needs \[1\]"),
    ],
)
def test_unused_tensors_and_unfilled_parameters_are_named(
    shapes: dict[str, tuple[int, ...]], tensors: dict[str, np.ndarray], message: str
):
    with pytest.raises(WeightError, match=message):
        run(shapes, tensors)


def test_parts_of_a_stack_share_a_dtype():
    parts = {"layers.0.experts.0.w": array(1), "layers.0.experts.1.w": array(1).astype(np.float16)}
    with pytest.raises(WeightError, match="dtype float16, but parts before it have float32"):
        run({"layers.0.experts": (2, 1)}, parts)


@each_row(
    ("names", "error"),
    [
        (["embed.weight", "layers.0.out.weight", "experts.x"], None),
        (["model.embed.weight", "layers.0.out.weight"], None),
        (["embed.weight"], r"parameter layers\.0\.o \[1, 2\]: the checkpoint lacks .*layers\.0\.out\.weight"),
        (
            ["embed.weight", "layers.0.out.weight", "layers.1.out.weight"],
            r"tensor layers\.1\.out\.weight belongs to no",
        ),
    ],
)
def test_names_are_checked_like_tensors(names: list[str], error: str | None) -> None:
    params = {"embed": Param("embed", (3, 2), ".."), "layers.0.o": Param("layers.0.o", (1, 2), "..")}
    if error is None:
        check_names(RULES, params, names, ("experts.*",))
        return
    with pytest.raises(WeightError, match=f"^{error}"):
        check_names(RULES, params, names, ("experts.*",))


def test_parts_beyond_a_stack_are_dropped_where_the_rule_says_so() -> None:
    params = {"layers.0.experts": Param("layers.0.experts", (2, 3), "..")}
    parts = {f"layers.0.experts.{number}.w": array(3) + number for number in (0, 1, 2, 5)}
    rule = Stack("layers.{l}.experts.{e}.w", "layers.{l}.experts", surplus=True)
    (filled,) = dict(apply_rules([rule], params, parts.items())).values()
    assert filled[:, 0].tolist() == [0, 1]
    check_names([rule], params, parts)
    with pytest.raises(WeightError, match=r"lacks layers\.0\.experts\.0\.w"):
        check_names([rule], params, ["layers.0.experts.1.w", "layers.0.experts.2.w"])
    with pytest.raises(WeightError, match=r"part 2 but there are 2"):
        dict(apply_rules([Stack(rule.source, rule.target)], params, parts.items()))


def test_names_of_a_stack_need_every_part() -> None:
    rules = [Stack("layers.{l}.experts.{e}.w", "layers.{l}.experts")]
    params = {"layers.0.experts": Param("layers.0.experts", (2, 3), "..")}
    check_names(rules, params, ["layers.0.experts.1.w", "layers.0.experts.0.w"])
    with pytest.raises(WeightError, match=r"^parameter layers\.0\.experts .*lacks layers\.0\.experts\.0\.w"):
        check_names(rules, params, ["layers.0.experts.1.w"])
