"""/v1/files with OpenAI's client: upload, list, download, delete, expiry, limits, owners, restarts."""

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.watching import PATIENCE, eventually

from pagoda.common.errors import ConfigError
from pagoda.server.http.errors import HttpError
from pagoda.server.http.stores import files as file_store

pytest.importorskip("python_multipart")

LINE = b'{"custom_id": "x"}\n'


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


def client_of(server: LiveServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def upload(client: openai.OpenAI, content: bytes = LINE, name: str = "in.jsonl", **more: Any) -> Any:
    return client.files.create(**({"file": (name, io.BytesIO(content)), "purpose": "batch"} | more))


def test_a_file_from_upload_to_deletion(server: LiveServer) -> None:
    client = client_of(server)
    large = LINE * 200_000  # more than the parser keeps in memory
    file = upload(client, large, "many lines.jsonl")
    assert (file.object, file.filename, file.bytes, file.purpose) == ("file", "many lines.jsonl", len(large), "batch")
    assert file.status == "processed"
    assert file.expires_at is None
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == large
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.retrieve(file.id)


def test_lists_are_filtered_ordered_and_paged(server: LiveServer) -> None:
    client = client_of(server)
    made = [upload(client, purpose=purpose) for purpose in ("batch", "user_data", "batch")]
    ids = [each.id for each in made]
    assert [each.id for each in client.files.list()] == ids[::-1], "newest first"
    assert [each.id for each in client.files.list(order="asc", limit=1)] == ids, "over several pages"
    assert [each.id for each in client.files.list(purpose="batch")] == [ids[2], ids[0]]
    page = client.files.list(limit=2, after=ids[2])
    assert ([each.id for each in page.data], page.has_more) == ([ids[1], ids[0]], False)
    for query, field in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=nothing", "after")):
        status, answer = server.get(f"/v1/files?{query}")
        assert (status, answer["error"]["param"]) == (400, field)
    for each in ids:
        client.files.delete(each)


def test_files_expire(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(server)
    file = upload(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    later = file_store.time.time() + 3601
    monkeypatch.setattr(file_store.time, "time", lambda: later)
    assert server.get(f"/v1/files/{file.id}")[0] == 404
    assert server.get("/v1/files")[1]["data"] == []


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"purpose": "other"}, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": 5}}, "expires_after"),
        ({"expires_after": {"anchor": "now", "seconds": 3600}}, "expires_after"),
    ],
)
def test_invalid_uploads_name_the_field(server: LiveServer, more: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        upload(client_of(server), **more)
    assert server.get("/v1/files")[1]["data"] == []


def test_bodies_that_are_no_form(server: LiveServer) -> None:
    assert server.post("/v1/files", {})[0] == 415
    kind = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b"", b"--x\r\nnonsense", b"--x\r\n\r\n"):
        assert server.request("POST", "/v1/files", body, kind)[0] == 400, body
    assert server.request("POST", "/v1/files", b"", {"content-type": "multipart/form-data"})[0] == 400
    part = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\ntext\r\n--x--\r\n'
    status, answer = server.request("POST", "/v1/files", part, kind)
    assert (status, answer["error"]["param"]) == (400, "file")


def test_without_the_parser_of_forms(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "python_multipart", None)
    status, answer = server.request("POST", "/v1/files", b"", {"content-type": "multipart/form-data; boundary=x"})
    assert status == 501
    assert "pip install python-multipart" in answer["error"]["message"]


@pytest.mark.setting("--max-stored-files", "--max-stored-file-bytes")
def test_limits() -> None:
    with live_server(max_stored_files=1, max_stored_file_bytes=100_000) as server:
        client = client_of(server)
        for size in (100_001, 300_000):  # found while it is stored, and while it is read
            with pytest.raises(openai.APIStatusError, match="--max-stored-file-bytes") as refused:
                upload(client, bytes(size))
            assert refused.value.status_code == 413
        file = upload(client, bytes(100_000))
        with pytest.raises(openai.APIStatusError, match="--max-stored-files"):
            upload(client)
        client.files.delete(file.id)
        upload(client, bytes(100_000))


def test_bytes_count_while_they_come() -> None:
    """Two uploads that each fit, but not both: the second is refused before it has ended."""
    head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    kind = {"content-type": "multipart/form-data; boundary=x", "content-length": str(10**6)}
    with live_server(max_stored_file_bytes=200_000) as server:
        with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)) as first:
            first.putrequest("POST", "/v1/files")
            for name, value in kind.items():
                first.putheader(name, value)
            first.endheaders(head + bytes(150_000))
            eventually(lambda: server.state.files.free_bytes("") <= 50_000)
            with pytest.raises(openai.APIStatusError, match="--max-stored-file-bytes"):
                upload(client_of(server), bytes(100_000))
        eventually(lambda: server.state.files.free_bytes("") == 200_000)  # the client has left


@pytest.mark.setting("--max-key-share")
def test_a_key_has_a_share_of_the_files() -> None:
    with live_server(api_key=("a", "b"), max_stored_files=4, max_stored_file_bytes=1000) as server:
        mine, other = client_of(server, "a"), client_of(server, "b")
        for size in (400, 100):
            upload(mine, bytes(size))
        with pytest.raises(openai.APIStatusError, match="--max-key-share"):
            upload(mine, b"")
        with pytest.raises(openai.APIStatusError, match="--max-key-share"):
            upload(other, bytes(501))
        upload(other, bytes(500))


def test_a_key_sees_its_own_files_only() -> None:
    with live_server(api_key=("a", "b")) as server:
        mine, other = client_of(server, "a"), client_of(server, "b")
        file = upload(mine)
        assert [each.id for each in mine.files.list()] == [file.id]
        assert list(other.files.list()) == []
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file.id)
        assert mine.files.content(file.id).read() == LINE


@pytest.mark.setting("--files-dir")
def test_a_folder_keeps_files_over_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    with live_server(files_dir=str(folder)) as server:
        file = upload(client_of(server))
    assert folder.stat().st_mode & 0o777 == 0o700
    with live_server(files_dir=str(folder)) as server:
        assert client_of(server).files.content(file.id).read() == LINE
        client_of(server).files.delete(file.id)
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--files-dir: .*file"):
        file_store.FileStore(str(tmp_path / "file"), 1, 1)
    (tmp_path / "file-1.json").write_text("{")
    with pytest.raises(ConfigError, match=r"file-1\.json"):
        file_store.FileStore(str(tmp_path), 1, 1)


@pytest.mark.parametrize("failing", [".part", ".draft"])
def test_a_file_that_the_disk_does_not_let_finish_can_be_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """It may also finish later: nothing of it is lost. `failing`: which of its two files cannot be renamed."""
    store = file_store.FileStore(str(tmp_path), 10, 1000)
    one, other = store.write("a"), store.write("a")
    usual, full = Path.rename, [True]

    def rename(self: Path, target: Path) -> Path:
        if full[0] and self.suffix == failing:
            raise OSError(errno.ENOSPC, "no space left on device")
        return usual(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    for writer in (one, other):
        writer.write(LINE)
        with pytest.raises(HttpError, match="disk is full"):
            writer.finish("name", "batch", None)
    one.abandon()
    full[0] = False
    made = other.finish("name", "batch", None)
    assert store.path(made).read_bytes() == LINE
    assert store.files("a") == [made]
    assert store._shares.of("a") == (1, len(LINE))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([made.id, f"{made.id}.json"])
