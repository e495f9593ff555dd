"""Which device backend runs a model: found by platform, imported only when chosen.

Knows the names and what each needs; knows nothing of what a backend does.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from pagoda.backends.modules import (
    BackendModule,
    CompilerModule,
    ConverterModule,
    HostRuntime,
    PoolingModule,
    RankRuntime,
)
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """A backend's name, where it lives (None: not in this version), what it imports and what it runs on.

    `has_device` is asked only when `needs` are installed. `without_device`: runs without it too, when asked by name.
    `spreads`: what of it there may be several of, which its `create` takes: `tensor`, devices that share the model, and
    `data`, copies of it.
    `ranks`: what it needs where those devices have a process each, whose `create` takes `comm` and `device`; None where
    one process drives them all.
    `hosts`: what it needs of several hosts, None where it runs on one.
    `checkpoints`: it implements CheckpointBackend. `remedy`: what to do without the device.
    `moves_weights`: it implements SleepingBackend, its `create` takes `sleep_mode`; weights may stay in host memory.
    `pools`: where its PoolingBackend lives, None where it only generates; `pool_spreads`: as `spreads`, of that one.
    """

    name: str
    module: str | None
    needs: tuple[str, ...]
    device: str
    install: str
    has_device: Callable[[], bool] = lambda: True
    without_device: Callable[[], bool] = lambda: False
    spreads: tuple[str, ...] = ()
    ranks: str | None = None
    hosts: str | None = None
    checkpoints: bool = False
    remedy: str = ""
    moves_weights: bool = False
    pools: str | None = None
    pool_spreads: tuple[str, ...] = ()

    def obstacle(self, named: bool = False) -> str | None:
        """Why this backend cannot run here, with the remedy; None when it can. `named`: it was asked for by name."""
        missing = [package for package in self.needs if not _installed(package)]
        if missing:
            return f"{' and '.join(missing)} not installed; {self.install}"
        if not (named and self.without_device()) and not self.has_device():
            return f"no {self.device} found{self.remedy if named else ''}"
        if self.module is None:
            return "not in this version"
        return None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _has_cuda() -> bool:
    """True with an NVIDIA driver. Reads /proc, because asking torch would cost its import."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def _has_tpu() -> bool:
    """True on a Cloud TPU host: its chips are PCI accelerators or VFIO groups beside libtpu."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


BACKENDS: Final[tuple[Entry, ...]] = (
    Entry(
        "jax_tpu",
        "pagoda.backends.jax_tpu.backend",
        ("jax", "flax"),
        "TPU",
        "pip install 'pagoda[tpu]'",
        _has_tpu,
        without_device=lambda: True,
        spreads=("tensor", "data"),
        hosts="pagoda.backends.jax_tpu.parallel.hosts",
        checkpoints=True,
        pools="pagoda.backends.jax_tpu.pooling",
        pool_spreads=("tensor",),
    ),
    Entry(
        "torch_cuda",
        "pagoda.backends.torch_cuda.backend",
        ("torch", "triton"),
        "NVIDIA GPU",
        "pip install 'pagoda[cuda]'",
        _has_cuda,
        spreads=("tensor",),
        ranks="pagoda.backends.torch_cuda.parallel.ranks",
        without_device=TORCH_CUDA_DEVICE.is_on,
        remedy=": install its driver, or use --backend reference",
        moves_weights=True,
        pools="pagoda.backends.torch_cuda.pooling",
    ),
    Entry(
        "reference",
        "pagoda.backends.reference.backend",
        ("torch",),
        "CPU",
        "pip install 'pagoda[cpu]'",
        pools="pagoda.backends.reference.pooling",
    ),
    Entry("simulated", None, (), "device", "", lambda: True),
)
"""In order of preference."""

_CHOSEN_BY_NAME_ONLY: Final = frozenset({"simulated"})


def choose_backend(name: str) -> str:
    """The backend for `name`; `auto` takes the first that can run here. Raises ConfigError saying why none can."""
    if name == "auto":
        for entry in BACKENDS:
            if entry.name not in _CHOSEN_BY_NAME_ONLY and entry.obstacle() is None:
                return entry.name
        raise ConfigError("--backend", f"no backend can run here: {explain()}")
    entry = _entry(name)
    obstacle = entry.obstacle(named=True)
    if obstacle is not None:
        raise ConfigError("--backend", f"{name}: {obstacle}; here: {explain(name)}")
    return name


def spread(name: str, parallel: ParallelConfig) -> dict[str, int]:
    """What the backend's `create` is told about devices; nothing for one that knows a single device.

    Raises ConfigError when the backend does not spread a model as asked.
    """
    entry = _entry(name)
    if parallel.nnodes > 1 and entry.hosts is None:
        able = " or ".join(entry.name for entry in BACKENDS if entry.hosts is not None)
        raise ConfigError("--nnodes", f"{name} runs a model on one host; use 1, or --backend {able} on every host")
    asked = {"tensor": parallel.tensor_parallel_size, "data": parallel.data_parallel_size}
    for kind, size in asked.items():
        if size > 1 and kind not in entry.spreads:
            raise ConfigError(f"--{kind}-parallel-size", _not_spread(entry, kind))
    _check_executor(entry, parallel)
    return {kind: asked[kind] for kind in entry.spreads}


def _not_spread(entry: Entry, kind: str) -> str:
    if entry.ranks is not None:
        return (
            f"{entry.name} runs one copy of a model per server; use 1, and start several servers, each with GPUs of "
            "its own (CUDA_VISIBLE_DEVICES) and a --port of its own, behind a load balancer"
        )
    able = " or ".join(each.name for each in BACKENDS if kind in each.spreads)
    return f"{entry.name} runs a model on one device; use 1, or --backend {able} where there are more"


def _check_executor(entry: Entry, parallel: ParallelConfig) -> None:
    """Raises ConfigError when the backend's ranks are not started as asked."""
    flag, asked = "--distributed-executor-backend", parallel.distributed_executor_backend
    if entry.ranks is None and asked == "ray":
        raise ConfigError(flag, f"{entry.name} drives all devices of a host from one process; use uni, or drop it")
    if entry.ranks is not None and asked == "uni" and (size := parallel.tensor_parallel_size) > 1:
        raise ConfigError(flag, f"uni is one process, {entry.name} needs {size} for {size} GPUs; use mp, or drop it")


