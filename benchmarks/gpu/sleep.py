"""Sleep mode and weight offloading on a GPU.

`checks`: a captured CUDA graph gives the same result after its weights slept, with the memory released and the times;
and a graph over offloaded layers against the same layers on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import CPU, Device, find_device
from pagoda.backends.torch_cuda.memory.arena import Storage
from pagoda.backends.torch_cuda.memory.offload import Offload, choose_layers
from pagoda.backends.torch_cuda.model.parameters import RankParams
from pagoda.benchmarks.gpu.measure import GIB, Bench, Number

WIDTH, LAYERS, ROWS = 8192, 16, 8


def chain(weights: list[Tensor]):
    """Return layers, functions of x [ROWS, WIDTH], one per weight."""

    def through(weight: Tensor):
        return lambda x: torch.nn.functional.normalize(x @ weight)

    return [through(weight) for weight in weights]


def captured(bench: Bench, layers: list, x: Tensor) -> tuple[Callable[[], None], Tensor]:
    """Return the replay function of a graph of the layers, and its output."""
    out = torch.empty_like(x)
    return bench.recorded([lambda: out.copy_(run(layers, x))]), out


def run(layers: list, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def free(bench: Bench) -> int:
    bench.synchronize()
    return torch.cuda.mem_get_info(bench.device)[0] if bench.is_gpu else 0


def seconds(bench: Bench, work: Callable[[], object]) -> float:
    bench.synchronize()
    begin = time.perf_counter()
    work()
    bench.synchronize()
    return time.perf_counter() - begin


def device_of(bench: Bench) -> Device:
    return find_device(bench.device.index or 0) if bench.is_gpu else CPU


@torch.inference_mode()
def sleep(bench: Bench) -> dict:
    """Put one arena to sleep and wake it up, twice: the first time pins host memory."""
    width, count = bench.choose((WIDTH, LAYERS), (64, 5))
    storage = Storage(device_of(bench), sleep_mode=True)
    weights = [storage.empty((width, width), torch.bfloat16).normal_() for _ in range(count)]
    x = torch.randn(ROWS, width, device=bench.device, dtype=torch.bfloat16)
    replay, out = captured(bench, chain(weights), x)
    replay()
    want, addresses = out.clone(), [weight.data_ptr() for weight in weights]
    rounds = []
    for _ in range(2):
        awake = free(bench)
        slept = seconds(bench, lambda: storage.sleep(keep=True))
        released = free(bench) - awake
        woke = seconds(bench, storage.wake_up)
        out.zero_()
        replay()
        rounds.append({"sleep_s": slept, "wake_up_s": woke, "given_back_gib": released / GIB})
    right = torch.equal(bench.spoiled(out).double(), want.double())
    right = right and addresses == [weight.data_ptr() for weight in weights]
    size = storage.num_bytes
    if bench.is_gpu:
        right = right and all(each["given_back_gib"] * GIB >= 0.99 * size for each in rounds)
    del replay
    storage.close()
    return {"right": right, "held_gib": size / GIB, "rounds": rounds}


@torch.inference_mode()
def offload(bench: Bench) -> dict:
    """Run layers of which all but two are on the host against the same on the device."""
    width, count = bench.choose((WIDTH, LAYERS), (64, 5))
    names = [f"layers.{number}.weight" for number in range(count)]
    shapes = RankParams({name: torch.empty(width, width, dtype=torch.bfloat16, device="meta") for name in names})
    on_host = choose_layers(shapes, count * width * width * 2 / GIB)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=bench.device)

    moved = Offload(on_host, device_of(bench), empty)
    allocators = moved.allocators()
    random = torch.randn(count, width, width, device=bench.device, dtype=torch.bfloat16)
    params = RankParams(
        {name: allocators[name]((width, width), torch.bfloat16).copy_(random[at]) for at, name in enumerate(names)}
    )
    staged = moved.staged(params)
    x = torch.randn(ROWS, width, device=bench.device, dtype=torch.bfloat16)
    replay, out = captured(bench, list(moved.wrap(chain([staged[name] for name in names]))), x)
    plain, want = captured(bench, chain(list(random)), x)
    replay()
    plain()
    bench.synchronize()
    right = torch.equal(bench.spoiled(out).double(), want.double())
    ms = bench.median_ms(lambda _: replay(), repeats=5, warmup=1)
    return {
        "right": right,
        "layers_on_host": len(on_host.layers),
        "step_ms": ms,
        "step_ms_on_device": bench.median_ms(lambda _: plain()),
        "copy_bytes_per_s": sum(on_host.sizes.values()) / (ms / 1e3),
    }


def checks(bench: Bench) -> Iterator[Number]:
    """Yield both; `right`: the contents were restored."""
    yield Number("sleep", lambda: sleep(bench))
    yield Number("offload", lambda: offload(bench))
