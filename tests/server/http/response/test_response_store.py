"""ResponseStore: eviction by count and size, owners, following of streams."""

import asyncio
from collections.abc import Iterator

import pytest

from pagoda.server.http.errors import ResponseNotFoundError
from pagoda.server.http.stores.responses import OVERHEAD, ResponseStore, StoredResponse

ME, OTHER = b"me", b"other"


def ended(name: str, size: int = 0, owner: bytes = ME) -> StoredResponse:
    response = StoredResponse(name, lambda: b"x" * size, owner=owner)
    response.end("completed", b"")
    return response


def ids_in(store: ResponseStore) -> list[str]:
    return [name for name in "abcdef" if store.contains(name, ME)]


def test_the_oldest_are_evicted_by_count() -> None:
    store = ResponseStore(2, 10**6)
    for name in "abc":
        store.put(ended(name))
    assert ids_in(store) == ["b", "c"]
    assert len(store) == 2
    with pytest.raises(ResponseNotFoundError, match="'a'"):
        store.get("a", ME)


def test_the_oldest_are_evicted_by_size() -> None:
    store = ResponseStore(100, 3 * OVERHEAD + 300)
    for name in "abc":
        store.put(ended(name, 100))
    assert ids_in(store) == ["a", "b", "c"]
    store.put(ended("d", 101))
    assert ids_in(store) == ["c", "d"]
    store.delete("c", ME)
    store.put(ended("e", 100))
    assert ids_in(store) == ["d", "e"]


def test_room_is_made_by_the_owner_with_most() -> None:
    store = ResponseStore(4, 10**6)
    for name in "ab":
        store.put(ended(name))
    for number in range(50):
        store.put(ended(f"their {number}", owner=OTHER))
    assert ids_in(store) == ["a", "b"]
    store = ResponseStore(100, 10 * OVERHEAD)
    store.put(ended("a", 3 * OVERHEAD))
    for number in range(50):
        store.put(ended(f"their {number}", 2 * OVERHEAD, owner=OTHER))
    assert ids_in(store) == ["a"]
    assert len(store.of(OTHER)) == 2


def test_other_owners_cannot_see_a_response() -> None:
    store = ResponseStore(100, 10**6)
    store.put(mine := ended("a"))
    assert not store.contains("a", OTHER)
    with pytest.raises(ResponseNotFoundError):
        store.get("a", OTHER)
    with pytest.raises(ResponseNotFoundError):
        store.delete("a", OTHER)
    store.put(theirs := ended("a", owner=OTHER))
    assert (store.get("a", ME), store.get("a", OTHER), len(store)) == (mine, theirs, 2)
    store.delete("a", OTHER)
    assert store.get("a", ME) is mine


def test_a_too_large_response_is_not_stored() -> None:
    store = ResponseStore(100, 2 * OVERHEAD)
    store.put(ended("a"))
    store.put(ended("b", 2 * OVERHEAD))
    assert ids_in(store) == ["a"]


def test_a_disabled_store() -> None:
    for store in (ResponseStore(0, 100), ResponseStore(100, 0)):
        assert not store.keeps
        store.put(ended("a"))
        assert len(store) == 0
    assert ResponseStore(1, 1).keeps


async def running(name: str) -> StoredResponse:
    response = StoredResponse(name, lambda: b"{}", owner=ME, keeps_events=True)
    response.task = asyncio.ensure_future(asyncio.Event().wait())  # type: ignore[arg-type]
    return response


async def test_running_responses_are_evicted_last_and_cancelled() -> None:
    store = ResponseStore(2, 10**6)
    first, second = await running("a"), await running("b")
    store.put(first)
    store.put(ended("c"))
    store.put(second)
    assert ids_in(store) == ["a", "b"]
    store.put(await running("d"))
    assert ids_in(store) == ["b", "d"]
    assert first.task is not None
    assert first.task.cancelling()
    store.delete("b", ME)
    assert second.task is not None
    assert second.task.cancelling()


async def test_event_sizes_are_counted_as_they_are_added() -> None:
    store = ResponseStore(10, 2 * OVERHEAD + 100)
    store.put(ended("a"))
    growing = await running("b")
    store.put(growing)
    growing.add_event(b"x" * 101)
    store.resize(growing)
    assert ids_in(store) == ["b"]
    growing.add_event(b"x" * 2 * OVERHEAD)
    store.resize(growing)
    assert ids_in(store) == []
    store.resize(growing)


async def test_followers_receive_all_events() -> None:
    response = await running("a")
    response.add_event(b"0")

    async def received(first: int) -> list[bytes]:
        return [event async for event in response.follow(first)]

    followers = [asyncio.ensure_future(received(first)) for first in (0, 1, 5)]
    await asyncio.sleep(0)
    response.add_event(b"1")
    await asyncio.sleep(0)
    response.add_event(b"2")
    response.end("completed", b"")
    assert await asyncio.gather(*followers) == [[b"0", b"1", b"2"], [b"1", b"2"], []]
    assert await received(2) == [b"2"]


def test_a_running_response_shows_its_current_state() -> None:
    bodies: Iterator[bytes] = iter([b"1", b"2"])
    response = StoredResponse("a", lambda: next(bodies), owner=ME)
    assert response.body == b"1"
    assert response.running
    response.end("failed", b"items")
    assert (response.body, response.body, response.items, response.running) == (b"2", b"2", b"items", False)


async def test_the_same_id_replaces_a_response() -> None:
    store = ResponseStore(10, 2 * OVERHEAD + 100)
    first = await running("a")
    store.put(first)
    for _ in range(3):
        store.put(ended("a", 60))
    assert first.task is not None
    assert first.task.cancelling()
    store.put(ended("b", 40))
    assert ids_in(store) == ["a", "b"], "evicted responses take no space"
