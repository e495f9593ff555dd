"""Linear attention with a constant decay per head: the scan of Mamba-2 with a state per head of keys.

A prefill goes by chunks of tokens as there (lightning attention, arXiv 2401.04658, is that algorithm for one decay).

Axis letters: S sequences, T tokens, N heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagoda.backends.torch_decoder.mixers.mamba2 import chunked_scan, recurrent_scan
from pagoda.backends.torch_decoder.mixers.recurrence import GateSpec, Inputs, StateMixerOps, StateRule
from pagoda.common.models.mixers import LightningAttention


class LightningMixer:
    """One layer's projections around the scan."""

    def __init__(self, spec: LightningAttention, ops: StateMixerOps, rule: StateRule) -> None:
        """`rule`: of q, k and v [T, 3*N*H], activated, normalised and rotated."""
        self.scale = spec.scale
        self.project = ops.project(("q", "k", "v"), ("gate",))
        self.activate = ops.silu if spec.silu else None
        self.rotations = None
        if spec.qk_norm is not None or spec.rope is not None:
            self.rotations = [ops.rotation(spec.qk_norm, f"{part}_norm", spec.rope, spec.head_dim) for part in "qk"]
        self.rule = rule
        self.gate = ops.gate(GateSpec(spec.norm, spec.groups, "sigmoid", rounded="heads and gates"))
        self.out = ops.out()

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        qkv, gate = self.project(x)
        if self.activate is not None:
            qkv = self.activate(qkv)
        if self.rotations is not None:
            *pair, v = qkv.chunk(3, -1)
            qkv = torch.cat((*(rotate(part, step) for rotate, part in zip(self.rotations, pair)), v), -1)
        heads = self.rule(qkv, step)
        return self.out(self.gate(heads if self.scale == 1.0 else heads * self.scale, gate))


class LightningRule:
    """The scan in plain torch, a PlainRule."""

    def __init__(self, spec: LightningAttention) -> None:
        self.spec = spec
        self.decay = -torch.tensor(spec.slopes)[:, None]

    def inputs(self, *projections: Tensor) -> Inputs:
        """Return q, k and v [T, 3*N*H] in float32."""
        (qkv,) = projections
        return (qkv.float(),)

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, ...] and the states before them [S, elements] -> heads [S, T, N*H], the states after them."""
        spec = self.spec
        tokens = inputs[0].shape[1]
        q, k, v = (part.unflatten(-1, (spec.heads, -1)).transpose(1, 2) for part in inputs[0].chunk(3, -1))
        scan = recurrent_scan if tokens == 1 else chunked_scan
        decay = self.decay.expand(len(q), -1, tokens)
        heads, state = scan(v, k, q, decay, states.view(-1, spec.heads, spec.head_dim, spec.head_dim))
        return heads.transpose(1, 2).flatten(2), state.flatten(1)
