"""Map each canonical parameter to a decoder array: target, offset and head order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.model.layout import HeadLayout, padded, segments, slot_parts
from pagoda.common.models.mixers import (
    Attention,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    ShortConvolution,
)
from pagoda.common.models.spec import Ffn, Layer, ModelSpec, Moe, Pooler
from pagoda.common.models.supported import unsupported_mixer

Array = npt.NDArray[np.generic]
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The slice of a decoder array that a parameter fills."""

    target: Path
    start: tuple[int, ...] = ()  # offsets of the leading axes; 0 for the others
    arrange: Callable[[Array], Array] = lambda values: values  # may add an axis, see `split_slot_axis`


_PARTS: Final[dict[str, Path]] = {
    **{f"side.{name}": ("side", name, "weight") for name in ("ffn_norm", "input_norm", "output_norm", "router_norm")},
    "side.expert_scale": ("side", "expert_scale"),
    "shortcut.norm": ("shortcut", "norm", "weight"),
    **{f"low_rank.{name}": ("low_rank", name) for name in ("left", "right")},
    **{f"per_layer.{name}": ("part", name) for name in ("gate", "out")},
    **{f"alt_up.{name}": ("alt_up", name) for name in ("router", "prediction", "correction", "scale")},
    **{f"{part}.norm": (to, "norm", "weight") for part, to in (("low_rank", "low_rank"), ("per_layer", "part"))},
    "alt_up.norm": ("alt_up", "norm", "weight"),
    "output_scale": ("output_scale",),
}
"""Last parts of the names of layers' parameters beside mixers, norms and ffn -> target in the layer."""

_TOP: Final = ("embed", "positions", "token_types", "embed_in", "embed_out", "head", "head_bias")


def placements(spec: ModelSpec, tensor: int) -> dict[str, Placement]:
    """Return a placement for every canonical parameter name."""
    result = {name: Placement((name,)) for name in _TOP}
    for name in ("embed_norm", "final_norm"):
        result[name] = Placement((name, "weight"))
        result[f"{name}_bias"] = Placement((name, "bias"))
    result |= {f"per_layer.{name}": Placement(("parts", name)) for name in ("table", "projection")}
    result |= {"per_layer.norm": Placement(("parts", "norm", "weight"))}
    result |= {f"alt_up.{name}": Placement(("stream_ends", to)) for name, to in (("in", "first"), ("out", "last"))}
    result |= {} if spec.pooler is None else _pooler(spec.pooler)
    for number, owner in enumerate(spec.block_owners):
        for name, placement in _block(spec.layers[owner], tensor):
            target = ("blocks", number, *placement.target)
            arrange = _add_repeat_axis(placement.arrange)
            result[f"layers.{owner}.{name}"] = Placement(target, (0, *placement.start), arrange)
    for number, segment in enumerate(segments(spec.layers)):
        for repeat, row in enumerate(segment.numbers.tolist()):
            for index, (layer, layer_number) in enumerate(zip(segment.block, row)):
                prefix: Path = ("segments", number, "layers", index)
                for name, placement in _layer(layer, tensor):
                    result[f"layers.{layer_number}.{name}"] = Placement(
                        (*prefix, *placement.target), (repeat, *placement.start), _add_repeat_axis(placement.arrange)
                    )
    return result


