"""`pagoda doctor`: check this machine, and report what to fix before a server is started on it.

A check yields findings with their remedy and never raises.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pagoda.backends.registry import (
    BACKENDS,
    Entry,
    choose_backend,
    device_env,
    load_host_runtime,
    load_rank_runtime,
    num_engines,
    parallel_sizes,
    runs_ranks,
)
from pagoda.common.config import backend_support, env
from pagoda.common.config.commands import COMMAND_SETTINGS, DoctorConfig
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.config.settings import build, from_environment
from pagoda.common.config.tpu_host import check_alone, check_chips, num_devices, tpu_chips
from pagoda.common.errors import ConfigError, PagodaError
from pagoda.common.observe.redact import Redactor
from pagoda.common.weights.hub import is_hub_id, split_quant
from pagoda.server.cli.diagnosis import machine
from pagoda.server.settings.flags import resolve_settings

if TYPE_CHECKING:
    from packaging.requirements import Requirement


Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of output."""

    level: Level
    subject: str
    text: str  # The observation and, unless ok, the remedy.


Findings: TypeAlias = Iterator[Finding]
Check: TypeAlias = Callable[[DoctorConfig], Findings]

SETTINGS: Final = COMMAND_SETTINGS["doctor"]


def run(args: argparse.Namespace) -> int:
    """Print a line per finding. Returns 1 if something would prevent the server from starting."""
    config = build(DoctorConfig, resolve_settings(args, SETTINGS).values)
    redact = Redactor()
    findings: list[Finding] = []
    for check in CHECKS:
        for finding in check(config):
            findings.append(finding)
            print(f"{finding.level:<6}{finding.subject:<15}{redact(' '.join(finding.text.split()))}", flush=True)
    fails, warnings = (sum(finding.level == level for finding in findings) for level in ("fail", "warn"))
    print(f"{fails} errors, {warnings} warnings" if fails or warnings else "nothing to fix")
    return 1 if fails else 0


def backends(config: DoctorConfig) -> Findings:
    """Check which backend would run, and why the others would not."""
    try:
        chosen = choose_backend(config.backend)
    except ConfigError as error:
        yield Finding("fail", "backend", str(error).partition("; here: ")[0])
        chosen = ""
    for entry in BACKENDS:
        obstacle = entry.obstacle()
        if entry.name == chosen:
            yield _chosen_backend(entry)
        elif entry.name == config.backend or not entry.needs:
            continue
        elif obstacle is not None and entry.name != "reference" and entry.has_device():
            yield Finding("warn", "backend", f"{entry.name}: a {entry.device} is present, but: {obstacle}")
        else:
            yield Finding(
                "ok",
                "backend",
                f"{entry.name} is not used: {obstacle or (f'{chosen} comes first' if chosen else 'not selected')}",
            )


def _chosen_backend(entry: Entry) -> Finding:
    """Return the finding of the chosen backend, from its framework where that knows more than the device files."""
    try:
        if entry.hosts is not None:
            count, kind = load_host_runtime(entry.name).devices()
            if not count:
                return Finding("fail", "backend", f"{entry.name}: JAX_PLATFORMS names a {entry.device}, there is none")
            if kind == "cpu":
                why = "JAX_PLATFORMS names it first" if entry.has_device() else f"there is no {entry.device}"
                return Finding("warn", "backend", f"{entry.name}, on this machine's CPU, which is for tests: {why}")
        if entry.ranks is None:
            return Finding("ok", "backend", f"{entry.name}, on {entry.device}")
        runtime = load_rank_runtime(entry.name)
        runtime.check_devices(1)
    except (ConfigError, ImportError, OSError) as error:
        return Finding("fail", "backend", str(error))
    return Finding("ok", "backend", f"{entry.name}, on {entry.device if runtime.needs_gpu() else 'CPU tensors'}")


def parallelism(config: DoctorConfig) -> Findings:
    """Check that the parallel sizes fit the devices, if more than one is requested."""
    tensor = config.tensor_parallel_size
    data = config.data_parallel_size
    wanted = tensor * data
    if wanted == 1:
        return
    try:
        parallel = ParallelConfig(tensor_parallel_size=tensor, data_parallel_size=data)
        backend = choose_backend(config.backend)
        backend_support.check_settings(EngineConfig(parallel=parallel), backend)
        parallel_sizes(backend, parallel)
        engines = num_engines(backend, parallel)
        if ranks := runs_ranks(backend, parallel):
            load_rank_runtime(backend).check_devices(wanted)
        for engine in range(engines if engines > 1 else 0):
            device_env(backend, parallel, engine)
    except (ConfigError, ImportError, OSError) as error:
        yield Finding("fail", "spread", str(error).partition("; here: ")[0])
        return
    if ranks:
        yield Finding("ok", "spread", f"{wanted} ranks have a device each")
        return
    if engines > 1:
        yield Finding("ok", "spread", f"{engines} replicas have an engine each")
        return
    present = num_devices(tpu_chips())
    if present < wanted:
        yield Finding(
            "warn", "spread", f"{wanted} devices are requested, {present} are present; reduce the parallel sizes"
        )
    else:
        yield Finding("ok", "spread", f"{wanted} of {present} devices")


