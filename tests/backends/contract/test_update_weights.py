"""Parameters replaced in a loaded backend: the answers of a backend that was loaded with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import support.devices.jax_devices
from support.engines.backend_options import make_options
from support.engines.reference_driver import Driver, random_weights, tiny_spec
from support.suite.shared_programs import SharedPrograms
from support.suite.slow_matrix import some

from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.device import CPU
from pagoda.common.backend import Backend, Weight
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.errors import WeightError
from pagoda.common.models.mixers import LatentAttention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.quantization.schemes import Float8
from pagoda.common.weights.quantization.tensors import QuantizedTensor, Value, random_quantized

assert support.devices.jax_devices.DEVICES > 1
Scores = npt.NDArray[np.float32]
BACKENDS = ["reference", "torch_cuda", "jax_tpu"]
SPEC = tiny_spec(window=6)
MOE = tiny_spec(moe=True)
TIED = replace(SPEC, tied=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PROGRAMS = SharedPrograms()


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    yield
    PROGRAMS.clear()


def device_of(backend: str) -> dict[str, Any]:
    return {"device": CPU} if backend == "torch_cuda" else {}


def driver(backend: str, spec: ModelSpec = SPEC, **options: Any) -> Driver:
    made = Driver(spec, backend=backend, block_size=8, **device_of(backend), **options)
    PROGRAMS.join(made.backend)
    return made


def scores(d: Driver) -> Scores:
    """Return the logprobs of a prompt's tokens."""
    _, result = d.step({0: PROMPT}, [d.start(0, PROMPT, SamplingRules(prompt_logprobs=1))])
    return np.array(result.prompt_logprobs[0].logprobs[:, 0])


def scores_of(backend: str, weights: Iterable[Weight], spec: ModelSpec = SPEC, **options: Any) -> Scores:
    """Return those of a backend that is loaded with these weights."""
    loaded = driver(backend, spec, weights=weights, **options)
    logprobs = scores(loaded)
    loaded.backend.close()
    return logprobs


def same(actual: Scores, expected: Scores) -> bool:
    return bool(np.abs(actual - expected).max() < 1e-5)


