"""Each weight-name rule, and strictness on both sides."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.common.errors import WeightError
from pagoda.common.models.family import Rename, Rule, Split, Stack, fused_linear, linear
from pagoda.common.models.primitives import Param
from pagoda.common.weights.quantization import Int8, QuantizedTensor
from pagoda.common.weights.rules import apply_rules

RULES: tuple[Rule, ...] = (
    Rename("[model.]embed.weight", "embed"),
    *linear("layers.{l}.out", "layers.{l}.o"),
    *fused_linear("layers.{l}.qk", "layers.{l}.q", "layers.{l}.k"),
    Rename("layers.{l}.turned", "layers.{l}.t", transpose=True),
    Split("layers.{l}.both", ("layers.{l}.x", "layers.{l}.y"), transpose=True),
    Split("layers.{l}.pairs", ("layers.{l}.x", "layers.{l}.y"), interleaved=True),
    Stack("layers.{l}.experts.{e}.w", "layers.{l}.experts"),
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


def test_split_takes_sizes_from_the_shapes():
    fused = array(5, 2)
    filled = run({"layers.0.q": (3, 2), "layers.0.k": (2, 2)}, {"layers.0.qk.weight": fused})
    np.testing.assert_array_equal(filled["layers.0.q"], fused[:3])
    np.testing.assert_array_equal(filled["layers.0.k"], fused[3:])


def test_interleaved_split_takes_the_groups_of_heads_from_the_parameters():
    """Two groups, each of one row of x and two of y."""
    params = {"layers.0.x": Param("layers.0.x", (2, 3), "ND", 2), "layers.0.y": Param("layers.0.y", (4, 3), "ND", 2)}
    pairs = array(6, 3)
    filled = dict(apply_rules(RULES, params, [("layers.0.pairs", pairs)]))
    np.testing.assert_array_equal(filled["layers.0.x"], pairs[[0, 3]])
    np.testing.assert_array_equal(filled["layers.0.y"], pairs[[1, 2, 4, 5]])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("columns", [1, 3])
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


@pytest.mark.parametrize(
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
