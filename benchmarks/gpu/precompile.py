"""Fill Triton's cache with the kernels of stages: programs are compiled, nothing is launched, no GPU is needed.

usage: python -m pagoda.benchmarks.gpu.precompile [--processes N] [--key KEY] [--launchers FILE] STAGE ...

Runs the numbers of each stage on meta tensors, up to every launch: arguments are bound as on the GPU, so exactly what
the GPU needs is compiled. Numbers fail where they use results, which is ignored. The chip is that of the local GPU, or
sm_90. --key: the identity of the Triton that will read the cache, in place of the local one's. --launchers: a file for
the C sources of the launchers of all kernels.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.backend import create
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.stream import CpuStream
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip, find_chip
from pagoda.backends.torch_cuda.sampling import CudaSampler
from pagoda.benchmarks.gpu.measure import Bench
from pagoda.benchmarks.gpu.parity import SMALL
from pagoda.benchmarks.gpu.stages import STAGES, numbers_of
from pagoda.common.backend import BackendOptions
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params

META = torch.device("meta")


class AbsentGpu:
    """What Triton asks of a driver before a launch."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class AbsentDevice(Device):
    """A meta device that runs kernels."""

    use_kernels = True


class AbsentBench(Bench):
    """Runs everything once, kernels included."""

    use_kernel = True

    def median_ms(self, run: Callable[[int], object], repeats: int = 30, warmup: int = 5) -> float:
        run(0)
        return 1.0

    def recorded(self, calls: list[Callable[[], object]]) -> Callable[[], None]:
        calls[0]()
        return lambda: None


class AbsentStream(CpuStream):
    """Copies to the host give zeros."""

    def fetch(self, tensor: Tensor) -> Any:
        return super().fetch(torch.zeros(tensor.shape, dtype=tensor.dtype))


SETTINGS = ("max_num_batched_tokens", "max_num_seqs", "kv_cache_dtype", "quantization")
"""Settings that kernels depend on."""


class WarmEngine:
    """Replaces pagoda.LLM: warms a backend up as serving would, then raises WarmError."""

    done: ClassVar[set[str]] = set()

    def __init__(
        self, chip: Chip, folder: str, *, backend: str, dtype: str, max_model_len: int, **settings: Any
    ) -> None:
        path = Path(folder, "config.json")
        config = json.loads(path.read_text()) if path.is_file() else SMALL
        settings = {name: value for name, value in settings.items() if name in SETTINGS}
        key = json.dumps([config, dtype, max_model_len, settings])
        if backend == "torch_cuda" and key not in self.done:
            self.done.add(key)
            warm_up(chip, config, dtype, max_model_len, settings)
        raise WarmError


def send(_: CudaSampler, numbers: npt.ArrayLike) -> Tensor:
    """Replaces the sampler's copy to the device."""
    return torch.from_numpy(np.array(numbers, order="C")).to(META)


class WarmError(Exception):
    """Every program of an engine has been compiled."""


def warm_up(chip: Chip, config: dict, dtype: str, max_model_len: int, settings: dict) -> None:
    """Run every warm-up step of a backend, for one layer of the model: the others are alike."""
    spec, _ = spec_from_config(config | {"num_hidden_layers": 1})
    limits = Limits(
        max_model_len=max_model_len,
        max_num_batched_tokens=settings.get("max_num_batched_tokens", 8192),
        max_num_seqs=settings.get("max_num_seqs", 256),
        block_size=16,
    )
    options = BackendOptions(
        spec=spec,
        limits=limits,
        layout=kv_layout(spec, limits.block_size),
        cache=CacheConfig(cache_dtype=settings.get("kv_cache_dtype", "auto")),
        dtype=dtype,
        quantization=settings.get("quantization"),
    )
    backend = create(options, AbsentDevice(META, chip, chip.name))
    CudaSampler._send = send  # type: ignore[method-assign]
    backend._stream = AbsentStream(backend.config.device)
    backend.load((each.name, np.empty(each.shape, np.float32)) for each in params(spec).values())
    backend.init_cache((2,) * len(options.layout.pools))
    backend._warmup_plans.minimal = lambda: backend._warmup_plans.all(backend.config.graph_sizes.sizes)  # as on a GPU
    backend.warmup()
    backend.close()


