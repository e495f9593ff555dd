"""Pages of lists: the query parameters `after`, `before`, `limit` and `order` of OpenAI's list routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from starlette.datastructures import QueryParams

from pagoda.common.errors import RequestError
from pagoda.server.http.body import MAX_IGNORED, Ignored

EntryT = TypeVar("EntryT")

MAX_LIMIT: Final = 100
_PARAMETERS: Final = frozenset({"after", "before", "limit", "order"})


def page_of(
    query: QueryParams,
    entries: Sequence[EntryT],
    id_of: Callable[[EntryT], str],
    as_dict: Callable[[EntryT], dict[str, Any]],
) -> dict[str, Any]:
    """Return one page of `entries`, which are in ascending order.

    The parameters are after, before, limit (20 by default) and order (desc by default). Raise RequestError for an
    invalid one.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order", "order must be asc or desc")
    limit = _limit(query.get("limit", "20"))
    ordered = list(entries) if order == "asc" else list(reversed(entries))
    positions = {id_of(entry): position for position, entry in enumerate(ordered)}
    start = _position("after", query, positions, -1) + 1
    end = max(start, _position("before", query, positions, len(ordered)))
    if "before" in query and "after" not in query:
        start = max(0, end - limit)
    page = ordered[start : min(end, start + limit)]
    return {
        "object": "list",
        "data": [as_dict(entry) for entry in page],
        "first_id": id_of(page[0]) if page else None,
        "last_id": id_of(page[-1]) if page else None,
        "has_more": (start > 0) if "before" in query and "after" not in query else start + len(page) < len(ordered),
    }


def ignored_parameters(query: QueryParams) -> list[Ignored]:
    """Return the parameters of a list without effect, such as `include`."""
    names = dict.fromkeys(name[:100] for name in query if name not in _PARAMETERS)
    return [Ignored(name, "unknown", f"{name} is not supported here; leave it out") for name in names][:MAX_IGNORED]


def _limit(text: str) -> int:
    if not (text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MAX_LIMIT):
        raise RequestError("limit", f"limit must be a number from 1 to {MAX_LIMIT}")
    return int(text)


def _position(name: str, query: QueryParams, positions: dict[str, int], default: int) -> int:
    entry_id = query.get(name)
    if not entry_id:
        return default
    if entry_id not in positions:
        raise RequestError(name, f"{name}: the list has no entry {entry_id[:200]!r}")
    return positions[entry_id]
