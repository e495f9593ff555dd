"""The kernels of recurrent mixers on a GPU: correctness in bfloat16, and speed relative to the chip's.

`checks`: outputs and states against the same inputs in float32, in units of the output's rounding. `speeds`: decodes in
CUDA graphs over more states than the L2 cache holds; prefills of one sequence outside graphs, as the engine runs them.
Bytes are those of inputs, outputs and states, each moved once; FLOP those of the matrix products of whole chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution import ConvolutionWeights, causal_convolution
from pagoda.backends.torch_cuda.kernels.recurrent.channel_delta import channel_delta
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta import DeltaWeights, gated_delta
from pagoda.backends.torch_cuda.kernels.recurrent.gated_norm import GatedNorm, gated_norm
from pagoda.backends.torch_cuda.kernels.recurrent.linear_scan import (
    DecayWeights,
    ScanShape,
    lightning_shape,
    linear_scan,
    mamba2_shape,
)
from pagoda.backends.torch_cuda.kernels.recurrent.selective_scan import Selection, SelectiveWeights, selective_scan
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK, StateStep
from pagoda.benchmarks.gpu.measure import BF16, Bench, Number, figures, verdict, worst
from pagoda.common.models.mixers import GatedDelta, KimiDelta
from pagoda.common.models.primitives import Norm

ROUNDINGS, CHUNK_ROUNDINGS = 8, 20
"""Of bfloat16, in decodes and in prefills, whose products within chunks are rounded between them. Interpreted in
float16, with heads of 128 and errors scaled to bfloat16, they reach 4 and 14 (the states of the delta rules)."""
COLD_BYTES = 256 << 20
"""Inputs are rotated over this many bytes, more than an L2 cache holds."""
DECODES, PREFILL = 256, 8192
"""Sequences of a timed decode, tokens of a timed prefill."""


@dataclass(frozen=True)
class Call:
    """A kernel, its inputs of all tokens, the step, and its other arguments."""

    kernel: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    step: StateStep | None
    facts: dict[str, Any]
    width: int  # channels of the output
    token_flop: int = 0  # of the matrix products of a prefill, per token

    @property
    def tokens(self) -> int:
        return len(self.inputs[0])

    @property
    def bytes_moved(self) -> int:
        arguments = sum(x.nbytes for x in tensors((self.inputs, *self.facts.values())))
        states = 0 if self.step is None else 2 * self.step.states.nbytes
        return arguments + states + self.tokens * self.width * self.inputs[0].itemsize

    def wide(self) -> Call:
        """Return the same numbers in float32, with states of its own."""
        step = None if self.step is None else replace(self.step, states=self.step.states.clone())
        facts = {name: widened(value) for name, value in self.facts.items()}
        return replace(self, inputs=widened(self.inputs), step=step, facts=facts)

    def run(self, *, use_kernel: bool) -> Tensor:
        """Return the outputs; replace the states."""
        steps = () if self.step is None else (self.step,)
        return self.kernel(*self.inputs, *steps, **self.facts, use_kernel=use_kernel)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument, which may be a tuple or a dataclass."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from tensors(each)
    elif is_dataclass(value):
        yield from tensors(tuple(getattr(value, field.name) for field in fields(value)))


def widened(value: Any) -> Any:
    """Return an argument with its tensors in float32."""
    if isinstance(value, Tensor):
        return value.float()
    if isinstance(value, tuple):
        return tuple(map(widened, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: widened(getattr(value, field.name)) for field in fields(value)})
    return value


def step_of(bench: Bench, seqs: int, new: int, elements: int) -> StateStep:
    """Return a step of `new` tokens of each sequence, after random states of that many elements."""
    device, chunks = bench.device, make_tiles(np.full(seqs, new, np.int32), 0, CHUNK)
    return StateStep(
        torch.randn(seqs, elements, device=device) * 0.3,
        torch.arange(seqs, dtype=torch.int32, device=device)[:, None],
        torch.arange(0, seqs * new + 1, new, dtype=torch.int32, device=device),
        torch.full((seqs,), new + 1, dtype=torch.int32, device=device),
        None if new == 1 else torch.from_numpy(chunks).to(device),
        num_decodes=seqs if new == 1 else 0,
    )


@dataclass(frozen=True)
class Inputs:
    """Random inputs of `seqs` sequences with `new` tokens each."""

    bench: Bench
    seqs: int
    new: int

    def normal(self, *shape: int) -> Tensor:
        """Return float32."""
        return torch.randn(shape, device=self.bench.device)

    def rows(self, channels: int, size: float = 1.0) -> Tensor:
        """Return bfloat16 for every token."""
        return (self.normal(self.seqs * self.new, channels) * size).to(BF16)

    def step(self, elements: int) -> StateStep:
        return step_of(self.bench, self.seqs, self.new, elements)


def delta(inputs: Inputs, spec: GatedDelta) -> Call:
    (cache,) = spec.caches()
    small = inputs.normal(spec.channels, 1, spec.taps), inputs.normal(spec.value_heads)
    weights = DeltaWeights(*(x.to(BF16) for x in (*small, inputs.normal(spec.value_heads) - 3)))
    rows = inputs.rows(spec.channels), inputs.rows(2 * spec.value_heads)
    facts = {"spec": spec, "weights": weights, "chip": inputs.bench.chip}
    flop = delta_flop(spec.value_heads, spec.key_dim, spec.value_dim)
    step, width = inputs.step(cache.block_elements(1)), spec.value_heads * spec.value_dim
    return Call(gated_delta, rows, step, facts, width, flop)


def kimi(inputs: Inputs, spec: KimiDelta) -> Call:
    (cache,) = spec.caches()
    conv = inputs.normal(3 * spec.width, 1, spec.taps).to(BF16)
    weights = DeltaWeights(conv, inputs.normal(spec.heads), inputs.normal(spec.width) - 3)
    rows = inputs.rows(3 * spec.width), inputs.rows(spec.heads), inputs.rows(spec.width)
    facts = {"spec": spec, "weights": weights, "chip": inputs.bench.chip}
    flop = delta_flop(spec.heads, spec.head_dim, spec.head_dim)
    return Call(channel_delta, rows, inputs.step(cache.block_elements(1)), facts, spec.width, flop)


def delta_flop(heads: int, keys: int, values: int) -> int:
    """Return the FLOP per token of a delta rule by chunks, without the inversion of their systems."""
    return 2 * heads * (CHUNK * (3 * keys + 2 * values) + 3 * keys * values)


def mamba2(inputs: Inputs, shape: ScanShape) -> Call:
    small = (inputs.normal(shape.heads) for _ in range(3))
    rate, offset, skip = small
    weights = DecayWeights(rate, offset - 3, skip)
    return scan_call(inputs, shape, inputs.rows(shape.heads), weights)


def lightning(inputs: Inputs, shape: ScanShape) -> Call:
    slopes = 2.0 ** (-8.0 * torch.arange(1, shape.heads + 1, device=inputs.bench.device) / shape.heads)
    return scan_call(inputs, shape, None, DecayWeights(slopes))


def scan_call(inputs: Inputs, shape: ScanShape, scalars: Tensor | None, weights: DecayWeights) -> Call:
    """Return the scan alone: its states have no tail of a convolution."""
    shape = replace(shape, tail=0)
    per_head = CHUNK * (shape.key_dim + shape.value_dim) + 2 * shape.key_dim * shape.value_dim
    facts = {"shape": shape, "weights": weights, "chip": inputs.bench.chip}
    rows, width = (inputs.rows(shape.channels), scalars), shape.heads * shape.value_dim
    return Call(linear_scan, rows, inputs.step(shape.elements), facts, width, 2 * shape.heads * per_head)


def mamba(inputs: Inputs, shape: tuple[int, int]) -> Call:
    """Return a call for channels and states per channel."""
    channels, states = shape
    rates = torch.arange(1, states + 1, device=inputs.bench.device).log().repeat(channels, 1)
    weights = SelectiveWeights(rates, inputs.normal(channels) - 3, inputs.normal(channels))
    chosen = Selection(inputs.rows(channels), *inputs.rows(2 * states).chunk(2, -1))
    rows = inputs.rows(channels), inputs.rows(channels), chosen
    return Call(selective_scan, rows, inputs.step(channels * states), {"weights": weights}, channels)


def convolution(inputs: Inputs, shape: tuple[int, int, bool]) -> Call:
    """Return a call for channels, taps, and whether it is gated (without a bias) or has a bias."""
    channels, taps, gated = shape
    x, *gates = inputs.rows(3 * channels if gated else channels).split(channels, -1)
    bias = None if gated else inputs.normal(channels).to(BF16)
    weights = ConvolutionWeights(inputs.normal(channels, 1, taps).to(BF16), bias)
    facts = {"weights": weights, "gates": tuple(gates) if gated else None}
    return Call(causal_convolution, (x,), inputs.step(channels * (taps - 1)), facts, channels)


def head_norm(inputs: Inputs, shape: tuple[int, int, dict]) -> Call:
    """Return a call for groups, channels of the weight, and how the norm is gated; it has no state."""
    groups, size, how = shape
    width = size if how.get("gate_first") else groups * size
    spec = GatedNorm(inputs.normal(size).to(BF16), groups, 1e-6, **how)
    return Call(gated_norm, (inputs.rows(width), inputs.rows(width), spec), None, {}, width)


RMS = Norm(1e-6)
CALLS: dict[str, tuple[Callable[[Inputs, Any], Call], Any, Any]] = {
    "gated_delta": (delta, GatedDelta(16, 32, 128, 128, 4, RMS), GatedDelta(2, 4, 16, 16, 4, RMS)),
    "channel_delta": (kimi, KimiDelta(32, 128, 128, 4, RMS), KimiDelta(2, 16, 8, 4, RMS)),
    "channel_delta_bounded": (kimi, KimiDelta(32, 128, None, 4, RMS, -5.0), KimiDelta(2, 16, None, 4, RMS, -5.0)),
    "linear_scan_mamba2": (mamba2, mamba2_shape(128, 64, 8, 128, 4), mamba2_shape(4, 16, 2, 16, 4)),
    "linear_scan_lightning": (lightning, lightning_shape(64, 128), lightning_shape(2, 16)),
    "selective_scan": (mamba, (8192, 16), (40, 8)),
    "convolution": (convolution, (10240, 4, False), (40, 4, False)),
    "short_convolution": (convolution, (2048, 3, True), (40, 3, True)),
    "gated_norm_heads": (head_norm, (32, 128, {}), (2, 16, {})),
    "gated_norm_sigmoid": (head_norm, (32, 128, {"activation": "sigmoid"}), (2, 16, {"activation": "sigmoid"})),
    "gated_norm_groups": (head_norm, (8, 8192, {"gate_first": True}), (2, 32, {"gate_first": True})),
}
"""Kernel -> its arguments at the shape of a model, and tiny ones: Qwen3-Next, Kimi Linear, Ling 3, Nemotron-H 8B,
MiniMax-Text-01, Falcon-Mamba 7B; the convolutions of Nemotron-H and LFM2; the norms of Qwen3-Next, Kimi Linear,
Nemotron-H."""


def make(bench: Bench, name: str, seqs: int, new: int) -> Call:
    """Return a call with random inputs."""
    function, usual, tiny = CALLS[name]
    return function(Inputs(bench, seqs, new), bench.choose(usual, tiny))


def checks(bench: Bench) -> Iterator[Number]:
    """Yield a decode and a prefill of each kernel."""
    for name in CALLS:
        for phase, seqs, new in (("decode", bench.choose(7, 3), 1), ("prefill", *bench.choose((2, 200), (1, 70)))):
            yield Number(f"{name}_{phase}", partial(check, bench, name, seqs, new))


def check(bench: Bench, name: str, seqs: int, new: int) -> dict:
    """Check the outputs, and the states after them."""
    torch.manual_seed(0)
    call = make(bench, name, seqs, new)
    wide = call.wide()
    got = call.run(use_kernel=bench.use_kernel)
    want = wide.run(use_kernel=False)
    roundings = ROUNDINGS if new == 1 else CHUNK_ROUNDINGS
    errors = [worst(bench.spoiled(got), want.double(), roundings)]
    if call.step is not None and wide.step is not None:
        errors.append(worst(bench.spoiled(call.step.states), wide.step.states.double(), roundings))
    return verdict(max(errors))


def speeds(bench: Bench) -> Iterator[Number]:
    """Yield a decode and a prefill of each kernel."""
    for name in CALLS:
        yield Number(f"{name}_decode_{DECODES}", partial(decode_speed, bench, name))
        yield Number(f"{name}_prefill_{PREFILL}", partial(prefill_speed, bench, name))


def decode_speed(bench: Bench, name: str) -> dict:
    """Return the figures of a decode in a CUDA graph; a decode has no matrix products."""
    first = make(bench, name, bench.choose(DECODES, 3), 1)
    others = [
        make(bench, name, bench.choose(DECODES, 3), 1) for _ in range(bench.copies(first.bytes_moved, COLD_BYTES) - 1)
    ]
    calls = [first, *others]
    replay = bench.recorded([partial(call.run, use_kernel=bench.use_kernel) for call in calls])
    return figures(bench, bench.median_ms(lambda _: replay(), 20) / 1e3 / len(calls), first.bytes_moved)


def prefill_speed(bench: Bench, name: str) -> dict:
    call = make(bench, name, 1, bench.choose(PREFILL, 70))
    took = bench.median_ms(lambda _: call.run(use_kernel=bench.use_kernel), 10) / 1e3
    speed = figures(bench, took, call.bytes_moved, call.tokens * call.token_flop)
    return speed | {"tokens_per_s": call.tokens / took}
