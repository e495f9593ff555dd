"""Shared by the GPU measurements: the bench, timing by CUDA events, the machine's rooflines, trials of settings."""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip, Settings, find_chip

GIB = 1 << 30
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Number:
    """One entry of a stage's JSON."""

    name: str
    run: Callable[[], dict]  # returns a JSON object; if results are checked, `right` is the verdict
    seconds: float = 60.0  # time limit, after which it has failed


@dataclass(frozen=True)
class Bench:
    """The device under test; on CPU tensors, to try the script, kernels are replaced by plain torch."""

    device: torch.device
    chip: Chip
    tiny: bool = False  # shapes that a CPU computes at once
    spoil: float = 0.0  # relative error added to every checked result, which each check must detect
    model: Path | None = None  # the small real model

    @classmethod
    def on(cls, device: str, **settings) -> Bench:
        """Return the bench of `cuda` or `cpu`."""
        if device == "cpu":
            return cls(torch.device("cpu"), CHIPS["sm_90"], **settings)
        gpu = torch.cuda.get_device_properties(0)
        return cls(torch.device("cuda", 0), find_chip((gpu.major, gpu.minor), gpu.multi_processor_count), **settings)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def use_kernel(self) -> bool:
        """True: Triton kernels; False: their plain torch definitions."""
        return self.is_gpu

    def choose(self, usual, tiny):
        """Return `tiny` if shapes are tiny, else `usual`."""
        return tiny if self.tiny else usual

    def spoiled(self, result: Tensor) -> Tensor:
        """Return a checked result with the error that --spoil adds."""
        return result if not self.spoil else (result.double() * (1 + self.spoil)).to(torch.float64)

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def median_ms(self, run: Callable[[int], object], repeats: int = 30, warmup: int = 5) -> float:
        """Return the median milliseconds of `run(i)`; `i` counts calls, to rotate over cold inputs."""
        if not self.is_gpu:
            return _median_ms_on_host(run, min(repeats, 2))
        for i in range(warmup):
            run(i)
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for i, (begin, end) in enumerate(events):
            begin.record()
            run(i)
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events)

    def recorded(self, calls: list[Callable[[], object]]) -> Callable[[], None]:
        """Return a replay function of the calls as one CUDA graph; on a CPU, a function that makes them."""
        if not self.is_gpu:
            return lambda: [call() for call in calls] and None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def copies(self, moved: int, cold_bytes: int, minimum: int = 2) -> int:
        """Return how many inputs of `moved` bytes exceed `cold_bytes`, more than an L2 cache."""
        return minimum if self.tiny else max(minimum, -(-cold_bytes // moved))


@cache
def copy_bandwidth(bench: Bench) -> float:
    """Return bytes per second, read and written, of a large copy; measured once."""
    size = 1 << 20 if bench.tiny else 4 * GIB
    source = torch.empty(size, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    return 2 * size / (bench.median_ms(lambda _: target.copy_(source)) / 1e3)


@cache
def matmul_rate(bench: Bench) -> float:
    """Return FLOP per second of a large bfloat16 product of random numbers (zeros would be faster); measured once."""
    side = 64 if bench.tiny else 8192
    a, b = torch.randn(2, side, side, device=bench.device, dtype=BF16)
    return 2 * side**3 / (bench.median_ms(lambda _: a @ b) / 1e3)


def figures(bench: Bench, seconds: float, moved: int, flop: int = 0) -> dict[str, float]:
    """Return microseconds, bytes and FLOP per second, also relative to a large copy and to a large product.

    The larger of `of_copy` and `of_matmul` is the share of the roofline. A copy counts bytes read and written, so a
    pure reader can reach it. `flop`: of matrix products; 0: there are none.
    """
    speed = {"us": seconds * 1e6, "bytes_per_s": moved / seconds, "of_copy": moved / seconds / copy_bandwidth(bench)}
    if flop:
        speed |= {"flop_per_s": flop / seconds, "of_matmul": flop / seconds / matmul_rate(bench)}
    return speed


def worst(got: Tensor, want: Tensor, roundings: float = 1) -> float:
    """Return the largest difference in units of `roundings` times bfloat16's rounding of `want`; above 1 is wrong."""
    unit = want.abs().clamp_min(want.abs().mean()) * 2.0**-8 * roundings
    return float(((got.double() - want) / unit).abs().max())


def verdict(error: float, **more) -> dict:
    """Return a result that is right if its error is at most 1; NaN is wrong."""
    return {"error": error, "right": 0 <= error <= 1, **more}


def machine(device: str) -> dict:
    """Return what the figures depend on; the same for every process on a machine."""
    gpu = torch.cuda.get_device_properties(0) if device == "cuda" and torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": package_version("triton"),
        "transformers": package_version("transformers"),
        "device": device,
        "gpu": gpu.name if gpu else None,
        "gpu_bytes": gpu.total_memory if gpu else None,
        "sms": gpu.multi_processor_count if gpu else None,
        "driver": _driver() if gpu else None,
    }


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the version of NVIDIA's kernel driver, if the system reports it."""
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().splitlines()[0] if path.is_file() else None


def _median_ms_on_host(run: Callable[[int], object], repeats: int) -> float:
    times = []
    for i in range(repeats):
        begin = time.perf_counter()
        run(i)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def is_refusal(error: Exception) -> bool:
    """Return whether Triton rejected settings that need too many registers or too much shared memory."""
    return type(error).__name__ in ("OutOfResources", "PTXASError", "CompilationError")


def each_of(values: Mapping[str, Iterable[int]]) -> Iterator[Settings]:
    """Yield every combination of the values of each setting."""
    yield from (dict(zip(values, each)) for each in itertools.product(*values.values()))


def settings_trials(
    bench: Bench,
    kernel: ModuleType,
    key: str,
    candidates: Iterable[Settings],
    make: Callable[[], list[Callable[[], object]]],
    lookup: ModuleType | None = None,
) -> Iterator[Number]:
    """Yield trials of settings for one key of a kernel's tuning.json, the current settings first.

    `make()` returns calls, which read the settings on trial; they are timed in a CUDA graph. `lookup`: the module whose
    `settings` the kernel calls, by default its own.
    """
    lookup, folder = lookup or kernel, kernel.TUNING.parent.name
    usual = dict(lookup.settings(kernel.TUNING, bench.chip, key))
    every = [usual, *(one for one in candidates if one != usual)]
    for chosen in every[: bench.choose(None, 2)]:
        label = f"{folder} {key}: {' '.join(map(str, chosen.values()))}"
        yield Number(label, partial(_settings_trial, bench, lookup, f"{folder} {key}", chosen, make), 40)


def _settings_trial(bench: Bench, lookup: ModuleType, key: str, chosen: Settings, make: Callable[[], list]) -> dict:
    about = {"key": key, "settings": dict(chosen)}
    with patch.object(lookup, "settings", lambda *_: chosen):
        try:
            calls = make()
            replay = bench.recorded(calls)
        except Exception as refused:
            if not is_refusal(refused):
                raise
            return about | {"refused": str(refused)[:200]}
        return about | {"us": bench.median_ms(lambda _: replay(), repeats=10, warmup=2) * 1e3 / len(calls)}
