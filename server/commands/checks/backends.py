"""Which backend would run here, and on how many devices."""

from __future__ import annotations

from pagoda.backends.registry import BACKENDS, Entry, choose_backend, load_rank_runtime, runs_ranks, spread
from pagoda.common.config.doctor import DoctorConfig
from pagoda.common.config.parallel import ParallelConfig
from pagoda.common.errors import ConfigError
from pagoda.server.commands.checks import machine
from pagoda.server.commands.checks.finding import Finding, Findings


def backends(config: DoctorConfig) -> Findings:
    """Which backend would run, and why the others would not."""
    try:
        chosen = choose_backend(config.backend)
    except ConfigError as error:
        yield Finding("fail", "backend", str(error).partition("; here: ")[0])
        chosen = ""
    for entry in BACKENDS:
        obstacle = entry.obstacle()
        if entry.name == chosen:
            yield _serving(entry)
        elif entry.name == config.backend or not entry.needs:
            continue
        elif obstacle is not None and entry.name != "reference" and entry.has_device():
            yield Finding("warn", "backend", f"{entry.name}: there is a {entry.device}, but: {obstacle}")
        else:
            yield Finding(
                "ok",
                "backend",
                f"{entry.name} is not used: {obstacle or (f'{chosen} comes first' if chosen else 'nobody asked')}",
            )


def _serving(entry: Entry) -> Finding:
    """The chosen backend; its framework is asked about the device where that knows more than the machine tells."""
    if entry.ranks is None:
        return Finding("ok", "backend", f"{entry.name}, on {entry.device}")
    runtime = load_rank_runtime(entry.name)
    try:
        runtime.check_devices(1)
    except (ConfigError, ImportError, OSError) as error:
        return Finding("fail", "backend", str(error))
    return Finding("ok", "backend", f"{entry.name}, on {entry.device if runtime.needs_gpu() else 'CPU tensors'}")


def spreading(config: DoctorConfig) -> Findings:
    """Whether a model can be spread as asked, where that is over more than one device."""
    tensor, data = config.tensor_parallel_size, config.data_parallel_size
    wanted = tensor * data
    if wanted == 1:
        return
    try:
        asked = ParallelConfig(tensor_parallel_size=tensor, data_parallel_size=data)
        backend = choose_backend(config.backend)
        spread(backend, asked)
        if ranks := runs_ranks(backend, asked):
            load_rank_runtime(backend).check_devices(tensor)
    except (ConfigError, ImportError, OSError) as error:
        yield Finding("fail", "spread", str(error).partition("; here: ")[0])
        return
    if ranks:
        yield Finding("ok", "spread", f"{tensor} ranks have a device each")
        return
    chips = len(machine.device_files("accel[0-9]*", "vfio/[0-9]*"))
    if chips < wanted:
        yield Finding("warn", "spread", f"{wanted} devices are asked for, here are {chips} chips; use what is there")
    else:
        yield Finding("ok", "spread", f"{wanted} of {chips} chips")