def _pooler(pooler: Pooler) -> dict[str, Placement]:
    linears: dict[str, Path] = {"pooler.classifier": ("classifier",)}
    linears |= {f"pooler.dense.{index}": ("dense", index, "product") for index in range(len(pooler.dense))}
    linears |= {f"pooler.{head.task}": ("heads", index) for index, head in enumerate(pooler.token_heads)}
    norms: dict[str, Path] = {
        f"pooler.dense.{index}.norm": ("dense", index, "norm") for index in range(len(pooler.dense))
    }
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
    before = 0 if layer.block is None else 1  # mixers of an input block
    if layer.block is not None:
        yield from _adapters(layer.attends_before, tensor)
    for index, mixer in enumerate(layer.mixers[before:], start=before):
        for name, placement in _mixer(mixer, tensor):
            target = ("mixers", index - before, *placement.target)
            yield f"mixers.{index}.{name}", Placement(target, placement.start, placement.arrange)
    for name, placement in () if layer.ffn is None else _ffn(layer.ffn):
        yield f"ffn.{name}", Placement(("ffn", *placement.target), placement.start, placement.arrange)
    for name, placement in () if layer.side_moe is None else _ffn(layer.side_moe.moe):
        yield f"side.moe.{name}", Placement(("side", "moe", *placement.target), placement.start, placement.arrange)
    for name, placement in () if layer.shortcut is None else _ffn(layer.shortcut.moe):
        target = ("shortcut", "moe", *placement.target)
        yield f"shortcut.moe.{name}", Placement(target, placement.start, placement.arrange)
    for name, target in _PARTS.items():
        yield name, Placement(target)


def _block(layer: Layer, tensor: int) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of an input block's weights that layers share."""
    assert layer.block is not None
    for name, placement in _attention(layer.attends_before, tensor):
        target = ("attention", *placement.target)
        yield f"mixers.0.{name}", Placement(target, placement.start, placement.arrange)
    for name, placement in _ffn(layer.block.ffn):
        yield f"block.ffn.{name}", Placement(("ffn", *placement.target), placement.start, placement.arrange)
    for norm in ("norm", "ffn_norm"):
        yield f"block.{norm}", Placement((norm, "weight"))
        yield f"block.{norm}_bias", Placement((norm, "bias"))


def once_stacked_attention(mixer: Attention, tensor: int) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of an attention that is not among the layers, stacked once."""
    for name, placement in _attention(mixer, tensor):
        yield name, Placement(placement.target, (0, *placement.start), _add_repeat_axis(placement.arrange))


def _adapters(mixer: Attention, tensor: int) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of what a layer has of its input block by itself."""
    heads = HeadLayout.of(mixer, tensor)
    arranged = {"q": lambda rows: heads.queries(rows, mixer.head_dim)}
    arranged |= dict.fromkeys("kv", lambda rows: heads.keys(rows, mixer.head_dim)[:, None])
    for index, (part, arrange) in enumerate(arranged.items()):
        yield f"mixers.0.{part}_adapter", Placement(("adapters", "first"), (index,), lambda rows: rows[None])
        yield f"mixers.0.{part}_adapter_out", Placement(("adapters", part), (), arrange)
    yield "block.ffn_adapter", Placement(("adapters", "ffn_first"))
    for index, part in enumerate(("gate", "up")):
        yield f"block.ffn.{part}_adapter_out", Placement(("adapters", "ffn"), (index,), lambda rows: rows[None])
    yield "block.out", Placement(("adapters", "out"))


def _mixer(mixer: Mixer, tensor: int) -> Iterator[tuple[str, Placement]]:
    match mixer:
        case Attention():
            yield from _attention(mixer, tensor)
        case LatentAttention():
            yield from _latent_attention(mixer, tensor)
        case GatedDelta():
            yield from _gated_delta(mixer, tensor)
        case KimiDelta():
            yield from _kimi_delta(mixer, tensor)
        case LightningAttention():
            yield from _lightning_attention(mixer, tensor)
        case Mamba():
            yield from _mamba(mixer, tensor)
        case Mamba2():
            yield from _mamba2(mixer, tensor)
        case ShortConvolution():
            yield from _short_convolution(mixer, tensor)
        case _:
            raise unsupported_mixer(mixer)


