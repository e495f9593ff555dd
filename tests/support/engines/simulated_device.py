"""A simulated device whose costs a test states, and calibration files of tiny models."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pagoda.backends.simulated.backend import SimulatedBackend
from pagoda.backends.simulated.calibration import (
    FORMAT,
    Calibration,
    CostCurve,
    CostTable,
    Fit,
    FitError,
    MeasuredPlatform,
    num_parameters,
    settings_of,
)
from pagoda.backends.simulated.device import CacheBytes, HostCosts
from pagoda.backends.simulated.step_time import StepLoad
from pagoda.common.backend import BackendOptions
from pagoda.common.config.defaults import Platform
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.steps.contract import StepPlan
from pagoda.common.engine.workload.drive import Clock, VirtualClock


@dataclass
class StatedTimes:
    """Step times of a formula; keeps every load."""

    per_step: float = 1.0
    per_token: float = 0.0
    loads: list[StepLoad] = field(default_factory=list)

    def seconds(self, load: StepLoad) -> float:
        self.loads.append(load)
        return self.per_step + self.per_token * load.num_tokens


@dataclass
class StatedDevice:
    times: StatedTimes = field(default_factory=StatedTimes)
    host: HostCosts = HostCosts()
    name: str = "stated"
    backend: str = "reference"
    platform: Platform = Platform("cpu")
    prefers_extents: bool = False
    blocks: int = 64

    def step_time(self, options: BackendOptions) -> StatedTimes:
        return self.times

    def cache_bytes(self, options: BackendOptions) -> CacheBytes:
        pools = options.layout.pools
        return CacheBytes(self.blocks * len(pools), (1,) * len(pools))


class RecordingBackend:
    """Keeps the plans that another backend executes."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.capabilities, self.plans = backend, backend.capabilities, list[StepPlan]()

    def execute(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        return self.backend.execute(plan)


def simulated_core(
    options: BackendOptions, device: StatedDevice, num_blocks: tuple[int, ...], clock: Clock | None = None, **more: Any
) -> tuple[EngineCore, RecordingBackend, Clock]:
    """An engine over a simulated backend, what records its plans, and its clock."""
    clock = clock or VirtualClock()
    recording = RecordingBackend(SimulatedBackend(options, device, clock))
    return generation_core(recording, options.layout, options.limits, num_blocks, **more), recording, clock


def assert_same_plans(plans: list[StepPlan], others: list[StepPlan]) -> None:
    """Every field of every plan is the same."""
    assert len(plans) == len(others)
    for one, other in zip(plans, others):
        assert describe(one) == describe(other), f"step {one.step}"


def describe(plan: StepPlan) -> dict[str, Any]:
    """The plan as plain values; of the rules of rows that start nothing."""
    values = {name: getattr(plan, name) for name in StepPlan.__dataclass_fields__}
    values["starts"] = [(each.row, each.token_ids.tolist(), each.num_prompt) for each in plan.starts]
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def calibration_of(options: BackendOptions, **changes: Any) -> Calibration:
    """A calibration of a model, whose decode steps take 10 ms plus 1 ms per token, mixed ones 20 ms plus 1 ms."""
    error = FitError(0.0, 0.0, 0.0)
    tables = {
        "decode": CostTable(CostCurve((1, 101), (0.011, 0.111)), CostCurve((0,), (0.0,)), {}),
        "mixed": CostTable(CostCurve((1, 101), (0.021, 0.121)), CostCurve((0,), (0.0,)), {}),
    }
    calibration = Calibration(
        format=FORMAT,
        model="tiny",
        parameters=num_parameters(options),
        backend="reference",
        device="a tiny device",
        created="2026-01-01 00:00 UTC",
        version="0",
        settings=settings_of(options),
        machine=MeasuredPlatform("cpu", 1 << 34, "x86_64"),
        prefers_extents=True,
        kv_cache_bytes=1 << 20,
        block_bytes=[2 * pool.block_elements for pool in options.layout.pools],
        block_elements=[pool.block_elements for pool in options.layout.pools],
        weight_bytes=1000,
        host=HostCosts(),
        fit=Fit(tables, {"decode": error, "mixed": error}),
        steps=[],
    )
    return msgspec.structs.replace(calibration, **changes)


def write_calibration(path: Path, calibration: Calibration, **changes: Any) -> Path:
    """Write a calibration; `changes` are made to its JSON."""
    path.write_text(json.dumps(json.loads(calibration.as_json()) | changes))
    return path


def with_limits(options: BackendOptions, **changes: Any) -> BackendOptions:
    """The options with other limits."""
    limits: Limits = replace(options.limits, **changes)
    layout: KvLayout = replace(options.layout, block_size=limits.block_size)
    return replace(options, limits=limits, layout=layout)
