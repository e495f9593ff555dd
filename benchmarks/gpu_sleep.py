"""Memory that goes and comes back on a GPU: the arena of sleep mode, and layers whose weights stay on the host.

`measure(device)`: a captured CUDA graph answers the same after its weights were away, how much memory that gave back
and how fast; and a graph over offloaded layers against the same layers on the device.
"""

from __future__ import annotations

import time

import torch
from gpu_measure import GIB, median_ms
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device, find_device
from pagoda.backends.torch_cuda.offload import Offload, choose_layers
from pagoda.backends.torch_cuda.parameters import ModelParams
from pagoda.backends.torch_cuda.storage import Storage

WIDTH, LAYERS, ROWS = 8192, 16, 8


def chain(weights: list[Tensor]):
    """A function of x [ROWS, WIDTH] that reads every weight."""

    def through(weight: Tensor):
        return lambda x: torch.nn.functional.normalize(x @ weight)

    return [through(weight) for weight in weights]


def captured(layers: list, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The layers one after the other as a graph, and what it computes."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(layers, x)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        found = run(layers, x)
    return graph, found


def run(layers: list, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def free(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def seconds(device: torch.device, work) -> float:
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def sleep(device: Device) -> dict:
    """One arena through sleep and waking up, twice: the first time pins the host's memory."""
    gpu, storage = device.torch, Storage(device, sleeps=True)
    weights = [storage.empty((WIDTH, WIDTH), torch.bfloat16).normal_() for _ in range(LAYERS)]
    x = torch.randn(ROWS, WIDTH, device=gpu, dtype=torch.bfloat16)
    graph, found = captured(chain(weights), x)
    graph.replay()
    want, addresses = found.clone(), [weight.data_ptr() for weight in weights]
    rounds = []
    for _ in range(2):
        awake = free(gpu)
        slept = seconds(gpu, lambda: storage.sleep(keep=True))
        given_back = free(gpu) - awake
        woke = seconds(gpu, storage.wake_up)
        found.zero_()
        graph.replay()
        rounds.append({"sleep_s": slept, "wake_up_s": woke, "given_back_gib": given_back / GIB})
    right = torch.equal(found, want) and addresses == [weight.data_ptr() for weight in weights]
    held = storage.num_bytes
    right = right and all(each["given_back_gib"] * GIB >= 0.99 * held for each in rounds)
    del graph
    storage.close()
    return {"right": right, "held_gib": held / GIB, "rounds": rounds}


def offload(device: Device) -> dict:
    """Layers of which all but two are on the host, against the same on the device."""
    gpu = device.torch
    names = [f"layers.{number}.weight" for number in range(LAYERS)]
    shapes = ModelParams({name: torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device="meta") for name in names})
    on_host = choose_layers(shapes, LAYERS * WIDTH * WIDTH * 2 / GIB)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=gpu)

    moved = Offload(on_host, device, empty)
    places = moved.places()
    random = torch.randn(LAYERS, WIDTH, WIDTH, device=gpu, dtype=torch.bfloat16)
    params = ModelParams(
        {name: places[name]((WIDTH, WIDTH), torch.bfloat16).copy_(random[at]) for at, name in enumerate(names)}
    )
    staged = moved.staged(params)
    x = torch.randn(ROWS, WIDTH, device=gpu, dtype=torch.bfloat16)
    graph, found = captured(list(moved.around(chain([staged[name] for name in names]))), x)
    plain, want = captured(chain(list(random)), x)
    graph.replay()
    plain.replay()
    ms = median_ms(lambda _: graph.replay(), repeats=5, warmup=1)
    return {
        "right": torch.equal(found, want),
        "layers_on_host": len(on_host.layers),
        "step_ms": ms,
        "step_ms_on_device": median_ms(lambda _: plain.replay()),
        "copy_bytes_per_s": sum(on_host.sizes.values()) / (ms / 1e3),
    }


@torch.inference_mode()
def measure(device: torch.device) -> dict:
    """Both parts; `right` in each says whether the numbers came back."""
    gpu = find_device(device.index or 0)
    return {"sleep": sleep(gpu), "offload": offload(gpu)}
