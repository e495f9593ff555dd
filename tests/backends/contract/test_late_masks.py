"""Token masks that are bound while their step runs, on every backend: same tokens as masks that were known before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import support.devices.jax_devices
from support.engines.backend_options import make_options
from support.engines.engine_runs import drained_tokens
from support.engines.reference_driver import Driver, random_weights, tiny_spec
from support.engines.scripted_masks import add_masked, allowed
from support.suite.shared_programs import SharedPrograms

from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.device import CPU
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.logit_edits import allowed_bits
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import StepPlan, TokenMasks

SPEC = tiny_spec(window=6)
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=8)
BACKENDS = ["reference", "torch_cuda", "jax_tpu"]
assert support.devices.jax_devices.DEVICES > 1


def device_of(backend: str) -> dict:
    return {"device": CPU} if backend == "torch_cuda" else {}


@pytest.fixture(scope="module")
def programs() -> Iterator[SharedPrograms]:
    shared = SharedPrograms()
    yield shared
    shared.clear()


def answers(programs: SharedPrograms, backend_name: str, masked: bool, **settings) -> dict[str, list[int]]:
    """Generate greedily and at random, under masks and without."""
    limits = replace(LIMITS, **settings)
    layout = kv_layout(SPEC, limits.block_size)
    options = make_options(SPEC, limits=limits, layout=layout)
    backend = load_backend(backend_name).create(options, **device_of(backend_name))
    backend.load(random_weights(SPEC))
    backend.init_cache((60,))
    programs.join(backend)
    core = generation_core(backend, layout, limits, (60,))
    plans: list[StepPlan] = []
    execute = core._execute
    core._execute = lambda plan: plans.append(plan) or execute(plan)
    for number in range(6):
        rules = SamplingRules(temperature=float(number % 2), seed=number, logprobs=1 if number == 1 else None)
        request = EngineRequest(
            request_id=str(number), prompt_token_ids=[number + 1] * (1 + 3 * number), rules=rules, max_tokens=9
        )
        if masked and number != 3:
            add_masked(core, request, SPEC.vocab)
        else:
            core.add_request(request)
    tokens = drained_tokens(core)
    backend.close()
    ahead = [plan.masked is not None and (plan.token_ids == -1).any() for plan in plans]
    assert any(ahead) == (masked and limits.async_scheduling)
    return tokens


@pytest.fixture(scope="module")
def expected(programs: SharedPrograms) -> dict[str, list[int]]:
    """What `reference` answers under masks."""
    return answers(programs, "reference", masked=True, async_scheduling=True)


@pytest.fixture(scope="module")
def free(programs: SharedPrograms) -> dict[str, list[int]]:
    """What it answers without masks."""
    return answers(programs, "reference", masked=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_planning_ahead_changes_no_token(
    backend: str, programs: SharedPrograms, expected: dict[str, list[int]], free: dict[str, list[int]]
) -> None:
    tokens = answers(programs, backend, masked=True, async_scheduling=True)
    assert tokens == answers(programs, backend, masked=True, async_scheduling=False)
    assert tokens == expected
    assert tokens["3"] == free["3"], "the row without a mask"
    assert sum(tokens[name] != free[name] for name in tokens) >= 4
    for name, answer in tokens.items():
        for place, token in enumerate(answer):
            assert name == "3" or token in allowed(answer[:place], SPEC.vocab)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_without_masks_is_an_error(backend: str) -> None:
    driver = Driver(SPEC, block_size=8, backend=backend, **device_of(backend))
    plans: list[StepPlan] = []
    execute, driver.backend.execute = driver.backend.execute, None
    result_of = type("Known", (), {"result": lambda self: None})

    def record(plan: StepPlan) -> object:
        plans.append(plan)
        return result_of()

    driver.backend.execute = record
    driver.step({0: [4, 5], 1: [6, 7]}, [driver.start(0, [4, 5]), driver.start(1, [6, 7])])
    pending = execute(replace(plans[0], masked=np.array([1], np.int32)))
    with pytest.raises(RuntimeError, match=r"^step 0 samples under a grammar: call bind_masks before result$"):
        pending.result()
    pending.bind_masks(
        TokenMasks(np.array([1], np.int32), np.zeros(1, np.int32), allowed_bits({0: [33]}, 1, SPEC.vocab))
    )
    assert pending.result().token_ids[1] == 33
    driver.backend.close()


def test_masks_of_several_shards_in_one_program() -> None:
    layout = kv_layout(SPEC, LIMITS.block_size)
    options = make_options(SPEC, limits=LIMITS, layout=layout, data=2)
    backend = load_backend("jax_tpu").create(options)
    backend.load(random_weights(SPEC))
    backend.init_cache((60,))
    core = sharded_core(backend, layout, LIMITS, (60,), 2)
    for number in range(4):
        request = EngineRequest(
            request_id=str(number), prompt_token_ids=[number + 1] * 3, rules=SamplingRules(), max_tokens=6
        )
        if number == 2:
            core.add_request(request)
        else:
            add_masked(core, request, SPEC.vocab)
    tokens = drained_tokens(core)
    backend.close()
    for name, answer in tokens.items():
        fits = [token in allowed(answer[:place], SPEC.vocab) for place, token in enumerate(answer)]
        assert all(fits) == (name != "2")
