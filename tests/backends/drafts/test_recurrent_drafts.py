"""Drafts of models with recurrent state: same tokens as without, whatever the drafts, for every kind of mixer."""

from __future__ import annotations

import pytest
from support.engines.draft_runs import DELTA_RULES, KEPT, PATTERNS, STATE_SPACES, Run, assert_equal, mixed, run, stacked
from support.engines.reference_driver import tiny_spec
from support.engines.replaying import Replaying
from support.suite.rows import each_row

from pagoda.common.models.spec import ModelSpec

MIXERS = {"delta rules": DELTA_RULES, "state spaces": STATE_SPACES}


@pytest.fixture(scope="module", params=MIXERS)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return stacked(*MIXERS[request.param], tiny_spec().layers[0].attention)


@pytest.fixture(scope="module")
def plain(spec: ModelSpec) -> Run:
    """Without drafts."""
    return run("reference", spec=spec, **KEPT)


@each_row("ahead", [False, True])
@each_row("drafts", [1, 4])
def test_drafts_change_no_token(spec: ModelSpec, plain: Run, drafts: int, ahead: bool) -> None:
    proposer = Replaying(plain.tokens, mixed)
    ran = run("reference", proposer, spec=spec, max_drafts=drafts, async_scheduling=ahead, **KEPT)
    assert_equal(ran, plain)
    assert 0 < ran.accepted < ran.drafted
    assert ran.cached > 0
    assert (ran.shifted > 0) == ahead


@each_row("pattern", ["right", "wrong"])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(spec: ModelSpec, plain: Run, pattern: str) -> None:
    names = ["greedy", "seeded", "guided"]
    want = run("reference", names=names, spec=spec)
    ran = run("reference", Replaying(want.tokens, PATTERNS[pattern]), names, spec=spec, max_drafts=3)
    assert_equal(ran, want)
    if pattern == "wrong":
        assert ran.accepted == 0 < ran.drafted
        assert ran.steps <= want.steps + 1
    else:
        assert ran.steps < want.steps / 2


@each_row("ahead", [False, True])
def test_drafts_under_preemption(spec: ModelSpec, plain: Run, ahead: bool) -> None:
    settings = {"max_drafts": 3, "async_scheduling": ahead, **KEPT}
    ran = run("reference", Replaying(plain.tokens, mixed), spec=spec, num_blocks=17, **settings)
    assert ran.preemptions > 0
    assert_equal(ran, plain)
