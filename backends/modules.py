"""The interfaces of a backend's modules, which are all that the server knows of a backend."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pagoda.common.backend import (
    Backend,
    BackendOptions,
    Capabilities,
    MemoryPlan,
    PoolingBackend,
    PoolingOptions,
    RankComm,
    Weight,
)
from pagoda.common.config.defaults import Platform
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.config.groups.simulation import SimulationConfig
from pagoda.common.distributed.messages import RankInfo
from pagoda.common.engine.workload.capacity import EnginePlan, LoadMeasures, PlannedLoad, ServiceTarget
from pagoda.common.engine.workload.drive import Clock
from pagoda.common.models.drafters import DrafterSpec
from pagoda.common.models.family import PoolUse
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.common.weights.quantization.support import SchemeSupport


class BackendModule(Protocol):
    """Interface of a backend's `backend.py`."""

    CAPABILITIES: Capabilities

    @staticmethod
    def create(options: BackendOptions) -> Backend:
        """Return a backend without weights. Raises ConfigError for options it does not support."""
        ...

    @staticmethod
    def check(options: BackendOptions) -> tuple[int, ...] | None:
        """Return the number of KV blocks, None where it depends on the weights or on the device's memory.

        Raises ConfigError where `create` would. Keeps no device and joins no other rank.
        """
        ...


class SchemeModule(Protocol):
    """Interface of a backend's `schemes.py`."""

    ROUNDED_ON_DEVICE: Collection[str]
    """Values of --quantization that the backend rounds on its devices; matrices of others come rounded."""

    @staticmethod
    def scheme_support(scheme: Scheme, experts: bool) -> SchemeSupport:
        """Return what the backend does with matrices of a scheme; `experts`: those of mixtures of experts."""
        ...


class DeviceFacts(Protocol):
    """What the settings' defaults depend on, of a device that is simulated."""

    @property
    def name(self) -> str:
        """The device, in words."""
        ...

    @property
    def backend(self) -> str:
        """The backend that runs on it."""
        ...

    @property
    def platform(self) -> Platform:
        """The devices, as `detect` would find them."""
        ...


@dataclass(frozen=True, slots=True)
class CalibrationTarget:
    """A loaded backend whose steps are to be measured."""

    backend: Backend
    options: BackendOptions  # that it was created with; the limits are those of the engine
    memory: MemoryPlan
    model: str
    platform: Platform


class CalibrationFile(Protocol):
    """What was measured of a target."""

    def as_json(self) -> bytes:
        """Return the content of the file that `SimulationConfig.calibration` names."""
        ...

    def report(self) -> str:
        """Return how well the model of step times fits, and what the engine's thread costs, in words."""
        ...


class SimulatorModule(Protocol):
    """Interface of the backend without a device, beside BackendModule's."""

    @staticmethod
    def open_device(config: SimulationConfig) -> DeviceFacts:
        """Return the device of the settings. Raises ConfigError if none is named or its file cannot be read."""
        ...

    @staticmethod
    def create(options: BackendOptions, clock: Clock | None = None) -> Backend:
        """Return a backend whose steps take time by `clock`; None: the machine's. Raises ConfigError."""
        ...

    @staticmethod
    def calibrate(
        target: CalibrationTarget, repeats: int, max_seconds: float, done: Callable[[int, int], None]
    ) -> CalibrationFile:
        """Measure the steps of a backend, each `repeats` times, for about `max_seconds`.

        `done` is called with the number of measured steps and that of all.
        """
        ...


class PlannerModule(Protocol):
    """Capacity planning over accelerators by their data sheets."""

    @staticmethod
    def chip_names() -> tuple[str, ...]:
        """Return the accelerators that are known."""
        ...

    @staticmethod
    def devices_per_chip(name: str) -> int:
        """Return the devices of a chip. Raises ConfigError for an unknown one."""
        ...

    @staticmethod
    def assumptions(name: str) -> str:
        """Return what step times on an accelerator assume, in words."""
        ...

    @staticmethod
    def best_limits(
        options: BackendOptions,
        load: PlannedLoad,
        target: ServiceTarget,
        seqs: Sequence[int],
        tokens: Sequence[int],
    ) -> EnginePlan:
        """Return the best engine with limits of the candidates. Raises ConfigError if none fits the device."""
        ...

    @staticmethod
    def replicas_for(
        options: BackendOptions, plan: EnginePlan, load: PlannedLoad, target: ServiceTarget, rate: float
    ) -> tuple[int, LoadMeasures]:
        """Return the fewest replicas that serve `rate` requests per second within the target, and the measures."""
        ...


