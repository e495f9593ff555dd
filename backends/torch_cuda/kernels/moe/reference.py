"""The definition of a routed mixture of experts, on the reference backend's own routing and mixing."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.reference.ops import activation, mix_experts, route
from pagoda.backends.torch_cuda.kernels.weight_only.packing import Packed, unpack
from pagoda.common.models.spec import Mlp, Router


def reference(
    x: Tensor,
    router_logits: Tensor,
    inner: Tensor | Packed,
    down: Tensor | Packed,
    inner_bias: Tensor | None,
    down_bias: Tensor | None,
    router: Router,
    expert: Mlp,
) -> Tensor:
    """As `api.moe`. An expert runs on the rows routed to it; packed experts are unpacked to x's dtype."""
    weights, experts = route(router_logits, router)
    act = activation(expert.activation)

    def run(index: int, rows: Tensor) -> Tensor:
        both = rows @ _matrix(inner, index, rows).T
        if inner_bias is not None:
            both = both + inner_bias[index]
        width = both.shape[1] // 2
        hidden = act(both[:, :width]) * both[:, width:] if expert.gated else act(both)
        out = hidden @ _matrix(down, index, rows).T
        return out if down_bias is None else out + down_bias[index]

    return mix_experts(x, weights, experts, run)


def _matrix(stack: Tensor | Packed, index: int, like: Tensor) -> Tensor:
    """One expert's matrix [O, I] in the dtype of `like`."""
    return stack[index] if isinstance(stack, Tensor) else unpack(stack.expert(index)).to(like.dtype)
