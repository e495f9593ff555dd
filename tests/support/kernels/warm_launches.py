"""Drives torch_cuda as an engine on an H100 that nobody has: warms up, serves, and tells what would be compiled when.

Tensors are a CPU's; launches of Triton kernels are bound to their arguments as on a GPU and go no further, so results
are zeros. Must run where TRITON_INTERPRET is not set: a `Starter` starts such a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

SERVED = 60
"""Steps that are served."""

LIMITS = {"max_model_len": 512, "max_num_batched_tokens": 400, "max_num_seqs": 70, "block_size": 16}


@dataclass(frozen=True)
class Start:
    """An engine's start and service.

    `model`: a name of `models`. `quantization`: a value of --quantization, or of matrices as checkpoints hold them a
    name of `STORED`. `drafter`: a name of `drafters`. `limits`: fields of Limits other than those of LIMITS.
    """

    model: str
    quantization: str | None = None
    drafter: str | None = None
    limits: Mapping[str, int] = field(default_factory=dict)


class Starter:
    """Starts engines one after another, each in a process forked from one that has imported everything.

    Kernels know what they were compiled for, so a process is good for one engine.
    """

    def __init__(self) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def compiled(self, start: Start) -> tuple[list[str], list[str]]:
        """(kernels compiled until the engine is warm, those compiled while it serves)."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        words = [start.model, start.quantization, start.drafter, LIMITS | dict(start.limits)]
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        lines = iter(process.stdout.readline, "")
        found = next((line for line in lines if line.startswith(FOUND)), None)
        assert found is not None, "the process ended"
        answer = json.loads(found.removeprefix(FOUND))
        if isinstance(answer, str):
            raise RuntimeError(answer)
        before, after = answer
        return before, after

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


FOUND = "found: "
"""Before a start's outcome in what the process prints: two lists, or a traceback."""


