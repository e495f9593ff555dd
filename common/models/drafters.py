"""Specifications of drafter models: what guesses the next tokens of a target model on the device.

A drafter keeps caches of its own, numbered after the target's in one layout. It guesses one token after another, each
the most likely one after the guesses before.

Two kinds read hidden states of the target: where the target has computed the token at position p, they read its hidden
state there and the token at p + 1, and guess the token at p + 2. Their cache at position p belongs to that pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from pagoda.common.models.mixers import Mixer
from pagoda.common.models.mixers.caches import CacheSpec
from pagoda.common.models.primitives import Norm, Param, linear_params, norm_params
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LanguageDrafter:
    """A language model of its own with the target's vocabulary, which reads tokens alone."""

    model: ModelSpec

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """Every cache kept per sequence."""
        return self.model.caches


@dataclass(frozen=True, slots=True)
class JoinedInputs:
    """The first layer reads project [embed_norm(e), hidden_norm(h)].

    e is the embedding of the next token; h a hidden state, of the target, or of the drafter for later guesses.
    """

    embed_norm: Norm | None = None
    hidden_norm: Norm | None = None
    bias: bool = False
    hidden_first: bool = False  # The order is [h, e] instead.
    blank_first: bool = False  # The embedding e is 0 at position 0.


@dataclass(frozen=True, slots=True)
class AttendedInputs:
    """An attention in front of the layers: they read r + attention([embed_norm(e), hidden_norm(h)]).

    h is `project` of the target's hidden states, or the drafter's own for later guesses; r is h, or with
    `norms_residual` hidden_norm(h).
    """

    attention: Mixer  # The attention reads the embedding, too.
    embed_norm: Norm
    hidden_norm: Norm
    norms_residual: bool = False


@dataclass(frozen=True, slots=True)
class FeatureDrafter:
    """Layers over the embedding of the next token and a hidden state.

    `model` has the layers, the final norm before the head, the embedding's scale, and the target's vocabulary.
    """

    model: ModelSpec
    inputs: JoinedInputs | AttendedInputs
    source_width: int  # Number of channels that are read of the target.
    captured: tuple[int, ...] = ()  # Target layers whose inputs are read; (): the input of the target's head is read.
    head_vocab: int | None = None  # Size of the head's own vocabulary; None: the target's.
    own_embedding: bool = False  # False: the target's embedding is used.
    own_head: bool = False  # False: the target's head is used.
    chains_normed: bool = False  # Later guesses read the hidden state after the final norm.

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """Every cache kept per sequence: that of the attention in front of the layers, then those of the layers."""
        first = self.inputs.attention.caches() if isinstance(self.inputs, AttendedInputs) else ()
        return (*first, *self.model.caches)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct ropes."""
        first = self.inputs.attention.ropes() if isinstance(self.inputs, AttendedInputs) else ()
        return tuple(dict.fromkeys((*first, *self.model.ropes)))


@dataclass(frozen=True, slots=True)
class HeadsDrafter:
    """One head per guess over the target's hidden state h (arXiv 2401.10774).

    Guess j has the logits head_j block(... block(h)), block(x) = x + silu(W x + b); each head has its own blocks.
    """

    vocab: int
    width: int
    heads: int
    blocks: int
    bias: bool = True

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """None: only the newest hidden state is read."""
        return ()


@dataclass(frozen=True, slots=True)
class StagesDrafter:
    """A stage per guess, over the target's hidden state and the token before (arXiv 2404.19124).

    Stage i: s = gelu(norm_i(project_i s + weight * embed_i[token])), logits head_i s; the norm divides by the root mean
    square, then multiplies by a weight and adds a bias. s starts as the hidden state, with `scales_input` divided by
    its root mean square and sqrt(2). The weight is sqrt((1 - w^2) * inner / 2) / w with w = 0.5^(0.5 / stages).
    """

    vocab: int
    width: int
    inner: int
    stages: int
    tied: bool = False  # All stages share one embedding, norm and head, and all but the first one projection.
    scales_input: bool = False
    eps: float = 1e-6

    @property
    def embedding_weight(self) -> float:
        """Factor on the embedding of the token before."""
        state: float = 0.5 ** (0.5 / self.stages)
        return float(((1 - state**2) * self.inner / 2) ** 0.5 / state)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """None: only the newest hidden state is read."""
        return ()


DrafterSpec: TypeAlias = LanguageDrafter | FeatureDrafter | HeadsDrafter | StagesDrafter


def mixers_of(drafter: DrafterSpec | None) -> tuple[Mixer, ...]:
    """Return every mixer of a drafter, that in front of its layers included."""
    match drafter:
        case LanguageDrafter():
            return drafter.model.mixers
        case FeatureDrafter():
            first = (drafter.inputs.attention,) if isinstance(drafter.inputs, AttendedInputs) else ()
            return (*first, *drafter.model.mixers)
        case _:
            return ()


def model_of(drafter: DrafterSpec | None) -> ModelSpec | None:
    """Return the layers of a drafter as a model; None: it has none."""
    return drafter.model if isinstance(drafter, LanguageDrafter | FeatureDrafter) else None


def captured_layers(drafter: DrafterSpec | None) -> tuple[int, ...]:
    """Return the target's layers whose inputs the drafter reads."""
    return drafter.captured if isinstance(drafter, FeatureDrafter) else ()


