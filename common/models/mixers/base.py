"""What every mixer answers to those who do not know its kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from pagoda.common.models.mixers.caches import CacheSpec
from pagoda.common.models.primitives import Param
from pagoda.common.models.rope import Rope


class MixerBase:
    """The answers that most kinds of mixer have in common: a kind overrides those that differ.

    Each kind adds its `caches`, `work` and `parameters`, and says whether it is `causal`. It has `divided` unless it
    overrides `indivisible`.
    """

    __slots__ = ()
    divided: ClassVar[str]  # What the tensor-parallel ranks divide, such as query heads.
    lora_targets: ClassVar[tuple[str, ...]] = ()  # Names of the matrices that a LoRA adapter may change.

    @property
    def reads_embedding(self) -> bool:
        """Whether it reads the token's embedding beside its input: the attention of an input block does."""
        return False

    @property
    def cache_owner(self) -> int | None:
        """The earlier layer whose cache it reads instead of its own; None for its own."""
        return None

    @property
    def shared_form(self) -> tuple[CacheSpec, Rope | None] | None:
        """What layers that share a cache have in common: the cache and the RoPE of its keys; None: they cannot."""
        return None

    @property
    def selected_tokens(self) -> int | None:
        """The number of tokens that an indexer selects for each query to attend to; None: nothing is selected."""
        return None

    @property
    def shares_selection(self) -> bool:
        """Whether its queries attend to the tokens that the last layer before it with an indexer selected."""
        return False

    @property
    def has_plain_cache(self) -> bool:
        """Whether its cache is one that every backend with 8-bit caches can store in 8 bits."""
        return True

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        raise NotImplementedError

    def indivisible(self, ranks: int) -> str | None:
        """Return what does not divide evenly over tensor-parallel ranks; None if everything does."""
        return f"{self.max_ranks} {self.divided}" if self.max_ranks % ranks else None

    def adapters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of low-rank adapters that are part of the model, which `parameters` does not include."""
        yield from ()

    def without_adapters(self) -> Self:
        """Return the mixer without low-rank adapters."""
        return self

    def ropes(self) -> tuple[Rope, ...]:
        """Return the ropes whose tables the mixer reads."""
        return ()

    def without_window(self) -> Self:
        """Return the mixer that sees all tokens."""
        return self

    def within(self, max_len: int) -> Self:
        """Return the mixer for sequences of at most `max_len` tokens, without what makes no difference there."""
        return self

    def batch_dependence(self) -> str | None:
        """Return why numbers of a token depend on the other tokens of a step, with the remedy; None: they do not."""
        kind = type(self).__name__
        return f"the model has mixers of kind {kind}, {CHUNKS_CHANGE_NUMBERS}"

    def half_split_orders(self) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Yield each parameter with interleaved RoPE, and the order that makes the channels of its heads half-split."""
        yield from ()

    def lora_copies(self) -> Mapping[str, str]:
        """Return LoRA targets without a parameter of their own, each with the parameter whose values it has."""
        return {}


CHUNKS_CHANGE_NUMBERS = "whose numbers depend on how a prompt is cut into chunks; drop it"
"""End of the reason why a model cannot be batch invariant."""