def _attention(mixer: Attention, tensor: int) -> Iterator[tuple[str, Placement]]:
    heads = HeadLayout.of(mixer, tensor)
    dim = mixer.head_dim

    def queries(rows: Array) -> Array:
        return heads.queries(rows, dim)

    def keys(rows: Array) -> Array:
        return heads.keys(rows, dim)

    def keys_in_slots(rows: Array) -> Array:
        return keys(rows)[:, None]

    for suffix, target in (("", "qkv"), ("_bias", "qkv_bias")):
        yield f"q{suffix}", Placement((target,), (), queries)
        yield f"k{suffix}", Placement((target,), (0, heads.group), keys_in_slots)
        if mixer.value_width == dim:
            yield f"v{suffix}", Placement((target,), (0, heads.group + 1), keys_in_slots)
        else:
            yield f"v{suffix}", Placement((f"values{suffix}",), (), lambda rows: heads.keys(rows, mixer.value_width))
        if mixer.gate_per_head:
            yield f"gate{suffix}", Placement((f"gate{suffix}",), (), lambda rows: heads.queries(rows, 1)[:, :, 0])
        else:
            yield f"gate{suffix}", Placement((target,), (0, slot_parts(mixer, heads.group) - heads.group), queries)
    yield "o", Placement(("out",), (), lambda rows: _columns(rows, lambda rows: heads.queries(rows, mixer.value_width)))
    yield "o_bias", Placement(("out_bias",))
    yield "sinks", Placement(("sinks",), (), lambda rows: heads.queries(rows, 1)[..., 0])
    if mixer.blocks is not None:
        index_dim = mixer.blocks.head_dim
        yield "blocks.q", Placement(("blocks", "q"), (), lambda rows: heads.keys(rows, index_dim))
        yield "blocks.k", Placement(("blocks", "k"))
        for part in "qk":
            yield f"blocks.{part}_norm", Placement(("blocks", f"{part}_norm", "weight"))
    shared = mixer.qk_norm_over == "per_head"  # by all heads
    for suffix in ("", "_bias"):
        for name, arrange in (("q_norm", queries), ("k_norm", keys)):
            target = f"{name}{suffix}"
            yield target, Placement((target,), (), (lambda v: v) if shared else partial(_flat, arrange))


def _latent_attention(mixer: LatentAttention, tensor: int) -> Iterator[tuple[str, Placement]]:
    heads = HeadLayout.of(mixer, tensor)
    for name in ("q_a", "q_a_bias", "kv_a", "kv_a_bias"):
        yield name, Placement((name,))
    for name in ("q_a_norm", "kv_a_norm"):
        yield name, Placement((name, "weight"))
        yield f"{name}_bias", Placement((name, "bias"))
    for name in ("q", "q_b"):  # the one that the model has
        yield name, Placement(("queries",), (), lambda rows: heads.keys(rows, mixer.nope_dim + mixer.rope.dim))
    yield "gate", Placement(("gate",), (), lambda rows: heads.keys(rows, 1)[:, 0])
    yield "kv_b", Placement(("kv_up",), (), lambda rows: heads.keys(rows, mixer.nope_dim + mixer.value_dim))
    yield "o", Placement(("out",), (), lambda rows: _columns(rows, lambda rows: heads.keys(rows, mixer.value_dim)))
    yield "o_bias", Placement(("out_bias",))
    for name in ("q", "k", "weights"):
        yield f"indexer.{name}", Placement(("indexer", name))
    yield "indexer.k_norm", Placement(("indexer", "k_norm", "weight"))
    yield "indexer.k_norm_bias", Placement(("indexer", "k_norm", "bias"))


def _gated_delta(mixer: GatedDelta, tensor: int) -> Iterator[tuple[str, Placement]]:
    heads = HeadLayout.of(mixer, tensor)
    group = heads.group
    key = mixer.key_dim
    value = mixer.value_dim

    def keys(rows: Array) -> Array:
        return heads.keys(rows, key)

    def values(rows: Array, dim: int = value) -> Array:
        return heads.queries(rows, dim).reshape(heads.slots, group * dim, *rows.shape[1:])

    def per_head(rows: Array) -> Array:
        return values(rows, 1)

    yield "q", Placement(("inner",), (), keys)
    yield "k", Placement(("inner",), (0, key), keys)
    yield "v", Placement(("inner",), (0, 2 * key), values)
    yield "gate", Placement(("inner",), (0, 2 * key + group * value), values)
    yield "beta", Placement(("rates",), (), per_head)
    yield "decay", Placement(("rates",), (0, group), per_head)
    yield "q_conv", Placement(("taps",), (), lambda taps: keys(taps[:, 0]))
    yield "k_conv", Placement(("taps",), (0, key), lambda taps: keys(taps[:, 0]))
    yield "v_conv", Placement(("taps",), (0, 2 * key), lambda taps: values(taps[:, 0]))
    yield "decay_rate", Placement(("decay_rate",), (), per_head)
    yield "decay_offset", Placement(("decay_offset",), (), per_head)
    yield "norm", Placement(("norm", "weight"))
    yield "norm_bias", Placement(("norm", "bias"))
    yield "o", Placement(("out",), (), lambda rows: _columns(rows, values))


