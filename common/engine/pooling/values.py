"""Values of pooling models: how a request is pooled, what a step computes, and its vectors.

A pooling model reads a prompt once and returns vectors: no tokens are generated and nothing is cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np

from pagoda.common.engine.steps.contract import Float32, Int32
from pagoda.common.models.spec import TokenSelection

PoolingTask: TypeAlias = Literal["embed", "classify", "score", "token_embed", "token_classify", "embed&token_classify"]

OF_TOKENS: Final = frozenset({"token_embed", "token_classify"})
"""Tasks with one vector per token."""

EMBEDS: Final = frozenset({"embed", "token_embed"})
"""Tasks whose vectors are embeddings."""

PARTS: Final[Mapping[PoolingTask, tuple[PoolingTask, ...]]] = {"embed&token_classify": ("embed", "token_classify")}
"""Tasks that are computed one after the other; their outputs are joined to one vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRules:
    """How one prompt is pooled. All values are resolved: none means "the model's default"."""

    task: PoolingTask  # one of the model's; `score` is `classify` of a pair by a model with one label
    use_activation: bool  # normalise embeddings, apply the model's sigmoid or softmax to labels
    dimensions: int | None = None  # leading dimensions kept of an embedding (Matryoshka), before it is normalised
    second_text: int | None = None  # first token of a pair's second text (token type 1); None: no pair
    selection: TokenSelection = TokenSelection()  # tokens that have an output, in tasks with one per token

    def parts(self) -> tuple[PoolingRules, ...]:
        """Return the rules of each part of the task, by themselves if it has none."""
        return tuple(replace(self, task=task) for task in PARTS.get(self.task, (self.task,)))

    def select(self, vectors: Float32, token_ids: Int32) -> Float32:
        """Return the vectors of the selected tokens, of one vector per token [T, n]; other vectors [n] as they are."""
        selection = self.selection
        if self.task not in OF_TOKENS or selection == TokenSelection():
            return vectors
        kept = np.ones(len(token_ids), bool) if selection.tag is None else token_ids == selection.tag
        kept[:1] &= token_ids[:1] != selection.skip_first if selection.skip_first is not None else True
        kept[-1:] &= token_ids[-1:] != selection.skip_last if selection.skip_last is not None else True
        selected: Float32 = vectors[kept]
        return selected


@dataclass(frozen=True, slots=True, eq=False)
class PoolPlan:
    """What one pooling step computes: S whole prompts, T tokens in all, concatenated.

    The tokens of prompt s are token_ids[query_start[s]:query_start[s+1]], at positions 0, 1, ...
    """

    token_ids: Int32  # [T]
    query_start: Int32  # [S+1] cumulative token counts
    token_types: Int32 | None  # [T] 0 or 1; None: all are 0
    rules: tuple[PoolingRules, ...]  # one per prompt

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.rules)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class PoolResult:
    """What a pooling step produced."""

    vectors: tuple[Float32, ...]  # one per prompt: [n], or [T, n] for tasks with one vector per token
    recompiles: int = 0  # programs that had to be compiled for this step, although serving had begun


class Pooled(msgspec.Struct, frozen=True, gc=False):
    """The vectors of one prompt in a message: bytes, because a long prompt has millions of numbers."""

    data: bytes  # float32 in native byte order
    shape: tuple[int, ...]  # (n,) or (T, n)

    @classmethod
    def of(cls, array: Float32) -> Pooled:
        """Pack an array [n] or [T, n]."""
        return cls(np.ascontiguousarray(array, np.float32).tobytes(), array.shape)

    @property
    def array(self) -> Float32:
        """The vectors as a read-only array."""
        return np.frombuffer(self.data, np.float32).reshape(self.shape)

    def tolist(self) -> list[float] | list[list[float]]:
        """Return the vectors as Python floats."""
        values: list[float] | list[list[float]] = self.array.tolist()
        return values
