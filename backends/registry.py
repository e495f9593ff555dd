"""The registry of device backends: chosen by platform, imported only when chosen."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from pagoda.backends.modules import (
    BackendModule,
    CompilerModule,
    ConverterModule,
    DescriberModule,
    HostRuntime,
    PlannerModule,
    PoolingModule,
    RankRuntime,
    SchemeModule,
    SimulatorModule,
)
from pagoda.common.backend import ParallelSizes
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.config.tpu_host import chips_env, tpu_chips
from pagoda.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """A backend and what it supports."""

    name: str
    module: str
    needs: tuple[str, ...]  # packages it imports
    device: str
    install: str
    has_device: Callable[[], bool] = lambda: True  # called only if `needs` are installed
    without_device: Callable[[], bool] = lambda: False  # runs without the device, too, when chosen by name
    parallel: tuple[str, ...] = ()  # supported fields of ParallelSizes
    ranks: str | None = None  # RankRuntime, where each device has its own process
    hosts: str | None = None  # HostRuntime; None: one host only
    checkpoints: bool = False  # implements CheckpointBackend
    remedy: str = ""  # what to do without the device
    batch_invariant: bool = False  # a token's numbers can be independent of its batch
    drafters: bool = False  # drafter models run on its device
    drafter_parallel: tuple[str, ...] = ()  # as `parallel`, with a drafter model
    pooling: str | None = None  # PoolingModule; None: it only generates
    pooling_parallel: tuple[str, ...] = ()  # as `parallel`, for pooling models
    transformers: tuple[str, ...] = ()  # packages with which it runs models of the library transformers
    transformers_extra: str = "transformers"  # the extra that installs them
    pools_transformers: bool = False  # pools such models, too
    encoder_decoder: bool = False  # it runs the encoder-decoder models among them
    has_weights: bool = True  # False: neither read nor downloaded
    device_env: Callable[[int, int], Mapping[str, str]] = lambda engine, devices: {}
    """Called with the number of one of several engines on this host and its devices: returns environment variables that
    show it no others. Raises ConfigError if there are too few."""

    def obstacle(self, named: bool = False) -> str | None:
        """Return why this backend cannot run here, with the remedy. `named`: it was chosen by name."""
        missing = [package for package in self.needs if not _installed(package)]
        if missing:
            return f"{' and '.join(missing)} not installed; {self.install}"
        if not (named and self.without_device()) and not self.has_device():
            return f"no {self.device} found{self.remedy if named else ''}"
        return None


_NVIDIA_GPUS: Final = Path("/proc/driver/nvidia/gpus")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _has_cuda() -> bool:
    """Return whether there is an NVIDIA driver, without importing torch."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def _cuda_env(engine: int, devices: int) -> Mapping[str, str]:
    """Return CUDA_VISIBLE_DEVICES of an engine: the next GPUs of this process's. Raises ConfigError."""
    if TORCH_CUDA_DEVICE.is_on():
        return {}
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = engine * devices
    if stated is None:
        present = len(list(_NVIDIA_GPUS.glob("*")))  # 0: unknown, as under WSL2
        visible = [str(index) for index in range(present or first + devices)]
    else:
        visible = [each for each in stated.split(",") if each]
    own = visible[first : first + devices]
    if len(own) < devices:
        raise ConfigError(
            "--data-parallel-size",
            f"replica {engine} needs GPUs {first} to {first + devices - 1} and {len(visible)} are visible; lower it or "
            "--tensor-parallel-size, or show this process more (CUDA_VISIBLE_DEVICES)",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _tpu_env(engine: int, devices: int) -> Mapping[str, str]:
    """Return libtpu's variables for an engine on some of this host's chips; none without a TPU. Raises ConfigError."""
    chips = tpu_chips()
    return chips_env(chips, engine, devices) if chips else {}


def _has_tpu() -> bool:
    """Return whether this is a Cloud TPU host, by its chips on the PCI bus."""
    return bool(tpu_chips())


BACKENDS: Final[tuple[Entry, ...]] = (
    Entry(
        "jax_tpu",
        "pagoda.backends.jax_tpu.backend",
        ("jax", "flax"),
        "TPU",
        "pip install 'pagoda[tpu]'",
        _has_tpu,
        device_env=_tpu_env,
        without_device=lambda: True,
        parallel=("tensor", "data"),
        hosts="pagoda.backends.jax_tpu.hosts",
        checkpoints=True,
        batch_invariant=True,
        drafters=True,
        drafter_parallel=("tensor", "data"),
        pooling="pagoda.backends.jax_tpu.pooling",
        pooling_parallel=("tensor",),
        transformers=("transformers", "torch", "torchax"),
        transformers_extra="torchax",
    ),
    Entry(
        "torch_cuda",
        "pagoda.backends.torch_cuda.backend",
        ("torch", "triton"),
        "NVIDIA GPU",
        "pip install 'pagoda[cuda]'",
        _has_cuda,
        device_env=_cuda_env,
        parallel=("tensor",),
        ranks="pagoda.backends.torch_cuda.parallel.ranks",
        without_device=TORCH_CUDA_DEVICE.is_on,
        remedy=": install its driver, or use --backend reference",
        batch_invariant=True,
        pooling="pagoda.backends.torch_cuda.pooling",
        transformers=("transformers",),
        pools_transformers=True,
        drafters=True,
        drafter_parallel=("tensor",),
    ),
    Entry(
        "reference",
        "pagoda.backends.reference.backend",
        ("torch",),
        "CPU",
        "pip install 'pagoda[cpu]'",
        batch_invariant=True,
        drafters=True,
        pooling="pagoda.backends.reference.pooling",
        transformers=("transformers",),
        pools_transformers=True,
        encoder_decoder=True,
    ),
    Entry("simulated", "pagoda.backends.simulated.backend", (), "device", "", parallel=("tensor",), has_weights=False),
)
"""In order of preference."""

_CHOSEN_BY_NAME_ONLY: Final = frozenset({"simulated"})


def choose_backend(name: str) -> str:
    """Return the backend for `name`; `auto`: the first that can run here. Raises ConfigError with the obstacles."""
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


def parallel_sizes(name: str, parallel: ParallelConfig) -> ParallelSizes:
    """Return how the backend distributes a model, of sizes that `backend_support` allows on it. Raises ConfigError."""
    entry = _entry(name)
    sizes = _sizes_of_engine(name, parallel)
    flag = "--distributed-executor-backend"
    executor = parallel.distributed_executor_backend
    if entry.ranks is not None and executor == "uni" and (size := parallel.tensor_parallel_size) > 1:
        raise ConfigError(flag, f"uni is one process, {entry.name} needs {size} for {size} GPUs; use mp, or drop it")
    return ParallelSizes(**{kind: sizes[kind] for kind in entry.parallel}, engines=num_engines(name, parallel))


def num_engines(name: str, parallel: ParallelConfig) -> int:
    """Return how many engine processes the replicas of a model run in, of settings that `backend_support` allows."""
    one_program = "data" in _entry(name).parallel and parallel.data_parallel_mode != "engines"
    return 1 if one_program else parallel.data_parallel_size


def _sizes_of_engine(name: str, parallel: ParallelConfig) -> dict[str, int]:
    """Return what each engine's model is distributed over, by kind."""
    data = parallel.data_parallel_size // num_engines(name, parallel)
    return {"tensor": parallel.tensor_parallel_size, "data": data, "nnodes": parallel.nnodes}


def device_env(name: str, parallel: ParallelConfig, engine: int) -> Mapping[str, str]:
    """Return the environment variables that show one of several engines its devices. Raises ConfigError."""
    return _entry(name).device_env(engine, parallel.tensor_parallel_size)


def runs_ranks(name: str, parallel: ParallelConfig) -> bool:
    """Return whether the model is sharded over several processes, one device each."""
    return _entry(name).ranks is not None and parallel.tensor_parallel_size > 1


def load_rank_runtime(name: str) -> RankRuntime:
    """Import a backend's support for ranks, after `runs_ranks`."""
    return cast(RankRuntime, _load(_entry(name).ranks))


def load_host_runtime(name: str) -> HostRuntime:
    """Import a backend's multi-host support, after `parallel_sizes`."""
    choose_backend(name)
    return cast(HostRuntime, _load(_entry(name).hosts))


def check_checkpoints(name: str) -> None:
    """Raise ConfigError if the backend does not read the checkpoints of `convert`."""
    if not _entry(name).checkpoints:
        able = _names(lambda each: each.checkpoints)
        raise ConfigError(
            "--load-format",
            f"sharded_state is not read by {name}; use --backend {able}, or serve the model that was converted",
        )


def check_batch_invariant(name: str) -> None:
    """Raise ConfigError if the backend's numbers depend on the batch."""
    if not _entry(name).batch_invariant:
        able = _names(lambda each: each.batch_invariant)
        raise ConfigError("--batch-invariant", f"{name} does not support it; drop it, or use --backend {able}")


def check_drafters(name: str, method: str, parallel: ParallelConfig) -> None:
    """Raise ConfigError if the backend does not run drafter models, or not on this number of devices."""
    entry = _entry(name)
    if not entry.drafters:
        able = _names(lambda each: each.drafters)
        raise ConfigError(
            "--speculative-config",
            f"method {method}: {name} runs no drafter models; use --backend {able}, or method ngram or suffix",
        )
    sizes = _sizes_of_engine(name, parallel)
    for kind, size in sizes.items():
        if size > 1 and kind not in entry.drafter_parallel:
            flag = "--nnodes" if kind == "nnodes" else f"--{kind}-parallel-size"
            where = "one host" if entry.drafter_parallel else "one device"
            raise ConfigError("--speculative-config", f"method {method}: {name} runs drafters on {where}; drop {flag}")


def load_schemes(name: str) -> SchemeModule:
    """Import what a backend does with quantised matrices, without the packages that it computes with."""
    return cast(SchemeModule, importlib.import_module(f"pagoda.backends.{_entry(name).name}.schemes"))


def load_backend(name: str) -> BackendModule:
    """Import a backend that `choose_backend` returned. May take seconds."""
    return cast(BackendModule, _load(_entry(name).module))


def has_weights(name: str) -> bool:
    """Return whether the backend computes with weights; else they are neither read nor downloaded."""
    return _entry(name).has_weights


def load_simulator() -> SimulatorModule:
    """Import the backend without a device."""
    return cast(SimulatorModule, load_backend("simulated"))


def load_planner() -> PlannerModule:
    """Import capacity planning over simulated devices."""
    return cast(PlannerModule, _load("pagoda.backends.simulated.planner"))


def pooling_parallel_sizes(name: str, parallel: ParallelConfig) -> ParallelSizes:
    """Return how the backend distributes a pooling model. Raises ConfigError if it is not supported."""
    entry = _entry(name)
    if entry.pooling is None:
        able = _names(lambda each: each.pooling is not None)
        raise ConfigError("--runner", f"pooling: {name} only generates; use --backend {able}")
    sizes = _sizes_of_engine(name, parallel)
    for kind, size in sizes.items():
        if size > 1 and kind not in entry.pooling_parallel:
            flag = "--nnodes" if kind == "nnodes" else f"--{kind}-parallel-size"
            many = "in one copy" if kind in entry.parallel and entry.pooling_parallel else "on one device, in one copy"
            raise ConfigError(flag, f"{name} runs a pooling model {many}; use 1, or start several servers")
    kinds = {kind: sizes[kind] for kind in entry.pooling_parallel}
    return ParallelSizes(**kinds, engines=num_engines(name, parallel))


def load_pooling(name: str) -> PoolingModule:
    """Import a backend's pooling module, after `pooling_parallel_sizes`. May take seconds."""
    return cast(PoolingModule, _load(_entry(name).pooling))


def load_describer(name: str, *, pooling: bool = False) -> DescriberModule:
    """Import what describes models of the library transformers to a backend. May take seconds.

    Raises ConfigError if the backend cannot run (or pool) them, or the library is not installed.
    """
    entry = _entry(name)
    if pooling and entry.transformers and not entry.pools_transformers:
        able = _names(lambda each: each.pools_transformers)
        raise ConfigError("--model-impl", f"transformers: {name} does not pool its models; use --backend {able}")
    if not entry.transformers:
        able = _names(lambda each: bool(each.transformers))
        raise ConfigError("--model-impl", f"transformers: {name} does not run its models; use --backend {able}")
    if missing := [package for package in entry.transformers if not _installed(package)]:
        extra = f"pip install 'pagoda[{entry.transformers_extra}]'"
        others = "" if missing == ["transformers"] else ", or use --backend reference"
        raise ConfigError("--model-impl", f"{' and '.join(missing)} is not installed; {extra}{others}")
    return cast(DescriberModule, _load("pagoda.backends.fallback.describe"))


def check_encoder_decoder(name: str) -> None:
    """Raise ConfigError if the backend does not run encoder-decoder models."""
    if not _entry(name).encoder_decoder:
        able = _names(lambda each: each.encoder_decoder)
        raise ConfigError("--backend", f"{name} does not run encoder-decoder models; use {able}")


def load_compiler() -> CompilerModule:
    """Import the TPU compiler. Raises ConfigError if its packages are not installed."""
    choose_backend("jax_tpu")
    return cast(CompilerModule, _load("pagoda.backends.jax_tpu.ahead_of_time.compile"))


def load_converter() -> ConverterModule:
    """Import the checkpoint converter. Raises ConfigError if its packages are not installed."""
    choose_backend("jax_tpu")
    return cast(ConverterModule, _load("pagoda.backends.jax_tpu.weights.convert"))


def explain(chosen: str = "") -> str:
    """Return one line on what each backend but the chosen one lacks."""
    others = (entry for entry in BACKENDS if entry.name != chosen)
    return "; ".join(f"{entry.name}: {entry.obstacle() or _available(entry)}" for entry in others)


def _available(entry: Entry) -> str:
    return "chosen by name only" if entry.name in _CHOSEN_BY_NAME_ONLY else "available"


def _load(module: str | None) -> object:
    assert module is not None, "the backend lacks it: its check comes first"
    return importlib.import_module(module)


def _names(able: Callable[[Entry], bool]) -> str:
    return " or ".join(entry.name for entry in BACKENDS if able(entry))


def _entry(name: str) -> Entry:
    for entry in BACKENDS:
        if entry.name == name:
            return entry
    raise ConfigError("--backend", f"{name} is unknown; use auto or one of {', '.join(e.name for e in BACKENDS)}")
