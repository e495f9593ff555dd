"""Where one of the processes that share a model stands among them."""

from __future__ import annotations

import msgspec


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. `rank` counts from 0 to `size` - 1. `device`: its number among the devices that its process sees.

    `host`, `port`: where rank 0 listens for the backend's own meeting.
    """

    rank: int
    size: int
    device: int
    host: str
    port: int
