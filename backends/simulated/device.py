"""The device that is simulated: what the engine's defaults, its memory plan and its clock need to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from pagoda.backends.simulated.step_time import StepTimeModel
from pagoda.common.backend import BackendOptions
from pagoda.common.config.defaults import Platform

PAUSE: Final = 0.05
"""Seconds, after which threads sleep and caches are other processes'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds of the engine's thread around a step; while the device computes the step before, they take no time."""

    plan_step: float = 0.0  # Host time to plan and start a step.
    plan_sequence: float = 0.0  # Further host time per sequence of the step.
    start_request: float = 0.0  # Further host time per request that starts in the step.
    report_step: float = 0.0  # Host time to apply a step's result.
    report_sequence: float = 0.0  # Further host time per sequence of the step.
    after_pause: float = 0.0  # Seconds added to a step that begins after an idle time of PAUSE.


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """The KV cache's memory, of one copy of the model."""

    total: int  # Bytes for all pools.
    per_block: tuple[int, ...]  # Bytes of a block of each pool.
    weights: int = 0  # Bytes of the weights, beside the pools.
    spare: bool = False  # The backend allocates blocks beyond those of all rows; they keep prefixes.


class SimulatedDevice(Protocol):
    """One device, or several that share a model, with the backend that runs on it."""

    @property
    def name(self) -> str:
        """The device, in words."""
        ...

    @property
    def backend(self) -> str:
        """The backend that runs on it: its defaults hold."""
        ...

    @property
    def platform(self) -> Platform:
        """What limits and batch defaults depend on."""
        ...

    @property
    def prefers_extents(self) -> bool:
        """Whether its backend prefers consecutive KV blocks (see Capabilities)."""
        ...

    @property
    def host(self) -> HostCosts:
        """What the engine's thread costs."""
        ...

    def step_time(self, options: BackendOptions) -> StepTimeModel:
        """Return how long its steps take. Raises ConfigError, naming the setting, where it cannot say that."""
        ...

    def cache_bytes(self, options: BackendOptions) -> CacheBytes:
        """Return the memory of the KV cache. Raises ConfigError if the model does not fit."""
        ...
