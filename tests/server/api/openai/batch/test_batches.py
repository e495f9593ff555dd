"""/v1/batches with OpenAI's client: from the file of requests to the files of answers."""

import asyncio
import errno
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row
from support.suite.watching import eventually

from pagoda.server.api.openai.batch import runner
from pagoda.server.http.stores import files as stored_files

pytest.importorskip("python_multipart")

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
TEXT = {"prompt": "a", "max_tokens": 3}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"input": "a", "max_output_tokens": 4, "store": False},
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


def client_of(server: LiveServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def line(body: Any, url: str = "/v1/completions", custom_id: str = "x") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def started(client: openai.OpenAI, *lines: str, endpoint: Any = "/v1/completions", **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
    return client.batches.create(
        **({"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"} | more)
    )


def until(client: openai.OpenAI, batch: Any, *statuses: str) -> Any:
    eventually(lambda: client.batches.retrieve(batch.id).status in statuses)
    return client.batches.retrieve(batch.id)


def until_one_is_answered(client: openai.OpenAI, batch: Any) -> None:
    eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


@pytest.mark.parametrize("endpoint", PATHS)
def test_answers_are_the_servers(server: LiveServer, endpoint: str) -> None:
    client = client_of(server)
    assert server.post(endpoint, PATHS[endpoint])[0] == 200  # its prefix is cached for all that follow
    batch = started(
        client, line(PATHS[endpoint], endpoint, "one"), "", line(PATHS[endpoint], endpoint, "two"), endpoint=endpoint
    )
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", endpoint)
    batch = until(client, batch, "completed", "failed")
    assert batch.status == "completed", batch
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (2, 2, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert (batch.expires_at, batch.error_file_id, batch.errors) == (batch.created_at + 86_400, None, None)
    answers = lines_of(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == ["one", "two"]
    whole = server.post(endpoint, PATHS[endpoint])[1]
    for each in answers:
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
        assert each["response"]["body"]["usage"] == whole["usage"]
        assert each["response"]["body"].keys() == whole.keys()
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.expires_at) == ("batch_output", None)


def test_embeddings() -> None:
    with live_server("fake:pool-embed") as server:
        client = client_of(server)
        body = {"input": ["a", "b"]}
        batch = started(client, line(body, "/v1/embeddings"), endpoint="/v1/embeddings")
        (answer,) = lines_of(client, until(client, batch, "completed").output_file_id)
        assert answer["response"]["body"]["data"] == server.post("/v1/embeddings", body)[1]["data"]


@pytest.mark.field("BatchCreateRequest.metadata|output_expires_after|completion_window|endpoint|input_file_id")
def test_refused_requests_are_in_the_error_file(server: LiveServer) -> None:
    client = client_of(server)
    batch = started(
        client,
        line(TEXT, custom_id="good"),
        line({"prompt": "a", "max_tokens": -5}, custom_id="bad"),
        metadata={"run": "1"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
        completion_window="2d",
    )
    assert batch.expires_at == batch.created_at + 2 * 86_400
    batch = until(client, batch, "completed")
    assert batch.metadata == {"run": "1"}
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    assert [each["custom_id"] for each in lines_of(client, batch.output_file_id)] == ["good"]
    (error,) = lines_of(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert "max_tokens" in error["response"]["body"]["error"]["message"]
    file = client.files.retrieve(batch.error_file_id)
    assert file.expires_at == file.created_at + 3600


def test_a_file_with_invalid_lines_fails(server: LiveServer) -> None:
    client = client_of(server)
    batch = started(
        client,
        line(TEXT),
        line(TEXT),
        "nonsense",
        line(CHAT, "/v1/chat/completions", "y"),
        line(TEXT | {"stream": True}, custom_id="z"),
    )
    batch = until(client, batch, "failed")
    assert [(each.code, each.line) for each in batch.errors.data] == [
        ("duplicate_custom_id", 2),
        ("invalid_request", 3),
        ("mismatched_url", 4),
        ("invalid_request", 5),
    ]
    assert batch.failed_at
    assert batch.output_file_id is None
    assert until(client, started(client, ""), "failed").errors.data[0].code == "empty_file"


def test_a_file_of_too_many_requests_fails(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_REQUESTS", 2)
    client = client_of(server)
    batch = until(client, started(client, *(line(TEXT, custom_id=str(number)) for number in range(3))), "failed")
    assert [each.code for each in batch.errors.data] == ["too_many_requests"]


@each_row(
    ("more", "field"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
    ],
)
def test_invalid_batches_name_the_field(server: LiveServer, more: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        started(client_of(server), line(TEXT), **more)


def test_the_input_must_be_a_file_for_batches(server: LiveServer) -> None:
    client = client_of(server)
    body: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(openai.NotFoundError, match="file-nothing"):
        client.batches.create(input_file_id="file-nothing", **body)
    file = client.files.create(file=("in.jsonl", io.BytesIO(b"x")), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose is user_data"):
        client.batches.create(input_file_id=file.id, **body)


def test_cancel_keeps_the_answers_so_far() -> None:
    slow = line({"prompt": "a", "max_tokens": 40}, custom_id="slow")
    with live_server("fake:slow", engine={"max_num_seqs": 2}) as server:
        client = client_of(server)
        batch = started(client, line({"prompt": "a", "max_tokens": 1}, custom_id="fast"), slow)
        waiting = started(client, line(TEXT))
        until_one_is_answered(client, batch)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = until(client, batch, "cancelled")
        assert batch.cancelling_at <= batch.cancelled_at
        assert [each["custom_id"] for each in lines_of(client, batch.output_file_id)] == ["fast"]
        assert until(client, waiting, "completed").request_counts.completed == 1
        assert client.batches.cancel(batch.id).status == "cancelled", "it has ended"
        assert server.state.running == 0


def test_a_batch_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    timeout, windows = asyncio.timeout, dict[float, asyncio.Timeout]()

    def without_end(seconds: float | None) -> asyncio.Timeout:
        if seconds is None or seconds < 1_000:
            return timeout(seconds)
        windows[seconds] = timeout(None)
        return windows[seconds]

    async def end(window: asyncio.Timeout) -> None:
        window.reschedule(asyncio.get_running_loop().time())

    monkeypatch.setattr(asyncio, "timeout", without_end)
    lines = [line({"prompt": "a", "max_tokens": count}, custom_id=str(count)) for count in (1, 10**6)]
    with live_server("fake:endless") as server:
        client = client_of(server)
        batch = started(client, *lines, completion_window="2h")
        until_one_is_answered(client, batch)
        ((seconds, window),) = windows.items()
        assert batch.expires_at - batch.created_at == 7200
        assert 7000 < seconds <= 7200
        server.call(end(window))
        batch = until(client, batch, "expired", "completed")
        assert batch.expired_at is not None
        assert (batch.request_counts.completed, batch.request_counts.total) == (1, 2)


def test_lists_and_owners() -> None:
    with live_server(api_key=("a", "b")) as server:
        mine, other = client_of(server, "a"), client_of(server, "b")
        made = [until(mine, started(mine, line(TEXT)), "completed").id for _ in range(3)]
        assert [each.id for each in mine.batches.list(limit=2)] == made[::-1]
        assert mine.batches.list(limit=2).has_more
        assert list(other.batches.list()) == []
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(made[0])
        assert server.get("/v1/batches", authorization="Bearer a")[1]["last_id"] == made[0]
        assert server.get("/v1/batches?limit=101", authorization="Bearer a")[0] == 400


def test_requests_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's queue is full of others' requests: those of a batch are repeated, not failed."""
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.01)
    answered: list[int] = []

    async def busy(app: Any, path: str, body: bytes, more: Any) -> tuple[int, bytes]:
        answered.append(429 if len(answered) < 2 else 200)
        return answered[-1], b'{"error": {"message": "full"}}'

    monkeypatch.setattr(runner, "post", busy)
    with live_server() as server:
        client = client_of(server)
        assert until(client, started(client, line(TEXT)), "completed").request_counts.completed == 1
    assert answered == [429, 429, 200]


def test_an_output_above_the_room_fails_the_batch() -> None:
    text = line(TEXT)
    with live_server(max_stored_file_bytes=len(text) + 10) as server:
        client = client_of(server)
        batch = until(client, started(client, text), "failed")
        assert "--max-stored-file-bytes" in batch.errors.data[0].message


def two_lines() -> tuple[str, str]:
    return line({"prompt": "a", "max_tokens": 1}), line({"prompt": "a", "max_tokens": 60}, custom_id="slow")


def first_answer(folder: Path) -> Any:
    """The answer that a batch has so far."""
    (part,) = folder.glob("*.part")
    return json.loads(part.read_bytes().splitlines()[0])


def check_both_are_answered_once(server: LiveServer, first: Any) -> None:
    client = client_of(server)
    (batch,) = client.batches.list().data
    batch = until(client, batch, "completed", "failed")
    assert (batch.status, batch.request_counts.completed, batch.request_counts.total) == ("completed", 2, 2)
    answers = lines_of(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == ["x", "slow"]
    assert answers[0] == first, "it was not generated again"


@pytest.mark.setting("--files-dir")
def test_a_batch_goes_on_after_the_server_was_stopped(tmp_path: Path) -> None:
    with live_server("fake:slow", files_dir=str(tmp_path)) as server:
        client = client_of(server)
        batch = started(client, *two_lines())
        until_one_is_answered(client, batch)
        server.call(server.state.drain())
    first = first_answer(tmp_path)
    with live_server(files_dir=str(tmp_path)) as server:
        check_both_are_answered_once(server, first)
        assert not list(tmp_path.glob("*.part")), "what was unfinished is finished"
    with live_server(files_dir=str(tmp_path)) as server:
        check_both_are_answered_once(server, first)


def test_a_batch_goes_on_after_the_server_was_killed(tmp_path: Path) -> None:
    with live_server("fake:slow", files_dir=str(tmp_path / "files")) as server:
        client = client_of(server)
        until_one_is_answered(client, started(client, *two_lines()))
        shutil.copytree(tmp_path / "files", tmp_path / "killed")
    first = first_answer(tmp_path / "killed")
    (part,) = (tmp_path / "killed").glob("*.part")
    with part.open("ab") as file:
        file.write(b'{"id": "batch_req_')  # of the answer that it was writing
    (tmp_path / "killed" / "file-other.part").write_bytes(b"of an upload")
    with live_server(files_dir=str(tmp_path / "killed")) as server:
        check_both_are_answered_once(server, first)
        assert not list((tmp_path / "killed").glob("*.part"))


def test_a_batch_whose_input_was_deleted_keeps_its_answers(tmp_path: Path) -> None:
    with live_server("fake:slow", files_dir=str(tmp_path)) as server:
        client = client_of(server)
        batch = started(client, *two_lines())
        client.files.delete(batch.input_file_id)
        until_one_is_answered(client, batch)
        server.call(server.state.drain())
    with live_server(files_dir=str(tmp_path)) as server:
        client = client_of(server)
        (batch,) = client.batches.list().data
        assert (batch.status, batch.errors.data[0].code) == ("failed", "input_file_deleted")
        assert len(lines_of(client, batch.output_file_id)) == 1


def test_a_full_disk_keeps_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    room = [10**6]

    def write(file: int, data: memoryview) -> int:
        if b'"two"' in bytes(data):
            room[0] = 7
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.write(file, data[: room[0]])
        room[0] -= written
        return written

    lines = [line(TEXT, custom_id=name) for name in ("one", "two", "three")]
    with live_server() as server:
        client = client_of(server)
        file = client.files.create(file=("in.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
        monkeypatch.setattr(stored_files, "os", SimpleNamespace(**{**vars(os), "write": write}))
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        batch = until(client, batch, "failed", "completed")
        assert [each.code for each in batch.errors.data] == ["storage_full"]
        assert [each["custom_id"] for each in lines_of(client, batch.output_file_id)] == ["one"]
        with pytest.raises(openai.InternalServerError, match="the server's disk is full") as refused:
            client.files.create(file=("in.jsonl", io.BytesIO(b"x" * 8)), purpose="batch")
        assert refused.value.status_code == 507
        monkeypatch.undo()
        assert server.state.files._shares.count == 2, "nothing else is counted"


def test_long_lines_are_not_read(server: LiveServer) -> None:
    client = client_of(server)
    batch = until(client, started(client, line(TEXT), line({"prompt": "a" * (33 << 20)})), "failed")
    assert [(each.code, each.line) for each in batch.errors.data] == [("line_too_long", 2)]


def test_keys_take_turns() -> None:
    with live_server("fake:slow", api_key=("a", "b"), engine={"max_num_seqs": 2}) as server:
        mine, other = client_of(server, "a"), client_of(server, "b")
        slow = line({"prompt": "a", "max_tokens": 20}, custom_id="slow")
        first, second, third = (started(mine, slow) for _ in range(3))
        theirs = until(other, started(other, line({"prompt": "a", "max_tokens": 1})), "completed")
        ended = [mine.batches.retrieve(each.id).status for each in (first, second, third)]
        assert ended[2] != "completed", "another key's batch comes before the last of this one"
        assert theirs.request_counts.completed == 1
