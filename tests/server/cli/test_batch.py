"""run-batch: responses equal the server's, bad lines do not affect others, input and output as files and URLs."""

import base64
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.byte_text import byte_tokenizer
from support.engines import fake_engine
from support.engines.fake_engine import WIDTH, build
from support.servers.api_bodies import LEAST
from support.servers.live_server import live_server
from support.servers.served import TESTS, environment
from support.suite.own_address import OWN_ADDRESS, own_port
from support.suite.watching import PATIENCE

from pagoda.common.errors import ConfigError
from pagoda.server.api.openai.batch.lines import ENDPOINTS
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.cli import main
from pagoda.server.cli.batch import files as places
from pagoda.server.cli.batch import run_batch
from pagoda.server.cli.batch import run_batch as inside
from pagoda.server.cli.batch.files import BatchOutput
from pagoda.server.core_client.engine import ThreadClient
from pagoda.server.http.state import ServerState

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
TEXT = {"prompt": "a", "max_tokens": 3, "logprobs": 1}


def line(body: Any, url: str = "/v1/completions", custom_id: str = "x", **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more)


class Batch:
    """Runs the command over the fake engine, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "out.jsonl"

    def run(self, *lines: str, flags: tuple[str, ...] = (), model: str = "fake", output: str | None = None) -> int:
        source = self.folder / "in.jsonl"
        source.write_text("\n".join(lines) + "\n")
        words = ["-i", str(source), "-o", output or str(self.output), "--model", model, "--served-model-name", "fake"]
        return main.main(["run-batch", *words, *flags])

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.output.read_text().splitlines()]

    @property
    def partial(self) -> Path:
        return self.folder / "out.jsonl.partial"

    @property
    def kept(self) -> list[dict[str, Any]]:
        """The partial file of an interrupted run."""
        return [json.loads(each) for each in self.partial.read_text().splitlines()]


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Batch:
    monkeypatch.setenv("PAGODA_CONFIGURE_LOGGING", "0")
    monkeypatch.setattr(run_batch, "start_engine", lambda config, in_process: ThreadClient(config, build))
    assert AsyncLLM.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(AsyncLLM.__init__.__kwdefaults__, "open_text", lambda _: byte_tokenizer())
    return Batch(tmp_path)


@contextmanager
def logged() -> Iterator[list[str]]:
    """Messages of the project's logger."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pagoda")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.command("run-batch")
@pytest.mark.setting("--input-file", "--output-file")
def test_responses_equal_those_over_http(batch: Batch) -> None:
    bodies = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
    assert batch.run(*(line(body, url, url) for url, body in bodies.items())) == 0
    with live_server() as server:
        for answer, (url, body) in zip(batch.answers, bodies.items(), strict=True):
            status, body_of_http = server.post(url, body)
            response = answer["response"]
            assert (answer["custom_id"], response["status_code"], answer["error"]) == (url, status, None)
            for own in ("id", "created"):
                assert body_of_http.pop(own)
                assert response["body"].pop(own)
            assert response["body"] == body_of_http
    ids = [each["id"] for each in batch.answers] + [each["response"]["request_id"] for each in batch.answers]
    assert len(set(ids)) == 4