def serve() -> None:
    """Read starts from stdin, a line each, and print the outcome of each."""
    import_everything()
    for line in sys.stdin:
        if not (child := os.fork()):
            try:
                outcome: object = main(*json.loads(line))
            except BaseException:
                outcome = traceback.format_exc()
            print(f"\n{FOUND}{json.dumps(outcome)}", flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(f"\n{FOUND}{json.dumps(f'the process ended with status {status}')}", flush=True)


def import_everything() -> None:
    """What `main` imports and what that imports late, without a thread: a fork has none of them."""
    checkpoints = ("adapted_models", "naive_drafters", "random_stored")
    support = ("engines.backend_options", "kernels.compile_launches", *(f"checkpoints.{name}" for name in checkpoints))
    product = ("backends.torch_cuda.backend", "backends.torch_cuda.weights.load", "common.weights.lora.weights")
    for name in (*(f"support.{each}" for each in support), *(f"pagoda.{each}" for each in product)):
        import_module(name)
    import torch

    torch.set_num_threads(1)  # other tests run beside this


def watch_launches() -> list[str]:
    """The kernels that would have been compiled until now, in order; grows."""
    from support.kernels.compile_launches import AbsentGpu
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    new: list[str] = []
    run = JITFunction.run

    def note(self: JITFunction, key: str, signature: Any, device: int, *_: Any) -> object:
        new.append(f"{self.__name__} {key}")
        program = self.device_caches[device][0][key] = object()
        return program

    def bind(self: JITFunction, *args: Any, grid: tuple[int, ...], **how: Any) -> Any:
        assert min(grid) > 0 and max(grid[1:], default=0) < 1 << 16, (self.__name__, grid)  # noqa: PT018
        return run(self, *args, grid=grid, **{**how, "warmup": True})

    driver.set_active(AbsentGpu())
    JITFunction._do_compile, JITFunction.run = note, bind
    return new


def models() -> dict[str, Any]:
    """Name -> spec."""
    from pagoda.common.models.mixers import (
        Attention,
        BlockIndexer,
        GatedDelta,
        KimiDelta,
        LatentAttention,
        LightningAttention,
        Mamba,
        Mamba2,
        ShortConvolution,
    )
    from pagoda.common.models.primitives import Norm
    from pagoda.common.models.rope import Rope
    from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Moe, Norms, Router

    norm = Norm(1e-5)

    def model(attention: Attention, ffn: Mlp | Moe, window: int | None = None) -> ModelSpec:
        layers = tuple(
            Layer((replace(attention, window=seen),), ffn, Norms(norm, None, norm, None)) for seen in (None, window)
        )
        return ModelSpec(vocab=1003, width=128, layers=layers, final_norm=norm, tied=True, max_positions=4096)

    usual, mlp = Attention(8, 2, 32, 0.2, Rope(1e4, 32)), Mlp(96, "silu", True)
    full = Attention(8, 2, 32, 0.2, Rope(1e4, 32), qk_norm=norm, qk_norm_over="full")
    mixture = Moe(4, Mlp(96, "silu", True), Router(2, True))
    latent = LatentAttention(8, None, 64, 32, 32, 0.2, Rope(1e4, 16), norm)
    recurrent = (
        GatedDelta(2, 4, 32, 32, 4, norm),
        KimiDelta(4, 32, 16, 4, norm),
        LightningAttention(32, (0.5, 0.1), norm),
        Mamba(192, 16, 8, 4, norm),
        Mamba2(6, 32, 2, 16, 4, norm),
        ShortConvolution(128, 3),
    )
    return {
        "states": replace(
            model(usual, mlp),
            layers=tuple(Layer((mixer,), mlp, Norms(norm, None, norm, None)) for mixer in (usual, *recurrent)),
        ),
        "latents": replace(model(usual, mlp), layers=(Layer((latent,), mlp, Norms(norm, None, norm, None)),)),
        "windows": model(usual, mlp, window=40),
        "blocks": model(replace(usual, blocks=BlockIndexer(32, 64, 4, 1, Rope(1e4, 32), norm)), mlp),
        "experts": model(usual, mixture),
        "full norms": model(full, mlp),
    }


def drafters(spec: Any) -> dict[str, Any]:
    """Name -> drafter of a model."""
    from pagoda.common.models.drafters import (
        AttendedInputs,
        FeatureDrafter,
        HeadsDrafter,
        JoinedInputs,
        LanguageDrafter,
        StagesDrafter,
    )
    from pagoda.common.models.mixers import Attention
    from pagoda.common.models.rope import Rope

    norm, last = spec.final_norm, spec.layers[-1]
    model = replace(spec, layers=(last,))
    attention = Attention(8, 2, 32, 0.2, Rope(1e4, 32), beside_embedding=True)
    attended = AttendedInputs(attention, norm, norm)
    layer = replace(last, mixers=(), norms=replace(last.norms, before_mixer=None))
    return {
        "draft_model": LanguageDrafter(model),
        "mtp": FeatureDrafter(model, JoinedInputs(norm, norm, blank_first=True), spec.width),
        "eagle3": FeatureDrafter(
            replace(spec, layers=(layer,)), attended, 3 * spec.width, (0, 1, 1), head_vocab=403, own_head=True
        ),
        "medusa": HeadsDrafter(spec.vocab, spec.width, 3, 1),
        "mlp_speculator": StagesDrafter(spec.vocab, spec.width, 48, 3),
    }


def some_rules(rng: Any) -> Any:
    """What a request may ask for, now and then."""
    from pagoda.common.engine.sampling.rules import SamplingRules

    asked: dict[str, Any] = {"temperature": float(rng.integers(2))}
    for chance, wish in (
        (0.3, {"top_k": int(rng.integers(1, 50)), "top_p": 0.9, "min_p": 0.1}),
        (0.2, {"repetition_penalty": 1.1}),
        (0.2, {"presence_penalty": 0.3}),
        (0.2, {"logit_bias": tuple((token, 1.0) for token in range(rng.integers(1, 20)))}),
        (0.2, {"bad_words": (tuple(range(2, rng.integers(3, 6))),) * int(rng.integers(1, 6))}),
        (0.2, {"allowed_token_ids": tuple(range(rng.integers(1, 900)))}),
        (0.2, {"min_tokens": 5, "stop_ids": (1, 2)}),
        (0.2, {"logprobs": int(rng.integers(-1, 21))}),
        (0.2, {"prompt_logprobs": int(rng.integers(-1, 21))}),
    ):
        if rng.random() < chance:
            asked |= wish
    return SamplingRules(**asked)


def steps(limits: Any, groups: int) -> Iterator[Any]:
    """Decode, prefill and mixed steps of all sizes, each of requests of its own."""
    import numpy as np

    from pagoda.common.engine.steps.contract import RowStart, StepPlan

    rng = np.random.default_rng(0)
    longest = limits.max_model_len - 1
    for step in range(SERVED):
        seqs = int(rng.integers(1, limits.max_num_seqs + 1))
        decodes = seqs if step % 3 == 0 else int(rng.integers(0, seqs + 1))
        lengths = [1] * decodes
        while len(lengths) < seqs and (left := limits.max_num_batched_tokens - sum(lengths)) > 1:
            lengths.append(int(rng.integers(2, min(left, longest, rng.choice([3, 20, 60, 200, 1000])) + 1)))
        drafted = decodes if limits.max_drafts and step % 2 else 0
        left = limits.max_num_batched_tokens - sum(lengths)
        drafts = [0] * len(lengths)
        for index in range(drafted - 1, -1, -1):
            drafts[index] = int(rng.integers(0, min(limits.max_drafts, left) + 1))
            left -= drafts[index]
        drafts[:drafted] = sorted(drafts[:drafted])
        size = np.array(lengths, np.int32) + np.array(drafts, np.int32)
        guessed = limits.max_drafts if limits.device_drafts else 0
        rooms = (limits.max_model_len - size - guessed).tolist()
        context = np.array([rng.integers(n == 1, room) for n, room in zip(lengths, rooms)], np.int32)
        context[(rng.random(len(size)) < 0.3) & (size > 1)] = 0
        known = context + size
        starts = (RowStart(row, np.zeros(n, np.int32), n, some_rules(rng)) for row, n in enumerate(known.tolist()))
        pages = -(-int(known.max() + guessed) // limits.block_size)
        adapters = rng.integers(-1, limits.max_loras, len(size)).astype(np.int32) if limits.max_loras else None
        samples = (rng.random(len(size)) < rng.choice([0.0, 0.8, 1.0])) | (np.array(drafts) > 0)
        guesses = (rng.integers(0, guessed + 1, len(size)) * samples).astype(np.int32)
        yield StepPlan(
            step=step,
            starts=tuple(starts),
            rows=np.arange(len(size), dtype=np.int32),
            query_start=np.concatenate([[0], np.cumsum(size)]).astype(np.int32),
            context=context,
            token_ids=np.zeros(int(size.sum()), np.int32),
            block_tables=tuple(np.zeros((len(size), pages), np.int32) for _ in range(groups)),
            samples=samples,
            num_guesses=guesses if guesses.any() else None,
            num_drafts=np.array(drafts, np.int32) if any(drafts) else None,
            adapter_slots=adapters if step % 4 else None,
        )


def main(
    name: str, quantization: str | None, drafting: str | None, stated: dict[str, int]
) -> tuple[list[str], list[str]]:
    """What `Starter.compiled` returns; in a process of its own."""
    import torch
    from support.checkpoints.adapted_models import random_adapter
    from support.checkpoints.naive_drafters import random_drafter
    from support.checkpoints.random_stored import STORED
    from support.engines.backend_options import make_options
    from support.engines.reference_driver import random_weights

    from pagoda.backends.torch_cuda.backend import create
    from pagoda.backends.torch_cuda.device import CPU, Device
    from pagoda.backends.torch_cuda.schemes import ROUNDED_ON_DEVICE
    from pagoda.common.config.engine import Limits
    from pagoda.common.engine.kv_cache.spec import kv_layout
    from pagoda.common.models.shapes import params
    from pagoda.common.weights.lora.weights import LoraOptions
    from pagoda.common.weights.quantization.on_the_fly import is_matrix

    class Absent(Device):
        use_kernels = True

    empty, empty_like = torch.empty, torch.empty_like
    torch.empty = lambda *shape, **how: empty(*shape, **how).fill_(0)
    torch.empty_like = lambda x, **how: empty_like(x, **how).fill_(0)
    new = watch_launches()
    spec, limits = models()[name], Limits(**stated, device_drafts=drafting is not None)
    drafter = None if drafting is None else drafters(spec)[drafting]
    own = () if drafter is None else drafter.caches
    layout = kv_layout(spec, limits.block_size, drafter=own, drafts=limits.max_drafts)
    stored = None if quantization is None or quantization in ROUNDED_ON_DEVICE else STORED[quantization]
    schemes = {} if stored is None else {each.name: stored.scheme for each in params(spec).values() if is_matrix(each)}
    quantised = {"schemes": schemes} if schemes else {"quantization": quantization}
    lora = LoraOptions(limits.max_loras, 64, "bfloat16") if limits.max_loras else None
    options = make_options(
        spec, limits=limits, layout=layout, dtype="bfloat16", lora=lora, drafter=drafter, **quantised
    )
    backend = create(options, Absent(CPU.torch, CPU.chip, "H100"))
    backend.load(
        (key, stored.tensor(*array.shape) if stored is not None and key in schemes else array)
        for key, array in random_weights(spec)
    )
    if drafter is not None:
        backend.load_drafter(random_drafter(drafter).items())
    backend.init_cache((2,) * len(layout.pools))
    backend._warmup_plans.minimal = lambda: backend._warmup_plans.all(backend.config.graph_sizes.sizes)  # as on a GPU
    backend.warmup()
    before = len(new)
    for plan in steps(limits, len(layout.groups)):
        if lora is not None and plan.step % 5 == 0:
            slot, rank = plan.step % limits.max_loras, (8, 16, 64)[plan.step % 3]
            backend.load_adapter(slot, random_adapter(backend.adaptable(), rank, plan.step))
        backend.execute(plan).result()
    return new[:before], new[before:]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    serve()
