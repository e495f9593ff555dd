"""Latents and recurrent state in the step loop of the JAX backend, in pooling models, and what is refused of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

pytest.importorskip("flax")

import support.devices.jax_devices  # noqa: F401
import torch
from support.devices.jax_model import JaxModel
from support.devices.pooling_plans import plan_of
from support.engines.backend_options import make_options, make_pooling_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.reference_engine import engine, generate
from support.suite.slow_matrix import some

from pagoda.backends import jax_tpu
from pagoda.backends.jax_tpu import pooling as jax_pooling
from pagoda.backends.jax_tpu.backend import create
from pagoda.backends.jax_tpu.model.mixers.registry import MIXERS
from pagoda.backends.jax_tpu.weights.formats import matrix_formats
from pagoda.backends.reference import pooling as reference
from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig, StateSnapshots
from pagoda.common.engine.messages import pooling_request
from pagoda.common.engine.pooling.values import PoolingRules
from pagoda.common.engine.steps.contract import StepPlan
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import (
    BlockIndexer,
    GatedDelta,
    Indexer,
    LatentAttention,
    Mamba,
    Mamba2,
    Mixer,
    ShortConvolution,
)
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Mlp, ModelSpec, Moe, Pooler, Router, SecondHalf
from pagoda.common.weights.quantization.schemes import Float8, Int4, Mxfp4, Scheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor, random_quantized
from pagoda.kernels_pallas.chips import CHIPS

RMS = Norm(1e-6)
DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4, norm=RMS)
MAMBA2 = Mamba2(heads=4, head_dim=6, groups=2, state_dim=8, taps=4, norm=RMS)
MAMBA = Mamba(channels=24, state_dim=8, step_rank=3, taps=4, part_norm=RMS)
SHORT = ShortConvolution(channels=24, taps=3)
LATENT = LatentAttention(4, None, 20, 12, 6, 0.3, Rope(1e4, 8), RMS)
INDEXER = Indexer(heads=16, head_dim=12, top_k=9, rope=Rope(1e4, 8), norm=Norm(1e-6, kind="layer", bias=True))
INDEXED = replace(LATENT, query_rank=12, indexer=INDEXER)
SHARING = replace(LATENT, query_rank=12, shared_top_k=9)
FULL = tiny_spec().layers[0].attention
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=8)
BLOCKS = replace(FULL, blocks=BlockIndexer(12, 4, 2, 1, Rope(1e4, 8), RMS))
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
PROMPTS = [PROMPT + [(7 * i + j * j) % 96 for j in range(3 + 4 * i)] for i in range(5)]


def model(*mixers: Mixer) -> ModelSpec:
    spec = tiny_spec()
    return replace(spec, layers=tuple(replace(spec.layers[0], mixers=(mixer,)) for mixer in mixers))


def halves(spec: ModelSpec) -> ModelSpec:
    """Return the model with a second half in its last layer, whose mixture has experts that return their input."""
    *first, last = spec.layers
    moe = Moe(3, Mlp(24, "silu", gated=True), Router(4, renormalise=False, correction=True), identity=3)
    second = SecondHalf(Mlp(24, "silu", gated=True), moe, RMS)
    return replace(spec, layers=(*first, replace(last, mixers=last.mixers * 2, second=second)))


def naive(spec: ModelSpec, prompts: list[list[int]], count: int) -> list[list[int]]:
    oracle = NaiveModel(spec, random_weights(spec), max_len=LIMITS.max_model_len)
    return [oracle.greedy(prompt, count) for prompt in prompts]


@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        (model(DELTA, FULL, MAMBA2, MAMBA), (20, 9, 20, 20)),
        (halves(model(LATENT, LATENT)), (8,)),
        (model(INDEXED, SHARING, SHARING, INDEXED, SHARING), (8, 8)),
    ],
    ids=["states", "two halves", "shared selections"],
)
def test_chunks_preemption_and_prefix_hits_give_the_naive_tokens(spec: ModelSpec, blocks: tuple[int, ...]) -> None:
    snapshots = StateSnapshots(interval=0, min_distance=8)
    core = engine(spec, blocks, limits=replace(LIMITS, snapshots=snapshots), name="jax_tpu")
    expected = naive(spec, PROMPTS, 9)
    assert generate(core, PROMPTS, 9) == expected
    assert core.stats.preemptions > 0
    before = core.stats.prefix_hits
    assert generate(core, PROMPTS[-1:], 9) == expected[-1:]
    assert core.stats.prefix_hits > before


def test_copies_of_states_read_all_sources_before_they_write() -> None:
    """In both arrays of the states, in few and in many copies."""
    spec = model(DELTA, FULL, DELTA)
    backend = create(make_options(spec, limits=LIMITS))
    arrays = [n for n, pool in enumerate(backend.model.cache_index.pools) if pool == 0]
    assert len(arrays) == 2

    for extra in ([], [[9 + i, 9 + i] for i in range(9)]):
        backend.init_cache((24, 8))
        backend._caches = tuple(
            cache + np.arange(24, dtype=np.float32).reshape(-1, *[1] * (cache.ndim - 2)) if number in arrays else cache
            for number, cache in enumerate(backend._caches)
        )
        pairs = np.array([[1, 2], [2, 1], [1, 3], *extra], np.int32)
        backend._copy_states({0: plan_with((pairs, np.zeros((0, 2), np.int32)))}, backend._serving.programs)
        for number in arrays:
            blocks = np.asarray(backend._caches[number]).reshape(2, 24, -1)
            assert blocks[:, :5].min(-1).tolist() == blocks[:, :5].max(-1).tolist() == [[0, 2, 1, 1, 4]] * 2


def plan_with(copies: tuple[np.ndarray, ...]) -> StepPlan:
    empty = np.zeros(0, np.int32)
    return StepPlan(0, (), empty, np.zeros(1, np.int32), empty, empty, (), np.zeros(0, np.bool_), copies)


def test_pooling_models() -> None:
    spec = replace(model(LATENT, BLOCKS, DELTA, MAMBA2, SHORT), pooler=Pooler("last"))
    limits = Limits(max_model_len=64, max_num_batched_tokens=128, max_num_seqs=4, block_size=8)
    prompts = [PROMPT, PROMPT[:3], PROMPTS[2]]
    plan = plan_of(
        pooling_request(str(n), prompt, PoolingRules(task="embed", use_activation=False))
        for n, prompt in enumerate(prompts)
    )
    outputs = []
    for module in (reference, jax_pooling):
        backend = module.create(make_pooling_options(spec, limits=limits))
        backend.load(random_weights(spec))
        outputs.append(np.stack(backend.execute(plan).result().vectors))
    np.testing.assert_allclose(outputs[1], outputs[0], atol=3e-5)


@pytest.mark.parametrize(("mixer", "words"), [(LATENT, "latents"), (BLOCKS, "an indexer")])
def test_caches_of_8_bits_are_refused(mixer: Mixer, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype.*{words}"):
        create(make_options(model(mixer), limits=LIMITS, cache=CacheConfig(cache_dtype="fp8")))


MIXTURE = Moe(4, Mlp(40, "silu", True), Router(2, True), shared=Mlp(24, "silu", True))
STORED: dict[str, tuple[Scheme, int]] = {  # and tensor parallel size
    "fp8": (Float8("channel"), 2),
    "fp8-blocks": (Float8((16, 8)), 1),
    "int4": (Int4((1, 8), offsets=True), 2),
    "mxfp4": (Mxfp4(), 1),
}


@pytest.mark.parametrize("name", some(list(STORED), ["int4"]))
def test_stored_numbers_give_the_logits_of_their_values(name: str) -> None:
    """Every mixer's matrices, and experts, in one scheme; what cannot be kept is dequantised."""
    scheme, tensor = STORED[name]
    first = tiny_spec().layers[0]
    layers = [replace(first, mixers=(mixer,)) for mixer in (FULL, DELTA, LATENT, MAMBA2)]
    layers[0] = replace(layers[0], ffn=MIXTURE)
    spec = replace(tiny_spec(), layers=tuple(layers))
    kept = {param.name: param for param in params(spec).values() if param.name.rpartition(".")[2] in QUANTISED}
    schemes = {each: scheme for each in kept if ".indexer" not in each}
    weights = {
        each: _with_zero_points(random_quantized(scheme, kept[each].shape, len(each), 0.25)) if each in kept else array
        for each, array in random_weights(spec)
    }
    formats = matrix_formats(None, spec, CHIPS["v6e"], schemes, tensor)
    jax_model = JaxModel(spec, weights.items(), 64, tensor, formats=formats)
    arrays = {path[-1] for path in jax_model.model.paths}
    assert {"numbers", "scales"} <= arrays
    assert ("shifts" in arrays) == name.startswith("int")
    stored = {path[-2] for path in jax_model.model.paths if path[-1] == "numbers"}
    whole = {"qkv", "inner"} if name == "mxfp4" else {"qkv", "inner", "down"}  # 40 inputs are not groups of 32
    assert whole <= stored
    values = {each: x.dequantize() if isinstance(x, QuantizedTensor) else x for each, x in weights.items()}
    expected = NaiveModel(spec, values.items(), max_len=64).logits(PROMPT)
    torch.testing.assert_close(jax_model.logits(PROMPT), expected, atol=2e-4, rtol=2e-4)


