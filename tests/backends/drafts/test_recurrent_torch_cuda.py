"""Drafts of models with recurrent state on torch_cuda: same tokens as without, in captured steps and in others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import snapshots_every
from support.engines.draft_runs import PATTERNS, Run, assert_equal, mixed, run
from support.engines.reference_driver import tiny_spec
from support.engines.replaying import Replaying
from support.suite.rows import each_row

from pagoda.backends.torch_cuda.kernels.attention.decode_attention import MAX_QUERY_LEN
from pagoda.common.models.mixers import (
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    ShortConvolution,
)
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import ModelSpec

NORM = Norm(1e-6)
MIXERS: tuple[Mixer, ...] = (
    GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8, taps=4, norm=NORM),
    Mamba2(heads=4, head_dim=8, groups=2, state_dim=8, taps=4, norm=NORM),
    tiny_spec().layers[0].mixers[0],
    KimiDelta(heads=2, head_dim=8, rank=5, taps=4, norm=NORM),
    Mamba(channels=16, state_dim=8, step_rank=4, taps=4, part_norm=NORM),
    LightningAttention(8, (0.5, 0.1, 0.01, 0.2), NORM, groups=2, qk_norm=NORM, rope=Rope(1e4, 4)),
    ShortConvolution(channels=16, taps=3),
)
KEPT = {"snapshots": snapshots_every(8)}


def every_kind() -> ModelSpec:
    spec = tiny_spec()
    return replace(spec, layers=tuple(replace(spec.layers[0], mixers=(mixer,)) for mixer in MIXERS))


SPEC = every_kind()


@pytest.fixture(scope="module")
def plain() -> Run:
    """Without drafts."""
    return run("torch_cuda", spec=SPEC, **KEPT)


@each_row(("drafts", "ahead"), [(1, True), (4, False), (MAX_QUERY_LEN, True)])
def test_drafts_change_no_token(plain: Run, drafts: int, ahead: bool) -> None:
    """The most drafts are more than a captured step has."""
    proposer = Replaying(plain.tokens, mixed)
    ran = run("torch_cuda", proposer, spec=SPEC, max_drafts=drafts, async_scheduling=ahead, **KEPT)
    assert_equal(ran, plain)
    assert 0 < ran.accepted < ran.drafted
    assert ran.cached > 0
    assert (ran.shifted > 0) == ahead


def test_right_drafts_save_steps(plain: Run) -> None:
    proposer = Replaying(plain.tokens, PATTERNS["right"])
    ran = run("torch_cuda", proposer, spec=SPEC, max_drafts=3, async_scheduling=True, **KEPT)
    assert_equal(ran, plain)
    assert ran.steps < plain.steps * 0.6


def test_drafts_under_preemption(plain: Run) -> None:
    settings = {"max_drafts": 3, "async_scheduling": True, **KEPT}
    ran = run("torch_cuda", Replaying(plain.tokens, mixed), spec=SPEC, num_blocks=17, **settings)
    assert ran.preemptions > 0
    assert_equal(ran, plain)
