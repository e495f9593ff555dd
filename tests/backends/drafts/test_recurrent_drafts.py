"""Drafts of models with recurrent state: same tokens as without, whatever the drafts, for every kind of mixer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import snapshots_every
from support.engines.draft_runs import PATTERNS, Run, assert_equal, mixed, run
from support.engines.reference_driver import tiny_spec
from support.engines.replaying import Replaying
from support.suite.rows import each_row

from pagoda.common.models.mixers import (
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    Recurrent,
    ShortConvolution,
)
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import ModelSpec

NORM = Norm(1e-6)
MIXERS: dict[str, tuple[Recurrent, ...]] = {
    "delta rules": (
        GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8, taps=4, norm=NORM),
        KimiDelta(heads=2, head_dim=8, rank=5, taps=4, norm=NORM),
        LightningAttention(8, (0.5, 0.1, 0.01, 0.2), NORM, groups=2, qk_norm=NORM, rope=Rope(1e4, 4)),
    ),
    "state spaces": (
        Mamba2(heads=4, head_dim=8, groups=2, state_dim=8, taps=4, norm=NORM),
        Mamba(channels=16, state_dim=8, step_rank=4, taps=4, part_norm=NORM),
        ShortConvolution(channels=16, taps=3),
    ),
}
KEPT = {"snapshots": snapshots_every(8)}


def model(mixers: tuple[Recurrent, ...]) -> ModelSpec:
    """A layer of attention, and one of each kind."""
    spec = tiny_spec()

    def layer(mixer: Mixer):
        return replace(spec.layers[0], mixers=(mixer,))

    return replace(spec, layers=(*map(layer, mixers), spec.layers[0]))


@pytest.fixture(scope="module", params=MIXERS)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return model(MIXERS[request.param])


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
