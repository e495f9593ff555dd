"""What each owner uses of a store, so that a full store makes room at the cost of the owner who uses most of it."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

Owner = TypeVar("Owner", str, bytes)


class Shares(Generic[Owner]):
    """The number of entries and the bytes of each owner (API key). `max_count`, `max_bytes`: of all together."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count = max_count
        self.max_bytes = max_bytes
        self._counts: Counter[Owner] = Counter()
        self._bytes: Counter[Owner] = Counter()
        self.count = 0
        self.bytes = 0

    def add(self, owner: Owner, *, count: int = 0, size: int = 0) -> None:
        """Count what an owner stores from now on; negative for what is removed."""
        self._counts[owner] += count
        self._bytes[owner] += size
        self.count += count
        self.bytes += size
        if not self._counts[owner] and not self._bytes[owner]:
            del self._counts[owner], self._bytes[owner]

    def over(self) -> Owner | None:
        """Return who is to make room: the owner with most of what there is too much of; None if all fits."""
        if self.count > self.max_count:
            return max(self._counts, key=self._counts.__getitem__)
        if self.bytes > self.max_bytes:
            return max(self._bytes, key=self._bytes.__getitem__)
        return None

    def of(self, owner: Owner) -> tuple[int, int]:
        """Return the number of entries and the bytes of an owner."""
        return self._counts[owner], self._bytes[owner]

    def __len__(self) -> int:
        """The number of owners."""
        return len(self._counts.keys() | self._bytes.keys())
