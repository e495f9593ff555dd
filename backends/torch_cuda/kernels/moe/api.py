"""A routed mixture of experts: the one entry point."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.chips import Chip
from pagoda.backends.torch_cuda.kernels.moe import kernel, many
from pagoda.backends.torch_cuda.kernels.moe.reference import reference
from pagoda.backends.torch_cuda.kernels.moe.routing import route
from pagoda.backends.torch_cuda.kernels.weight_only.packing import Packed
from pagoda.common.models.spec import Mlp, Router


def moe(
    x: Tensor,
    router_logits: Tensor,
    inner: Tensor | Packed,
    down: Tensor | Packed,
    *,
    router: Router,
    expert: Mlp,
    inner_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    use_kernel: bool,
    chip: Chip,
) -> Tensor:
    """Sum of each token's best experts' outputs, weighted by the router: [T, D] in x's dtype.

    x [T, D]; router_logits float32 [T, E]; inner [E, 2F, D], gate then up, or [E, F, D] of an expert without a gate;
    down [E, D, F]; inner_bias [E, 2F or F], down_bias [E, D]. F may be a rank's share of the expert's width. Matrices
    are in x's dtype or packed. Tokens of padding cost their experts' time and give something. ValueError: shapes.
    """
    experts, columns = router_logits.shape[1], inner.shape[1] if isinstance(inner, Tensor) else inner.outputs
    width = columns // 2 if expert.gated else columns
    shapes = {"router_logits": (x.shape[0], experts), "inner": (experts, columns, x.shape[1])}
    shapes["down"] = (experts, x.shape[1], width)
    for name, found in (("router_logits", router_logits), ("inner", inner), ("down", down)):
        if _shape(found) != shapes[name]:
            raise ValueError(f"{name} is {_shape(found)}, not {shapes[name]}")
    if not use_kernel:
        return reference(x, router_logits, inner, down, inner_bias, down_bias, router, expert)
    weights, chosen = route(router_logits, router)
    if isinstance(inner, Packed) or isinstance(down, Packed) or not many.is_faster(x, chosen, inner, down, chip):
        parts = kernel.experts(x, chosen, inner, down, inner_bias, down_bias, expert, chip)
    else:
        parts = many.experts(x, chosen, inner, down, inner_bias, down_bias, expert)
    return kernel.mix(parts, weights, x)


def _shape(x: Tensor | Packed) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, Tensor) else (*x.data.shape[:-1], x.inputs)