class PoolingModule(Protocol):
    """Interface of a backend's `pooling.py`."""

    @staticmethod
    def create(options: PoolingOptions) -> PoolingBackend:
        """Return a backend without weights. Raises ConfigError for options it does not support."""
        ...


class DescriberModule(Protocol):
    """Describes models that the library transformers computes."""

    @staticmethod
    def describe(folder: Path, config: Mapping[str, Any], *, trust_remote_code: bool) -> TransformersSpec:
        """Return the spec of the model in a folder, whose config.json is `config`. Raises ModelError if it cannot run.

        `trust_remote_code`: the folder's Python files may be executed.
        """
        ...

    @staticmethod
    def describe_pooling(
        folder: Path, config: Mapping[str, Any], use: PoolUse, *, trust_remote_code: bool
    ) -> TransformersSpec:
        """Return the spec of the same model, to be pooled for `use`. Raises ModelError if it cannot run."""
        ...


class HostRuntime(Protocol):
    """Multi-host support of a backend. No device is initialised before `start`."""

    @staticmethod
    def versions() -> dict[str, str]:
        """Return package -> version of the packages that compiled programs depend on."""
        ...

    @staticmethod
    def environment() -> dict[str, str]:
        """Return the environment variables that change compiled programs, with their values."""
        ...

    @staticmethod
    def devices() -> tuple[int, str]:
        """Return the number of devices of this host (0: not known yet) and their kind."""
        ...

    @staticmethod
    def start(parallel: ParallelConfig) -> None:
        """Connect the devices of all hosts (collective). Raises ConfigError or EngineDeadError."""
        ...

    @staticmethod
    def stop() -> None:
        """Disconnect from the other hosts (collective)."""
        ...


class RankRuntime(Protocol):
    """Support for ranks: processes on one machine that share a model, one device each.

    Importing it is cheap; only `check_devices` and `join` may import a framework.
    """

    @staticmethod
    def check(spec: ModelSpec, size: int, drafter: DrafterSpec | None = None) -> None:
        """Raise ConfigError if `size` ranks cannot share the model and its drafter, naming a size that can."""
        ...

    @staticmethod
    def check_devices(size: int) -> None:
        """Raise ConfigError if this process sees fewer devices."""
        ...

    @staticmethod
    def needs_gpu() -> bool:
        """Return whether each rank has its own GPU; False where CPUs replace them in tests."""
        ...

    @staticmethod
    def join(info: RankInfo, listener: socket.socket | None) -> RankComm:
        """Connect to the other ranks (collective). `listener`: of rank 0, bound to the address in `info`.

        Raises ConfigError or EngineDeadError.
        """
        ...


class CompileTarget(Protocol):
    """A description of devices to compile for; none need be present."""

    @property
    def devices(self) -> Sequence[object]:
        """Return the backend's descriptions of the devices."""
        ...

    hbm_bytes: int  # usable by programs, per device
    device_name: str  # such as V6E; empty for a CPU


class CompileReport(Protocol):
    """The result of compiling for a target; str() is a summary for people."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        ...

    def save(self, folder: Path) -> str:
        """Write the programs as a bundle and return a one-line summary. Raises ConfigError if it cannot be written."""
        ...


class CompilerModule(Protocol):
    """Ahead-of-time compilation for devices that are not present."""

    @staticmethod
    def find_target(name: str) -> CompileTarget:
        """Return the devices of a topology. Raises ConfigError."""
        ...

    @staticmethod
    def compile_ahead(target: CompileTarget, options: BackendOptions, *, largest: bool, stated: bool) -> CompileReport:
        """Compile a model's programs.

        `largest`: compile only the largest program of each kind. `stated`: the user set max_model_len (generation) or
        max_num_batched_tokens (pooling), so it must not be lowered to fit. Raises ConfigError if the model does not
        fit.
        """
        ...


class ConvertedArrays(Protocol):
    """The manifest of arrays that were written."""

    @property
    def summary(self) -> str:
        """One line: how many elements in how many arrays, for how many devices."""
        ...

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder. Raises OSError."""
        ...


class ConverterModule(Protocol):
    """Conversion of checkpoints to a backend's arrays."""

    @staticmethod
    def convert(
        spec: ModelSpec,
        weights: Iterable[Weight],
        *,
        dtype: str,
        tensor: int,
        folder: Path,
        architectures: Sequence[str],
    ) -> ConvertedArrays:
        """Write a model's arrays, sharded for `tensor` devices. Raises ConfigError, WeightError or OSError."""
        ...
