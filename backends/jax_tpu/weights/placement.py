"""Map each canonical parameter to a decoder array: target, offset and head order; and quantise matrices to 8 bits.

Quantisation divides every row of a matrix (one output channel) by a scale, so that its largest value becomes the
dtype's largest. XLA converts inside the matmul, so HBM stores and transfers 8 bits. The float8 dtype depends on the
chip: v5e, v5p and v6e multiply e4m3b11fnuz natively, but would convert e4m3fn with a dozen vector operations, which
takes longer than reading the weight; see benchmarks/LOG.md. In the range used here both have the same values up to a
power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.model.layout import HeadLayout, segments
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Attention
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Ffn, Layer, ModelSpec, Moe
from pagoda.common.weights.quantization import Float8, Int8, Scheme
from pagoda.kernels_pallas.chips import ChipInfo

Array = npt.NDArray[np.generic]
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The slice of a decoder array that a parameter fills."""

    target: Path
    start: tuple[int, ...] = ()  # offsets of the leading axes; 0 for the others
    arrange: Callable[[Array], Array] = lambda values: values  # may add an axis, see `split_slot_axis`


SCALE: Final = "_scale"
"""Suffix of the name of a quantised matrix's scales: float32, one per row."""

_MATRICES: Final = ("q", "k", "v", "o", "gate", "up", "down")
"""Last parts of the names of layers' matrices, which may be quantised."""

_LARGEST: Final = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e4m3b11fnuz": 28.0}

_TOP: Final = ("embed", "positions", "token_types", "embed_in", "embed_out", "head", "head_bias")


def placements(spec: ModelSpec, tensor: int) -> dict[str, Placement]:
    """Return a placement for every canonical parameter name."""
    result = {name: Placement((name,)) for name in _TOP}
    for name in ("embed_norm", "final_norm"):
        result[name], result[f"{name}_bias"] = Placement((name, "weight")), Placement((name, "bias"))
    result |= _pooler(0 if spec.pooler is None else len(spec.pooler.dense))
    for number, segment in enumerate(segments(spec.layers)):
        for repeat, row in enumerate(segment.numbers.tolist()):
            for index, (layer, layer_number) in enumerate(zip(segment.block, row)):
                prefix: Path = ("segments", number, "layers", index)
                for name, placement in _layer(layer, tensor):
                    result[f"layers.{layer_number}.{name}"] = Placement(
                        (*prefix, *placement.target), (repeat, *placement.start), _add_repeat_axis(placement.arrange)
                    )
    return result


def _pooler(num_dense: int) -> dict[str, Placement]:
    linears = {"pooler.classifier": ("classifier",)} | {
        f"pooler.dense.{index}": ("dense", index, "product") for index in range(num_dense)
    }
    norms = {f"pooler.dense.{index}.norm": ("dense", index, "norm") for index in range(num_dense)}
    return {
        f"{name}{suffix}": Placement(("pooler", *path, last))
        for name, path in (linears | norms).items()
        for suffix, last in (("", "weight"), ("_bias", "bias"))
    }


