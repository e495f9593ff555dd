"""Host cost of a torch_cuda step, without the device's: microseconds of processor time per step.

usage: python -m pagoda.benchmarks.gpu.host_cost [--context 1024] [--steps 300]

`pack`: pad, pack and send a plan. `step`: that, queueing the graphs (empty here), and reading the result. Decode steps,
and with `prompt` tokens beside them mixed ones. Runs on a GPU if there is one, else on a CPU. Prints one JSON line per
number of rows, of prompt tokens, and kind of sampling.

With --eager: a prefill that is not captured, of a bfloat16 Llama with 32 layers, on a CPU. Its products are results
that are ready; its kernels are launched as on a GPU up to the driver, which does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from pagoda.backends.torch_cuda.backend import TorchCudaBackend, create
from pagoda.backends.torch_cuda.device import CPU, Device, find_device
from pagoda.backends.torch_cuda.kernels.frame import bound
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundLaunch
from pagoda.backends.torch_cuda.model import parts
from pagoda.benchmarks.gpu import model
from pagoda.common.backend import BackendOptions
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS, RowStart, StepPlan
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Norms

ROWS = (1, 32, 256)
KINDS = {"greedy": SamplingRules(), "filtered": SamplingRules(temperature=0.8, top_k=40, top_p=0.95)}
BLOCK = 16
WIDTH = 64
"""Of the small model."""


def small_backend(context: int) -> TorchCudaBackend:
    """Return a backend with one layer and few tokens: the host cost does not depend on the model."""
    norm = Norm(1e-5)
    layer = Layer((Attention(4, 2, 64, 0.125, Rope(1e4, 64)),), Mlp(64, "silu", True), Norms(norm, None, norm, None))
    spec = ModelSpec(vocab=512, width=WIDTH, layers=(layer,), final_norm=norm, tied=True, max_positions=2 * context)
    limits = Limits(max_model_len=2 * context, max_num_batched_tokens=512, max_num_seqs=max(ROWS), block_size=BLOCK)
    device = find_device() if torch.cuda.is_available() else CPU
    layout = kv_layout(spec, BLOCK)
    options = BackendOptions(spec=spec, limits=limits, layout=layout, cache=CacheConfig(), dtype="float32")
    backend = create(options, device)
    backend.load((each.name, np.zeros(each.shape, np.float32)) for each in params(spec).values())
    backend.init_cache((64,))
    return backend


def plans(rows: int, context: int, rules: SamplingRules, prompt: int = 0) -> tuple[StepPlan, StepPlan]:
    """Return the step that starts these rows, and one like all that follow; the last row has `prompt` tokens."""
    lengths = np.ones(rows, np.int32)
    lengths[-1] = prompt or 1
    numbers = np.arange(rows, dtype=np.int32)
    starts = tuple(RowStart(row, np.zeros(context, np.int32), context - 1, rules) for row in range(rows))
    blocks = np.random.default_rng(0).integers(64, size=(rows, context // BLOCK + 1), dtype=np.int32)
    plans = [
        StepPlan(
            step=0,
            starts=first,
            rows=numbers,
            query_start=np.append(0, lengths.cumsum()).astype(np.int32),
            context=(context - lengths).astype(np.int32),
            token_ids=np.full(lengths.sum(), 0 if prompt else PREVIOUS, np.int32),
            block_tables=(blocks,),
            samples=np.ones(rows, np.bool_),
        )
        for first in (starts, ())
    ]
    return plans[0], plans[1]


def microseconds(run: Callable[[], object], steps: int) -> float:
    """Return the median of `steps` runs."""
    times = []
    for _ in range(steps):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return round(statistics.median(times) * 1e6, 1)


def cost(backend: TorchCudaBackend, steps: int, first: StepPlan, plan: StepPlan) -> dict[str, float]:
    """Return the cost of `plan`, which continues what `first` started, and the load of the machine."""
    runner = backend._runner
    backend.execute(first).result()
    programs, size = runner.programs, backend.config.graph_sizes.bucket_for(plan.num_seqs)
    programs._forward[size, 1, False] = programs._sample[size, 1] = lambda: None
    programs._left_hidden = {
        size: torch.zeros(size, WIDTH, device=backend.config.device.torch) for size in programs._hidden
    }
    programs._hidden = dict.fromkeys(programs._hidden, lambda: None)

    def pack() -> None:
        runner._send(runner._padded(plan))
        runner._staging.mark_read()

    with backend._stream.running():
        packing = microseconds(pack, steps)
    whole = microseconds(lambda: backend.execute(plan).result(), steps)
    return {"pack_us": packing, "step_us": whole, "load": round(os.getloadavg()[0], 1)}


class KernelDevice(Device):
    """A CPU whose backend calls kernels."""

    use_kernels = True


def _no_program(*_: object) -> tuple[Callable[..., None], int, int]:
    """Replaces `BoundLaunch._compile`: a program that does nothing."""
    return _launch_nothing, 0, 0


def _launch_nothing(*_: object) -> None:
    """The driver's part of a launch."""


def eager_cost(steps: int) -> dict[str, float]:
    """Return the cost of a step of 32 layers that is not captured: the number of tokens does not matter."""
    ready: dict[tuple[int, int], Tensor] = {}

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = x.shape[0], weight.shape[0]
        if shape not in ready:
            ready[shape] = torch.zeros(shape, dtype=x.dtype)
        return ready[shape]

    config = model.TINY | {"num_hidden_layers": 32, "head_dim": 64}
    spec, _ = spec_from_config(config)
    limits = Limits(max_model_len=512, max_num_batched_tokens=256, max_num_seqs=4, block_size=BLOCK)
    layout = kv_layout(spec, BLOCK)
    options = BackendOptions(spec=spec, limits=limits, layout=layout, cache=CacheConfig(), dtype="bfloat16")
    with (
        patch.object(torch.nn.functional, "linear", product),
        patch.object(parts, "_float32_linear", lambda x, weight, bias: product(x, weight).float()),
        patch.object(Tensor, "get_device", lambda self: 0),
        patch.object(bound, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 0))),
        patch.object(BoundLaunch, "_compile", _no_program),
        patch.object(JITFunction, "run", lambda self, *args, **how: None),
    ):
        backend = create(options, KernelDevice(CPU.torch, CPU.chip, CPU.name))
        backend.load((each.name, np.zeros(each.shape, np.float32)) for each in params(spec).values())
        backend.init_cache((64,))
        plan, runner = backend._warmup_plans.prefill(24), backend._runner
        with backend._stream.running():
            runner.run(plan, eager=True)
            cost = microseconds(lambda: runner.run(plan, eager=True), steps)
    return {"layers": 32, "step_us": cost, "load": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.eager:
        print(json.dumps(eager_cost(args.steps)))
        return
    backend = small_backend(args.context)
    for rows in ROWS:
        for kind, rules in KINDS.items():
            for prompt in (0, 200):
                planned = plans(rows, args.context, rules, prompt)
                result = {"rows": rows, "prompt": prompt, "sampling": kind, **cost(backend, args.steps, *planned)}
                print(json.dumps({**result, "context": args.context, "device": backend.config.device.name}), flush=True)


if __name__ == "__main__":
    main()
