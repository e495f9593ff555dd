"""Mamba over recurrent state: projections, the causal convolution, the recurrence's kernel.

Channels are divided among the devices, a slot of C channels each; the step of low rank, b and c are sums over all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu.execution.replay import StateRun, States
from pagoda.backends.jax_tpu.model.layers import Caches, Rotations, all_reduce, apply_norm, make_norm, reduced
from pagoda.backends.jax_tpu.model.lora import adapted, matrix_lora
from pagoda.backends.jax_tpu.model.mixers.convolution import convolve, taps_placements
from pagoda.backends.jax_tpu.model.mixers.ops import RecurrentModule, RecurrentOps
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, project
from pagoda.backends.jax_tpu.model.slots import Stack, StateStack, TailStack, padded
from pagoda.backends.jax_tpu.weights.arrange import Array, Placement, arrange_columns, in_slots
from pagoda.common.models.mixers import Mamba
from pagoda.kernels_pallas.linear_recurrence import RecurrenceInputs, Selective, linear_recurrence
from pagoda.kernels_pallas.recurrent_state import Arrays


class JaxMamba(RecurrentModule):
    """One layer's state space model. S: states of a channel; R: channels of the step of low rank.

    `inner` [K, 2 C, D]: v, gate; `taps` [K, C, taps]; `selection` [K, R + 2 S, C]: step of low rank, b, c; `step`
    [K, C, R]; `step_offset`, `skip` [K, C]; `decay_rate` [K, S, C]; `out` [D, K * C].
    """

    def __init__(self, spec: Mamba, width: int, build: JaxBuildContext) -> None:
        slots = build.tensor
        wide = build.float32()
        channels = padded(spec.channels, slots) // slots
        rank = spec.step_rank
        states = spec.state_dim
        self.spec = spec
        self.dtype = build.dtype
        self.inner = build.matrix("inner", "K.D", slots, 2 * channels, width)
        self.inner_bias = build.parameter("K.", slots, 2 * channels) if spec.bias else None
        self.taps = wide.parameter("K..", slots, channels, spec.taps)
        self.taps_bias = wide.parameter("K.", slots, channels) if spec.conv_bias else None
        self.selection = build.parameter("K..", slots, rank + 2 * states, channels)
        self.step_a_norm = make_norm(spec.part_norm, rank, build)
        self.b_norm, self.c_norm = (make_norm(spec.part_norm, states, build) for _ in "bc")
        self.step = build.parameter("K..", slots, channels, rank)
        self.step_offset = wide.parameter("K.", slots, channels)
        self.decay_rate = wide.parameter("K..", slots, states, channels)
        self.skip = wide.parameter("K.", slots, channels)
        self.out = build.matrix("out", "DK", width, slots * channels)
        self.lora_in = matrix_lora(build, "D", width, "K.", (slots, channels), (slots, channels))
        self.lora_out = matrix_lora(build, "K", slots * channels, "D", (width,))
        self.out_bias = build.parameter("D", width) if spec.bias else None

    def __call__(
        self, x: jax.Array, caches: Caches, cache_index: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, Caches]:
        """X [T, D], the stacked tails and states, this layer's int32 [2] (block table, layer) -> [T, D], the caches."""
        # The barrier keeps XLA from reshaping the product, for which it would copy the weight first.
        inner = adapted(jax.lax.optimization_barrier(project(x, self.inner, step)), self.lora_in, x, step)
        if self.inner_bias is not None:
            inner = inner + self.inner_bias[...]
        v, gate = (part.astype(jnp.float32) for part in jnp.split(inner, 2, axis=-1))
        mixed, caches = self.apply_rule((v,), caches, cache_index, step)
        gated = (mixed * jax.nn.silu(gate)).astype(x.dtype).reshape(len(x), -1)
        out = reduced(adapted(project(gated, self.out, step), self.lora_out, gated, step), step)
        return (out if self.out_bias is None else out + self.out_bias[...]), caches

    def rule(self, inputs: Arrays, states: States, run: StateRun) -> tuple[jax.Array, States]:
        """Convolve v [T, K, C], apply the recurrence, and add the part of v that skips it -> [T, K, C]."""
        v, tails = convolve(inputs[0], self.taps[...], states[0], run)
        v = jax.nn.silu(v if self.taps_bias is None else v + self.taps_bias[...])
        tokens = self._inputs(v, self.dtype)
        mixed, after = linear_recurrence(Selective(), tokens, states[1], run.layer, run.batch, **run.options)
        return mixed + self.skip[...] * v, (tails, after)

    def _inputs(self, v: jax.Array, dtype: jnp.dtype) -> RecurrenceInputs:
        """V float32 [T, K, C] after the convolution -> the recurrence's inputs. `dtype`: of the products."""
        tokens, slots, _ = v.shape
        selected = jnp.einsum("tkc,krc->tr", v.astype(dtype), self.selection[...], preferred_element_type=jnp.float32)
        ends = self.spec.step_rank, self.spec.step_rank + self.spec.state_dim
        low_rank, b, c = jnp.split(all_reduce(selected), ends, axis=-1)
        low_rank, b, c = (
            apply_norm(norm, part) for norm, part in ((self.step_a_norm, low_rank), (self.b_norm, b), (self.c_norm, c))
        )
        steps = project(low_rank.astype(dtype), self.step[...]).astype(jnp.float32) + self.step_offset[...]
        keys = tuple(jnp.broadcast_to(part[:, None], (tokens, slots, self.spec.state_dim)) for part in (c, b))
        return RecurrenceInputs(keys, (v, jax.nn.softplus(steps)), (-jnp.exp(self.decay_rate[...]),))


class MambaOps(RecurrentOps[Mamba]):
    """What the backend knows of this kind, see `JaxMixerOps`."""

    def module(self, spec: Mamba, width: int, build: JaxBuildContext) -> JaxMamba:
        return JaxMamba(spec, width, build)

    def placements(self, spec: Mamba, tensor: int) -> Iterator[tuple[str, Placement]]:
        of_slots = partial(in_slots, tensor)
        rank = spec.step_rank
        states = spec.state_dim
        channels = padded(spec.channels, tensor) // tensor

        def columns(rows: Array) -> Array:
            return np.moveaxis(of_slots(rows.T), -1, 1)  # [slots, rows, C]

        for index, name in enumerate(("v", "gate")):
            for suffix in ("", "_bias"):
                yield f"{name}{suffix}", Placement((f"inner{suffix}",), (0, index * channels), of_slots)
        yield from taps_placements("v_conv", 0, of_slots)
        for name, start in (("step_a", 0), ("b", rank), ("c", rank + states)):
            yield name, Placement(("selection",), (0, start), columns)
            yield f"{name}_norm", Placement((f"{name}_norm", "weight"))
            yield f"{name}_norm_bias", Placement((f"{name}_norm", "bias"))
        yield "decay_rate", Placement(("decay_rate",), (), lambda rows: of_slots(rows).swapaxes(1, 2))
        for name in ("step", "step_offset", "skip"):
            yield name, Placement((name,), (), of_slots)
        yield "o", Placement(("out",), (), lambda rows: arrange_columns(rows, of_slots))
        yield "o_bias", Placement(("out_bias",))

    def rule_inputs(self, spec: Mamba, tensor: int) -> tuple[int, int]:
        return tensor, padded(spec.channels, tensor) // tensor

    def state_stacks(self, spec: Mamba, tensor: int) -> tuple[Stack, ...]:
        width = padded(spec.channels, tensor) // tensor
        return TailStack(tensor, spec.taps - 1, width), StateStack(tensor, spec.state_dim, width)
