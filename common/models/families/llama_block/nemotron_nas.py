"""DeciLM and Nemotron-NAS (Llama-Nemotron Super and Ultra): Llama's block, pruned and sized layer by layer."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.llama_block.llama import LLAMA, llama
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import Layer, Mlp, ModelSpec


def _nemotron_nas(config: HfConfig) -> ModelSpec:
    config.expect("architecture", "transformer")
    count = config.size("num_hidden_layers")
    heads = config.size("num_attention_heads")
    if "block_configs" not in config:  # DeciLM-7B
        kv_heads = config.per_layer("num_key_value_heads_per_layer", count, heads)
        spec = llama(config)
        layers = [_resized(config, layer, kv, heads) for layer, kv in zip(spec.layers, kv_heads)]
        return replace(spec, layers=tuple(layers))
    blocks = config.need("block_configs", list)
    if len(blocks) != count or not all(isinstance(block, dict) for block in blocks):
        raise config.error("block_configs", f"has {len(blocks)} entries, not an object for each of {count} layers")
    config.default("intermediate_size", 1)  # stated by each block
    spec = llama(config)
    layers = [
        _block(HfConfig(block, label="block_configs"), layer, heads, spec.width)
        for layer, block in zip(spec.layers, blocks)
    ]
    return replace(spec, layers=tuple(layers))


def _resized(config: HfConfig, layer: Layer, kv_heads: int, heads: int) -> Layer:
    """Return the layer with this number of KV heads."""
    if kv_heads < 1 or heads % kv_heads:
        raise config.error("num_key_value_heads_per_layer", f"has {kv_heads}, which does not divide {heads} heads")
    return replace(layer, mixers=(replace(layer.attention, kv_heads=kv_heads),))


def _block(block: HfConfig, layer: Layer, heads: int, width: int) -> Layer:
    """Return the layer with the mixer and the ffn that its block states, each possibly none."""
    block.expect("parallel_blocks", None)
    attention = block.section("attention")
    ffn = block.section("ffn")
    if attention is None or ffn is None:
        raise block.error("attention" if attention is None else "ffn", "is missing")
    mixer = _attention(attention, layer.attention, heads)
    mlp = _mlp(ffn, layer.feed_forward, width)
    block.finish()
    norms = layer.norms
    norms = replace(
        norms, before_mixer=norms.before_mixer if mixer else None, before_ffn=norms.before_ffn if mlp else None
    )
    return replace(layer, mixers=(mixer,) if mixer else (), ffn=mlp, norms=norms)


def _attention(section: HfConfig, attention: Attention, heads: int) -> Attention | None:
    for key in (
        "replace_with_linear",
        "sparsify",
        "window_length",
        "num_sink_tokens",
        "use_prefill_window_in_sink_attention",
    ):
        section.expect(key, False)
    section.expect("unshifted_sink", False)
    per_group = section.opt("n_heads_in_group", int, 0)
    none = section.opt("no_op", bool, False)
    section.finish()
    if none:
        return None
    if per_group < 1 or heads % per_group:
        raise section.error("n_heads_in_group", f"is {per_group}, which does not divide {heads} heads")
    return replace(attention, kv_heads=heads // per_group)


def _mlp(section: HfConfig, mlp: object, width: int) -> Mlp | None:
    assert isinstance(mlp, Mlp), "Llama's"
    for key in ("replace_with_linear", "sparsify"):
        section.expect(key, False)
    multiple = section.opt("ffn_mult", float, 0.0)
    none = section.opt("no_op", bool, False)
    channels = section.opt("intermediate_size", int, 0) or -(-int(2 * multiple * width / 3) // 256) * 256
    activation = section.activation("hidden_act", mlp.activation)
    section.finish()
    return None if none else replace(mlp, width=channels, activation=activation)


NEMOTRON_NAS = replace(LLAMA, build=_nemotron_nas)
