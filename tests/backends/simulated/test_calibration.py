"""Fits of step times, and the file that keeps them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import tiny_spec
from support.engines.backend_options import make_options
from support.engines.simulated_device import calibration_of, with_limits, write_calibration

from pagoda.backends.simulated.calibration import (
    MeasuredStep,
    context_of,
    fit,
    kind_of,
    non_negative_least_squares,
    read_calibration,
    terms_of,
)
from pagoda.common.backend import BackendOptions
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.errors import ConfigError


@pytest.fixture
def options() -> BackendOptions:
    limits = Limits(max_model_len=64, max_num_batched_tokens=32, max_num_seqs=8, block_size=4)
    return make_options(tiny_spec(), limits=limits)


def step(query: list[int], context: list[int], sampled: int, seconds: float = 1.0, drafts: int = 0) -> MeasuredStep:
    return MeasuredStep(query, context, sampled, drafts, seconds)


def test_a_step_with_chunks_is_mixed_and_drafts_are_tokens_of_their_own() -> None:
    assert kind_of(step([1, 1], [5, 9], 2).load) == "decode"
    assert kind_of(step([1, 4], [5, 9], 2).load) == "mixed"
    assert kind_of(step([3, 3], [5, 9], 6, drafts=4).load) == "decode"
    assert context_of(step([3, 1], [5, 9], 4, drafts=2).load) == 24.0


def test_the_terms_of_a_mixed_step() -> None:
    """A chunk of 4 tokens after 6 attends to 7 + 8 + 9 + 10 positions."""
    load = step([1, 4], [30, 10], 2).load
    assert terms_of(load) == {"pairs": 34.0, "chunks": 1.0, "singles": 1.0, "sampled": 2.0}
    assert context_of(load) == 30.0


@pytest.mark.parametrize("seed", range(20))
def test_least_squares_are_those_of_the_best_subset(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(12, 5)), rng.normal(size=12)
    x = non_negative_least_squares(a, b)
    assert (x >= 0).all()
    best = np.inf
    for count in range(6):
        for columns in itertools.combinations(range(5), count):
            own = np.linalg.lstsq(a[:, columns], b, rcond=None)[0] if columns else np.zeros(0)
            if (own >= 0).all():
                best = min(best, float(np.linalg.norm(a[:, list(columns)] @ own - b)))
    assert np.linalg.norm(a @ x - b) == pytest.approx(best, rel=1e-6)


def seconds_of(query: list[int], context: list[int], sampled: int) -> float:
    """Known costs: those of tokens bend at 16, those of context at 4,096."""
    load, tokens = step(query, context, sampled).load, sum(query)
    terms, read = terms_of(load), context_of(load)
    base = 0.004 + 0.0002 * min(tokens, 16) + 0.0005 * max(0, tokens - 16)
    if max(query) == 1:
        return base + 4e-6 * min(read, 4096) + 2e-6 * max(0, read - 4096)
    return 2 * base + 1e-6 * read + 3e-7 * terms["pairs"] + 5e-4 * terms["sampled"] + 1e-3 * terms["chunks"]


def designed() -> list[MeasuredStep]:
    cases: list[tuple[list[int], list[int], int]] = []
    for count, context in itertools.product((1, 4, 16, 64), (16, 256, 1024)):
        cases.append(([1] * count, [context] * count, count))
    for tokens, before, sampled in itertools.product((16, 64, 256), (0, 500), (0, 1)):
        cases.append(([tokens], [tokens + before], sampled))
    for tokens, singles in itertools.product((16, 64, 256), (3, 7)):
        cases.append(([1] * singles + [tokens - singles], [100] * singles + [tokens - singles], singles + 1))
        cases.append(([tokens // 4] * 4, [tokens // 4] * 4, 4))
    return [step(query, context, sampled, seconds_of(query, context, sampled)) for query, context, sampled in cases]


def test_a_fit_finds_known_costs() -> None:
    fitted = fit(designed())
    for query, context, sampled in (
        ([1] * 40, [600] * 40, 40),
        ([1, 1, 90], [70, 80, 290], 3),
        ([50, 50], [50, 80], 1),
    ):
        got = fitted.seconds(step(query, context, sampled).load)
        assert got == pytest.approx(seconds_of(query, context, sampled), rel=0.02)
    assert fitted.errors["decode"].largest < 0.01
    assert fitted.errors["mixed"].largest < 0.02


def test_steps_beyond_the_largest_measured_one_go_on_along_the_line() -> None:
    table = fit(designed()).tables["decode"]
    at = [table.tokens(n) for n in (16, 64, 128)]
    assert (at[2] - at[1]) / 64 == pytest.approx((at[1] - at[0]) / 48, rel=0.05)


def test_a_mean_of_many_steps_weighs_more_than_one_step() -> None:
    twice = [step([1], [100], 1, 0.010), MeasuredStep([1], [100], 1, 0, 0.020, 9), step([9], [9], 1, 1.0)]
    assert fit(twice).seconds(twice[0].load) == pytest.approx(0.019, rel=0.01)


def test_both_kinds_of_step_are_needed() -> None:
    with pytest.raises(ValueError, match="no mixed step was measured"):
        fit([step([1], [1], 1)])


def test_a_file_is_what_was_written(tmp_path: Path, options: BackendOptions) -> None:
    calibration = calibration_of(options)
    read = read_calibration(write_calibration(tmp_path / "c.json", calibration))
    assert read == calibration
    assert read.step_time(options).seconds(step([1] * 11, [5] * 11, 11).load) == pytest.approx(0.021)
    assert read.step_time(options).seconds(step([10, 1], [10, 9], 11).load) == pytest.approx(0.031)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "has format 99, not 1; calibrate again"),
        ({"fit": {"tables": {}, "errors": {}}}, "is no calibration: .*tables of decode and mixed steps are needed"),
        ({"machine": 3}, "is no calibration: .*machine"),
        ({"surprise": 3}, "is no calibration: .*surprise"),
    ],
)
def test_a_file_of_something_else_is_refused(
    tmp_path: Path, options: BackendOptions, changes: dict[str, Any], message: str
) -> None:
    path = write_calibration(tmp_path / "c.json", calibration_of(options), **changes)
    with pytest.raises(ConfigError, match=f"^--calibration: .*{message}"):
        read_calibration(path)


def test_a_missing_file_and_one_that_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--calibration: .*No such file"):
        read_calibration(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(ConfigError, match="is no calibration"):
        read_calibration(tmp_path / "text.json")


def test_negative_costs_are_refused(tmp_path: Path, options: BackendOptions) -> None:
    path = write_calibration(tmp_path / "c.json", calibration_of(options))
    values = json.loads(path.read_text())
    values["fit"]["tables"]["decode"]["tokens"]["seconds"][0] = -1
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="seconds must be finite and not negative"):
        read_calibration(path)


def test_another_model_and_other_settings_are_refused(options: BackendOptions) -> None:
    calibration = calibration_of(options)
    other = make_options(tiny_spec(layers=3), limits=options.limits)
    with pytest.raises(ConfigError, match=r"--calibration: it is of tiny, with \d+ parameters, the model has"):
        calibration.step_time(other)
    with pytest.raises(ConfigError, match="--dtype: bfloat16, but --calibration was measured with float32"):
        calibration.step_time(make_options(tiny_spec(), limits=options.limits, dtype="bfloat16"))
    fp8 = make_options(tiny_spec(), limits=options.limits, cache=CacheConfig(cache_dtype="fp8"))
    with pytest.raises(ConfigError, match="--kv-cache-dtype: fp8"):
        calibration.step_time(fp8)
    with pytest.raises(ConfigError, match="--tensor-parallel-size: 2"):
        calibration.step_time(make_options(tiny_spec(), limits=options.limits, tensor=2))


def test_bytes_of_a_block_follow_the_block_size(options: BackendOptions) -> None:
    calibration = calibration_of(options)
    larger = with_limits(options, block_size=8)
    assert calibration.cache_bytes(larger).per_block == tuple(2 * each for each in calibration.block_bytes)