def _mamba2(mixer: Mamba2, tensor: int) -> Iterator[tuple[str, Placement]]:
    heads = HeadLayout.of(mixer, tensor)
    size = mixer.state_dim
    width = heads.group * mixer.head_dim

    def values(rows: Array) -> Array:
        return heads.queries(rows, mixer.head_dim).reshape(heads.slots, width, *rows.shape[1:])

    def keys(rows: Array) -> Array:
        return heads.keys(rows, size)

    def per_head(rows: Array) -> Array:
        return heads.queries(rows, 1).reshape(heads.slots, heads.group, *rows.shape[1:])

    parts = (("v", 0, values), ("b", width, keys), ("c", width + size, keys))
    for name, start, arrange in (*parts, ("gate", width + 2 * size, values)):
        for suffix in ("", "_bias"):
            yield f"{name}{suffix}", Placement((f"inner{suffix}",), (0, start), arrange)
    for suffix in ("", "_bias"):
        yield f"step{suffix}", Placement((f"steps{suffix}",), (), per_head)
    for name, start, arrange in parts:
        yield from _taps(f"{name}_conv", start, arrange)
    for name in ("decay_rate", "step_offset", "skip"):
        yield name, Placement((name,), (), per_head)
    yield "norm", Placement(("norm",), (), values)
    yield "o", Placement(("out",), (), lambda rows: _columns(rows, values))
    yield "o_bias", Placement(("out_bias",))


def _kimi_delta(mixer: KimiDelta, tensor: int) -> Iterator[tuple[str, Placement]]:
    heads = HeadLayout.of(mixer, tensor)
    dim = mixer.head_dim

    def of_heads(rows: Array) -> Array:
        return heads.keys(rows, dim)

    def per_head(rows: Array) -> Array:
        return heads.keys(rows, 1)[:, 0]

    for index, name in enumerate("qkv"):
        yield name, Placement(("inner",), (0, index * dim), of_heads)
        yield from _taps(f"{name}_conv", index * dim, of_heads)
    yield "beta", Placement(("beta",), (), per_head)
    for index, name in enumerate(("decay", "gate")):
        if mixer.rank is not None:
            yield f"{name}_a", Placement(("low_rank",), (index * mixer.rank,))
        yield name if mixer.rank is None else f"{name}_b", Placement((name,), (), of_heads)
    yield "decay_rate", Placement(("decay_rate",), (), per_head)
    yield "decay_offset", Placement(("decay_offset",), (), of_heads)
    yield "norm", Placement(("norm", "weight"))
    yield "norm_bias", Placement(("norm", "bias"))
    yield "o", Placement(("out",), (), lambda rows: _columns(rows, of_heads))


def _lightning_attention(mixer: LightningAttention, tensor: int) -> Iterator[tuple[str, Placement]]:
    heads = HeadLayout.of(mixer, tensor)
    dim = mixer.head_dim

    def of_heads(rows: Array) -> Array:
        return heads.keys(rows, dim)

    for index, name in enumerate(("q", "k", "v", "gate")):
        yield name, Placement(("inner",), (0, index * dim), of_heads)
    for name in ("q_norm", "k_norm"):
        yield name, Placement((name, "weight"))
    yield "norm", Placement(("norm",), (), of_heads)
    yield "o", Placement(("out",), (), lambda rows: _columns(rows, of_heads))