def stop_at_launch(capability: int) -> list[Any]:
    """Make kernel launches stop at the compiled program. Return the list of programs, which grows."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    programs: list[Any] = []
    run = JITFunction.run

    def bind(self: JITFunction, *args: Any, **how: Any) -> Any:
        program = run(self, *args, **{**how, "warmup": True})
        programs.append(program)
        return program

    driver.set_active(AbsentGpu(capability))
    JITFunction.run = bind
    return programs


def launcher_sources(programs: list[Any]) -> set[str]:
    """Return the C source of the launcher of each signature."""
    from triton.backends.nvidia.driver import make_launcher

    sources = set()
    for program in {id(one): one for one in programs}.values():
        source = program.src
        constants = {
            (source.fn.arg_names.index(at),) if isinstance(at, str) else at: x for at, x in source.constants.items()
        }
        signature = dict(source.signature.items())
        sources.add(make_launcher(constants, signature, getattr(program.metadata, "tensordesc_meta", None)))
    return sources


def compile_share(stages: list[str], capability: int, sms: int, share: int, shares: int, *, verbose: bool) -> list[Any]:
    """Run every `shares`-th number, beginning with number `share`. Return the programs."""
    import pagoda

    programs = stop_at_launch(capability)
    chip = find_chip(divmod(capability, 10), sms)
    pagoda.LLM = lambda folder, **settings: WarmEngine(chip, folder, **settings)  # type: ignore[attr-defined,misc]
    bench = AbsentBench(META, chip)
    numbers = ((part, number) for stage in stages for part in STAGES[stage] for number in numbers_of(part, bench))
    for at, (part, number) in enumerate(numbers):
        if at % shares == share:
            before = len(programs)
            try:
                number.run()
            except Exception as error:
                if verbose:
                    print(f"{part}/{number.name}: {len(programs) - before} launches", file=sys.stderr)
                    traceback.print_exception(error, limit=-9, file=sys.stderr)
    return programs


def compile_in_processes(arguments: list[str], processes: int, launchers: Path | None) -> int:
    """Distribute the numbers over processes of this program. Return how many programs they compiled or found."""
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [Path(scratch, str(share)) for share in range(processes)]
        command = [sys.executable, "-m", "pagoda.benchmarks.gpu.precompile", *arguments]
        running = [
            subprocess.Popen([*command, "--share", str(share), "--launchers", str(path)], stdout=subprocess.PIPE)
            for share, path in enumerate(outputs)
        ]
        counts = [int(process.communicate()[0]) for process in running]
        if launchers is not None:
            sources = {source for path in outputs for source in json.loads(path.read_text())}
            launchers.write_text(json.dumps(sorted(sources)))
    return sum(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="+", choices=tuple(STAGES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--key")
    parser.add_argument("--launchers", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print why numbers failed")
    parser.add_argument("--share", type=int, help="index of this process (internal)")
    parser.add_argument("--chip", type=int, nargs=2, help="capability, multiprocessors")
    args = parser.parse_args()
    args.chip = args.chip or here()
    if args.processes > 1 and args.share is None:
        print(compile_in_processes([*sys.argv[1:], "--chip", *map(str, args.chip)], args.processes, args.launchers))
        return 0
    if args.key:
        importlib.import_module("triton.runtime.cache").triton_key = lambda: args.key
    programs = compile_share(args.stages, *args.chip, args.share or 0, args.processes, verbose=args.verbose)
    if args.launchers:
        args.launchers.write_text(json.dumps(sorted(launcher_sources(programs))))
    print(len({id(one) for one in programs}))
    return 0


def here() -> tuple[int, int]:
    """Return capability and multiprocessors of the local GPU, or of an H100."""
    if not torch.cuda.is_available():
        return CHIPS["sm_90"].arch, CHIPS["sm_90"].sms
    gpu = torch.cuda.get_device_properties(0)
    return 10 * gpu.major + gpu.minor, gpu.multi_processor_count


if __name__ == "__main__":
    sys.exit(main())