MIN_DISK_BYTES: Final = 10 * machine.GIB


def folders(config: DoctorConfig) -> Findings:
    """Check free space and permissions of the folders for downloads and sockets."""
    cache = machine.hub_cache(config.download_dir)
    yield _folder("downloads", cache, "--download-dir or HF_HOME", MIN_DISK_BYTES)
    yield _folder("sockets", Path(config.rpc_base_path or tempfile.gettempdir()), "--rpc-base-path or TMPDIR", 2**20)
    shared = Path("/dev/shm")
    if shared.exists():
        yield Finding(
            "ok", "shared memory", f"{machine.gib(machine.free_bytes(shared))} free; the engine does not use it"
        )


def _folder(subject: str, folder: Path, remedy: str, enough: int) -> Finding:
    try:
        if not os.access(machine.existing(folder), os.W_OK | os.X_OK):
            return Finding("fail", subject, f"{folder} is not writable; choose another with {remedy}")
        free = machine.free_bytes(folder)
    except OSError as error:
        return Finding("fail", subject, f"{folder}: {error.strerror or error}; choose another with {remedy}")
    if free < enough:
        return Finding(
            "warn", subject, f"{folder} has {machine.gib(free)} left; free some space, or choose another with {remedy}"
        )
    return Finding("ok", subject, f"{folder}, {machine.gib(free)} free")


MIN_OPEN_FILES: Final = 4096
MIN_MEMORY_BYTES: Final = 2 * machine.GIB


def devices(config: DoctorConfig) -> Findings:
    """Check device files and drivers of GPUs and TPUs."""
    nvidia = machine.device_files("nvidia[0-9]*", "nvidiactl")
    listed, problem = machine.gpus()
    if listed:
        yield from (Finding("ok", "gpu", line) for line in listed)
    elif nvidia:
        yield Finding("warn", "gpu", f"{nvidia[0]} exists, but {problem}; install the matching driver and its tools")
    elif problem and problem != "nvidia-smi is not installed":
        yield Finding("warn", "gpu", f"{problem}; a GPU needs the driver, and in a container docker run --gpus all")
    else:
        yield Finding("ok", "gpu", "none")
    yield from _tpus()


def _tpus() -> Findings:
    """Check chips on the PCI bus, and the permissions of their device files."""
    chips = tpu_chips()
    if not chips:
        yield Finding("ok", "tpu", "none")
        return
    try:
        check_chips(chips)
        check_alone(chips)
    except ConfigError as error:
        yield Finding("warn", "tpu", str(error))
    closed = [path for path in machine.tpu_files() if not os.access(path, os.R_OK | os.W_OK)]
    for path in closed:
        yield Finding("warn", "tpu", f"no permission to open {path}; run as root, or docker run --privileged")
    if not closed:
        yield Finding("ok", "tpu", f"{len(chips)} chips {chips[0].name.lower()}, {num_devices(chips)} devices")


def processor(config: DoctorConfig) -> Findings:
    """Check vector instructions, number of cores and the container's CPU quota."""
    features = ", ".join(machine.vector_features()) or "no known vector instructions"
    note = "" if machine.has_bfloat16() else "; no bfloat16, so products run in float32 and weights take more memory"
    yield Finding("ok", "processor", f"{machine.processor()}: {features}{note}")
    cores = machine.cores()
    quota = machine.cpu_quota()
    if quota is not None and quota < cores and env.OMP_NUM_THREADS.read() is None:
        threads = max(1, int(quota))
        yield Finding(
            "warn", "cores", f"{cores}, but the container's quota is {quota:g}; set OMP_NUM_THREADS={threads}"
        )
    else:
        yield Finding("ok", "cores", str(cores) if quota is None else f"{cores}, quota {quota:g}")


def memory(config: DoctorConfig) -> Findings:
    total, free = machine.memory()
    text = f"{machine.gib(free)} of {machine.gib(total)} free"
    if free < MIN_MEMORY_BYTES:
        yield Finding("warn", "memory", f"{text}; end other programs, or set --kv-cache-memory-bytes low")
    else:
        yield Finding("ok", "memory", text)


def limits(config: DoctorConfig) -> Findings:
    """Check the limit of open files: each client connection uses one."""
    files = machine.limit("RLIMIT_NOFILE")
    if files is not None and files < MIN_OPEN_FILES:
        yield Finding("warn", "open files", f"at most {files}, one per client; run ulimit -n 65536 first")
    else:
        yield Finding("ok", "open files", "no limit" if files is None else f"at most {files}")