def _mamba(mixer: Mamba, tensor: int) -> Iterator[tuple[str, Placement]]:
    of_slots = partial(_of_slots, tensor)
    rank = mixer.step_rank
    states = mixer.state_dim
    channels = padded(mixer.channels, tensor) // tensor

    def columns(rows: Array) -> Array:
        return np.moveaxis(of_slots(rows.T), -1, 1)  # [slots, rows, C]

    for index, name in enumerate(("v", "gate")):
        for suffix in ("", "_bias"):
            yield f"{name}{suffix}", Placement((f"inner{suffix}",), (0, index * channels), of_slots)
    yield from _taps("v_conv", 0, of_slots)
    for name, start in (("step_a", 0), ("b", rank), ("c", rank + states)):
        yield name, Placement(("selection",), (0, start), columns)
        yield f"{name}_norm", Placement((f"{name}_norm", "weight"))
        yield f"{name}_norm_bias", Placement((f"{name}_norm", "bias"))
    yield "decay_rate", Placement(("decay_rate",), (), lambda rows: of_slots(rows).swapaxes(1, 2))
    for name in ("step", "step_offset", "skip"):
        yield name, Placement((name,), (), of_slots)
    yield "o", Placement(("out",), (), lambda rows: _columns(rows, of_slots))
    yield "o_bias", Placement(("out_bias",))


def _short_convolution(mixer: ShortConvolution, tensor: int) -> Iterator[tuple[str, Placement]]:
    of_slots = partial(_of_slots, tensor)
    channels = padded(mixer.channels, tensor) // tensor
    for index, name in enumerate("bcv"):
        for suffix in ("", "_bias"):
            yield f"{name}{suffix}", Placement((f"inner{suffix}",), (0, index * channels), of_slots)
    yield from _taps("conv", 0, of_slots)
    yield "o", Placement(("out",), (), lambda rows: _columns(rows, of_slots))
    yield "o_bias", Placement(("out_bias",))


def _taps(name: str, start: int, arrange: Callable[[Array], Array]) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of a convolution of each channel. `start`: its first channel in a slot."""
    yield name, Placement(("taps",), (0, start), lambda taps: arrange(taps[:, 0]))
    yield f"{name}_bias", Placement(("taps_bias",), (0, start), arrange)


def _of_slots(slots: int, rows: Array) -> Array:
    """Divide channels among slots, padded with zeros: [channels, ...] -> [slots, C, ...]."""
    missing = -len(rows) % slots
    rows = np.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1)) if missing else rows
    return rows.reshape(slots, -1, *rows.shape[1:])


def _columns(rows: Array, arrange: Callable[[Array], Array]) -> Array:
    """Arrange the columns of a matrix [D, heads * dim] -> [D, ...] flat."""
    return np.moveaxis(arrange(rows.T), -1, 0).reshape(len(rows), -1)


def _flat(arrange: Callable[[Array], Array], values: Array) -> Array:
    return arrange(values.reshape(-1))


def _ffn(ffn: Ffn) -> Iterator[tuple[str, Placement]]:
    if isinstance(ffn, Moe):
        yield "router", Placement(("router",))
        yield "router_bias", Placement(("router_bias",))
        yield "router_correction", Placement(("correction",))
        last = 1 if ffn.expert.gated else 0
        for name, part in (("gate", 0), ("up", last)):
            yield f"experts.{name}", Placement(("inner",), (0, part), lambda w: w[:, None])
            yield f"experts.{name}_bias", Placement(("inner_bias",), (0, part), lambda b: b[:, None])
        yield "experts.down", Placement(("down",), (), lambda w: w.swapaxes(1, 2)[:, None])
        yield "experts.down_bias", Placement(("down_bias",))
        yield "shared_gate", Placement(("shared_gate",))
        if ffn.shared is not None:
            for name, placement in _ffn(ffn.shared):
                yield f"shared.{name}", Placement(("shared", *placement.target), placement.start, placement.arrange)
        return
    for name, part in (("gate", 0), ("up", 1 if ffn.gated else 0)):
        yield name, Placement(("inner",), (part,), lambda w: w[None])
        yield f"{name}_bias", Placement(("inner_bias",), (part,), lambda b: b[None])
    for name in ("down", "down_bias", "curvature_p", "curvature_n"):
        yield name, Placement((name,))
