"""Decodes by FlashInfer: a stand-in checks what its wrapper is documented to take, and that every step is planned."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.reference_driver import Driver, tiny_spec
from support.kernels.paged_attention import paged
from torch import Tensor

from pagoda.backends.torch_cuda import backend
from pagoda.backends.torch_cuda.attention_backends.flashinfer import FlashInferDecode, page_lists
from pagoda.backends.torch_cuda.attention_backends.triton import own_kernels
from pagoda.backends.torch_cuda.device import CPU
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS

SPEC = tiny_spec(softcap=0.05)
PROMPTS = {0: [5, 17, 3, 80, 41, 2, 9, 60], 1: [33, 21, 7, 8, 90] * 4, 2: [44, 3], 3: [61]}
EVERY = SamplingRules(logprobs=-1)
PROMPTS_TOO = SamplingRules(logprobs=-1, prompt_logprobs=0)
INTEGERS = 8 << 20


class Package:
    """Calls of wrappers and events, in order, by the number of the wrapper or event."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.wrappers: list[Wrapper] = []
        self.events = 0

    def make_wrapper(self, *args: Any, **how: Any) -> Wrapper:
        self.wrappers.append(Wrapper(self, len(self.wrappers), *args, **how))
        return self.wrappers[-1]

    def make_event(self) -> Event:
        self.events += 1
        return Event(self, self.events - 1)

    def decode(self) -> FlashInferDecode:
        return FlashInferDecode(self.make_wrapper, torch.zeros(64, dtype=torch.uint8), self.make_event)

    def of(self, number: int) -> list[str]:
        """The calls of a wrapper and its event."""
        return [name for name, of in self.calls if of == number]


class Event:
    """torch.cuda.Event."""

    def __init__(self, package: Package, number: int) -> None:
        self.package, self.number = package, number

    def record(self) -> None:
        self.package.calls.append(("record", self.number))

    def synchronize(self) -> None:
        self.package.calls.append(("synchronize", self.number))


class Wrapper:
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper, by the names of its arguments that are used."""

    def __init__(
        self,
        package: Package,
        number: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        assert (kv_layout, use_tensor_cores) == ("HND", True)
        self.package, self.number, self.workspace = package, number, float_workspace_buffer
        self.integers: Tensor | None = None
        self.buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self.size: int | None = None
        if use_cuda_graph:
            assert all(isinstance(each, Tensor) and each.dtype == torch.int32 for each in self.buffers)
            self.size = len(self.buffers[2])
            assert len(self.buffers[0]) == self.size + 1

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert float_workspace_buffer is self.workspace
        assert (int_workspace_buffer.dtype, len(int_workspace_buffer)) == (torch.uint8, INTEGERS)
        self.integers = int_workspace_buffer

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        lists = indptr, indices, last_page_len
        assert {each.dtype for each in lists} == {torch.int32}
        starts = indptr.tolist()
        assert (len(starts), starts[0], starts[-1]) == (len(last_page_len) + 1, 0, len(indices))
        assert last_page_len.min() >= 1
        assert last_page_len.max() <= page_size
        if self.size is not None:
            assert len(last_page_len) == self.size
            for buffer, each in zip(self.buffers, lists):
                buffer[: len(each)].copy_(each)
        pages = indptr.diff()
        assert pages.min() >= 1
        self.tables = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for s, (begin, end) in enumerate(pairwise(starts)):
            self.tables[s, : end - begin] = indices[begin:end]
        self.lens = (pages - 1) * page_size + last_page_len
        self.shapes = (num_qo_heads, head_dim), (num_kv_heads, page_size, head_dim), q_data_type, kv_data_type
        self.rules = sm_scale, logits_soft_cap or 0.0
        self.package.calls.append(("plan", self.number))

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert self.shapes == (q.shape[1:], keys.shape[1:], q.dtype, keys.dtype)
        assert len(q) == len(self.lens)
        self.package.calls.append(("run", self.number))
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        return paged(q, k, v, starts, self.lens, self.tables, *self.rules)


def driver(monkeypatch: pytest.MonkeyPatch, decode: FlashInferDecode | None = None) -> Driver:
    kernels = replace(own_kernels(CPU), decode=decode)
    monkeypatch.setattr(backend, "load_kernels", lambda name, needs: kernels)
    return Driver(SPEC, "scattered", backend="torch_cuda", device=CPU)


def steps(d: Driver, rules: SamplingRules = EVERY) -> list[np.ndarray]:
    """Log-probabilities of steps in which prompts join rows that decode, which grow over pages and are replaced."""
    found = []

    def step(pieces: dict[int, list[int]], starts: tuple[int, ...] = ()) -> None:
        begun = [d.start(row, PROMPTS[row], rules) for row in starts]
        _, result = d.step(pieces, begun)
        found.extend(each.logprobs for each in result.logprobs.values())

    step({0: PROMPTS[0]}, (0,))
    step({0: [PREVIOUS], 1: PROMPTS[1], 2: PROMPTS[2]}, (1, 2))
    for _ in range(6):
        step({row: [PREVIOUS] for row in (0, 1, 2)})
    step({0: [PREVIOUS], 3: PROMPTS[3]}, (3,))
    step({3: [PREVIOUS], 0: [PREVIOUS]})
    step({1: [PREVIOUS]})
    return found


@pytest.mark.parametrize(("rules", "fixed"), [(EVERY, {True, False}), (PROMPTS_TOO, {False})], ids=["graphs", "eager"])
def test_steps_are_the_same(rules: SamplingRules, fixed: set[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured sizes with and without padding, mixed steps, and decodes that run eagerly."""
    package = Package()
    want = steps(driver(monkeypatch), rules)
    got = steps(driver(monkeypatch, package.decode()), rules)
    assert len(got) == len(want)
    for mine, its in zip(got, want):
        np.testing.assert_allclose(mine, its, atol=2e-5)
    assert {wrapper.size is not None for wrapper in package.wrappers} == fixed