def runs_ranks(name: str, parallel: ParallelConfig) -> bool:
    """Whether the backend shares the model among processes of its own, a device each."""
    return _entry(name).ranks is not None and parallel.tensor_parallel_size > 1


def load_rank_runtime(name: str) -> RankRuntime:
    """Import what a backend needs of ranks; it has them, says `runs_ranks`."""
    module = _entry(name).ranks
    assert module is not None, "runs_ranks() comes first"
    return cast(RankRuntime, importlib.import_module(module))


def load_host_runtime(name: str) -> HostRuntime:
    """Import what a backend needs of several hosts; it runs on them, says `spread`."""
    choose_backend(name)
    module = _entry(name).hosts
    assert module is not None, "spread() comes first"
    return cast(HostRuntime, importlib.import_module(module))


def check_checkpoints(name: str) -> None:
    """Raises ConfigError when a backend does not read the checkpoints of `convert`."""
    if not _entry(name).checkpoints:
        able = " or ".join(entry.name for entry in BACKENDS if entry.checkpoints)
        raise ConfigError(
            "--load-format",
            f"sharded_state is not read by {name}; use --backend {able}, or serve the model that was converted",
        )


def check_moves(name: str, *, sleep_mode: bool, cpu_offload_gb: float) -> dict[str, bool]:
    """What the backend's `create` is told about sleep. Raises ConfigError for a backend whose weights stay in place."""
    for flag, asked in (("--enable-sleep-mode", sleep_mode), ("--cpu-offload-gb", cpu_offload_gb > 0)):
        if asked and not _entry(name).moves_weights:
            able = " or ".join(entry.name for entry in BACKENDS if entry.moves_weights)
            raise ConfigError(flag, f"{name} leaves its memory where it is; drop it, or use --backend {able}")
    return {"sleep_mode": True} if sleep_mode else {}


def load_backend(name: str) -> BackendModule:
    """Import a backend that `choose_backend` returned; this may take seconds."""
    module = _entry(name).module
    assert module is not None, "choose_backend() comes first"
    return cast(BackendModule, importlib.import_module(module))


def pooling_spread(name: str, parallel: ParallelConfig) -> dict[str, int]:
    """What the `create` of a backend's models that pool is told about devices.

    Raises ConfigError when there are no such models, or when they are not spread as asked.
    """
    entry = _entry(name)
    if entry.pools is None:
        able = " or ".join(each.name for each in BACKENDS if each.pools is not None)
        raise ConfigError("--runner", f"pooling: {name} only generates; use --backend {able}")
    asked = {"tensor": parallel.tensor_parallel_size, "data": parallel.data_parallel_size, "nnodes": parallel.nnodes}
    for kind, size in asked.items():
        if size > 1 and kind not in entry.pool_spreads:
            flag = "--nnodes" if kind == "nnodes" else f"--{kind}-parallel-size"
            many = "in one copy" if kind in entry.spreads and entry.pool_spreads else "on one device, in one copy"
            raise ConfigError(flag, f"{name} runs a pooling model {many}; use 1, or start several servers")
    return {kind: asked[kind] for kind in entry.pool_spreads}


def load_pooling(name: str) -> PoolingModule:
    """Import what pools on a backend that `pooling_spread` let pass; this may take seconds."""
    module = _entry(name).pools
    assert module is not None, "pooling_spread() comes first"
    return cast(PoolingModule, importlib.import_module(module))


def load_compiler() -> CompilerModule:
    """Import what compiles for a TPU. Raises ConfigError when its packages are not installed."""
    choose_backend("jax_tpu")
    return cast(CompilerModule, importlib.import_module("pagoda.backends.jax_tpu.ahead_of_time.compile"))


def load_converter() -> ConverterModule:
    """Import what converts checkpoints. Raises ConfigError when its packages are not installed."""
    choose_backend("jax_tpu")
    return cast(ConverterModule, importlib.import_module("pagoda.backends.jax_tpu.weights.convert"))


def explain(chosen: str = "") -> str:
    """One line: what each backend but the chosen one lacks."""
    others = (entry for entry in BACKENDS if entry.name != chosen)
    return "; ".join(f"{entry.name}: {entry.obstacle() or 'available'}" for entry in others)


def _entry(name: str) -> Entry:
    for entry in BACKENDS:
        if entry.name == name:
            return entry
    raise ConfigError("--backend", f"{name} is unknown; use auto or one of {', '.join(e.name for e in BACKENDS)}")
