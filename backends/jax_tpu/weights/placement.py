"""Map each canonical parameter to a decoder array: target, offset and head order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from pagoda.backends.jax_tpu.model.layout import segments
from pagoda.backends.jax_tpu.model.mixers.attention import adapter_placements
from pagoda.backends.jax_tpu.model.mixers.registry import ops_of
from pagoda.backends.jax_tpu.weights.arrange import Path, Placement, add_repeat_axis
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.spec import Ffn, Layer, ModelSpec, Moe, Pooler

_PARTS: Final[dict[str, Path]] = {
    **{f"side.{name}": ("side", name, "weight") for name in ("ffn_norm", "input_norm", "output_norm", "router_norm")},
    "side.expert_scale": ("side", "expert_scale"),
    "shortcut.norm": ("shortcut", "norm", "weight"),
    **{f"second.{name}": ("second", name, "weight") for name in ("mixer_norm", "ffn_norm")},
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
            result[f"layers.{owner}.{name}"] = _stacked(_inside(placement, "blocks", number), repeat=0)
    for number, segment in enumerate(segments(spec.layers)):
        for repeat, row in enumerate(segment.numbers.tolist()):
            for index, (layer, layer_number) in enumerate(zip(segment.block, row)):
                prefix: Path = ("segments", number, "layers", index)
                for name, placement in _layer(layer, tensor):
                    result[f"layers.{layer_number}.{name}"] = _stacked(_inside(placement, *prefix), repeat=repeat)
    return result


def _inside(placement: Placement, *module: str | int) -> Placement:
    """Return the placement of a parameter of a module, by its path, in the module around it."""
    return replace(placement, target=(*module, *placement.target))


def _stacked(placement: Placement, repeat: int) -> Placement:
    """Return the placement in an array that has a leading axis for the repeats of a layer."""
    return replace(placement, start=(repeat, *placement.start), arrange=add_repeat_axis(placement.arrange))


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


def _layer(layer: Layer, tensor: int) -> Iterator[tuple[str, Placement]]:
    for norm in ("before_mixer", "after_mixer", "before_ffn", "after_ffn"):
        yield f"norms.{norm}", Placement((norm, "weight"))
        yield f"norms.{norm}_bias", Placement((norm, "bias"))
    before = 0 if layer.block is None else 1  # mixers of an input block
    if layer.block is not None:
        yield from _adapters(layer, tensor)
    for index, mixer in enumerate(layer.mixers[before:], start=before):
        for name, placement in _mixer(mixer, tensor):
            yield f"mixers.{index}.{name}", _inside(placement, "mixers", index - before)
    for prefix, ffn in layer.ffns.items():
        for name, placement in _ffn(ffn):
            yield f"{prefix}.{name}", _inside(placement, *prefix.split("."))
    for name, target in _PARTS.items():
        yield name, Placement(target)


def _mixer(mixer: Mixer, tensor: int) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of a mixer's parameters in its module."""
    ops = ops_of(mixer)
    for name, placement in ops.placements(mixer, tensor):
        (array, *parts) = placement.target
        yield name, replace(placement, matrix=not parts and array in ops.matrices)


def _block(layer: Layer, tensor: int) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of an input block's weights that layers share."""
    assert layer.block is not None
    for name, placement in _mixer(layer.attends_before, tensor):
        yield f"mixers.0.{name}", _inside(placement, "attention")
    for name, placement in _ffn(layer.block.ffn):
        yield f"block.ffn.{name}", _inside(placement, "ffn")
    for norm in ("norm", "ffn_norm"):
        yield f"block.{norm}", Placement((norm, "weight"))
        yield f"block.{norm}_bias", Placement((norm, "bias"))


def once_stacked(mixer: Mixer, tensor: int) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of a mixer that is not among the layers, stacked once."""
    for name, placement in ops_of(mixer).placements(mixer, tensor):
        yield name, _stacked(placement, repeat=0)


def _adapters(layer: Layer, tensor: int) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of what a layer has of its input block by itself."""
    for name, placement in adapter_placements(layer.attends_before, tensor):
        yield f"mixers.0.{name}", _inside(placement, "adapters")
    yield "block.ffn_adapter", Placement(("adapters", "ffn_first"))
    for index, part in enumerate(("gate", "up")):
        yield f"block.ffn.{part}_adapter_out", Placement(("adapters", "ffn"), (index,), lambda rows: rows[None])
    yield "block.out", Placement(("adapters", "out"))


def _ffn(ffn: Ffn) -> Iterator[tuple[str, Placement]]:
    if isinstance(ffn, Moe):
        yield "router", Placement(("router",))
        yield "router_bias", Placement(("router_bias",))
        yield "router_correction", Placement(("correction",))
        last = 1 if ffn.expert.gated else 0
        for name, part in (("gate", 0), ("up", last)):
            yield f"experts.{name}", Placement(("inner",), (0, part), lambda w: w[:, None], matrix=True)
            yield f"experts.{name}_bias", Placement(("inner_bias",), (0, part), lambda b: b[:, None])
        yield "experts.down", Placement(("down",), (), lambda w: w.swapaxes(1, 2)[:, None], matrix=True)
        yield "experts.down_bias", Placement(("down_bias",))
        yield "shared_gate", Placement(("shared_gate",))
        for name in ("latent_in", "latent_out"):
            yield name, Placement((name,), matrix=True)
        if ffn.shared is not None:
            for name, placement in _ffn(ffn.shared):
                yield f"shared.{name}", _inside(placement, "shared")
        return
    for name, part in (("gate", 0), ("up", 1 if ffn.gated else 0)):
        yield name, Placement(("inner",), (part,), lambda w: w[None], matrix=True)
        yield f"{name}_bias", Placement(("inner_bias",), (part,), lambda b: b[None])
    for name in ("down", "down_bias", "inner_norm", "curvature_p", "curvature_n"):
        yield name, Placement((name,), matrix=name == "down")