def test_each_step_is_planned_before_its_graph_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for both layers; before the pinned buffer is overwritten, its last copy is waited for."""
    package = Package()
    d = driver(monkeypatch, package.decode())
    sizes = d.backend.config.graph_sizes.sizes
    d.backend._warmup_plans.minimal = lambda: d.backend._warmup_plans.all(sizes)  # as on a GPU
    d.backend.warmup()
    made = len(package.wrappers)
    fixed = {wrapper.size: wrapper for wrapper in package.wrappers if wrapper.size is not None}
    assert fixed.keys() == set(sizes)
    assert made == len(sizes) + 1, "one for decodes of mixed steps, as many as there are"
    assert d.backend.config.mixed_shapes is None, "their decodes are planned, too"
    package.calls.clear()
    steps(d)
    assert package.events == len(package.wrappers) == made, "nothing is made while serving"
    for number in range(len(package.wrappers)):
        calls = package.of(number)
        assert calls == ["synchronize", "plan", "record", "run", "run"] * (len(calls) // 5)
    assert len(package.of(fixed[4].number)) == 6 * 5, "as many as steps of three rows"


def test_wrappers_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package()
    decode = package.decode()
    d = driver(monkeypatch, decode)
    d.backend.warmup()
    fixed = [wrapper for wrapper in package.wrappers if wrapper.size is not None]
    largest = max(fixed, key=lambda wrapper: wrapper.size)
    assert {wrapper.workspace.data_ptr() for wrapper in package.wrappers} == {decode.workspace.data_ptr()}
    assert {wrapper.integers.data_ptr() for wrapper in fixed} == {largest.integers.data_ptr()}
    assert {wrapper.buffers[1].data_ptr() for wrapper in fixed} == {largest.buffers[1].data_ptr()}
    assert len(largest.buffers[1]) == largest.size * d.backend._runner.programs.parts.buffers.width


def test_pages_of_sequences_and_of_padding() -> None:
    tables = np.array([[3, 5, 0], [7, 0, 0], [4, 6, 8]], np.int32)
    starts, indices, last = page_lists(np.array([5, 4, 12], np.int32), (tables[:0], tables), 1, 5, 4)
    assert starts.tolist() == [0, 2, 3, 6, 7, 8]
    assert indices.tolist() == [3, 5, 7, 4, 6, 8, 0, 0]
    assert last.tolist() == [1, 4, 4, 1, 1]
    padding = page_lists(np.zeros(0, np.int32), (), 0, 2, 4)
    assert [each.tolist() for each in padding] == [[0, 1, 2], [0, 0], [1, 1]]
