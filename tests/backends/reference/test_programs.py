"""Steps repeated as programs against the same steps computed call by call."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.engines.reference_driver import Driver, random_weights

from pagoda.backends.reference.threads import CoreLoad
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Norms
from pagoda.common.weights.quantization.on_the_fly import quantized, schemes_on_the_fly

pytest.importorskip("llvmlite")

from pagoda.backends.cpu_kernels.emission.jit import has_feature
from pagoda.backends.reference.model.quantized.compiled import lanes
from pagoda.backends.reference.programs import program

pytestmark = pytest.mark.skipif(not has_feature("avx512bf16") or not lanes(), reason="has no bfloat16 instructions")

NORM = Norm(1e-5)
ATTENTION = Attention(4, 2, 32, 0.2, Rope(1e4, 32), qkv_bias=True)
LAYER = Layer((ATTENTION,), Mlp(96, "silu", True), Norms(NORM, None, NORM, None))
WINDOWED = replace(LAYER, mixers=(replace(ATTENTION, window=6, qk_norm=NORM),))
SPEC = ModelSpec(vocab=96, width=64, layers=(LAYER, WINDOWED), final_norm=NORM, tied=True, max_positions=256)
EVERYTHING = SamplingRules(temperature=0.0, logprobs=96)
PROMPTS = [[5, 9, 2], [7] * 9, [1, 2, 3, 4, 5, 6, 7]]


def driver(spec: ModelSpec = SPEC, method: str | None = None) -> Driver:
    schemes = {} if method is None else schemes_on_the_fly(method, params(spec))
    weights = quantized(random_weights(spec), schemes)
    return Driver(spec, "scattered", dtype="bfloat16", weights=weights)


def sizes(made: Driver) -> list[list[int]]:
    """Return the numbers of sequences that each thread has a program for."""
    threads = made.backend._decoder.programs._threads.values()
    return [sorted(count for count, each in steps.programs.items() for _ in each) for steps in threads]


def logprobs(made: Driver, steps: int = 9) -> list[np.ndarray]:
    """Of all tokens after each step, with one to three sequences in it."""
    for row, prompt in enumerate(PROMPTS):
        made.step({row: prompt}, [made.start(row, prompt, EVERYTHING)])
    found = []
    for step, rows in zip(range(steps), itertools.cycle([(0,), (0, 1, 2), (1, 2), (2,), (0, 2)])):
        _, result = made.step({row: [(step * 7 + row) % 96] for row in rows})
        found += [result.logprobs[index].logprobs for index in range(len(rows))]
    return found


@pytest.mark.parametrize("method", [None, "int8", "int4"])
def test_programs_repeat_steps(method: str | None) -> None:
    plain, made = driver(method=method), driver(method=method)
    plain.backend._decoder.programs = None
    expected = logprobs(plain)
    assert len({row.tobytes() for row in expected}) == len(expected)
    np.testing.assert_array_equal(logprobs(made), expected)
    assert sizes(made) == [[1, 2, 3]]
    made.backend.init_cache((3 * 64,) * 2)
    made.backend.init_cache(tuple(1 + table.max() for table in made.tables))
    np.testing.assert_array_equal(logprobs(made), expected)


def test_shared_prefixes() -> None:
    found = []
    for repeated in (False, True):
        made = Driver(SPEC, rows=6, block_size=16, dtype="bfloat16", weights=random_weights(SPEC))
        if not repeated:
            made.backend._decoder.programs = None
        made.tables[:, [1, 3, 4, 5], :4] = made.tables[:, :1, :4]
        prefix = [(3 * at) % 96 for at in range(64)]
        for row in range(6):
            made.step({row: [*prefix, row, 7]}, [made.start(row, [*prefix, row, 7], EVERYTHING)])
        scores = []
        for step, rows in enumerate([range(5), range(6), range(1, 6), (0, 1, 3, 4, 5), range(6), (1, 2, 3), range(5)]):
            _, result = made.step({row: [(step * 7 + row) % 96] for row in rows})
            scores += [result.logprobs[index].logprobs for index in range(len(rows))]
        found.append(scores)
        if repeated:
            assert sizes(made) == [[3, 5, 5, 6]]
    np.testing.assert_array_equal(*found)


def test_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made, single = driver(), driver()
    made.backend._threads.count, single.backend._threads.count = 2, 1
    np.testing.assert_array_equal(logprobs(made, 60), logprobs(single, 60))


def test_threads_that_work_apart_have_programs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoreLoad, "update", lambda self: None)
    monkeypatch.setattr("pagoda.backends.reference.threads.TOKENS_PER_PART", 1)
    made, plain = driver(), driver()
    made.backend._threads.count, made.backend._threads.load.contended = 2, True
    plain.backend._decoder.programs = None
    np.testing.assert_array_equal(logprobs(made, 60), logprobs(plain, 60))
    assert len(sizes(made)) > 1
    assert [1] in sizes(made)


def test_what_torch_computes_is_not_repeated() -> None:
    normed = replace(LAYER, mixers=(replace(ATTENTION, qk_norm=NORM, qk_norm_over="full"),))
    made = driver(replace(SPEC, layers=(LAYER, normed)))
    plain = driver(replace(SPEC, layers=(LAYER, normed)))
    plain.backend._decoder.programs = None
    np.testing.assert_array_equal(logprobs(made), logprobs(plain))
    assert sizes(made) == [[]]


def test_larger_steps_are_computed_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MOST_SEQUENCES", 2)
    made = driver()
    logprobs(made)
    assert sizes(made) == [[1, 2]]
