"""Where each parameter of the spec goes: which array of the decoder, at which offset, in which order of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.model.layout import HeadLayout, segments
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import Attention, Ffn, Layer, ModelSpec, Moe
from pagoda.kernels_pallas.chips import ChipInfo

Array = npt.NDArray[np.generic]
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """A parameter fills, once `arrange`d, the target from `start` on (0 in the axes not given).

    With an axis more than the target it counts slots and the places of a slot apart, see `seen`.
    """

    target: Path
    start: tuple[int, ...] = ()
    arrange: Callable[[Array], Array] = lambda values: values


_TOP: Final = ("embed", "positions", "token_types", "embed_in", "embed_out", "head", "head_bias")


def placements(spec: ModelSpec, tensor: int) -> dict[str, Placement]:
    """A placement for every canonical parameter name."""
    found = {name: Placement((name,)) for name in _TOP}
    for name in ("embed_norm", "final_norm"):
        found[name], found[f"{name}_bias"] = Placement((name, "weight")), Placement((name, "bias"))
    found |= _pooler(0 if spec.pooler is None else len(spec.pooler.dense))
    for number, segment in enumerate(segments(spec.layers)):
        for repeat, row in enumerate(segment.numbers.tolist()):
            for index, (layer, layer_number) in enumerate(zip(segment.block, row)):
                prefix: Path = ("segments", number, "layers", index)
                for name, placement in _layer(layer, tensor):
                    found[f"layers.{layer_number}.{name}"] = Placement(
                        (*prefix, *placement.target), (repeat, *placement.start), _lead(placement.arrange)
                    )
    return found


def _pooler(dense: int) -> dict[str, Placement]:
    """Of a pooler with so many dense layers."""
    found = {"pooler.classifier": ("classifier",)} | {
        f"pooler.dense.{index}": ("dense", index, "product") for index in range(dense)
    }
    norms = {f"pooler.dense.{index}.norm": ("dense", index, "norm") for index in range(dense)}
    return {
        f"{name}{suffix}": Placement(("pooler", *path, last))
        for name, path in (found | norms).items()
        for suffix, last in (("", "weight"), ("_bias", "bias"))
    }


def seen(shape: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...]:
    """The target's shape as a part counts it: [L, K * places, ...] as [L, K, places, ...], with that axis more."""
    return shape if len(part) == len(shape) else (shape[0], part[1], shape[1] // part[1], *shape[2:])


def _lead(arrange: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The same with an axis for the repeats in front."""
    return lambda values: arrange(values)[None]


def _layer(layer: Layer, tensor: int) -> Iterator[tuple[str, Placement]]:
    for place in ("before_mixer", "after_mixer", "before_ffn", "after_ffn"):
        yield f"norms.{place}", Placement((place, "weight"))
        yield f"norms.{place}_bias", Placement((place, "bias"))
    for name, placement in _attention(layer.mixer, tensor):
        yield f"mixer.{name}", Placement(("mixer", *placement.target), placement.start, placement.arrange)
    for name, placement in _ffn(layer.ffn):
        yield f"ffn.{name}", Placement(("ffn", *placement.target), placement.start, placement.arrange)


def _attention(mixer: Attention, tensor: int) -> Iterator[tuple[str, Placement]]:
    heads, dim = HeadLayout.of(mixer, tensor), mixer.head_dim

    def queries(rows: Array) -> Array:
        return heads.queries(rows, dim)

    def keys(rows: Array) -> Array:
        return heads.keys(rows, dim)

    def key_place(rows: Array) -> Array:
        return keys(rows)[:, None]

    for suffix, target in (("", "qkv"), ("_bias", "qkv_bias")):
        yield f"q{suffix}", Placement((target,), (), queries)
        yield f"k{suffix}", Placement((target,), (0, heads.group), key_place)
        yield f"v{suffix}", Placement((target,), (0, heads.group + 1), key_place)
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


# The matrices of the layers in 8 bits: which type a chip takes, and how its numbers are made from wider ones.
#
# Every row of a matrix, which makes one output channel, is divided by a scale so that its largest value becomes the
# largest number of the type. XLA widens the numbers inside the product, so HBM holds and sends 8 bits. Which float8
# it is depends on the chip: v5e, v5p and v6e multiply e4m3b11fnuz as it is and would widen e4m3fn by a dozen vector
# operations, which takes longer than the reading; see benchmarks/LOG.md. Both have the same numbers but for a power
# of two, as far as they are used here.

SCALE: Final = "_scale"
"""What is added to a matrix's name for the name of its scales: float32, one per row."""

_LARGEST: Final = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e4m3b11fnuz": 28.0}


def matrix_dtype(method: str | None, spec: ModelSpec, chip: ChipInfo) -> str | None:
    """The type of the layers' matrices; None: that of the activations. Raises ConfigError where there is none.

    `method`: a value of --quantization, None for none.
    """
    if method is None:
        return None
    if any(isinstance(layer.ffn, Moe) for layer in spec.layers):
        raise ConfigError("--quantization", f"{method}: experts stay as they are; drop it, or use --kv-cache-dtype fp8")
    if method == "int4":
        raise ConfigError("--quantization", f"jax_tpu cannot make weights {method}; use fp8 or int8")
    if method.startswith("fp8"):
        return chip.float8
    if not chip.int8:
        raise ConfigError("--quantization", f"{method}: {chip.name} has no int8; use fp8, which takes as little room")
    return "int8"


def quantized(x: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """X [..., D] in `dtype`, and float32 scales [...]: number * scale = value."""
    wide = x.astype(jnp.float32)
    largest = jnp.abs(wide).max(-1)
    scale = jnp.where(largest > 0, largest / _LARGEST[dtype], 1)
    wide = jnp.clip(wide / scale[..., None], -_LARGEST[dtype], _LARGEST[dtype])
    return (jnp.round(wide) if dtype == "int8" else wide).astype(dtype), scale
