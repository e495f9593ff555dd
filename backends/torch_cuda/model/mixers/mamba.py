"""The state space model of Mamba on a rank: kernels over the states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.pointwise.norm import RowNorm
from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution import causal_convolution
from pagoda.backends.torch_cuda.kernels.recurrent.selective_scan import Selection, SelectiveWeights, selective_scan
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_cuda.model.mixers.recurrence import RankLayer, recurrent_ops
from pagoda.backends.torch_decoder.mixers.mamba import MambaMixer
from pagoda.backends.torch_decoder.mixers.recurrence import StateRule
from pagoda.common.models.mixers import Mamba


def _rule(spec: Mamba, own: RankLayer[Mamba]) -> StateRule:
    use_kernel = own.build.device.use_kernels
    convolution = own.convolution()
    select = _selection(spec, own)
    widen = own.linear("step")
    rate, offset, skip = (own.tensor(name) for name in ("decay_rate", "step_offset", "skip"))
    weights = SelectiveWeights(rate, offset, skip)

    def scan(v: Tensor, gate: Tensor, step: StateStep) -> Tensor:
        v = causal_convolution(v, step, convolution, use_kernel=use_kernel)
        low_rank, b, c = select(v)
        chosen = Selection(widen(low_rank), b, c)
        return selective_scan(v, gate, chosen, step, weights=weights, use_kernel=use_kernel)

    return scan


def _selection(spec: Mamba, own: RankLayer[Mamba]) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return a function of v [T, C]: the low-rank size, b and c, normalised."""
    sizes = {"step_a": spec.step_rank, "b": spec.state_dim, "c": spec.state_dim}
    select = own.build.summed(f"{own.prefix}.selection")
    norm = spec.part_norm
    if norm is None:
        return lambda v: select(v).split([*sizes.values()], -1)
    ones = own.tensor("skip").new_ones(max(sizes.values()), dtype=own.build.compute_dtype)
    norms = [
        RowNorm(
            own.tensor(f"{name}_norm") if norm.scale else ones[:size],
            eps=norm.eps,
            kind=norm.kind,
            unit_offset=norm.unit_offset,
            use_kernel=own.build.device.use_kernels,
        )
        for name, size in sizes.items()
    ]
    return lambda v: [step(part)[0] for step, part in zip(norms, select(v).split([*sizes.values()], -1))]


MAMBA: Final = recurrent_ops(
    Mamba,
    MambaMixer,
    _rule,
    fused={
        **dict.fromkeys(("v", "gate"), "inner"),
        **dict.fromkeys(("step_a", "b", "c"), "selection"),
        "v_conv": "conv",
        "o": "out",
    },
    matrices=frozenset({"inner", "out"}),
    small_matrices=frozenset({"selection", "step"}),
    dropped=frozenset({1}),  # the gate
)
