"""What a backend implements of the specification, so that a model with anything else is refused at load by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pagoda.common.errors import ModelError
from pagoda.common.models.mixers import Attention, GatedDelta, KimiDelta, LatentAttention, Mixer, QueryGrowth
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Moe

Feature = Literal[
    "shared cache",
    "output gate",
    "ALiBi",
    "sinks",
    "chunks",
    "query growth",
    "value norm",
    "values are keys",
    "indexer",
    "scaled beta",
    "several mixers",
    "no mixer",
    "no ffn",
    "sparse gate",
    "side mixture",
    "low-rank residual",
    "normed residual",
    "output scale",
    "per-layer embedding",
    "AltUp",
    "gate per head",
    "root of ALiBi",
    "chunk lookback",
    "value width",
    "latent query growth",
    "latent gate",
    "block indexer",
    "direct decay",
    "bounded decay",
    "clipped gate",
    "empty layer",
    "blend",
    "shortcut",
    "input block",
]


@dataclass(frozen=True, slots=True)
class Supported:
    """What a backend has beyond layers of one `Attention`, then an ffn."""

    backend: str
    mixers: tuple[type, ...] = (Attention,)
    features: frozenset[Feature] = frozenset()

    def check(self, spec: ModelSpec) -> None:
        """Raise ModelError naming the first layer with something that the backend does not implement."""
        for feature, words in _model_features(spec):
            if feature not in self.features:
                problem = f"the model has {words}, which {self.backend} does not support"
                raise ModelError(f"{problem}; use --backend reference")
        for index, layer in enumerate(spec.layers):
            for problem in self._missing(layer):
                words = f"layer {index} has {problem}, which {self.backend} does not support; use --backend reference"
                raise ModelError(words)

    def _missing(self, layer: Layer) -> Iterator[str]:
        for mixer in layer.mixers:
            if not isinstance(mixer, self.mixers):
                yield f"a mixer of kind {type(mixer).__name__}"
        yield from (words for feature, words in _features(layer) if feature not in self.features)


def _model_features(spec: ModelSpec) -> Iterator[tuple[Feature, str]]:
    """Yield the features of the model as a whole, each with words for an error message."""
    if spec.per_layer is not None:
        yield "per-layer embedding", "an embedding per layer"
    if spec.alt_up is not None:
        yield "AltUp", f"{spec.alt_up.streams} residual streams (AltUp)"


def _features(layer: Layer) -> Iterator[tuple[Feature, str]]:
    """Yield the features that a layer has, each with words for an error message."""
    for mixer in layer.mixers:
        if isinstance(mixer, GatedDelta) and mixer.beta_scale != 1:
            yield "scaled beta", f"a gated delta rule whose beta is scaled by {mixer.beta_scale}"
        if isinstance(mixer, LatentAttention) and mixer.indexer is not None:
            yield "indexer", "latent attention with an indexer"
        if isinstance(mixer, LatentAttention) and (growth := mixer.query_growth) is not None:
            yield "latent query growth", _growth_words(growth)
        if isinstance(mixer, LatentAttention) and mixer.gate_per_head:
            yield "latent gate", "latent attention with an output gate"
        if isinstance(mixer, KimiDelta) and mixer.rank is None:
            yield "direct decay", "KDA whose decays are projected directly"
        if isinstance(mixer, KimiDelta) and mixer.decay_bound is not None:
            yield "bounded decay", "KDA with bounded decays"
        if not isinstance(mixer, Attention):
            continue
        if mixer.shares_cache_of is not None:
            yield "shared cache", f"attention over the cache of layer {mixer.shares_cache_of}"
        if mixer.output_gate:
            yield "output gate", "attention with an output gate"
        if mixer.gate_per_head:
            yield "gate per head", "attention with an output gate per head"
        if mixer.alibi_slopes is not None:
            yield "ALiBi", "ALiBi"
        if mixer.alibi_root:
            yield "root of ALiBi", "ALiBi by the root of the distance"
        if mixer.sinks:
            yield "sinks", "attention sinks"
        if mixer.chunk is not None:
            yield "chunks", f"attention in chunks (none with --max-model-len {mixer.seen_chunks})"
        if mixer.chunk_lookback:
            yield "chunk lookback", f"attention to the chunk before (none with --max-model-len {mixer.seen_chunks})"
        if (growth := mixer.query_growth) is not None:
            yield "query growth", _growth_words(growth)
        if mixer.value_norm is not None:
            yield "value norm", "attention with normed values"
        if mixer.values_are_keys:
            yield "values are keys", "attention whose values are its keys"
        if mixer.blocks is not None:
            yield "block indexer", "attention to blocks that an indexer selects"
        if mixer.value_dim not in (None, mixer.head_dim):
            yield "value width", f"value heads of {mixer.value_dim} channels and key heads of {mixer.head_dim}"
    yield from _ffn_features(layer)
    if layer.shortcut is not None:
        yield "shortcut", "a mixture of experts around it"
    if layer.block is not None:
        yield "input block", "a transformer block in front of its mixers"
    if layer.blend is not None:
        yield "blend", f"an input blended with that of layer {layer.blend.layer}"
    if isinstance(layer.ffn, Mlp) and layer.ffn.sparsity:
        yield "sparse gate", "a sparse gate"
    if layer.side_moe is not None:
        yield "side mixture", "a mixture of experts beside its feed-forward block"
    if layer.low_rank is not None:
        yield "low-rank residual", "a low-rank residual"
    if layer.output_scale:
        yield "output scale", "a scaled output"
    if len(layer.mixers) > 1:
        yield "several mixers", f"{len(layer.mixers)} mixers side by side"
    if not layer.mixers and layer.ffn is None:
        yield "empty layer", "neither mixer nor feed-forward block"
    elif not layer.mixers:
        yield "no mixer", "a feed-forward block alone"
    if layer.norm_residual:
        yield "normed residual", "updates that are added to normalised values"
    if layer.ffn is None and layer.mixers:
        yield "no ffn", "no feed-forward block"


def _growth_words(growth: QueryGrowth) -> str:
    longest = growth.period - growth.offset
    return f"queries that grow with their position (constant with --max-model-len {longest})"


def _ffn_features(layer: Layer) -> Iterator[tuple[Feature, str]]:
    mlps = (layer.ffn.expert, layer.ffn.shared) if isinstance(layer.ffn, Moe) else (layer.ffn,)
    if any(mlp is not None and mlp.clip is not None for mlp in mlps):
        yield "clipped gate", "a clipped gate"


def unsupported_mixer(mixer: Mixer) -> ModelError:
    """Return the error for a kind of mixer that a backend does not have; `Supported.check` refuses it before."""
    return ModelError(f"the backend has no mixer of kind {type(mixer).__name__}")
