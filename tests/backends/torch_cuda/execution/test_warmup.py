"""Engine start on a simulated GPU: it works, and nothing is compiled afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.kernels.warm_launches import Start, Starter

from pagoda.backends.torch_cuda.backend import create
from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.execution import stream
from pagoda.backends.torch_cuda.execution.mixed_steps import mixed_sizes
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout

MIB = 1 << 20


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    made = Starter()
    yield made
    made.close()


def test_an_engine_that_does_not_start_is_an_error(starter: Starter) -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'no such model'"):
        starter.compiled(Start("no such model"))


def slow(cases: list[Any]) -> list[Any]:
    """The cases as parameters of `make test-full` alone."""
    return [pytest.param(*case, marks=pytest.mark.slow_matrix) for case in cases]


STARTS: list[tuple[str, str | None, dict[str, int]]] = [
    ("latents", None, {"max_num_batched_tokens": 150}),
    ("blocks", None, {"max_drafts": 3}),
    ("states", None, {"max_drafts": 3, "max_num_seqs": 20}),  # steps without drafts are those of other engines
    # Few sequences: no decode step has as many rows as short prompts, whose products have tiles of their own.
    ("windows", "fp8", {"max_num_seqs": 1}),
    ("experts", "int4", {"max_num_seqs": 4, "max_model_len": 100, "max_num_batched_tokens": 2000}),
    ("windows", "fp8-small-blocks", {"max_num_seqs": 9}),
    ("full norms", "int4-ordered", {"max_num_seqs": 5}),
    ("experts", "int8", {"max_loras": 1, "max_drafts": 3, "max_num_seqs": 9}),
]
MORE_STARTS: list[tuple[str, str | None, dict[str, int]]] = [
    ("windows", None, {}),
    ("states", None, {}),
    ("experts", "int8", {}),
    ("full norms", "int4", {}),
    ("windows", "int8", {"max_num_seqs": 2, "max_num_batched_tokens": 64}),
    ("full norms", "int4", {"max_num_seqs": 8, "max_model_len": 48}),
    ("windows", None, {"max_drafts": 3}),
    ("experts", "int8", {"max_drafts": 7, "max_num_seqs": 5}),
    ("windows", None, {"max_loras": 3}),
]


@pytest.mark.parametrize(("model", "quantization", "limits"), [*STARTS, *slow(MORE_STARTS)])
def test_serving_compiles_nothing(
    starter: Starter, model: str, quantization: str | None, limits: dict[str, int]
) -> None:
    before, after = starter.compiled(Start(model, quantization, limits=limits))
    assert len(before) > 15
    assert not after


DRAFTERS: list[tuple[str, str, dict[str, int]]] = [
    ("windows", "draft_model", {"max_drafts": 3, "max_num_seqs": 9}),
    ("latents", "mtp", {"max_drafts": 1, "max_num_batched_tokens": 150}),
    ("full norms", "eagle3", {"max_drafts": 3, "max_num_seqs": 20}),
    ("windows", "medusa", {"max_drafts": 3, "max_num_seqs": 5}),
    ("windows", "mlp_speculator", {"max_drafts": 3, "max_num_seqs": 5}),
]
MORE_DRAFTERS: list[tuple[str, str, dict[str, int]]] = [
    ("windows", "mtp", {"max_drafts": 3}),
    ("experts", "mtp", {"max_drafts": 2, "max_num_seqs": 6, "max_loras": 2}),
    ("windows", "draft_model", {"max_drafts": 9, "max_num_seqs": 3}),
]


@pytest.mark.parametrize(("model", "drafter", "limits"), [*DRAFTERS, *slow(MORE_DRAFTERS)])
def test_serving_with_a_drafter_compiles_nothing(
    starter: Starter, model: str, drafter: str, limits: dict[str, int]
) -> None:
    before, after = starter.compiled(Start(model, drafter=drafter, limits=limits))
    assert len(before) > 15
    assert not after


class Gpu(Device):
    """A CPU that starts as a GPU does: memory is measured by steps over a tiny cache, then everything is run."""

    is_gpu = True
    use_kernels = False


@pytest.mark.parametrize(
    ("seqs", "measured", "drafts"),
    [(1, 1, 0), (3, 3, 0), *slow([(64, 6, 0), (192, 8, 0)]), (6, 4, 3)],
)
def test_a_start_reads_and_writes_within_bounds(
    monkeypatch: pytest.MonkeyPatch, seqs: int, measured: int, drafts: int
) -> None:
    """Nothing is read or written where it should not be: a CPU's indexing complains."""
    monkeypatch.setattr(stream, "GpuStream", stream.CpuStream)
    for name, fake in {
        "mem_get_info": lambda device: (60 * MIB, 80 * MIB),
        "memory_reserved": lambda device: MIB,
        "max_memory_reserved": lambda device: 2 * MIB,
        "reset_peak_memory_stats": lambda device: None,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    limits = Limits(max_model_len=48, max_num_batched_tokens=256, max_num_seqs=seqs, block_size=4, max_drafts=drafts)
    spec = tiny_spec(window=6, moe=seqs == 3)
    layout = kv_layout(spec, limits.block_size)
    device = Gpu(CPU.torch, CPU.chip, "NVIDIA H100")
    backend = create(make_options(spec, limits=limits, layout=layout), device)
    backend.load(random_weights(spec))
    plan = backend.plan_memory()
    assert plan.kv_cache > 48 * MIB, "what is left of nine tenths, which is more than these requests need"
    backend.init_cache(plan.num_blocks)
    backend.warmup()
    programs = 2 * (1 + (drafts > 0))
    mixed = 0 if drafts else 2 * len(mixed_sizes(256))  # all of them are measured, too
    assert backend._stream.captures == programs * (len(backend.config.graph_sizes.captured) + measured) + mixed
    for served in (backend._warmup_plans.decode(seqs), *backend._warmup_plans.drafts(seqs)):
        assert not backend.execute(served).result().recompiles
