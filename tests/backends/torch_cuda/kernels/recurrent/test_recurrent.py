"""Mixers with recurrent state: definitions and interpreted kernels against the readable maths, token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from support.devices.torch_cuda_model import poisoned
from support.engines.reference_driver import random_weights, tiny_spec
from torch import Tensor

from pagoda.backends.reference.model.naive.recurrent import NaiveParts, recurrent
from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.torch_cuda.attention_backends.triton import own_kernels
from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.kernels.recurrent.gated_norm import GatedNorm, gated_norm
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK, StateStep
from pagoda.backends.torch_cuda.model.mixers.recurrence import CudaPagedRecurrence
from pagoda.backends.torch_cuda.model.mixers.registry import ops_of
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, RankShard
from pagoda.backends.torch_cuda.weights.load import Loader
from pagoda.common.models.mixers import KimiDelta, LightningAttention, Mamba, Mamba2, Recurrent, ShortConvolution
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
STEPS = ({0: 20, 1: 2, 2: 16}, {3: 1, 0: 1, 1: 3, 2: 66}, {2: 1, 0: 1, None: 0})
"""Sequence -> new tokens in each step, sequences of one token first; None: padding, after all others."""


@dataclass
class Layer:
    """A mixer alone, and the states of four sequences in blocks that are all NaN at first."""

    mixer: Recurrent
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        spec = tiny_spec()
        self.spec = replace(spec, layers=(replace(spec.layers[0], mixers=(self.mixer,)),))
        self.weights = dict(random_weights(self.spec))
        (cache,) = self.mixer.caches()
        self.states = poisoned((6, cache.block_elements(1)), torch.float32)
        torch.manual_seed(0)
        self.blocks = (1 + torch.randperm(5)[:4]).tolist()
        totals = [sum(step.get(row, 0) for step in STEPS) for row in range(4)]
        self.inputs = [torch.randn(total, self.spec.width).to(self.dtype) for total in totals]

    def want(self) -> list[Tensor]:
        """The outputs of each sequence, from the formulas."""
        parts = NaiveParts({name: to_torch(value).to(self.dtype).float() for name, value in self.weights.items()})
        assert not self.mixer.ropes(), "no mixer here rotates"
        return [recurrent(parts, "layers.0.mixers.0", self.mixer, x.float(), lambda _, x: x) for x in self.inputs]

    def outputs(self, *, use_kernel: bool) -> list[Tensor]:
        """The same in steps."""

        class Chosen(Device):
            use_kernels = use_kernel

        device = Chosen(CPU.torch, CPU.chip, "CPU")
        loader = Loader(self.spec, RankShard(), self.dtype, poisoned)
        loader.fill(self.weights.items())
        build = CudaBuildContext(loader.params, device, SINGLE_RANK, own_kernels(device), self.spec.width)
        mixer = ops_of(self.mixer).paged(self.mixer, {None: None}, build, "layers.0.mixers.0", (0,))
        assert isinstance(mixer, CudaPagedRecurrence)
        layer = mixer.layer
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
