"""Drafter models on jax_tpu: every program is compiled before serving, on one device and on several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flax")

import support.devices.jax_devices  # noqa: F401
from support.checkpoints.naive_drafters import random_drafter
from support.devices.jax_requests import requests
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.suite.slow_matrix import some

from pagoda.backends.jax_tpu.ahead_of_time.compile import compile_ahead, find_target, model_for
from pagoda.backends.jax_tpu.backend import JaxBackend, create
from pagoda.backends.jax_tpu.drafters.drafter import build_drafter
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.step_programs import Draft
from pagoda.backends.jax_tpu.memory.plan import weight_bytes
from pagoda.backends.reference import backend as reference
from pagoda.common.backend import BackendOptions
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.shapes import StepShapes
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.drafters import DrafterSpec, FeatureDrafter, JoinedInputs, LanguageDrafter, StagesDrafter
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Norms

SPEC = tiny_spec(window=6)
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=12, max_num_seqs=4, block_size=64)
"""Steps with two drafts for each sequence have as many tokens as the largest step, so that there are fewer programs."""

BLOCKS = 9


def feature_drafter(spec: ModelSpec = SPEC) -> FeatureDrafter:
    """EAGLE's drafter with the structure of the model's first layer."""
    model = replace(spec, layers=spec.layers[:1], final_norm=None)
    return FeatureDrafter(model, JoinedInputs(bias=True), source_width=spec.width)


STAGES = StagesDrafter(SPEC.vocab, SPEC.width, inner=24, stages=2)


def options(
    drafter: DrafterSpec | None, drafts: int, tensor: int = 1, data: int = 1, **others: object
) -> BackendOptions:
    limits = replace(LIMITS, max_drafts=drafts, device_drafts=drafter is not None)
    layout = kv_layout(SPEC, limits.block_size, drafter=() if drafter is None else drafter.caches)
    return make_options(SPEC, limits=limits, layout=layout, drafter=drafter, tensor=tensor, data=data, **others)


def engine(drafter: DrafterSpec, drafts: int, tensor: int, data: int) -> tuple[EngineCore, JaxBackend]:
    """An engine whose programs are all compiled: one that is missing is an error."""
    made = options(drafter, drafts, tensor, data, strict=True)
    backend = create(made)
    backend.load(random_weights(SPEC))
    backend.load_drafter(random_drafter(drafter, scale=0.1).items())
    blocks = (BLOCKS,) * len(made.layout.pools)
    backend.init_cache(blocks)
    backend.warmup()
    if data == 1:
        return generation_core(backend, made.layout, made.limits, blocks), backend
    return sharded_core(backend, made.layout, made.limits, blocks, data), backend


def answers(core: EngineCore, count: int) -> dict[str, tuple[list[int], str | None]]:
    """Run random requests of every kind, a few at a time."""
    got: dict[str, tuple[list[int], str | None]] = {}
    line = list(requests(count, seed=2))
    while line or core.has_work:
        for request in line[:3]:
            core.add_request(request)
        del line[:3]
        for output in core.step().outputs:
            tokens, _ = got.get(output.request_id, ([], None))
            got[output.request_id] = tokens + output.new_token_ids, output.finish_reason
    core.check_integrity()
    return got


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[list[int], str | None]]:
    """Of the reference backend, without a drafter."""
    made = options(None, 0)
    backend = reference.create(made)
    backend.load(random_weights(SPEC))
    blocks = (BLOCKS,) * len(made.layout.pools)
    backend.init_cache(blocks)
    return answers(generation_core(backend, made.layout, made.limits, blocks), 30)


@pytest.mark.parametrize(
    ("drafter", "tensor", "data"),
    [
        (feature_drafter(), 2, 2),
        pytest.param(feature_drafter(), 1, 1, marks=pytest.mark.slow_matrix),
        pytest.param(LanguageDrafter(SPEC), 2, 1, marks=pytest.mark.slow_matrix),
        pytest.param(STAGES, 2, 1, marks=pytest.mark.slow_matrix),
    ],
)
def test_answers_are_those_without_a_drafter_and_nothing_is_compiled(
    drafter: DrafterSpec, tensor: int, data: int, plain: dict[str, tuple[list[int], str | None]]
) -> None:
    core, backend = engine(drafter, 2, tensor, data)
    assert answers(core, 30) == plain
    assert backend.recompiles == 0
    drafts = core.stats.drafts
    assert drafts is not None
    assert drafts.tokens > 50


def test_a_drafter_counts_in_the_memory_plan() -> None:
    with_drafter, without = create(options(feature_drafter(), 2)), create(options(None, 0))
    assert with_drafter.drafter is not None
    own, both = weight_bytes(with_drafter.drafter), with_drafter.plan_memory()
    assert own > 4 * SPEC.width * SPEC.width
    assert both.weights == without.plan_memory().weights + own
    assert both.activations > without.plan_memory().activations


def test_drafters_without_programs_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--compiled-bundle: bundles have no programs for drafter models"):
        create(options(feature_drafter(), 2, bundle=tmp_path))
    with pytest.raises(ConfigError, match="--speculative-config: pagoda compile has no programs for drafter models"):
        compile_ahead(find_target("cpu"), options(feature_drafter(), 2))
    with pytest.raises(ConfigError, match="--batch-invariant: jax_tpu has other programs for drafts"):
        create(options(feature_drafter(), 2, batch_invariant=True))
    drafter = feature_drafter()
    embedding = replace(drafter.model.embedding, positions=64)
    with pytest.raises(ModelError, match="drafters over hidden states have no tables of positions or token types"):
        create(options(replace(drafter, model=replace(drafter.model, embedding=embedding)), 2))


@pytest.mark.parametrize("drafts", some([False, True], [True]))
def test_the_tpu_compiler_keeps_the_caches_of_a_drafter_in_place(drafts: bool) -> None:
    """After a step with drafts, and after one without."""
    pytest.importorskip("libtpu")
    attention = Attention(8, 2, 128, 0.1, Rope(1e4, 128))
    layer = Layer((attention,), Mlp(1024, "silu", True), Norms(Norm(1e-5), None, Norm(1e-5), None))
    spec = ModelSpec(1024, 1024, (layer, layer), Norm(1e-5), tied=False, max_positions=1024)
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 128}
    limits = Limits(**sizes, max_drafts=3, device_drafts=True)
    drafter = feature_drafter(spec)
    layout = kv_layout(spec, 128, drafter=drafter.caches)
    model = model_for(find_target("v6e:1x1"), spec, limits, layout, "bfloat16", tensor=1, drafter=drafter)
    shapes = StepShapes.of(limits, len(layout.groups))
    blocks = 600
    program_set = StepProgramSet(model, shapes, (blocks,) * len(layout.pools), 8, drafter=build_drafter(drafter, model))
    cache = sum(blocks * size for size in model.block_bytes)
    shape = shapes.shape_for(32, 8, False, drafts=True) if drafts else shapes.shape_for(8, 8, True)
    memory = program_set.lower(Draft(shape)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < cache / 4