def model(config: DoctorConfig) -> Findings:
    """Check that a local model can be served."""
    if config.model is None:
        return
    path = Path(config.model).expanduser()
    if not path.exists() and is_hub_id(split_quant(config.model)[0]) and not _is_downloaded(config):
        yield Finding("ok", "model", f"{config.model} is not on this machine; serve would download it from the hub")
        return
    from pagoda.server.settings.flags import EngineArgs
    from pagoda.server.settings.resolve import resolve

    try:
        engine_args = EngineArgs(
            config.model,
            backend=config.backend,
            download_dir=config.download_dir,
            tensor_parallel_size=config.tensor_parallel_size,
            data_parallel_size=config.data_parallel_size,
        )
        resolved = resolve(engine_args.create_engine_config(), "server")
    except PagodaError as error:
        yield Finding("fail", "model", str(error))
        return
    yield Finding("ok", "model", f"{config.model}: {resolved.dtype}, up to {resolved.limits.max_model_len} tokens")


def _is_downloaded(config: DoctorConfig) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository = (config.model or "").partition(":")[0]
    cache = machine.hub_cache(config.download_dir)
    try:
        return isinstance(try_to_load_from_cache(repository, "config.json", cache_dir=cache), str)
    except (HFValidationError, OSError):
        return False


HUB_SECONDS: Final = 5.0


def port(config: DoctorConfig) -> Findings:
    """Check that the server could listen on its address."""
    from pagoda.server.cli.serving.serve import bind

    server = ServerConfig(host=config.host, port=config.port)
    try:
        bind(server).close()
    except ConfigError as error:
        yield Finding("fail", "port", str(error))
    else:
        yield Finding("ok", "port", f"{server.address}:{config.port} is free")


def hub(config: DoctorConfig) -> Findings:
    if env.HF_HUB_OFFLINE.is_on():
        yield Finding("ok", "hub", "HF_HUB_OFFLINE is set: only downloaded models can be used")
        return
    from huggingface_hub import constants

    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=HUB_SECONDS):
            yield Finding("ok", "hub", "reachable")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        yield Finding(
            "warn",
            "hub",
            f"not reachable ({reason}); check network and proxy, or serve local files with HF_HUB_OFFLINE=1",
        )


_EXTRAS: Final = {"reference": "cpu", "torch_cuda": "cuda", "jax_tpu": "tpu"}  # Backend -> the extra that installs it.


def python_version(config: DoctorConfig) -> Findings:
    """Check the interpreter against the supported range."""
    version = platform.python_version()
    supported, _ = machine.project()
    if not supported or _within(version, supported) is not False:
        yield Finding("ok", "python", version)
    else:
        yield Finding(
            "fail", "python", f"{version} is outside {supported}; create an environment with a supported Python"
        )


def packages(config: DoctorConfig) -> Findings:
    """Check installed versions against the requirements of the base and of the backend's extra."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Finding("warn", "packages", "versions cannot be compared; pip install packaging")
        return
    extras = {"gguf", "uvloop", _EXTRAS.get(_chosen(config), "")}
    good = 0
    wanted = list(_applying(map(Requirement, machine.project()[1]), extras))
    for requirement in list(wanted):  # The requirement "jax[tpu]" needs a libtpu version.
        wanted += _applying(map(Requirement, machine.requires(requirement.name)), requirement.extras, base=False)
    for requirement in wanted:
        optional = _is_optional(requirement)
        installed = machine.version(requirement.name)
        remedy = f"pip install '{requirement.name}{requirement.specifier}'"
        if installed is None and not optional:
            yield Finding("fail", "packages", f"{requirement.name} is not installed; {remedy}")
        elif installed is not None and not requirement.specifier.contains(installed, prereleases=True):
            yield Finding("warn", "packages", f"{requirement.name} {installed} is not a tested version; {remedy}")
        else:
            good += installed is not None
    yield Finding("ok", "packages", f"{good} within the tested ranges")


def _applying(requirements: Iterable[Requirement], extras: Collection[str], base: bool = True) -> Iterator[Requirement]:
    """Yield the requirements of these extras and, if `base`, of the base install."""
    for requirement in requirements:
        if not _is_optional(requirement):
            if base:
                yield requirement
        elif any(requirement.marker.evaluate({"extra": extra}) for extra in extras if extra):  # type: ignore[union-attr]
            yield requirement


def _is_optional(requirement: Requirement) -> bool:
    return requirement.marker is not None and "extra" in str(requirement.marker)


def environment(config: DoctorConfig) -> Findings:
    """Check for environment variables without effect, refused or invalid."""
    settings = COMMAND_SETTINGS["serve"]
    clean = True
    try:
        from_environment([settings])
        for note in env.notes(settings={name for settings in COMMAND_SETTINGS.values() for name in settings}):
            clean = False
            yield Finding("warn", "environment", note)
    except ConfigError as error:
        yield Finding("fail", "environment", str(error))
    else:
        if clean:
            yield Finding("ok", "environment", "no variable without effect")


def _chosen(config: DoctorConfig) -> str:
    try:
        return choose_backend(config.backend)
    except ConfigError:
        return config.backend


def _within(version: str, wanted: str) -> bool | None:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return None
    return SpecifierSet(wanted).contains(version, prereleases=True)


CHECKS: Final[tuple[Check, ...]] = (
    *(python_version, packages, backends, devices, parallelism, processor, memory, folders),
    *(port, hub, limits, environment, model),
)
