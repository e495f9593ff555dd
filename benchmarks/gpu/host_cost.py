"""Host cost of a torch_cuda decode step, without the device's: microseconds per step.

usage: python gpu_host_cost.py [--context 1024] [--steps 300]

`pack`: pad, pack and send a plan. `step`: that, queueing the two graphs (empty here), and reading the result. Runs on a
GPU if there is one, else on a CPU. Prints one JSON line per number of rows and kind of sampling.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from pagoda.backends.torch_cuda.backend import TorchCudaBackend, create
from pagoda.backends.torch_cuda.device import CPU, find_device
from pagoda.common.backend import BackendOptions
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.step import PREVIOUS, RowStart, StepPlan
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Norms

ROWS = (1, 32, 256)
KINDS = {"greedy": SamplingRules(), "filtered": SamplingRules(temperature=0.8, top_k=40, top_p=0.95)}
BLOCK = 16


def small_backend(context: int) -> TorchCudaBackend:
    """Return a backend with one layer and few tokens: the host cost does not depend on the model."""
    norm = Norm(1e-5)
    layer = Layer((Attention(4, 2, 64, 0.125, Rope(1e4, 64)),), Mlp(64, "silu", True), Norms(norm, None, norm, None))
    spec = ModelSpec(vocab=512, width=64, layers=(layer,), final_norm=norm, tied=True, max_positions=2 * context)
    limits = Limits(max_model_len=2 * context, max_num_batched_tokens=512, max_num_seqs=max(ROWS), block_size=BLOCK)
    device = find_device() if torch.cuda.is_available() else CPU
    layout = kv_layout(spec, BLOCK)
    options = BackendOptions(spec=spec, limits=limits, layout=layout, cache=CacheConfig(), dtype="float32")
    backend = create(options, device)
    backend.load((each.name, np.zeros(each.shape, np.float32)) for each in params(spec).values())
    backend.init_cache((64,))
    return backend


def plans(rows: int, context: int, rules: SamplingRules) -> tuple[StepPlan, StepPlan]:
    """Return the step that starts these rows, and one like all that follow."""
    numbers = np.arange(rows, dtype=np.int32)
    starts = tuple(RowStart(row, np.zeros(context, np.int32), context - 1, rules) for row in range(rows))
    blocks = np.random.default_rng(0).integers(64, size=(rows, context // BLOCK + 1), dtype=np.int32)
    plans = [
        StepPlan(
            step=0,
            starts=first,
            rows=numbers,
            query_start=np.arange(rows + 1, dtype=np.int32),
            context=np.full(rows, context - 1, np.int32),
            token_ids=np.full(rows, PREVIOUS, np.int32),
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
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times) * 1e6, 1)


def cost(backend: TorchCudaBackend, steps: int, first: StepPlan, plan: StepPlan) -> dict[str, float]:
    """Return the cost of `plan`, which continues what `first` started, and the load of the machine."""
    runner = backend._runner
    backend.execute(first).result()
    size = backend.config.graph_sizes.bucket_for(plan.num_seqs)
    runner.programs._forward[size] = runner.programs._sample[size] = lambda: None

    def pack() -> None:
        runner._send(runner._padded(plan))
        runner._staging.mark_read()

    with backend._stream.running():
        packing = microseconds(pack, steps)
    whole = microseconds(lambda: backend.execute(plan).result(), steps)
    return {"pack_us": packing, "step_us": whole, "load": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backend = small_backend(args.context)
    for rows in ROWS:
        for kind, rules in KINDS.items():
            result = {"rows": rows, "sampling": kind, **cost(backend, args.steps, *plans(rows, args.context, rules))}
            print(json.dumps({**result, "context": args.context, "device": backend.config.device.name}), flush=True)


if __name__ == "__main__":
    main()