def test_bad_lines_do_not_affect_others(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {
        "oops": (None, "line 2 is not a batch request"),
        "[1]": (None, "line 3 is not a batch request"),
        '{"custom_id": "no-body", "method": "POST", "url": "/v1/completions"}': ("no-body", "`body`"),
        line([1], custom_id="list"): ("list", "Expected `object`"),
        line(TEXT, custom_id="more", extra=1): ("more", "`extra`"),
        line(TEXT, custom_id="get", method="GET"): ("get", "method 'GET' is not supported; use POST"),
        line(TEXT, "/v1/audio/speech", "url"): ("url", "use one of /v1/chat/completions, /v1/completions"),
        line(TEXT | {"stream": True}, custom_id="stream"): ("stream", "stream is not supported in a batch"),
        line(TEXT | {"max_tokens": "five"}, custom_id="field"): ("field", "max_tokens"),
        line(TEXT | {"model": "other"}, custom_id="model"): ("model", "'other' does not exist"),
    }
    assert batch.run(line(TEXT, custom_id="first"), *bad, "", line(TEXT, custom_id="last")) == 1
    first, *errors, last = batch.answers
    assert [first["custom_id"], last["custom_id"]] == ["first", "last"]
    assert first["response"]["body"]["choices"] == last["response"]["body"]["choices"]
    for answer, (custom_id, message) in zip(errors, bad.values(), strict=True):
        assert answer["custom_id"] == custom_id
        assert message in answer["error"]["message"]
        status = 404 if custom_id == "model" else 400
        code = "model_not_found" if custom_id == "model" else None
        assert (answer["response"]["status_code"], answer["error"]["code"]) == (status, code)
    assert f"10 of 12 requests failed; see their lines in {batch.output}" in capsys.readouterr().err


POOLED = {
    "/v1/embeddings": ("embed", "EmbeddingCompletionRequest"),
    "/v2/embed": ("embed", "CohereEmbedRequest"),
    "/pooling": ("embed", "PoolingCompletionRequest"),
    "/classify": ("classify", "ClassificationCompletionRequest"),
    "/score": ("embed", "ScoreTextRequest"),
    "/v1/score": ("embed", "ScoreDataRequest"),
    "/rerank": ("embed", "RerankRequest"),
    "/v1/rerank": ("embed", "RerankRequest"),
    "/v2/rerank": ("embed", "RerankRequest"),
}
SAID = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"input": "a", "max_output_tokens": 4, "store": False},
    "/v1/messages": {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
}


def test_every_endpoint_is_answered(batch: Batch) -> None:
    assert set(ENDPOINTS) == SAID.keys() | POOLED.keys()
    assert batch.run(*(line(body, url, url) for url, body in SAID.items())) == 0, batch.answers
    assert [each["custom_id"] for each in batch.answers] == list(SAID)
    for kind in ("embed", "classify"):
        urls = {url: LEAST[schema] for url, (model, schema) in POOLED.items() if model == kind}
        assert batch.run(*(line(body, url, url) for url, body in urls.items()), model=f"fake:pool-{kind}") == 0
        with live_server(f"fake:pool-{kind}") as server:
            for answer, (url, body) in zip(batch.answers, urls.items(), strict=True):
                status, body_of_http = server.post(url, body)
                response = answer["response"]
                assert (answer["custom_id"], response["status_code"]) == (url, status)
                for own in ("id", "created"):
                    assert body_of_http.pop(own, None) is not response["body"].pop(own, True)
                if kind == "classify":  # the same tokenizer is wanted for equal numbers
                    assert response["body"].keys() == body_of_http.keys()


def test_unsupported_lines(batch: Batch) -> None:
    bodies = [{"input": "a", "encoding_format": "bytes"}, {"input": "a", "background": True}]
    assert batch.run(*(line(body, "/v1/embeddings") for body in bodies), model="fake:pool-embed") == 1
    assert "a line cannot contain bytes" in batch.answers[0]["error"]["message"]
    assert "background is not supported in a batch" in batch.answers[1]["error"]["message"]


