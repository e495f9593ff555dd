"""What the engine knows of a model that the library transformers computes (--model-impl transformers).

Its layers are transformers' own code. Of a model that generates, attention is ours: transformers calls it with
projected, rotated q, k and v through its attention interface, and each call is one `Attention` here, with a KV cache of
its own. A model that pools needs no cache. Where each of its calls attends to a prompt, the prompts of a step are
concatenated and attention is ours, too; else all of it is transformers' code, on prompts of one length at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagoda.common.errors import ConfigError
from pagoda.common.models.family import PoolUse
from pagoda.common.models.mixers import Attention
from pagoda.common.models.mixers.caches import CacheSpec
from pagoda.common.models.spec import ModelSpec, Pooler


@dataclass(frozen=True, slots=True)
class TransformersSource:
    """What transformers builds the model from."""

    folder: Path  # Folder of config.json, and of the model's code if it has its own.
    config: Mapping[str, Any]  # The config.json with --hf-overrides.
    custom_code: bool  # The folder's Python files define the model (--trust-remote-code).
    use: PoolUse | None = None  # The use whose class of transformers is built; None: the model generates.


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """What the engine knows of the encoder of an encoder-decoder model.

    The keys and values of cross-attention are computed from the encoder's output once per request, and kept by row.
    """

    max_positions: int  # Maximum number of tokens that it reads.
    decoder_start: tuple[int, ...]  # Token ids that the decoder starts from.
    cross_attention: tuple[str, ...]  # Names of the decoder's modules that attend to the encoder's output.
    cross_elements: int  # Numbers in all keys and values of one encoder token.


@dataclass(frozen=True, slots=True)
class TransformersSpec:
    """`attention`: one per call in a forward pass, in order; q and k have RoPE.

    None of a model that pools, if its prompts cannot be concatenated. Of an encoder-decoder model (`encoder`), it is
    the decoder's self-attention.
    """

    vocab: int
    width: int  # Width of the hidden states that the head or the pooler reads.
    max_positions: int  # Maximum context in tokens, from the checkpoint; of an encoder-decoder model, the decoder's.
    attention: tuple[Attention, ...]
    source: TransformersSource = field(compare=False)
    pooler: Pooler | None = None  # None: the model generates. Its classifier is transformers' code, with its pooling.
    encoder: EncoderSpec | None = None

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """The cache of each call of attention."""
        return tuple(attention.keys_and_values for attention in self.attention)

    @property
    def mixers(self) -> tuple[Attention, ...]:
        """Its mixers, as of ModelSpec."""
        return self.attention

    @property
    def hidden_width(self) -> int:
        """Width of the hidden state that the head reads."""
        return self.width

    @property
    def per_prompt(self) -> bool:
        """Whether its own code pools: one row of logits per prompt."""
        return self.source.use == "classify"

    def without_windows(self) -> TransformersSpec:
        """Return the model without sliding windows, its context limited to the narrowest one."""
        windows = [attention.window for attention in self.attention if attention.window is not None]
        attention = tuple(attention.without_window() for attention in self.attention)
        return replace(self, attention=attention, max_positions=min([self.max_positions, *windows]))


AnySpec = ModelSpec | TransformersSpec


def own_spec(spec: AnySpec, user: str) -> ModelSpec:
    """Return the spec of a model that pagoda computes. Raise ConfigError for another, which `user` cannot take."""
    if isinstance(spec, TransformersSpec):
        raise ConfigError("--model-impl", f"transformers is not supported by {user}; serve the model without it")
    return spec