def split_slot_axis(shape: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shape` [L, K * n, ...] as [L, K, n, ...] if `part` has that extra axis, else unchanged."""
    return shape if len(part) == len(shape) else (shape[0], part[1], shape[1] // part[1], *shape[2:])


def _add_repeat_axis(arrange: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda values: arrange(values)[None]


def _layer(layer: Layer, tensor: int) -> Iterator[tuple[str, Placement]]:
    for norm in ("before_mixer", "after_mixer", "before_ffn", "after_ffn"):
        yield f"norms.{norm}", Placement((norm, "weight"))
        yield f"norms.{norm}_bias", Placement((norm, "bias"))
    for name, placement in _attention(layer.attention, tensor):
        yield f"mixers.0.{name}", Placement(("mixer", *placement.target), placement.start, placement.arrange)
    for name, placement in _ffn(layer.feed_forward):
        yield f"ffn.{name}", Placement(("ffn", *placement.target), placement.start, placement.arrange)


def _attention(mixer: Attention, tensor: int) -> Iterator[tuple[str, Placement]]:
    heads, dim = HeadLayout.of(mixer, tensor), mixer.head_dim

    def queries(rows: Array) -> Array:
        return heads.queries(rows, dim)

    def keys(rows: Array) -> Array:
        return heads.keys(rows, dim)

    def keys_in_slots(rows: Array) -> Array:
        return keys(rows)[:, None]

    for suffix, target in (("", "qkv"), ("_bias", "qkv_bias")):
        yield f"q{suffix}", Placement((target,), (), queries)
        yield f"k{suffix}", Placement((target,), (0, heads.group), keys_in_slots)
        yield f"v{suffix}", Placement((target,), (0, heads.group + 1), keys_in_slots)
    yield "o", Placement(("out",), (), lambda rows: np.moveaxis(queries(rows.T), -1, 0).reshape(len(rows), -1))
    yield "o_bias", Placement(("out_bias",))
    full = mixer.qk_norm_over == "full"
    yield "q_norm", Placement(("q_norm",), (), queries if full else lambda values: values)
    yield "k_norm", Placement(("k_norm",), (), keys if full else lambda values: values)


def _ffn(ffn: Ffn) -> Iterator[tuple[str, Placement]]:
    if isinstance(ffn, Moe):
        yield "router", Placement(("router",))
        last = 1 if ffn.expert.gated else 0
        for name, part in (("gate", 0), ("up", last)):
            yield f"experts.{name}", Placement(("inner",), (0, part), lambda w: w[:, None])
            yield f"experts.{name}_bias", Placement(("inner_bias",), (0, part), lambda b: b[:, None])
        yield "experts.down", Placement(("down",), (), lambda w: w.swapaxes(1, 2)[:, None])
        yield "experts.down_bias", Placement(("down_bias",))
        return
    for name, part in (("gate", 0), ("up", 1 if ffn.gated else 0)):
        yield name, Placement(("inner",), (part,), lambda w: w[None])
        yield f"{name}_bias", Placement(("inner_bias",), (part,), lambda b: b[None])
    yield "down", Placement(("down",))
    yield "down_bias", Placement(("down_bias",))


def matrix_dtype(
    method: str | None, spec: ModelSpec, chip: ChipInfo, schemes: Mapping[str, Scheme] | None = None
) -> str | None:
    """Return the dtype of the layers' matrices for a --quantization value; None: that of the activations.

    `schemes`: of parameters that the checkpoint holds quantised. Without a method its numbers are kept if all matrices
    of the layers have them, with scales per channel, and the chip multiplies them.

    Raise ConfigError if the chip or the model does not support the method.
    """
    if method is None:
        return _stored_dtype(spec, chip, schemes or {})
    if any(isinstance(layer.ffn, Moe) for layer in spec.layers):
        raise ConfigError(
            "--quantization", f"{method}: jax_tpu cannot quantise experts; drop it, or use --kv-cache-dtype fp8"
        )
    if method == "int4":
        raise ConfigError("--quantization", f"jax_tpu does not support {method} weights; use fp8 or int8")
    if method.startswith("fp8"):
        return chip.float8
    if not chip.int8:
        raise ConfigError("--quantization", f"{method}: {chip.name} has no int8; use fp8, which has the same size")
    return "int8"


def _stored_dtype(spec: ModelSpec, chip: ChipInfo, schemes: Mapping[str, Scheme]) -> str | None:
    """Return the dtype in which a checkpoint's numbers are kept; None: they are dequantised."""
    if any(isinstance(layer.ffn, Moe) for layer in spec.layers):
        return None
    matrices = [name for name in params(spec) if name.startswith("layers.") and name.rpartition(".")[2] in _MATRICES]
    stored = {schemes.get(name) for name in matrices}
    if all(isinstance(scheme, Float8) and isinstance(scheme.group, str) for scheme in stored):
        return chip.float8
    if chip.int8 and all(isinstance(scheme, Int8) and isinstance(scheme.group, str) for scheme in stored):
        return "int8"
    return None


def quantize(x: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Quantise x [..., D] to `dtype`; return the values and float32 scales [...], with value * scale = x."""
    wide = x.astype(jnp.float32)
    largest = jnp.abs(wide).max(-1)
    scale = jnp.where(largest > 0, largest / _LARGEST[dtype], 1)
    wide = jnp.clip(wide / scale[..., None], -_LARGEST[dtype], _LARGEST[dtype])
    return (jnp.round(wide) if dtype == "int8" else wide).astype(dtype), scale
