"""The gated delta rule: definition and interpreted kernels against the rule token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta import DeltaWeights, gated_delta
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK, StateStep
from pagoda.common.models.mixers import GatedDelta
from pagoda.common.models.primitives import Norm

NAN = float("nan")
SMALL = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=12, taps=4, norm=Norm(1e-6))


def definition(spec: GatedDelta, qkv: Tensor, scalars: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """Heads [T, N*V] and state [N, K, V] of a whole sequence, from the formulas of GatedDelta, in float64."""
    tokens, heads = len(qkv), spec.value_heads
    seen = torch.cat((torch.zeros(spec.taps - 1, spec.channels), qkv)).double()
    taps = weights.conv[:, 0].double()
    mixed = F.silu(torch.stack([(seen[t : t + spec.taps] * taps.T).sum(0) for t in range(tokens)]))
    keys = spec.key_heads * spec.key_dim
    q, k, v = mixed.split([keys, keys, heads * spec.value_dim], 1)
    each = heads // spec.key_heads
    q, k = (F.normalize(x.view(tokens, spec.key_heads, -1), dim=2).repeat_interleave(each, 1) for x in (q, k))
    beta, decay = scalars.double().split(heads, 1)
    factor = torch.exp(-weights.decay_rate.double().exp() * F.softplus(decay + weights.decay_offset.double()))
    state, out = torch.zeros(heads, spec.key_dim, spec.value_dim).double(), []
    for t in range(tokens):
        state = state * factor[t, :, None, None]
        written = (
            spec.beta_scale
            * beta[t].sigmoid()[:, None]
            * (v[t].view(heads, -1) - torch.einsum("nk,nkv->nv", k[t], state))
        )
        state = state + torch.einsum("nk,nv->nkv", k[t], written)
        out.append(torch.einsum("nk,nkv->nv", q[t] * spec.key_dim**-0.5, state).flatten())
    return torch.stack(out).float(), state.float()


@dataclass
class Sequences:
    """Sequences with states after some of their tokens, in blocks that are all NaN else; decodes first."""

    lens: list[int]  # all tokens
    counts: list[int]  # new tokens; 0 is padding
    spec: GatedDelta = SMALL
    decay: float = 1.0
    dtype: torch.dtype = torch.float32

    def run(self, *, use_kernel: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """(new heads, states, tails) of each sequence and the same by definition: computed in two steps."""
        spec = self.spec
        torch.manual_seed(sum(self.lens))
        channels, heads = spec.channels, spec.value_heads
        weights = DeltaWeights(torch.randn(channels, 1, spec.taps), self.decay * torch.randn(heads), torch.randn(heads))
        weights = DeltaWeights(*(x.to(self.dtype) for x in (weights.conv, weights.decay_rate, weights.decay_offset)))
        qkv = [torch.randn(length, channels).to(self.dtype) for length in self.lens]
        scalars = [torch.randn(length, 2 * heads).to(self.dtype) for length in self.lens]
        (cache,) = spec.caches()
        states = torch.full((len(self.lens) + 2, cache.block_elements(1)), NAN)
        blocks = 1 + torch.randperm(len(self.lens) + 1)[: len(self.lens)]

        def part(lens: list[int], counts: list[int], rows: list[int]) -> list[Tensor]:
            def new(tensors: list[Tensor]) -> Tensor:
                taken = [tensors[row][lens[i] - counts[i] : lens[i]] for i, row in enumerate(rows)]
                padding = [torch.full((1, tensors[0].shape[1]), NAN, dtype=self.dtype) for count in counts if not count]
                return torch.cat([*taken, *padding])

            decodes = sum(count <= 1 for count in counts)
            tables = torch.full((len(rows), 3), 1 << 30, dtype=torch.int32)
            tables[:, 0] = blocks[rows]
            ends = [0, *torch.tensor(counts).cumsum(0).tolist()]
            chunks = make_tiles(torch.tensor(counts, dtype=torch.int32).numpy(), decodes, CHUNK)
            wide = torch.cat((new(qkv), new(qkv)[:, :3]), 1)[:, :channels]  # rows apart
            step = StateStep(
                states,
                tables,
                torch.tensor(ends, dtype=torch.int32),
                torch.tensor([length if count else 0 for length, count in zip(lens, counts)], dtype=torch.int32),
                torch.from_numpy(chunks) if len(chunks) else None,
                num_decodes=decodes,
            )
            out = gated_delta(wide, new(scalars), step, spec=spec, weights=weights, use_kernel=use_kernel)
            return [out[begin:end] for begin, end in pairwise(ends)] + [out[ends[-1] :]]

        before = [length - count for length, count in zip(self.lens, self.counts)]
        earlier = sorted(
            (row for row, length in enumerate(before) if length and self.counts[row]), key=before.__getitem__
        )
        if earlier:
            part([before[row] for row in earlier], [before[row] for row in earlier], earlier)
        found = part(self.lens, self.counts, list(range(len(self.lens))))
        assert not found.pop().any(), "padding"
        outs, want = [], []
        for row, length in enumerate(self.lens):
            if not self.counts[row]:
                continue
            heads_of, state = definition(spec, qkv[row].float(), scalars[row].float(), weights)
            tail = torch.cat((torch.zeros(spec.taps - 1, channels), qkv[row].float()))[-(spec.taps - 1) :].T
            want += [heads_of[length - self.counts[row] :], torch.cat((tail.flatten(), state.flatten()))]
            outs += [found[row].float(), states[blocks[row]]]
        others = [block for block in range(len(states)) if block not in blocks.tolist()]
        assert states[others].isnan().all()
        return outs, want


CASES = {
    "decodes": Sequences([5, 1, 9, 3], [1, 1, 1, 0]),
    "whole prompts": Sequences([2, 70, 150, 3], [2, 70, 150, 3]),
    "chunks after context, and a decode": Sequences([20, 9, 140], [1, 7, 100]),
    "strong decay": Sequences([90, 130], [1, 130], decay=3.0),
    "scaled beta": Sequences([20, 9, 140], [1, 7, 100], replace(SMALL, beta_scale=2.0)),
    "one key head per value head, two taps": Sequences([66, 7], [1, 2], GatedDelta(3, 3, 16, 16, 2, Norm(1e-6))),
}


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_rule_token_by_token(name: str, use_kernel: bool):
    actual, want = CASES[name].run(use_kernel=use_kernel)
    assert len(want) >= 4
    for one, other in zip(actual, want):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=5e-6)


def test_half_precision():
    actual, want = Sequences([40, 100], [1, 90], dtype=torch.float16).run(use_kernel=True)
    for one, other in zip(actual, want):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.01)


def test_chunks_of_equal_keys():
    """The worst system to solve: every key the same, everything written, nothing forgotten."""
    spec = GatedDelta(1, 1, 16, 16, 2, Norm(1e-6))
    qkv, scalars = torch.ones(130, spec.channels), torch.tensor([[30.0, -30.0]]).repeat(130, 1)
    qkv[:, 32:] = torch.randn(130, 16)
    weights = DeltaWeights(torch.ones(spec.channels, 1, 2), torch.zeros(1), torch.zeros(1))
    (cache,) = spec.caches()
    chunks = torch.from_numpy(make_tiles(torch.tensor([130], dtype=torch.int32).numpy(), 0, CHUNK))
    step = StateStep(
        torch.full((1, cache.block_elements(1)), NAN),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, 130], dtype=torch.int32),
        torch.tensor([130], dtype=torch.int32),
        chunks,
        num_decodes=0,
    )
    out = gated_delta(qkv, scalars, step, spec=spec, weights=weights, use_kernel=True)
    torch.testing.assert_close(out, definition(spec, qkv, scalars, weights)[0], rtol=1e-5, atol=1e-5)


def test_what_does_not_fit():
    arrays = {"qkv": torch.zeros(1, SMALL.channels), "scalars": torch.zeros(1, 8)}
    step = StateStep(
        torch.zeros(1, SMALL.caches()[0].block_elements(1)),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        None,
        num_decodes=1,
    )
    weights = DeltaWeights(torch.zeros(SMALL.channels, 1, 4), torch.zeros(4), torch.zeros(4))
    how = {"step": step, "spec": SMALL, "weights": weights, "use_kernel": False}
    gated_delta(**arrays, **how)
    for change, message in (
        ({"qkv": torch.zeros(1, 3)}, "qkv is"),
        ({"step": replace(step, states=torch.zeros(1, 3))}, "states are"),
        ({"step": replace(step, kv_lens=torch.ones(1, dtype=torch.int64))}, "kv_lens are torch.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            gated_delta(**{**arrays, **how, **change})
