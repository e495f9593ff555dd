"""Which part of each axis a rank holds, and what cannot be shared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.engines.reference_driver import tiny_spec

from pagoda.backends.torch_cuda.parallel.ranks import check
from pagoda.backends.torch_cuda.parallel.tensor_parallel import RankShard
from pagoda.backends.torch_cuda.weights.load import make_layout
from pagoda.common.errors import ConfigError
from pagoda.common.models.drafters import AttendedInputs, FeatureDrafter, HeadsDrafter, LanguageDrafter
from pagoda.common.models.primitives import Norm
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Mlp, ModelSpec, Moe, Router, SecondHalf, SideMoe

SPEC = tiny_spec()  # 4 query heads, 2 KV heads, ffn 48, vocabulary 96


def with_heads(heads: int, kv_heads: int) -> ModelSpec:
    layer = SPEC.layers[0]
    mixer = replace(layer.attention, heads=heads, kv_heads=kv_heads)
    return replace(SPEC, layers=(replace(layer, mixers=(mixer,)),))


def with_narrow_values() -> ModelSpec:
    layer = SPEC.layers[0]
    mixer = replace(layer.attention, value_dim=5)
    return replace(SPEC, layers=(replace(layer, mixers=(mixer,)),))


def with_shared(width: int) -> ModelSpec:
    """Mixtures with a score correction and a gated Mlp of this width beside the experts."""
    layer = tiny_spec(moe=True).layers[0]
    assert isinstance(layer.ffn, Moe)
    shared = Mlp(width, "silu", gated=True, bias=True)
    moe = replace(layer.ffn, router=Router(2, True, correction=True), shared=shared, shared_gate=True)
    return replace(SPEC, layers=(replace(layer, ffn=moe),))


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_element_lies_on_a_rank_and_every_row_is_filled_once(size: int, moe: bool) -> None:
    spec = with_shared(40) if moe else with_narrow_values()
    layouts = [make_layout(spec, RankShard(rank, size)) for rank in range(size)]
    for name, param in params(spec).items():
        seen = np.zeros(param.shape, np.int32)
        for layout in layouts:
            if (place := layout.placements[name]) is not None:
                seen[place.cut] += 1
        copies = max(size // 2, 1) if "K" in param.axes else size if not set("NFV") & set(param.axes) else 1
        once = name.endswith(("o_bias", "down_bias"))
        assert (seen == (1 if once else copies)).all(), name
    for layout in layouts:
        filled = {name: np.zeros(shape, np.int32) for name, shape in layout.shapes.items()}
        for place in layout.placements.values():
            if place is not None:
                filled[place.tensor][place.into] += 1
        for name, count in filled.items():
            assert (count[: layout.filled.get(name)] == 1).all(), name
            assert not count[layout.filled.get(name, len(count)) :].any(), name


def test_shapes_of_fused_parameters_on_the_second_rank() -> None:
    shapes = make_layout(SPEC, RankShard(1, 2)).shapes
    assert shapes["layers.0.mixers.0.qkv"] == ((2 + 1 + 1) * 16, 32)
    assert shapes["layers.0.mixers.0.qkv_bias"] == ((2 + 1 + 1) * 16,)
    assert shapes["layers.0.mixers.0.out"] == (32, 2 * 16)
    assert shapes["layers.0.ffn.inner"] == (2 * 24, 32)
    assert "layers.0.ffn.down_bias" not in shapes, "the first rank adds it"
    assert shapes["head"] == (64, 32), "48 rows of vocabulary and padding"


def with_side(width: int) -> ModelSpec:
    """Mixtures of this width beside the ffn."""
    side = SideMoe(Moe(4, Mlp(width, "silu", gated=True), Router(2, True)), Norm(1e-5))
    return replace(SPEC, layers=tuple(replace(layer, side_moe=side) for layer in SPEC.layers))


def with_second_half(width: int) -> ModelSpec:
    """Second halves with an ffn of this width."""
    second = SecondHalf(Mlp(width, "silu", gated=True), Moe(4, Mlp(8, "silu", gated=True), Router(2, True)), Norm(1e-5))
    layers = (replace(layer, mixers=layer.mixers * 2, second=second) for layer in SPEC.layers)
    return replace(SPEC, layers=tuple(layers))


@pytest.mark.parametrize(
    ("size", "spec", "message"),
    [
        (3, SPEC, "3 ranks cannot share 4 query heads evenly; use 1, 2 or 4"),
        (4, with_heads(12, 6), "4 ranks cannot share 6 KV heads evenly; use 1, 2, 3, 6 or 12"),
        (10, with_heads(10, 2), "10 ranks cannot share the ffn width of 48 evenly; use 1 or 2"),
        (4, with_shared(6), "4 ranks cannot share the ffn width of 6 evenly; use 1 or 2"),
        (4, with_side(6), "4 ranks cannot share the ffn width of 6 evenly; use 1 or 2"),
        (4, with_second_half(6), "4 ranks cannot share the ffn width of 6 evenly; use 1 or 2"),
        (7, with_heads(5, 5), "7 ranks cannot share 5 query heads evenly; use 1"),
    ],
)
def test_a_size_that_does_not_divide(size: int, spec: ModelSpec, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(spec, size)
    assert str(caught.value) == f"--tensor-parallel-size: {message}"


def test_a_size_that_does_not_divide_a_drafter() -> None:
    """It divides the model; of the drafter the attention in front of the layers counts, and the layers' own blocks."""
    one_head = replace(SPEC.layers[0].attention, heads=1, kv_heads=1, beside_embedding=True)
    layer = replace(SPEC.layers[0], mixers=())
    inputs = AttendedInputs(one_head, Norm(1e-5), Norm(1e-5))
    attends = FeatureDrafter(replace(SPEC, layers=(layer,)), inputs, source_width=SPEC.width)
    with pytest.raises(
        ConfigError, match=r"^--tensor-parallel-size: 2 ranks .* 1 query heads of the drafter .*; use 1$"
    ):
        check(SPEC, 2, attends)
    narrow = replace(SPEC.layers[0], ffn=Mlp(7, "silu", gated=True))
    with pytest.raises(ConfigError, match=r"2 ranks cannot share the ffn width of 7 of the drafter evenly; use 1$"):
        check(SPEC, 2, LanguageDrafter(replace(SPEC, layers=(narrow,))))
    check(SPEC, 2, LanguageDrafter(SPEC))
    check(SPEC, 2, HeadsDrafter(SPEC.vocab, SPEC.width, heads=3, blocks=1))