# --- going on ---


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The request bodies that were posted."""
    bodies: list[bytes] = []
    post = inside.post

    async def watched(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
        bodies.append(body)
        return await post(app, path, body)

    monkeypatch.setattr(inside, "post", watched)
    return bodies


def numbered(count: int, **more: Any) -> list[str]:
    return [
        line({"prompt": "a", "max_tokens": 3, "user": str(number)} | more, custom_id=str(number))
        for number in range(count)
    ]


def test_a_killed_run_is_resumed(batch: Batch, posted: list[bytes]) -> None:
    lines = numbered(12, max_tokens=6)
    source = batch.folder / "in.jsonl"
    source.write_text("\n".join(lines) + "\n")
    words = ["-i", str(source), "-o", str(batch.output), "--model", "fake:slow", "--max-num-seqs", "1"]
    words = [sys.executable, str(TESTS / "support" / "engines" / "fake_batch.py"), *words]
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL, process_group=0)
    try:
        while not batch.partial.exists() or batch.partial.read_bytes().count(b"\n") < 2:
            assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = batch.partial.read_bytes().count(b"\n")
    assert 2 <= done < 12
    before = batch.partial.read_bytes().splitlines()[:done]
    with batch.partial.open("ab") as torn:
        torn.write(b'{"id": "pagoda-0123' + b"x" * 20_000)
    assert batch.run(*lines, model="fake:slow") == 0
    assert [json.loads(body)["user"] for body in posted] == [str(number) for number in range(done, 12)]
    assert batch.output.read_bytes().splitlines()[:done] == before
    assert [each["custom_id"] for each in batch.answers] == [str(number) for number in range(12)]
    assert len({each["id"] for each in batch.answers}) == 12
    assert not batch.partial.exists()


def cut(batch: Batch, lines: list[str], count: int) -> None:
    """Truncate the partial file to `count` answers, as a killed run leaves it."""
    assert batch.run(*lines) == 0
    answers = batch.output.read_bytes().splitlines(keepends=True)
    batch.output.unlink()
    batch.partial.write_bytes(b"".join(answers[:count]))


def test_errors_of_an_earlier_run_count(batch: Batch, posted: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line({"prompt": 5}), *numbered(3)]
    batch.run(*lines)
    answers = batch.output.read_bytes().splitlines(keepends=True)
    batch.partial.write_bytes(b"".join(answers[:2]))
    posted.clear()
    assert batch.run(*lines) == 1
    assert len(posted) == 2
    assert "1 of 4 requests failed" in capsys.readouterr().err


def test_lines_after_a_change_are_run_again(batch: Batch, posted: list[bytes]) -> None:
    lines = numbered(6)
    cut(batch, lines, 5)
    posted.clear()
    lines[3] = line(TEXT, custom_id="new")
    assert batch.run(*lines) == 0
    assert len(posted) == 3
    assert [each["custom_id"] for each in batch.answers] == ["0", "1", "2", "new", "4", "5"]


def test_a_complete_partial_file_is_renamed(batch: Batch, posted: list[bytes]) -> None:
    lines = numbered(3)
    cut(batch, lines, 3)
    posted.clear()
    assert batch.run(*lines) == 0
    assert not posted
    assert len(batch.answers) == 3


def test_input_from_a_pipe_is_resumed(batch: Batch, posted: list[bytes]) -> None:
    lines = numbered(5)
    cut(batch, lines, 2)
    posted.clear()
    pipe = batch.folder / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("\n".join(lines) + "\n"))
    writer.start()
    words = ["-i", str(pipe), "-o", str(batch.output), "--model", "fake", "--served-model-name", "fake"]
    assert main.main(["run-batch", *words]) == 0
    writer.join()
    assert len(posted) == 3
    assert [each["custom_id"] for each in batch.answers] == list("01234")


@pytest.mark.parametrize("left", ["another model", "another batch", "no answers"])
def test_answers_of_another_batch_are_not_touched(batch: Batch, left: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = numbered(3)
    cut(batch, lines, 2)
    if left == "no answers":
        batch.partial.write_text("precious\n")
    before = batch.partial.read_bytes()
    other = [line(CHAT, "/v1/chat/completions")] if left == "another batch" else lines
    assert batch.run(*other, model="fake:slow" if left == "another model" else "fake") == 2
    assert "contains answers of another batch; remove it, or use another path" in capsys.readouterr().err
    assert batch.partial.read_bytes() == before
    assert not batch.output.exists()


def test_one_run_at_a_time(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    with BatchOutput(str(batch.output)):
        assert batch.run(*numbered(1)) == 2
    assert "another run is writing it" in capsys.readouterr().err


@pytest.mark.setting("--output-tmp-dir")
def test_an_upload_is_resumed(batch: Batch, posted: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "UPLOAD_DELAYS", (0,))
    lines = numbered(3)
    flags = ("--output-tmp-dir", str(batch.folder))
    with store(b"", batch.folder, 503) as server:
        target = address(server, "out")
        assert batch.run(*lines, flags=flags, output=target) == 1
        assert len(posted) == 3
        assert batch.run(*lines, flags=flags, output=target) == 0
        (stored,) = server.stored
    assert len(posted) == 3
    assert [json.loads(each)["custom_id"] for each in stored.splitlines()] == list("012")
    assert [path.name for path in batch.folder.iterdir()] == ["in.jsonl"]


def test_a_link_as_partial_file_is_not_followed(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    precious = batch.folder / "precious"
    precious.write_text("")
    batch.partial.symlink_to(precious)
    assert batch.run(*numbered(1)) == 2
    assert "--output-file" in capsys.readouterr().err
    assert precious.read_text() == ""


def test_many_requests_keep_their_order(batch: Batch) -> None:
    lines = [line({"prompt": "a", "max_tokens": 1 + number * 7 % 11}, custom_id=str(number)) for number in range(60)]
    assert batch.run(*lines, flags=("--max-num-seqs", "2")) == 0
    assert [each["custom_id"] for each in batch.answers] == [str(number) for number in range(60)]
    counts = [each["response"]["body"]["usage"]["completion_tokens"] for each in batch.answers]
    assert counts == [1 + number * 7 % 11 for number in range(60)]


def test_requests_run_together(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []

    async def watched(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
        running.append(1)
        answer = await post(app, path, body)
        running.pop()
        return answer

    post = inside.post
    most = 0

    class Counted(list[int]):
        def append(self, item: int) -> None:
            nonlocal most
            super().append(item)
            most = max(most, len(self))

    running = Counted()
    monkeypatch.setattr(inside, "post", watched)
    assert batch.run(*[line(TEXT)] * 30, flags=("--max-num-seqs", "2")) == 0
    assert most == 8  # four waiting or running for each that may run
    most = 0
    flags = ("--max-num-seqs", "2", "--data-parallel-size", "3")
    assert batch.run(*[line(TEXT)] * 60, flags=flags) == 0
    assert most == 24  # on every copy of the model
    most = 0
    assert batch.run(*[line(TEXT)] * 30, flags=("--max-num-seqs", "2", "--max-num-queued-reqs", "3")) == 0
    assert most == 3


@pytest.mark.setting("--response-role", "--enable-prompt-tokens-details", "--chat-template")
def test_settings_apply_to_responses(batch: Batch) -> None:
    chat = line(CHAT, "/v1/chat/completions")
    assert batch.run(chat) == 0
    plain = batch.answers[0]["response"]["body"]
    flags = ("--response-role", "oracle", "--enable-prompt-tokens-details", "--chat-template", "{{ 'abc' }}")
    assert batch.run(chat, flags=flags) == 0
    shaped = batch.answers[0]["response"]["body"]
    assert (plain["choices"][0]["message"]["role"], shaped["choices"][0]["message"]["role"]) == ("assistant", "oracle")
    assert plain["usage"]["prompt_tokens_details"] is None
    assert shaped["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert (shaped["usage"]["prompt_tokens"], shaped["choices"][0]["message"]["content"]) == (3, "defg")


def test_prompt_embeds(batch: Batch) -> None:
    rows, file = torch.zeros(3, WIDTH), io.BytesIO()
    rows[:, 0] = torch.tensor(list(b"abc"))
    torch.save(rows, file)
    body = {"prompt_embeds": base64.b64encode(file.getvalue()).decode(), "max_tokens": 3}
    assert batch.run(line(body), flags=("--enable-prompt-embeds",)) == 0
    assert [each["response"]["body"]["choices"][0]["text"] for each in batch.answers] == ["def"]


@pytest.mark.setting("--max-log-len", "--enable-log-requests")
def test_requests_are_logged(batch: Batch) -> None:
    with logged() as quiet:
        assert batch.run(line(TEXT | {"prompt": "a" * 30})) == 0
    with logged() as lines:
        assert batch.run(line(TEXT | {"prompt": "a" * 30}), flags=("--enable-log-requests", "--max-log-len", "20")) == 0
    assert not [each for each in quiet if "aaa" in each]
    (entry,) = [each for each in lines if "aaa" in each]
    assert f"prompt '{'a' * 20}...', params" in entry


@pytest.mark.setting("--disable-log-stats")
def test_statistics_are_logged(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    async def log_stats(state: ServerState) -> None:
        begun.append(state)

    monkeypatch.setattr(ServerState, "log_stats", log_stats)
    assert batch.run(line(TEXT), flags=("--disable-log-stats",)) == 0
    assert not begun
    assert batch.run(line(TEXT)) == 0
    assert len(begun) == 1


@pytest.mark.setting("--enable-metrics", "--url", "--port")
def test_metrics_are_served_while_it_runs(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    port = own_port()
    seen: list[str] = []

    async def watched(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            for accept in ("", "application/openmetrics-text"):
                request = urllib.request.Request(f"http://{OWN_ADDRESS}:{port}/metrics", headers={"accept": accept})
                with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                    seen.append(response.read().decode())
        except OSError:
            seen.append("")
        return await post(app, path, body)

    post = inside.post
    monkeypatch.setattr(inside, "post", watched)
    where = ("--url", OWN_ADDRESS, "--port", str(port))
    assert batch.run(line(TEXT), flags=where) == 0
    assert batch.run(line(TEXT), flags=("--enable-metrics", *where)) == 0
    assert seen[0] == ""
    assert "vllm:cache_config_info{" in seen[1]
    assert "vllm:prompt_tokens_total{" in seen[2]
    assert seen[2].endswith("# EOF\n")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((OWN_ADDRESS, port), timeout=PATIENCE)


def test_a_busy_metrics_port_is_one_line(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ("--enable-metrics", "--url", "127.0.0.1", "--port", port)
        assert batch.run(line(TEXT), flags=flags) == 2
    assert "--port: cannot listen on 127.0.0.1" in capsys.readouterr().err
    assert not list(batch.folder.glob("out*"))


class Store(ThreadingHTTPServer):
    """Answers GET with `source`; takes a PUT after refusing it with each of `refusals`."""

    def __init__(self, source: bytes, staging: Path, *refusals: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.source, self.staging, self.refusals = source, staging, list(refusals)
        self.stored: list[bytes] = []
        self.keys: list[str | None] = []
        self.staged: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://user:secret@127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Store

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        exists = self.path == "/in.jsonl?token=secret"
        self.send_response(302 if self.path == "/away" else 200 if exists else 404)
        self.send_header("location", address(self.server, "in.jsonl"))
        self.end_headers()
        self.wfile.write(self.server.source if exists else b"")

    def do_PUT(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.staged = os.listdir(self.server.staging)
        status = self.server.refusals.pop(0) if self.server.refusals else 200
        if status == 200:
            self.server.stored.append(body)
        self.send_response(status)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def store(*args: Any) -> Iterator[Store]:
    with Store(*args) as server:
        yield server
        server.shutdown()


def address(server: Store, name: str) -> str:
    return f"http://127.0.0.1:{server.server_port}/{name}?token=secret"


@pytest.mark.setting("--input-file", "--output-file", "--output-tmp-dir")
def test_urls_are_downloaded_and_uploaded(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "UPLOAD_DELAYS", (0, 0, 0))
    source = "\n".join([line(TEXT, custom_id="1"), line(CHAT, "/v1/chat/completions", "2")])
    with store(source.encode(), batch.folder, 503, 500) as server:
        where = ["-i", address(server, "in.jsonl"), "-o", address(server, "out"), "--output-tmp-dir", str(batch.folder)]
        assert main.main(["run-batch", *where, "--model", "fake"]) == 0
        (stored,) = server.stored
        (staged,) = server.staged
    assert [json.loads(each)["custom_id"] for each in stored.splitlines()] == ["1", "2"]
    assert staged.startswith("pagoda-batch-")
    assert not os.listdir(batch.folder)


def test_urls_with_a_password(batch: Batch) -> None:
    with store(line(TEXT).encode(), batch.folder) as server:
        where = ["-i", f"{server.url}/in.jsonl?token=secret", "-o", f"{server.url}/out"]
        assert main.main(["run-batch", *where, "--output-tmp-dir", str(batch.folder), "--model", "fake"]) == 0
        assert server.keys == [f"Basic {base64.b64encode(b'user:secret').decode()}"] * 2
        assert len(server.stored) == 1


def test_redirects_into_the_network_are_not_followed(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    with store(b"inside", batch.folder) as server:
        url = f"http://127.0.0.1:{server.server_port}/away"
        with places.open_source(url) as source:
            assert source.read() == b"inside", "from one private address to another"
        monkeypatch.setattr(places, "_is_public", lambda each: each == url)
        with pytest.raises(ConfigError, match=r"it redirects to the private address http://127.0.0.1:\d+/in.jsonl$"):
            places.open_source(url)
        assert len(server.keys) == 3, "the last redirect was not followed"


def test_which_addresses_are_public(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, is_public in (("127.0.0.1", False), ("[::1]", False), ("10.0.0.1", False), ("169.254.169.254", False)):
        assert places._is_public(f"http://{host}/x") is is_public
    assert places._is_public("https://8.8.8.8/x")


def test_a_refused_upload_keeps_the_responses(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    staging = batch.folder / "staging"
    staging.mkdir()
    with store(b"", staging, 403) as server:
        target = address(server, "out")
        assert batch.run(line(TEXT), flags=("--output-tmp-dir", str(staging)), output=target) == 1
        assert server.refusals == server.stored == []
    text = capsys.readouterr().err
    (kept,) = staging.iterdir()
    assert "403 Forbidden; the answers so far are in " + str(kept) in text
    assert "secret" not in text
    assert json.loads(kept.read_text())["custom_id"] == "x"


@pytest.mark.setting("--output-tmp-dir")
def test_output_tmp_dir(batch: Batch) -> None:
    staging = batch.folder / "staging"
    staging.mkdir()
    output = BatchOutput(str(batch.output), str(staging))
    with output:
        output.write(b"1\n")
        assert len(list(staging.iterdir())) == 1
        assert not batch.output.exists()
        output.finish()
    assert batch.output.read_bytes() == b"1\n"
    assert not list(staging.iterdir())


def test_the_output_is_renamed_when_complete(batch: Batch) -> None:
    batch.output.write_text("old")

    def interrupted() -> None:
        with BatchOutput(str(batch.output)) as output:
            output.write(b"new\n")
            raise KeyboardInterrupt

    with logged() as lines, pytest.raises(KeyboardInterrupt):
        interrupted()
    partial = batch.folder / "out.jsonl.partial"
    assert (batch.output.read_text(), partial.read_text()) == ("old", "new\n")
    assert f"1 answers are in {partial}; run the same command to continue" in lines
    with BatchOutput(str(batch.output)) as output:
        assert list(output.answers()) == [b"new\n"]
        output.resume(1, 4)
        output.write(b"more\n")
        output.finish()
    assert batch.output.read_text() == "new\nmore\n"
    assert not partial.exists()


def test_links_and_devices_are_not_replaced(batch: Batch) -> None:
    link = batch.folder / "link"
    link.symlink_to(batch.output)
    for target in (str(link), "/dev/null"):
        with BatchOutput(target) as output:
            output.write(b"1\n")
            output.finish()
    assert link.is_symlink()
    assert batch.output.read_bytes() == b"1\n"
    assert not Path("/dev/null").is_file()


def test_a_full_disk_is_one_line(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    assert batch.run(*[line(TEXT)] * 200, output="/dev/full") == 1
    text = capsys.readouterr().err
    assert "pagoda: error: /dev/full: No space left on device" in text
    assert "Traceback" not in text


def test_a_run_is_resumed_after_engine_death(
    batch: Batch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line({"prompt": "a", "max_tokens": 1 + 8 * (number > 0)}, custom_id=str(number)) for number in range(5)]
    flags = ("--max-num-seqs", "1")
    assert batch.run(*lines, model="fake:crash", flags=flags) == 1
    assert "pagoda: error: " in capsys.readouterr().err
    assert not batch.output.exists()
    assert [each["custom_id"] for each in batch.kept] == ["0"]
    monkeypatch.setitem(fake_engine.NEXT, "crash", fake_engine.alphabet)
    monkeypatch.setattr(fake_engine, "CRASH_AT", None)
    assert batch.run(*lines, model="fake:crash", flags=flags) == 0
    assert [each["custom_id"] for each in batch.answers] == list("01234")


def test_no_files_are_left_without_an_engine(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    assert batch.run(line(TEXT), model="fake:config") == 2
    assert "--dtype: not today" in capsys.readouterr().err
    assert not list(batch.folder.glob("out*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--input-file: is required"),
        (["-i", "x"], "--output-file: is required"),
        (["-i", "x", "-o", "x"], "--output-file: is the input file"),
        (["-i", "/no/file", "-o", "x"], "--input-file: /no/file: No such file or directory"),
        (
            ["-i", "http://127.0.0.1:1/x?token=secret", "-o", "x"],
            "--input-file: http://127.0.0.1:1/x: Connection refused",
        ),
        (["-i", "/dev/null", "-o", "/no/folder/x"], "--output-file: /no/folder/x: No such file or directory"),
        (["-i", "/dev/null", "-o", "/"], "--output-file: / is a folder"),
        (["-i", "/dev/null", "-o", "http://x/", "--output-tmp-dir", "/no"], "--output-tmp-dir: /no: No such file"),
    ],
)
def test_start_up_errors_are_one_line(
    batch: Batch, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["run-batch", *words, "--model", "fake"]) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
    assert "secret" not in text
