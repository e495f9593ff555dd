"""Granite with sliding windows, dense and with experts: attention sinks, a base of RoPE (or none) for each layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pagoda.common.models.families.experts import FFN
from pagoda.common.models.families.llama_block.granite import GRANITE
from pagoda.common.models.families.mixtures.granite_moe import GRANITE_MOE
from pagoda.common.models.family import Rename, Split
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import ModelSpec


def _windowed(build: Callable[[HfConfig], ModelSpec], config: HfConfig) -> ModelSpec:
    spec = build(config)
    window = config.window(128)
    layers = len(spec.layers)
    kinds = config.layer_types(layers, ["sliding_attention" if n % 4 else "full_attention" for n in range(layers)])
    thetas = config.opt("layer_rope_theta", list, [None] * layers)
    if len(thetas) != layers:
        raise config.error("layer_rope_theta", f"has {len(thetas)} entries for {layers} layers")

    def mixer(attention: Attention, kind: str, theta: float | None) -> Attention:
        rope = attention.rope
        if theta is not None and rope is not None:
            rope = replace(rope, theta=float(theta)) if theta else None  # 0: no positions
        return replace(attention, rope=rope, sinks=True, window=window if kind == "sliding_attention" else None)

    stack = (
        replace(layer, mixers=(mixer(layer.attention, kind, theta),))
        for layer, kind, theta in zip(spec.layers, kinds, thetas)
    )
    return replace(spec, layers=tuple(stack))


_SINKS = Rename("[model.]layers.{l}.self_attn.sinks", "layers.{l}.mixers.0.sinks")
_MOE = "[model.]layers.{l}.block_sparse_moe"
_EXPERTS = (
    Rename(f"{_MOE}.router.weight", f"{FFN}.router"),
    Split(f"{_MOE}.experts.gate_up_proj", (f"{FFN}.experts.gate", f"{FFN}.experts.up"), axis=1),
    Rename(f"{_MOE}.experts.down_proj", f"{FFN}.experts.down"),
)

GRANITE_SWA = replace(GRANITE, build=partial(_windowed, GRANITE.build), rules=(*GRANITE.rules, _SINKS))
GRANITE_MOE_SWA = replace(
    GRANITE_MOE, build=partial(_windowed, GRANITE_MOE.build), rules=(*GRANITE_MOE.rules, _SINKS, *_EXPERTS)
)