@pytest.mark.parametrize("spec", [SPEC, MOE, TIED], ids=["dense", "experts", "tied"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_parameters_are_replaced(backend: str, spec: ModelSpec) -> None:
    d = driver(backend, spec)
    before = scores(d)
    after = scores_of(backend, random_weights(spec, 1), spec)
    assert not same(after, before)
    d.backend.update_weights(random_weights(spec, 1))
    assert same(scores(d), after)
    d.backend.update_weights(list(random_weights(spec)))
    assert same(scores(d), before)
    d.backend.close()


def layer(number: int) -> list[str]:
    return [name for name in params(SPEC) if name.startswith(f"layers.{number}.")]


PARTS = {
    "norm": ["layers.1.norms.before_ffn"],
    "k": ["layers.0.mixers.0.k", "layers.0.mixers.0.k_bias"],
    "up": ["layers.0.ffn.up"],
    "layer": layer(1),
    "embed": ["embed"],
    "head": ["head"],
    "final_norm": ["final_norm"],
}
WHOLE_LAYERS = {name: names for name, names in PARTS.items() if name not in ("norm", "k", "up")}


@pytest.mark.parametrize(
    ("backend", "part"),
    [*(("torch_cuda", part) for part in PARTS), *(("reference", part) for part in WHOLE_LAYERS), ("jax_tpu", "all")],
)
def test_some_parameters_are_replaced_and_the_others_stay(backend: str, part: str) -> None:
    parts = PARTS.values() if part == "all" else [PARTS[part]]
    d, old, new = driver(backend), dict(random_weights(SPEC)), dict(random_weights(SPEC, 1))
    for names in parts:
        before = scores(d)
        sent = {name: new[name].copy() for name in names}
        d.backend.update_weights(iter(sent.items()))
        for array in sent.values():
            array[...] = 0  # the backend has a copy
        old |= {name: new[name] for name in names}
        after = scores(d)
        assert same(after, scores_of(backend, old.items()))
        assert not same(after, before)
    d.backend.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_invalid_parameters_are_refused_by_name_and_nothing_changes(backend: str) -> None:
    d = driver(backend)
    before = scores(d)
    good = "embed", next(iter(random_weights(SPEC, 1)))[1]
    short = np.zeros(31, np.float32)
    wrong = [
        (("extra", short), "^parameter extra is unknown or came twice$"),
        (("final_norm", short), r"^parameter final_norm has shape \(31,\), the model needs \(32,\)$"),
        (good, "^parameter embed is unknown or came twice$"),
    ]
    for bad, error in wrong:
        with pytest.raises(WeightError, match=error):
            d.backend.update_weights([good, bad])
        assert same(scores(d), before)
        with pytest.raises(WeightError, match=error):
            d.backend.update_weights(iter([bad, good] if bad != good else [good, good]))
    d.backend.update_weights(random_weights(SPEC))
    assert same(scores(d), before), "an invalid update does no lasting harm"
    d.backend.close()


@pytest.mark.parametrize(
    ("backend", "quantization", "whole", "missing"),
    [
        ("reference", None, layer(0), "layers.0.mixers.0.q_bias, .*layers.0.ffn.down_bias too$"),
        ("torch_cuda", "int8", PARTS["k"] + ["layers.0.mixers.0.q", "layers.0.mixers.0.v"], "mixers.0.[qv], .*v too$"),
    ],
)
@pytest.mark.parametrize("collect", [list, iter])
def test_a_part_of_what_is_packed_together_is_refused(
    backend: str, quantization: str | None, whole: list[str], missing: str, collect: Any
) -> None:
    d, new = driver(backend, quantization=quantization), dict(random_weights(SPEC, 1))
    before = scores(d)
    sent = ["embed", "layers.0.mixers.0.k"] if collect is list else ["layers.0.mixers.0.k"]
    for _ in range(2):
        with pytest.raises(WeightError, match=rf"parameters of layers.0.* together; send .*{missing}"):
            d.backend.update_weights(collect([(name, new[name]) for name in sent]))
        assert same(scores(d), before)
        if backend == "torch_cuda":
            assert not d.backend._model.loader._unfinished, "memory of the first"
    weights = dict(random_weights(SPEC)) | {name: new[name] for name in whole}
    d.backend.update_weights(collect([(name, new[name]) for name in whole]))
    after = scores(d)
    assert same(after, scores_of(backend, weights.items(), quantization=quantization))
    assert not same(after, before)
    d.backend.close()


QUANTISED_OR_SHARDED: list[dict[str, Any]] = [{"quantization": "int8"}, {"quantization": "fp8"}, {"tensor": 2}]


@pytest.mark.parametrize("options", some(QUANTISED_OR_SHARDED, QUANTISED_OR_SHARDED[::2]), ids=str)
def test_a_quantised_or_sharded_model_in_jax(options: dict[str, Any]) -> None:
    new = dict(random_weights(SPEC, 1))
    part = {name: new[name] for name in ("layers.0.mixers.0.k", "layers.0.mixers.0.v", "layers.1.ffn.up")}
    d = driver("jax_tpu", **options)
    before = scores(d)
    d.backend.update_weights(part.items())
    weights = (dict(random_weights(SPEC)) | part).items()
    after = scores(d)
    assert same(after, scores_of("jax_tpu", weights, **options))
    assert not same(after, before)
    d.backend.close()


STORED = [
    name
    for name, param in params(SPEC).items()
    if name.startswith("layers.") and len(param.shape) == 2 and "norm" not in name
]
SCHEMES = dict.fromkeys(STORED, Float8("channel"))


def stored(seed: int) -> dict[str, Value]:
    """Weights of a checkpoint whose layers are float8."""
    dense = dict(random_weights(SPEC, seed))
    quantised = {
        name: random_quantized(Float8("channel"), dense[name].shape, seed + at, 0.25) for at, name in enumerate(STORED)
    }
    return dense | quantised


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_a_quantised_checkpoint_are_replaced(backend: str) -> None:
    d = driver(backend, weights=stored(0).items(), schemes=SCHEMES)
    before = scores(d)
    names = layer(0) if backend == "reference" else ["layers.0.mixers.0.k", "layers.0.ffn.down"]
    part = {name: stored(1)[name] for name in names}
    assert isinstance(part["layers.0.mixers.0.k"], QuantizedTensor)
    d.backend.update_weights(iter(part.items()))
    expected = scores_of(backend, (stored(0) | part).items(), schemes=SCHEMES)
    after = scores(d)
    assert same(after, expected)
    assert not same(after, before)
    d.backend.close()


def test_a_dense_matrix_does_not_replace_a_quantised_one_in_torch_cuda() -> None:
    d = driver("torch_cuda", weights=stored(0).items(), schemes=SCHEMES)
    name = "layers.0.mixers.0.k"
    with pytest.raises(WeightError, match=f"parameter {name} is not fp8, as its config.json states"):
        d.backend.update_weights([(name, dict(random_weights(SPEC))[name])])
    d.backend.close()


def test_latent_attention_is_replaced_in_reference() -> None:
    latent = LatentAttention(4, None, 16, 8, 8, 0.3, Rope(1e4, 4), Norm(1e-6))
    spec = replace(SPEC, layers=(replace(SPEC.layers[0], mixers=(latent,)), SPEC.layers[0]))
    d, new = driver("reference", spec), dict(random_weights(spec, 1))
    part = {name: new[name] for name in new if name.startswith("layers.0.")}
    d.backend.update_weights(part.items())
    weights: Mapping[str, Any] = dict(random_weights(spec)) | part
    assert same(scores(d), scores_of("reference", weights.items(), spec))
    d.backend.close()


LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=8)


def engine(backend: str, weights: Iterable[Weight]) -> tuple[Backend, EngineCore]:
    layout = kv_layout(SPEC, LIMITS.block_size)
    loaded = load_backend(backend).create(make_options(SPEC, limits=LIMITS, layout=layout), **device_of(backend))
    loaded.load(weights)
    blocks = (60,) * len(layout.pools)
    loaded.init_cache(blocks)
    PROGRAMS.join(loaded)  # which are compiled as steps need them
    return loaded, generation_core(loaded, layout, LIMITS, blocks)


def ask(core: EngineCore, request_id: str) -> tuple[list[int], int]:
    """Return the tokens of an answer, and the cached tokens of its prompt."""
    core.add_request(
        EngineRequest(request_id=request_id, prompt_token_ids=PROMPT * 3, rules=SamplingRules(), max_tokens=9)
    )
    tokens: list[int] = []
    cached = 0
    while core.has_work:
        for output in core.step().outputs:
            tokens += output.new_token_ids
            cached = max(cached, output.num_cached_tokens or 0)
    return tokens, cached


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_answers_with_new_weights_and_without_cached_prefixes(backend: str) -> None:
    loaded, core = engine(backend, random_weights(SPEC))
    fresh, other = engine(backend, random_weights(SPEC, 1))
    before, expected = ask(core, "a")[0], ask(other, "a")[0]
    assert before != expected
    assert ask(core, "b") == (before, 16), "from the prefix cache"
    core.update_weights(lambda: loaded.update_weights(random_weights(SPEC, 1)))
    assert ask(core, "c") == (expected, 0)
    assert ask(core, "d") == (expected, 16)
    with pytest.raises(WeightError):
        core.update_weights(lambda: loaded.update_weights([("extra", np.zeros(1))]))
    assert ask(core, "e") == (expected, 0), "weights may have changed before the error"
    for each in (loaded, fresh):
        each.close()
