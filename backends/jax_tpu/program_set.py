"""What compiles, keeps and bundles programs asks of those who know them, of generation and of pooling alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import jax

from pagoda.backends.jax_tpu.model import Model

KeyT = TypeVar("KeyT")


class ProgramSet(Protocol[KeyT]):
    """Every program of one engine, by key. Keys are frozen dataclasses: their repr names a program."""

    @property
    def model(self) -> Model:
        """What the programs compute."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """What bundled programs depend on besides the model and the limits; `num_blocks` is among it."""
        ...

    def __iter__(self) -> Iterator[KeyT]:
        """The key of every program, the largest first."""
        ...

    def lower(self, key: KeyT) -> jax.stages.Lowered:
        """The program of that key, traced. Call from one thread."""
        ...

    def signature(self, key: KeyT) -> str:
        """All that the program depends on besides the model and its key."""
        ...
