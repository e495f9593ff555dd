"""Measuring a backend: what steps are measured, and that known step times are found again."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakeBackend, mixed_layout, tiny_spec
from support.engines.backend_options import make_options
from support.engines.simulated_device import RecordingBackend, StatedDevice, StatedTimes, calibration_of

from pagoda.backends.modules import CalibrationTarget
from pagoda.backends.simulated.backend import SimulatedBackend
from pagoda.backends.simulated.device import HostCosts
from pagoda.backends.simulated.measure import (
    StepMeasurer,
    TrialShape,
    calibrate,
    measure_host,
    measure_pause,
    measure_steps,
    serve_steps,
    shapes,
)
from pagoda.common.backend import MemoryPlan
from pagoda.common.config.defaults import Platform
from pagoda.common.config.engine import Limits
from pagoda.common.engine.workload.drive import VirtualClock

LIMITS = Limits(max_model_len=1024, max_num_batched_tokens=64, max_num_seqs=8, block_size=4)
BLOCKS = (1200,)


def target_of(times: StatedTimes, clock: VirtualClock, host: HostCosts | None = None) -> CalibrationTarget:
    options = make_options(tiny_spec(), limits=LIMITS)
    backend = SimulatedBackend(options, StatedDevice(times=times, host=host or HostCosts()), clock)
    return CalibrationTarget(backend, options, MemoryPlan(7, 0, BLOCKS, (1,)), "tiny", Platform("cpu"))


def test_shapes_cover_the_limits_and_keep_them() -> None:
    decodes, mixed = shapes(LIMITS, cached_tokens=4096)
    assert {each.singles for each in decodes} == {1, 2, 4, 8}
    assert {each.context for each in decodes} == {64, 512}
    assert {each.num_tokens for each in mixed} == {16, 32, 64}
    assert any(each.before for each in mixed)
    assert any(not each.ends for each in mixed)
    assert any(each.singles and each.chunks for each in mixed)
    assert any(len(each.chunks) > 1 for each in mixed)
    for each in (*decodes, *mixed):
        assert each.singles + len(each.chunks) <= LIMITS.max_num_seqs
        assert each.num_cached + LIMITS.block_size <= 4096
        assert max((each.context, *(each.before + chunk for chunk in each.chunks))) <= LIMITS.max_model_len


def test_shapes_that_do_not_fit_the_cache_are_left_out() -> None:
    decodes, _ = shapes(LIMITS, cached_tokens=1100)
    assert max(each.num_cached for each in decodes) == 1024


def test_drafts_are_measured_if_there_are_any() -> None:
    limits = Limits(max_model_len=1024, max_num_batched_tokens=64, max_num_seqs=8, block_size=4, max_drafts=3)
    decodes, _ = shapes(limits, 8192)
    assert {each.drafts for each in decodes} == {0, 1, 2, 3}


@pytest.mark.parametrize("shape", [TrialShape(3, 20), TrialShape(2, 9, (5, 7), before=4), TrialShape(2, 20, drafts=2)])
def test_a_plan_has_the_shape_and_blocks_of_its_own(shape: TrialShape) -> None:
    layout = mixed_layout(block_size=4)
    measurer = StepMeasurer(FakeBackend(layout, num_blocks=64), layout, (64,) * len(layout.pools), VirtualClock())
    plan = measurer._plan(shape)
    lengths = np.diff(plan.query_start).tolist()
    assert lengths == [1 + shape.drafts] * shape.singles + list(shape.chunks)
    assert (plan.context + lengths).tolist() == [shape.context] * shape.singles + [
        shape.before + chunk for chunk in shape.chunks
    ]
    for pool in range(len(layout.pools)):
        used = [
            block
            for group, table in zip(layout.groups, plan.block_tables)
            if group.pool == pool
            for block in table.ravel().tolist()
            if block
        ]
        assert len(used) == len(set(used))
        assert max(used) < 64


def test_known_step_times_are_measured() -> None:
    clock, times = VirtualClock(), StatedTimes(per_step=0.1, per_token=0.01)
    target = target_of(times, clock)
    recording = RecordingBackend(target.backend)
    measurer = StepMeasurer(recording, target.options.layout, BLOCKS, clock)  # type: ignore[arg-type]
    step = measurer.measure(TrialShape(3, 20, (5,)), repeats=2)
    assert step.seconds == pytest.approx(0.18)
    assert (step.query_lens, step.context_lens, step.num_sampled) == ([1, 1, 1, 5], [20, 20, 20, 5], 4)
    assert len(recording.plans) == 2 + 2  # two warm-ups
    assert [bool(plan.starts) for plan in recording.plans] == [True, False, False, False]
    times.per_step, times.per_token = 0.01, 0.0
    measurer.measure(TrialShape(1, 20), repeats=2)
    assert len(recording.plans) - 4 >= 22  # short steps are measured for 0.2 s


def test_a_calibration_finds_the_step_times_and_says_what_it_measured() -> None:
    clock = VirtualClock()
    target = target_of(StatedTimes(per_step=0.1, per_token=0.01), clock)
    done: list[tuple[int, int]] = []
    calibration = calibrate(target, 1, 1e9, lambda number, total: done.append((number, total)), clock)
    assert done[-1][0] == done[-1][1] < len(calibration.steps), "and steps of an engine"
    assert calibration.fit.errors["mixed"].largest < 0.01
    step = StepMeasurer(target.backend, target.options.layout, BLOCKS, clock).measure(TrialShape(2, 64, (30,)), 1)
    assert step.seconds == pytest.approx(0.42)
    assert calibration.fit.seconds(step.load) == pytest.approx(0.42, rel=0.02)
    assert (calibration.kv_cache_bytes, calibration.weight_bytes) == (1200, 7)
    assert calibration.settings == calibration_of(target.options).settings
    report = calibration.report()
    assert "decode steps: mean error" in report
    assert "110.0 ms with 1, 180.0 ms with 8 tokens" in report


def test_a_measurement_ends_when_its_time_is_up() -> None:
    clock = VirtualClock()
    target = target_of(StatedTimes(per_step=1.0), clock)
    measurer = StepMeasurer(target.backend, target.options.layout, BLOCKS, clock)
    steps = measure_steps(measurer, LIMITS, 1, 20.0, lambda number, total: None)
    kinds = {len(step.query_lens) == sum(step.query_lens) for step in steps}
    assert kinds == {True, False}, "each kind has half of the time"
    assert len(steps) < 12


def test_steps_of_an_engine_are_those_between_results() -> None:
    clock, times = VirtualClock(), StatedTimes(per_step=0.1, per_token=0.01)
    target = target_of(times, clock)
    steps = serve_steps(target.backend, target.options.layout, LIMITS, BLOCKS, 3, clock)
    assert len(steps) == len(times.loads) > 50
    assert [step.seconds for step in steps] == pytest.approx([0.1 + 0.01 * sum(step.query_lens) for step in steps])
    kinds = {min(step.query_lens) < max(step.query_lens) for step in steps}
    assert kinds == {True, False}, "chunks beside sequences that generate"


@pytest.mark.parametrize("longer", [0.0, 0.25])
def test_a_pause_costs_what_the_next_step_takes_more(longer: float) -> None:
    clock = VirtualClock()
    target = target_of(StatedTimes(), clock, HostCosts(after_pause=longer))
    measurer = StepMeasurer(target.backend, target.options.layout, BLOCKS, clock)
    assert measure_pause(measurer, LIMITS) == pytest.approx(longer)
    calibration = calibrate(target, 1, 1e9, lambda number, total: None, clock)
    assert calibration.host.after_pause == pytest.approx(longer)


def test_the_engine_s_thread_is_measured_with_a_real_scheduler() -> None:
    target = target_of(StatedTimes(), VirtualClock())
    host = measure_host(target.backend, target.options.layout, LIMITS, BLOCKS)
    assert 1e-6 < host.plan_step + host.plan_sequence < 0.05
    assert 1e-6 < host.report_step + host.report_sequence < 0.05
