"""Mixers with recurrent state: definitions and interpreted kernels against the readable maths, token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.devices.thread_ranks import on_ranks
from support.devices.torch_cuda_model import poisoned
from support.engines.reference_driver import random_weights, tiny_spec
from support.suite.rows import each_row
from torch import Tensor

from pagoda.backends.reference.model.naive.recurrent import NaiveParts, recurrent
from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.torch_cuda.attention_backends.triton import own_kernels
from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.execution.replay import ReplayPlanner, StepSequences, make_replay
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.kernels.recurrent.gated_norm import GatedNorm, gated_norm
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK, StateStep
from pagoda.backends.torch_cuda.memory.cache import CudaArrayCache
from pagoda.backends.torch_cuda.model.mixers.recurrence import CudaPagedRecurrence
from pagoda.backends.torch_cuda.model.mixers.registry import ops_of
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, Comm, RankShard
from pagoda.backends.torch_cuda.weights.load import Loader
from pagoda.common.engine.steps.contract import StepPlan
from pagoda.common.models.mixers import (
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    Recurrent,
    ShortConvolution,
)
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.primitives import Norm

RMS = Norm(1e-5)
MIXERS: dict[str, Recurrent] = {
    "Mamba-2": Mamba2(6, 8, 2, 12, 4, RMS),
    "Mamba-2, biased, clamped": Mamba2(3, 20, 1, 16, 2, RMS, True, bias=True, conv_bias=False, step_limit=(0.3, 0.8)),
    "Mamba-2 without a norm": Mamba2(4, 40, 4, 20, 3, None),
    "Mamba": Mamba(40, 16, 5, 4, None),
    "Mamba, parts normalised": Mamba(20, 6, 3, 2, RMS, bias=True, conv_bias=False),
    "Mamba, parts normalised without weights": Mamba(20, 6, 3, 2, Norm(1e-5, scale=False)),
    "KDA": KimiDelta(2, 20, 6, 4, RMS),
    "KDA, direct decays, bounded": KimiDelta(2, 20, None, 4, RMS, -5.0),
    "lightning attention": LightningAttention(12, (0.9, 0.01, 0.3), RMS),
    "short convolution": ShortConvolution(150, 3),
    "short convolution, biased": ShortConvolution(20, 4, bias=True),
}
WITH_DRAFTS: dict[str, Recurrent] = {
    "gated delta": GatedDelta(1, 2, 8, 12, 4, RMS),
    "KDA": KimiDelta(1, 8, 6, 4, RMS),
    "lightning attention": LightningAttention(12, (0.9, 0.01), RMS),
    "Mamba": Mamba(20, 6, 3, 2, RMS),
    "Mamba-2": Mamba2(2, 8, 2, 12, 4, RMS),
    "short convolution": ShortConvolution(20, 3),
}
STEPS = ({0: 20, 1: 2, 2: 16}, {3: 1, 0: 1, 1: 3, 2: 66}, {2: 1, 0: 1, None: 0})
"""Sequence -> new tokens in each step, sequences of one token first; None: padding, after all others."""


@dataclass
class Layer:
    """A mixer alone, and the states of four sequences in blocks that are all NaN at first."""

    mixer: Recurrent
    dtype: torch.dtype = torch.float32

    drafts: int = 0  # whose inputs each block has room for
    more_chunks: bool = False  # the first sequence of several tokens may have one chunk more than it has
    comm: Comm = SINGLE_RANK
    tokens: tuple[int, ...] = tuple(sum(step.get(row, 0) for step in STEPS) for row in range(4))  # of each sequence

    def __post_init__(self) -> None:
        spec = tiny_spec()
        self.spec = replace(spec, layers=(replace(spec.layers[0], mixers=(self.mixer,)),))
        self.weights = dict(random_weights(self.spec))
        (cache,) = self.mixer.caches()
        assert isinstance(cache, StateCache)
        elements = replace(cache, drafts=self.drafts).elements_of_rank(self.comm.size)
        self.states = poisoned((6, elements), torch.float32)
        self.random = torch.Generator().manual_seed(0)  # of its own, for layers in several threads
        self.blocks = (1 + torch.randperm(5, generator=self.random)[:4]).tolist()
        self.inputs = [
            torch.randn(total, self.spec.width, generator=self.random).to(self.dtype) for total in self.tokens
        ]

    def want(self) -> list[Tensor]:
        """The outputs of each sequence, from the formulas."""
        parts = NaiveParts({name: to_torch(value).to(self.dtype).float() for name, value in self.weights.items()})
        assert not self.mixer.ropes(), "no mixer here rotates"
        return [recurrent(parts, "layers.0.mixers.0", self.mixer, x.float(), lambda _, x: x) for x in self.inputs]

    def paged(self, *, use_kernel: bool) -> CudaPagedRecurrence:
        class Chosen(Device):
            use_kernels = use_kernel

        device = Chosen(CPU.torch, CPU.chip, "CPU")
        loader = Loader(self.spec, RankShard(self.comm.rank, self.comm.size), self.dtype, poisoned)
        loader.fill(self.weights.items())
        build = CudaBuildContext(loader.params, device, self.comm, own_kernels(device), self.spec.width)
        mixer = ops_of(self.mixer).paged(self.mixer, {None: None}, build, "layers.0.mixers.0", (0,))
        assert isinstance(mixer, CudaPagedRecurrence)
        return mixer

    def outputs(self, *, use_kernel: bool) -> list[Tensor]:
        """The same in steps."""
        layer = self.paged(use_kernel=use_kernel).layer
        done, parts = [0] * 4, [[] for _ in range(4)]
        for counts in STEPS:
            step, rows = self.step(counts, done)
            x = torch.cat([self.inputs[row][begin:end] for row, begin, end in rows] + [poisoned((2, 32), self.dtype)])
            found = layer(x, step)
            at = 0
            for row, begin, end in rows:
                parts[row].append(found[at : at + end - begin].float())
                at, done[row] = at + end - begin, end
        return [torch.cat(part) for part in parts]

    def step(self, counts: dict[int | None, int], done: list[int]) -> tuple[StateStep, list[tuple[int, int, int]]]:
        """Return the step, and (sequence, its first new token, the end) in order; padding rows are NaN."""
        rows = [(row, done[row], done[row] + count) for row, count in counts.items() if row is not None]
        decodes = sum(count <= 1 for count in counts.values())
        lengths = torch.tensor([count or 1 for count in counts.values()], dtype=torch.int32)
        chunks = make_tiles(lengths.numpy(), decodes, CHUNK)
        if self.more_chunks and len(chunks):
            chunks = np.concatenate((chunks, np.array([[decodes, CHUNK]], np.int32)))
        tables = torch.full((len(counts), 3), 1 << 30, dtype=torch.int32)
        for index, row in enumerate(counts):
            if row is not None:
                tables[index, 0] = self.blocks[row]
        kv_lens = [0 if row is None else done[row] + count for row, count in counts.items()]
        return StateStep(
            self.states,
            tables,
            torch.cat((torch.zeros(1), lengths.cumsum(0))).int(),
            torch.tensor(kv_lens, dtype=torch.int32),
            torch.from_numpy(chunks) if len(chunks) else None,
            decodes,
        ), rows


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_it_is_the_recurrence_token_by_token(name: str, use_kernel: bool):
    layer = Layer(MIXERS[name])
    for got, want in zip(layer.outputs(use_kernel=use_kernel), layer.want(), strict=True):
        assert want.std() > 0.01
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    unused = [block for block in range(6) if block not in layer.blocks]
    assert layer.states[unused].isnan().all()


@pytest.mark.parametrize("name", ["Mamba"])
def test_chunks_behind_a_sequence_do_nothing(name: str):
    layer = Layer(MIXERS[name], more_chunks=True)
    for got, want in zip(layer.outputs(use_kernel=True), layer.want(), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


DRAFTS = 3
DRAFTED: tuple[dict[int | None, tuple[int, int, int]], ...] = (
    {0: (18, 0, 0), 1: (1, 2, 1)},
    {0: (1, 3, 2), 2: (3, 0, 0), None: (0, 0, 0)},
    {1: (1, 3, 3), 2: (1, 2, 1), 0: (1, 0, 0)},
    {2: (1, 0, 0), 1: (1, 0, 0), 0: (2, 0, 0)},
)
"""Sequence -> new tokens that are no drafts, drafts, and how many of these are right, in each step; None: padding."""


class Drafted:
    """A mixer over sequences with drafts. A wrong draft is any input."""

    def __init__(self, mixer: Recurrent, comm: Comm = SINGLE_RANK) -> None:
        totals = [
            sum(new + right for step in DRAFTED for new, _, right in [step.get(row, (0, 0, 0))]) for row in (0, 1, 2)
        ]
        self.layer = Layer(mixer, drafts=DRAFTS, tokens=tuple(totals), comm=comm)
        self.planner = ReplayPlanner(3, DRAFTS)
        self.done = [0] * 3  # right tokens of each sequence
        self.lags = [0] * 3

    def outputs(self, *, use_kernel: bool) -> list[Tensor]:
        """Those of the right tokens of each sequence."""
        mixer = self.layer.paged(use_kernel=use_kernel)
        cache = {0: CudaArrayCache(self.layer.states, 0)}
        parts: list[list[Tensor]] = [[] for _ in range(3)]
        for counts in DRAFTED:
            x = [poisoned((0, 32), torch.float32)]
            for row, (new, drafts, right) in counts.items():
                if row is not None:
                    begin = self.done[row]
                    x += [
                        self.layer.inputs[row][begin : begin + new + right],
                        torch.randn(drafts - right, 32, generator=self.layer.random),
                    ]
            found = mixer(torch.cat((*x, poisoned((2, 32), torch.float32))), self.batch(counts), cache)
            at = 0
            for row, (new, drafts, right) in counts.items():
                if row is not None:
                    parts[row].append(found[at : at + new + right])
                    at += new + drafts
                    self.done[row] += new + right
                    self.lags[row] = right
        return [torch.cat(part) for part in parts]

    def batch(self, counts: dict[int | None, tuple[int, int, int]]) -> CudaStepBatch:
        """Return a step, of which recurrent mixers read the tables and the calls."""
        new, drafts, _ = np.array([*counts.values()], np.int32).T
        real = [row for row in counts if row is not None]
        ends = np.concatenate(([0], np.cumsum(new + drafts))).astype(np.int32)
        plan = StepPlan(
            step=0,
            starts=(),
            rows=np.array(real, np.int32),
            query_start=ends[: len(real) + 1],
            context=np.zeros(len(real), np.int32),
            token_ids=np.zeros(ends[-1], np.int32),
            block_tables=(),
            samples=np.ones(len(real), np.bool_),
            num_drafts=drafts[: len(real)] if drafts.any() else None,
        )
        planned = self.planner.plan(plan, 16)
        self.planner.finish(plan)
        context = [0 if row is None else self.done[row] for row in counts]
        tables = [[1 << 30 if row is None else self.layer.blocks[row], 1 << 30] for row in counts]
        sequences = StepSequences(
            first_tokens=torch.from_numpy(ends[:-1]),
            counts=torch.from_numpy(new + drafts),
            kv_lens=torch.from_numpy(np.array(context, np.int32) + new + drafts),
            lags=torch.tensor([0 if row is None else self.lags[row] for row in counts], dtype=torch.int32),
            drafts=torch.from_numpy(drafts) if drafts.any() else None,
            of_tokens=torch.from_numpy(np.repeat([*range(len(counts)), 0], [*(new + drafts), 2]).astype(np.int32)),
            tables=torch.tensor([tables], dtype=torch.int32),
        )
        chunks, draft_chunks = (torch.from_numpy(each) for each in (planned.chunks, planned.draft_chunks))
        nothing = torch.zeros(0, dtype=torch.int32)
        return CudaStepBatch(
            nothing,
            nothing,
            nothing,
            nothing,
            (),
            num_decodes=0,
            tiles=None,
            replay=make_replay(planned.shape, sequences, chunks, draft_chunks),
        )


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("name", WITH_DRAFTS)
def test_accepted_drafts_run_again(name: str, use_kernel: bool):
    drafted = Drafted(WITH_DRAFTS[name])
    for got, want in zip(drafted.outputs(use_kernel=use_kernel), drafted.layer.want(), strict=True):
        assert want.std() > 0.01
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    blocks = [drafted.layer.blocks[row] for row in range(3)]
    unused = [block for block in range(1, 6) if block not in blocks]
    assert drafted.layer.states[unused].isnan().all()


ON_RANKS: dict[str, Recurrent] = {
    **WITH_DRAFTS,
    "gated delta": GatedDelta(2, 4, 8, 12, 4, RMS),
    "KDA": KimiDelta(2, 8, 6, 4, RMS),
    "Mamba-2, a group on both ranks": Mamba2(2, 8, 1, 12, 4, RMS),
}


@each_row("name", list(ON_RANKS))
def test_each_rank_runs_its_own_part_again(name: str):
    def outputs(comm: Comm) -> list[Tensor]:
        return Drafted(ON_RANKS[name], comm).outputs(use_kernel=False)

    want = Layer(ON_RANKS[name], tokens=Drafted(ON_RANKS[name]).layer.tokens).want()
    for found in on_ranks(2, outputs):
        torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("use_kernel", [False, True])
def test_norm_of_a_part_of_the_channels(use_kernel: bool):
    torch.manual_seed(0)
    x, gate, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    whole = F.rms_norm(x * F.silu(gate), (24,), weight, 1e-3)
    spec = GatedNorm(weight[:12], 1, 1e-3, gate_first=True)
    mean_square = (x * F.silu(gate)).square().mean(1, keepdim=True)
    part = gated_norm(x[:, :12].contiguous(), gate[:, :12], spec, mean_square=mean_square, use_kernel=use_kernel)
    torch.testing.assert_close(part, whole[:, :12], rtol=0, atol=1e-6)


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm(groups: int, unit_offset: bool, use_kernel: bool):
    torch.manual_seed(0)
    x, gate = torch.randn(5, 3 * 12), torch.randn(5, 40)[:, 4:]
    weight = torch.randn(12 if groups == 3 else 36)
    out = gated_norm(x, gate, GatedNorm(weight, groups, 1e-3, unit_offset), use_kernel=use_kernel)
    width = 36 // groups
    normed = F.rms_norm(x.view(5, groups, width), (width,), weight + unit_offset, 1e-3).flatten(1)
    torch.testing.assert_close(out, normed * F.silu(gate), rtol=0, atol=1e-6)
