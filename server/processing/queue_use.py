"""What unfinished requests use of the queue, in total and by API key, and the limits on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pagoda.common.engine.messages import KEY_SHARE, QUEUED_REQUESTS, QUEUED_TOKENS
from pagoda.common.errors import QueueFullError, RequestError

NO_KEY: Final = b""
"""Stands for the API key of requests to a server without keys, and from Python."""


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences of a request, and prompt tokens of all of them."""

    sequences: int = 0
    tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.sequences + other.sequences, self.tokens + other.tokens)

    def __sub__(self, other: Load) -> Load:
        return Load(self.sequences - other.sequences, self.tokens - other.tokens)


_NOTHING: Final = Load()


class QueueUse:
    """The loads of unfinished requests."""

    def __init__(self) -> None:
        self.total = _NOTHING
        self._requests: dict[str, tuple[bytes, Load]] = {}
        self._keys: dict[bytes, Load] = {}  # of keys with unfinished requests

    def of(self, key: bytes) -> Load:
        """Return the load of a key's requests."""
        return self._keys.get(key, _NOTHING)

    def add(self, request_id: str, key: bytes, load: Load) -> None:
        """Count a request until `remove`."""
        self._requests[request_id] = key, load
        self._keys[key] = self.of(key) + load
        self.total += load

    def remove(self, request_ids: Iterable[str]) -> None:
        """Count requests no longer; unknown ids are skipped."""
        for request_id in request_ids:
            if (counted := self._requests.pop(request_id, None)) is None:
                continue
            key, load = counted
            self.total -= load
            if (left := self._keys[key] - load).sequences:
                self._keys[key] = left
            else:
                del self._keys[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds on the load of all unfinished requests. None: unlimited."""

    sequences: int | None = None  # --max-num-queued-reqs
    tokens: int | None = None  # --max-num-queued-tokens
    key_share: float = 1.0  # of each bound, that one key may use

    def share(self, limit: int) -> int:
        """Return what one key may use of a limit, at least 1."""
        return max(1, int(limit * self.key_share))

    def check(self, use: QueueUse, key: bytes, load: Load, others: int = 0) -> None:
        """Raise OverLimitError if a request does not fit now, RequestError if it never will.

        `others`: sequences of other API server processes, whose tokens and keys are counted by themselves.
        """
        parts = (
            ("n", "sequences", load.sequences, use.total.sequences + others, use.of(key).sequences, self.sequences),
            ("prompt", "prompt tokens", load.tokens, use.total.tokens, use.of(key).tokens, self.tokens),
        )
        for field, what, needed, used, used_by_key, limit in parts:
            if limit is None or not needed:
                continue
            reason = QUEUED_REQUESTS if field == "n" else QUEUED_TOKENS
            flag, share = "--" + reason.replace("_", "-"), self.share(limit)
            if needed > share:
                shown = f"{limit} ({flag})" if share == limit else f"{share} ({flag} x --max-key-share)"
                raise RequestError(field, f"{needed} {what} are above the limit of {shown}; send fewer")
            if used + needed > limit:
                raise OverLimitError(
                    reason, f"the server has {used} of {limit} {what} in progress ({flag}); try again later"
                )
            if used_by_key + needed > share:
                raise OverLimitError(
                    KEY_SHARE,
                    f"this API key has {used_by_key} of its {share} {what} in progress (--max-key-share); try again "
                    "later",
                )


class OverLimitError(QueueFullError):
    """A request that does not fit now. `reason`: the limit, one of REJECTION_REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
