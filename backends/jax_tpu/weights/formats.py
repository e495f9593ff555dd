"""Which of the decoder's matrices are quantised, and how each is stored and multiplied.

A matrix of the decoder holds several parameters (q, k and v) of all repeats of a layer, so all of them have one format;
where the checkpoint's schemes differ the matrix is dense, and its parameters are dequantised.

The float8 dtype depends on the chip: v5e, v5p and v6e multiply e4m3b11fnuz natively, but would convert e4m3fn with a
dozen vector operations, which takes longer than reading the weight; see benchmarks/LOG.md. In the range used here both
have the same values up to a power of two.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.schemes import ops_of
from pagoda.backends.jax_tpu.weights.arrange import MatrixFormat, Path, Placement
from pagoda.backends.jax_tpu.weights.placement import placements
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.quantization.schemes import ROUNDED, Scheme
from pagoda.common.weights.quantization.tensors import and_more
from pagoda.kernels_pallas.chips import ChipInfo

logger = logging.getLogger(__name__)


def matrix_formats(
    method: str | None,
    spec: ModelSpec,
    chip: ChipInfo,
    schemes: Mapping[str, Scheme] | None = None,
    tensor: int = 1,
) -> dict[Path, MatrixFormat]:
    """Return the formats of the quantised matrices, by path in the decoder; all others are dense.

    `method`: a --quantization value for a dense checkpoint. `schemes`: of the parameters that a checkpoint holds
    quantised. `tensor`: devices that share each layer.
    """
    wanted: dict[Path, dict[str, MatrixFormat | None]] = {}
    places = placements(spec, tensor)
    for name, param in params(spec).items():
        if not places[name].matrix:
            continue
        scheme = ROUNDED[method] if method is not None else (schemes or {}).get(name)
        form = None if scheme is None else _format(scheme, chip, experts=".experts." in name)
        if method is not None and form is not None:
            form = replace(form, shifted=False)  # `quantize_groups` rounds without zero points
        if form is not None and form.for_kernel and not _keeps_groups(places[name], param.shape[-1], form, name):
            form = None
        wanted.setdefault(places[name].target, {})[name] = form
    formats = {}
    for path, forms in wanted.items():
        first, *others = set(forms.values())
        if others:
            _log_mixed(forms)
        elif first is not None:
            formats[path] = first
    return formats


def _log_mixed(forms: Mapping[str, MatrixFormat | None]) -> None:
    """Log that the parameters of a matrix are dequantised."""
    dense = [name for name, form in forms.items() if form is None]
    quantised = [name for name, form in forms.items() if form is not None]
    why = f"{dense[0]} in the same matrix is dense" if dense else "they have several schemes in one matrix"
    logger.info("jax_tpu: dequantises %s: %s", and_more(quantised), why)


def _keeps_groups(placement: Placement, inputs: int, form: MatrixFormat, name: str) -> bool:
    """Whether the decoder's matrix is one of a layer, and its arrangement moves inputs in whole groups; log if not."""
    if placement.target[0] == "blocks":
        why = "several layers share it"
    elif form.group is not None and inputs % form.group:
        why = f"its {inputs} inputs are not whole groups of {form.group}"
    elif placement.target[-1] == "out" and moved_groups(placement, inputs, form.group or inputs) is None:
        why = f"its heads are not whole groups of {form.group or inputs} inputs; use another --tensor-parallel-size"
    else:
        return True
    logger.info("jax_tpu: dequantises %s: %s", name, why)
    return False


def moved_groups(placement: Placement, inputs: int, group: int) -> npt.NDArray[np.int64] | None:
    """Return which group of inputs each group of a matrix `out` holds, -1 for none; None if groups are divided."""
    order = placement.arrange(np.arange(1, inputs + 1)[None]).reshape(-1).astype(np.int64)
    if len(order) % group:
        return None
    groups = order.reshape(-1, group)
    empty = (groups == 0).all(1)
    first = groups[:, 0]
    whole = ((first - 1) % group == 0) & (groups == first[:, None] + np.arange(group)).all(1)
    return np.where(empty, -1, (first - 1) // group) if (whole | empty).all() else None


def _format(scheme: Scheme, chip: ChipInfo, *, experts: bool) -> MatrixFormat | None:
    """Return the format of a scheme; None: its matrices are dequantised."""
    product = ops_of(scheme).product(scheme)
    if product is None:
        return None
    numbers = chip.float8 if product.numbers == "float8" else product.numbers
    if product.group is not None:
        return MatrixFormat(numbers, for_kernel=True, group=product.group, shifted=product.shifted)
    multiplied = chip.multiplies_float8 if product.numbers == "float8" else chip.int8
    return MatrixFormat(numbers, multiplied and scheme.activations is not None, experts)
