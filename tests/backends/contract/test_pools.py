"""Layers whose K and V differ in shape: each shape has its own pool of blocks, on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.servers.embedded_requests import LIMITS, answers, asked, assert_same

from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.device import CPU
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.models.mixers import Attention
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import ModelSpec


def two_shapes() -> ModelSpec:
    """Full attention with 2 KV heads of 16, between windows with 1 of 8."""
    spec = tiny_spec()
    narrow = replace(spec.layers[0], mixers=(Attention(4, 1, 8, 0.3, Rope(1e4, 8), window=6),))
    return replace(spec, layers=(narrow, spec.layers[0], narrow, narrow))


def engine(backend: str, blocks: tuple[int, int], **make: Any) -> EngineCore:
    spec = two_shapes()
    layout = kv_layout(spec, LIMITS.block_size)
    assert [len(pool) for pool in layout.groups_by_pool] == [1, 1]
    loaded = load_backend(backend).create(make_options(spec, limits=LIMITS, layout=layout), **make)
    loaded.load(random_weights(spec))
    assert len(loaded.plan_memory().num_blocks) == 2
    loaded.init_cache(blocks)
    return generation_core(loaded, layout, LIMITS, blocks)


@pytest.mark.parametrize(("backend", "make"), [("reference", {}), ("torch_cuda", {"device": CPU}), ("jax_tpu", {})])
def test_answers_do_not_depend_on_the_size_of_a_pool(backend: str, make: dict[str, Any]) -> None:
    """The expected answers come from the reference backend with room for all requests."""
    line = list(asked(12))
    roomy = engine("reference", (65, 65))
    expected = answers(roomy, line)
    assert roomy.stats.preemptions == 0
    for blocks in ((13, 40),) if backend == "jax_tpu" else ((13, 40), (40, 13)):  # it compiles for each
        core = engine(backend, blocks, **make)
        assert_same(answers(core, line), expected)
        core.check_integrity()
