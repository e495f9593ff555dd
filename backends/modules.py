"""What the modules of a backend offer, by the kind of module: all that the server knows of them."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pagoda.common.backend import Backend, Capabilities, PoolingBackend, Weight
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.distributed.messages import RankInfo
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.sampling import USUAL, LogprobsMode, SamplerOptions
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.sharded import Manifest


class BackendModule(Protocol):
    """What a backend's `backend.py` offers."""

    CAPABILITIES: Capabilities

    @staticmethod
    def create(
        spec: ModelSpec,
        *,
        limits: Limits,
        layout: KvLayout,
        cache: CacheConfig,
        dtype: str,
        sampling: SamplerOptions = USUAL,
    ) -> Backend:
        """A backend for one model. `dtype`: resolved, not `auto`. Raises ConfigError for what it cannot do."""
        ...

    @staticmethod
    def check(spec: ModelSpec, **options: Any) -> int | None:
        """The number of KV blocks, None where it depends on the weights and on the device's memory.

        Raises ConfigError where `create` with the same keywords would; keeps no device and meets no other rank.
        """
        ...


class PoolingModule(Protocol):
    """What a backend's `pooling.py` offers."""

    @staticmethod
    def create(spec: ModelSpec, *, limits: Limits, dtype: str) -> PoolingBackend:
        """A backend for one model that pools. `dtype`: resolved, not `auto`. Raises ConfigError.

        Backends with compiled programs take where those are kept, and what memory they may use.
        """
        ...


class HostRuntime(Protocol):
    """What a backend knows of several hosts. Nothing here touches a device before `start`."""

    @staticmethod
    def versions() -> dict[str, str]:
        """Package -> version, of what makes programs."""
        ...

    @staticmethod
    def environment() -> dict[str, str]:
        """Variable -> value, of those that change what a program compiles to."""
        ...

    @staticmethod
    def devices() -> tuple[int, str]:
        """How many devices this host has (0: it does not show yet), and their kind."""
        ...

    @staticmethod
    def start(parallel: ParallelConfig) -> None:
        """Join the devices of all hosts, which all do together. Raises ConfigError or EngineDeadError."""
        ...

    @staticmethod
    def stop() -> None:
        """Leave the other hosts, which all do together."""
        ...


class RankRuntime(Protocol):
    """What a backend knows of its ranks: processes on one machine that share a model, a device each.

    Importing it is cheap; only `check_devices`, `device` and `join` may import a framework.
    """

    @staticmethod
    def check(spec: ModelSpec, size: int) -> None:
        """Raises ConfigError when so many ranks cannot share the model, naming how many can."""
        ...

    @staticmethod
    def check_devices(size: int) -> None:
        """Raises ConfigError when this process sees fewer devices."""
        ...

    @staticmethod
    def device(index: int) -> Any:
        """The device of that number among those that this process sees, for `create`. Raises ConfigError."""
        ...

    @staticmethod
    def needs_gpu() -> bool:
        """Whether each rank has a GPU for itself; False where CPUs stand for them."""
        ...

    @staticmethod
    def join(place: RankInfo, listener: socket.socket | None) -> RankComm:
        """Meet the other ranks, which all do together. `listener`: rank 0's, bound to the place's address.

        Raises ConfigError or EngineDeadError.
        """
        ...


class RankComm(Protocol):
    """A rank's line to the others, which `create` gets as `comm`."""

    def leave(self) -> None:
        """End it in good order, which all ranks do together."""
        ...

    def abandon(self) -> None:
        """From any thread: another rank is dead; what waits for it here shall fail."""
        ...

    def release(self) -> None:
        """Last, when the other ranks' processes are gone. Idempotent."""
        ...


class CompileTarget(Protocol):
    """Devices to compile for, described without one being there."""

    devices: tuple[Any, ...]
    hbm_bytes: int
    """What programs may use of each device."""
    device_name: str
    """V6E and the like; empty for a CPU."""


class CompileReport(Protocol):
    """What compiling for a target found; as text, what a person should see of it."""

    def as_json(self) -> dict[str, Any]:
        """The same as data."""
        ...

    def save(self, folder: Path) -> str:
        """Write the programs as a bundle; one line about it. Raises ConfigError when that cannot be written."""
        ...


class CompilerModule(Protocol):
    """What compiles programs for a machine that is not here."""

    @staticmethod
    def find_target(name: str) -> CompileTarget:
        """The devices that a topology's name stands for. Raises ConfigError."""
        ...

    @staticmethod
    def compile_ahead(
        target: CompileTarget,
        spec: ModelSpec,
        *,
        limits: Limits,
        layout: KvLayout,
        cache: CacheConfig,
        dtype: str,
        tensor: int,
        data: int,
        mode: LogprobsMode,
        largest: bool,
        stated: bool,
        quantization: str | None,
    ) -> CompileReport:
        """Compile a model's programs. Raises ConfigError when it does not fit."""
        ...


class ConverterModule(Protocol):
    """What writes a backend's own arrays."""

    @staticmethod
    def convert(
        spec: ModelSpec,
        weights: Iterable[Weight],
        *,
        dtype: str,
        tensor: int,
        folder: Path,
        architectures: Sequence[str],
    ) -> Manifest:
        """Write the arrays of a model, laid out for `tensor` devices. Raises ConfigError, WeightError, OSError."""
        ...