def drafter_params(drafter: DrafterSpec) -> dict[str, Param]:
    """Return every parameter of a drafter's own by canonical name."""
    return {param.name: param for param in _params(drafter)}


def _params(drafter: DrafterSpec) -> Iterator[Param]:
    match drafter:
        case LanguageDrafter():
            yield from params(drafter.model).values()
        case FeatureDrafter():
            yield from _feature_params(drafter)
        case HeadsDrafter():
            for head in range(drafter.heads):
                for block in range(drafter.blocks):
                    name = f"heads.{head}.blocks.{block}"
                    yield from linear_params(name, drafter.width, drafter.width, "D.", drafter.bias)
                yield Param(f"heads.{head}.head", (drafter.vocab, drafter.width), "VD")
        case StagesDrafter():
            yield from _stage_params(drafter)


def _feature_params(drafter: FeatureDrafter) -> Iterator[Param]:
    model = drafter.model
    inputs = drafter.inputs
    table = model.embedding.width or model.width
    if isinstance(inputs, JoinedInputs):
        yield from norm_params("inputs.embed_norm", inputs.embed_norm, model.width)
        yield from norm_params("inputs.hidden_norm", inputs.hidden_norm, drafter.source_width)
        both = model.width + drafter.source_width
        yield from linear_params("inputs.project", model.width, both, "D.", inputs.bias)
    else:
        yield Param("inputs.project", (model.width, drafter.source_width), "D.")
        yield from norm_params("inputs.embed_norm", inputs.embed_norm, model.width)
        yield from norm_params("inputs.hidden_norm", inputs.hidden_norm, model.width)
        for param in inputs.attention.parameters(model.width):
            yield replace(param, name=f"inputs.attention.{param.name}")
    shared = {"head", "head_bias"} | (set() if drafter.own_embedding else {"embed", "embed_in", "embed_out"})
    yield from (param for name, param in params(model).items() if name not in shared)
    if drafter.own_head:
        yield Param("head", (drafter.head_vocab or model.vocab, table), "VD")
    if drafter.head_vocab is not None:
        yield Param("target_ids", (drafter.head_vocab,), ".", float32=True)


def _stage_params(drafter: StagesDrafter) -> Iterator[Param]:
    for stage in range(drafter.stages):
        columns = drafter.inner if stage else drafter.width
        if stage < 2 or not drafter.tied:
            yield Param(f"stages.{stage}.project", (drafter.inner, columns), "..")
        if stage and drafter.tied:
            continue
        yield Param(f"stages.{stage}.embed", (drafter.vocab, drafter.inner), "V.")
        yield Param(f"stages.{stage}.norm", (drafter.inner,), ".")
        yield Param(f"stages.{stage}.norm_bias", (drafter.inner,), ".")
        yield Param(f"stages.{stage}.head", (drafter.vocab, drafter.inner), "V.")
