"""What kernels with recurrent state share: the batch, its visits in tiles, and the decode kernel of any rule."""

from __future__ import annotations

from pagoda.kernels_pallas.recurrent_state.batch import RecurrentBatch, TileVisits, tile_visits
from pagoda.kernels_pallas.recurrent_state.decode import (
    Arrays,
    TokenInputs,
    TokenRule,
    block_bytes,
    decode,
    group_size,
    join,
)

__all__ = [
    "Arrays",
    "RecurrentBatch",
    "TileVisits",
    "TokenInputs",
    "TokenRule",
    "block_bytes",
    "decode",
    "group_size",
    "join",
    "tile_visits",
]
