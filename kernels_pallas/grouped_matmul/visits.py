"""The order of work: which tile of rows meets which group, computed once per call by XLA."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Visits:
    """One entry per (group, tile of rows) that share rows, in the order of the rows; int32 [V], V static.

    tile; group; low, high: the group's rows, counted from the tile's first; number: of the group among those with
    rows; following: the next group with rows, after the last the first again; groups [1]: with rows.
    """

    tile: Any
    group: Any
    low: Any
    high: Any
    number: Any
    following: Any
    groups: Any


FIELDS = tuple(field.name for field in fields(Visits))


def visits(sizes: jax.Array, rows: int, tile: int) -> tuple[Visits, jax.Array]:
    """The visits of groups of `sizes` int32 [E] over `rows` rows in tiles, and how many entries are real."""
    count = sizes.shape[0]
    most = -(-rows // tile) + count - 1  # a border inside a tile makes one more
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    filled = sizes > 0
    each = jnp.where(filled, (ends - 1) // tile - starts // tile + 1, 0)
    last = jnp.cumsum(each)  # visits up to and with each group
    number = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum((number[:, None] >= last[None]).sum(1), count - 1).astype(jnp.int32)
    at = starts[group] // tile + number - (last - each)[group]
    order = jnp.cumsum(filled) - 1
    total = filled.sum()
    wanted = (order + 1) % jnp.maximum(total, 1)
    following = jnp.argmax((order[None] == wanted[:, None]) & filled[None], axis=1)
    found = Visits(
        tile=at,
        group=group,
        low=starts[group] - at * tile,
        high=ends[group] - at * tile,
        number=order[group],
        following=following[group],
        groups=total[None],
    )
    return jax.tree.map(lambda x: x.astype(jnp.int32), found), last[-1]