QUANTISED = ("q", "k", "v", "o", "gate", "up", "down", "q_b", "kv_a", "kv_b", "b", "c")


def _with_zero_points(tensor: QuantizedTensor) -> QuantizedTensor:
    if not isinstance(tensor.scheme, Int4):
        return tensor
    zeros = np.random.default_rng(1).integers(-4, 5, tensor.scales.shape).astype(np.float32)
    return replace(tensor, offsets=zeros * tensor.scales)


def test_8_bit_matrices_of_other_mixers() -> None:
    """--quantization rounds them, too."""
    spec = model(LATENT, DELTA)
    formats = matrix_formats("tpu_int8", spec, CHIPS["v6e"])
    for place in range(2):
        assert any(path[:2] == ("segments", place) for path in formats), "each layer has some"
    exact = NaiveModel(spec, random_weights(spec), max_len=64).logits(PROMPT)
    rounded = JaxModel(spec, random_weights(spec), 64, formats=formats).logits(PROMPT)
    assert 1e-4 < (exact - rounded).norm() / exact.norm() < 0.05


def test_every_kind_has_a_room() -> None:
    assert set(MIXERS) == set(get_args(Mixer))


def test_kinds_are_named_in_their_rooms_alone() -> None:
    names = re.compile(rf"\b({'|'.join(kind.__name__ for kind in MIXERS)})\b")
    folder = Path(jax_tpu.__path__[0])
    rooms = folder / "model" / "mixers"
    others = (path for path in folder.rglob("*.py") if rooms not in path.parents)
    assert not [str(path.relative_to(folder)) for path in others if names.search(path.read_text(encoding="utf-8"))]
