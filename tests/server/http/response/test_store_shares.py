"""Each store of what clients leave behind is divided between keys: the key with most makes room, or gets no more."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from support.checkpoints.grammars import asking, vocabulary

from pagoda.common.engine.structured_output import compiler
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.grammar import Grammar
from pagoda.server.http import stores
from pagoda.server.http.errors import HttpError
from pagoda.server.http.stores.conversations import ConversationStore
from pagoda.server.http.stores.files import FileStore
from pagoda.server.http.stores.responses import ResponseStore, StoredResponse

FOLDER = Path(stores.__file__).parent
MAX_COUNT, MAX_BYTES = 6, 60_000

Put = Callable[[str, int], Callable[[], bool]]
"""Stores bytes for a key; what it returns tells whether they are still there."""


def responses(folder: Path) -> Put:
    store, ids = ResponseStore(MAX_COUNT, MAX_BYTES), iter(range(10_000))

    def put(owner: str, size: int) -> Callable[[], bool]:
        response = StoredResponse(f"r{next(ids)}", lambda: b"x" * size, owner=owner.encode())
        response.end("completed", b"")
        store.put(response)
        return lambda: store.contains(response.id, response.owner)

    return put


def conversations(folder: Path) -> Put:
    store = ConversationStore(MAX_COUNT, MAX_BYTES)

    def put(owner: str, size: int) -> Callable[[], bool]:
        made = store.create(owner.encode(), {}, {"item": b"x" * size})

        def is_there() -> bool:
            try:
                return store.get(made.id, owner.encode()) is made
            except HttpError:
                return False

        return is_there

    return put


def files(folder: Path) -> Put:
    store = FileStore(str(folder), MAX_COUNT, MAX_BYTES, share=0.5)

    def put(owner: str, size: int) -> Callable[[], bool]:
        writer = store.write(owner)
        try:
            writer.write(b"x" * size)
        except HttpError:
            writer.abandon()
            raise
        made = writer.finish("name", "batch", None)
        return lambda: made in store.files(owner)

    return put


def grammars(folder: Path) -> Put:
    with patch.object(compiler, "MAX_GRAMMARS", MAX_COUNT):
        store, names = Structured(vocabulary, max_cached_bytes=MAX_BYTES), iter(range(10_000))
    store._resident = store._memory._resident = SimpleNamespace(bytes=0)  # so that grammars count their texts

    def put(owner: str, size: int) -> Callable[[], bool]:
        grammar = Grammar(f'start: "a{next(names)}" // {"x" * size}')
        store.mask_state(replace(asking(grammar), owner=owner)).release()
        return lambda: grammar in store._kept

    return put


STORES: dict[str, Callable[[Path], Put]] = {
    "ResponseStore": responses,
    "ConversationStore": conversations,
    "FileStore": files,
    "Structured": grammars,
}


@pytest.mark.parametrize("size", [10, 15_000])
@pytest.mark.parametrize("name", STORES)
def test_a_key_that_fills_a_store_takes_nothing_from_another(name: str, size: int, tmp_path: Path) -> None:
    put = STORES[name](tmp_path)
    mine = put("mine", 1000)
    for _ in range(3 * MAX_COUNT):
        with contextlib.suppress(HttpError):
            put("hostile", size)
    assert mine()
    again = put("mine", 1000)
    assert again()
    assert mine()


def test_every_store_is_here() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.py")]
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert {name for name in classes if name.endswith("Store")} == STORES.keys() - {"Structured"}
