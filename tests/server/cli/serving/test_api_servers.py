"""Several API server processes over one (fake) engine process, as `pagoda serve --api-server-count` starts them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.engines.fake_engine import allow
from support.servers.served import served, wait_for, wait_ready
from support.suite.watching import PATIENCE, eventually, gone, programs

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError
from pagoda.server.cli.serving.api_servers import MAX_RESTARTS, KeptStreams, _Supervisor
from pagoda.server.cli.serving.serve import check_processes
from pagoda.server.core_client.ipc_messages import Failed, FromEngine, Rejoin, ToEngine
from pagoda.server.http.forward import Forwarder
from pagoda.server.http.peers import PeerReport
from pagoda.server.http.response import KEEP_STREAM, LOST_RESPONSE
from pagoda.server.settings.flags import AsyncEngineArgs

COUNT = 3
UNLIMITED = 10**9
"""Tokens: no sequence is held."""

TRACKED = "--enable-server-load-tracking"
JSON = {"content-type": "application/json"}


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str, folder: Path) -> None:
        self.process, self.address, self._base = process, url.removeprefix("http://"), folder

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """Return status, headers and content of a request on a connection of its own."""
        with closing(HTTPConnection(self.address, timeout=PATIENCE)) as connection:
            raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, raw, JSON | (headers or {}))
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def completion(self, tokens: int, stream: bool = False) -> tuple[int, bytes]:
        body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        status, _, text = self.request("POST", "/v1/completions", body)
        return status, text

    def begun_stream(self, path: str) -> HTTPResponse:
        """Return the response of a stream of 60,000 tokens, whose head has come."""
        body = {"ignore_eos": True, "stream": True, "store": False}
        body |= (
            {"input": "a", "max_output_tokens": 60_000}
            if "responses" in path
            else {"prompt": "a", "max_tokens": 60_000}
        )
        connection = HTTPConnection(self.address, timeout=PATIENCE)
        connection.request("POST", path, json.dumps(body), JSON)
        return connection.getresponse()

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples, as whichever process answers reports them."""
        text = self.request("GET", "/metrics")[2].decode()
        return sum(
            float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? ([\d.e+]+)$", text, re.MULTILINE)
        )

    def running(self) -> int:
        return int(json.loads(self.request("GET", "/load")[2])["server_load"])

    @property
    def folder(self) -> Path:
        """The private folder of this server's sockets."""
        (folder,) = self._base.glob("pagoda-ipc-*")
        return folder

    def report(self, index: int) -> PeerReport:
        """Return what one process reports of itself."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.folder / f"engine.api{index}"))
            client.sendall(b"a")
            data = b""
            while part := client.recv(65536):
                data += part
        return msgspec.msgpack.decode(data, type=PeerReport)

    def children(self) -> list[int]:
        """Return the process ids of the API server processes and of the engine."""
        return list(programs(self.process.pid))

    def api_processes(self) -> list[int]:
        return [pid for pid, name in programs(self.process.pid).items() if "fake_serve" in name]


@contextmanager
def api_servers(model: str, folder: Path, *flags: str) -> Iterator[Server]:
    words = ("--api-server-count", str(COUNT), "--rpc-base-path", str(folder), "--served-model-name", "m", *flags)
    with served(model, *words) as (process, url):
        wait_ready(process)
        yield Server(process, url, folder)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that holds the tokens of `server`; it lets all pass."""
    file = tmp_path_factory.mktemp("gate") / "length"
    allow(file, UNLIMITED)
    return file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, gate: Path) -> Iterator[Server]:
    with api_servers(f"fake:held@{gate}", tmp_path_factory.mktemp("a"), TRACKED, "--root-path", "/x") as server:
        yield server


@pytest.mark.setting("--api-server-count")
def test_all_processes_serve_and_each_reports_the_metrics_of_all(server: Server) -> None:
    names = ("vllm:request_success_total", "vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count")
    before = [server.metric(name) for name in names]
    steps = server.metric("vllm:iteration_tokens_total_sum")
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda _: server.completion(7), range(90)))
    assert [status for status, _ in answers] == [200] * 90
    reports = [server.report(index) for index in range(COUNT)]
    assert all(report.generated for report in reports)
    for _ in range(12):  # whichever process answers
        assert [server.metric(name) for name in names] == [before[0] + 90, before[1] + 630, before[2] + 90]
        assert server.metric("vllm:iteration_tokens_total_sum") == steps + 90 * 8  # with the token of the prompt
        assert server.metric("vllm:num_requests_running") == 0
        assert server.metric("vllm:cache_config_info") == 1
    assert server.metric("process_open_fds") > max(value(report, "process_open_fds") for report in reports)
    accept = {"accept": "application/openmetrics-text"}
    assert b"# EOF" in server.request("GET", "/metrics", headers=accept)[2]


def value(report: PeerReport, name: str) -> float:
    return next(family.samples[0][2] for family in report.metrics if family.name == name)


def test_load_counts_the_requests_of_all_processes(server: Server, gate: Path) -> None:
    allow(gate, 10)
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(server.completion, 60, True) for _ in range(12)]
        eventually(lambda: server.running() == 12)
        allow(gate, UNLIMITED)
        assert all(each.result()[1].endswith(b"[DONE]\n\n") for each in answers)
    eventually(lambda: server.running() == 0)


def test_stored_state_is_found_whichever_process_answers(server: Server) -> None:
    status, _, text = server.request("POST", "/v1/responses", {"input": "a", "max_output_tokens": 4, "store": True})
    assert status == 200
    response = json.loads(text)["id"]
    for prefix in ("", "/x"):
        for _ in range(6):
            status, headers, text = server.request("GET", f"{prefix}/v1/responses/{response}")
            assert (status, json.loads(text)["id"]) == (200, response)
            assert int(headers["content-length"]) == len(text)
            assert len(headers.get_all("date")) == 1
    body = {"input": "a", "previous_response_id": response, "max_output_tokens": 4, "stream": True}
    for _ in range(6):
        status, headers, text = server.request("POST", "/v1/responses", body)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert b"response.completed" in text or b"response.incomplete" in text
    assert server.request("HEAD", f"/v1/responses/{response}")[::2] == (200, b"")
    assert server.request("DELETE", f"/v1/responses/{response}")[0] == 200
    for _ in range(6):
        assert server.request("GET", f"/v1/responses/{response}")[0] == 404


def test_files_are_stored_once(server: Server) -> None:
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}})
    part = b'--b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    content = line.encode() * 2000
    form = part % (b"purpose", b"", b"batch") + part % (b"file", b'; filename="f.jsonl"', content) + b"--b--\r\n"
    kind = {"content-type": "multipart/form-data; boundary=b"}
    status, _, text = server.request("POST", "/v1/files", form, kind)
    assert status == 200, text
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(form[at : at + 999]), form[at : at + 999]) for at in range(0, len(form), 999)
    )
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    head += b"expect: 100-continue\r\n"
    host, port = server.address.split(":")
    with closing(socket.create_connection((host, int(port)), timeout=PATIENCE)) as client:
        client.sendall(head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        received = b""
        while b'"object":"file"' not in received:
            received += client.recv(65536)
    for _ in range(6):
        files = json.loads(server.request("GET", "/v1/files")[2])["data"]
        assert [each["bytes"] for each in files] == [len(content)] * 2
        assert server.request("GET", f"/v1/files/{files[0]['id']}/content")[2] == content


def test_a_client_that_disconnects_ends_a_forwarded_request(server: Server) -> None:
    body = json.dumps({"input": "a", "max_output_tokens": 60_000, "stream": True, "store": False}).encode()
    host, port = server.address.split(":")
    clients = [socket.create_connection((host, int(port)), timeout=PATIENCE) for _ in range(6)]
    before = server.metric("vllm:request_success_total")
    for client in clients:
        client.sendall(b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        client.sendall(b"content-length: %d\r\n\r\n" % len(body) + body)
        client.recv(100)
    for client in clients:
        client.close()
    eventually(lambda: server.running() == 0)
    eventually(lambda: server.metric("vllm:request_success_total") == before + 6)
    text = server.request("GET", "/metrics")[2].decode()
    aborted = re.search(r'finished_reason="abort".*} (\d+)', text)
    assert aborted is not None
    assert int(aborted[1]) >= 3


def test_sockets_are_private(server: Server) -> None:
    assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
    sockets = [each for each in server.folder.iterdir() if each.is_socket()]
    assert len(sockets) == 2 + 2 * COUNT + 1
    assert {stat.S_IMODE(each.stat().st_mode) for each in sockets} == {0o600}


def test_the_queue_limit_holds_for_all_processes_together(tmp_path: Path) -> None:
    flags = (TRACKED, "--max-num-queued-reqs", "12")
    with api_servers("fake:endless", tmp_path, *flags) as server, ThreadPoolExecutor(12) as pool:
        for _ in range(12):
            pool.submit(server.completion, 60_000)
        eventually(lambda: server.running() == 12)
        # until each process has learnt of the others' requests
        eventually(lambda: [server.completion(1)[0] for _ in range(12)] == [429] * 12)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 1


def test_a_signal_lets_the_requests_of_all_processes_finish(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gate, folder = tmp_path / "length", tmp_path_factory.mktemp("a")  # paths of sockets are short
    allow(gate, 10)
    with api_servers(f"fake:held@{gate}", folder, TRACKED, "--shutdown-timeout", "600") as server:
        with ThreadPoolExecutor(13) as pool:
            answers = [pool.submit(server.completion, 60, True) for _ in range(9)]
            body = {"input": "a", "max_output_tokens": 60}
            forwarded = [pool.submit(server.request, "POST", "/v1/responses", body) for _ in range(4)]
            eventually(lambda: server.running() == 13)
            os.killpg(server.process.pid, signal.SIGTERM)
            wait_for(server.process, "stopping; ")
            allow(gate, UNLIMITED)
            assert all(each.result()[1].endswith(b"[DONE]\n\n") for each in answers)
            assert all(each.result()[0] == 200 for each in forwarded)
        assert server.process.wait(PATIENCE) == 0
        assert not list(folder.iterdir())


@pytest.mark.parametrize("signals", [1, 2])
def test_cut_requests_get_errors_and_the_exit_status_says_so(tmp_path: Path, signals: int) -> None:
    seconds = "1" if signals == 1 else "60"
    with api_servers("fake:endless", tmp_path, TRACKED, "--shutdown-timeout", seconds) as server:
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(server.completion, 60_000, True) for _ in range(12)]
            eventually(lambda: server.running() == 12)
            server.process.send_signal(signal.SIGTERM)
            if signals == 2:
                wait_for(server.process, "stopping; ")  # else both would be one
                server.process.send_signal(signal.SIGTERM)
            assert all(b"shutting down" in each.result()[1] for each in answers)
        assert server.process.wait(PATIENCE) == 1
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()


@pytest.mark.parametrize("suspended", [False, True])
def test_all_requests_fail_with_the_cause_when_the_engine_is_killed(tmp_path: Path, suspended: bool) -> None:
    """`suspended`: the API server processes do not run meanwhile, so that all they are told awaits them."""
    with api_servers("fake:endless", tmp_path, TRACKED) as server:
        children, apis = server.children(), server.api_processes()
        (engine,) = set(children) - set(apis)
        assert len(apis) == COUNT
        with ThreadPoolExecutor(30) as pool:
            answers = [pool.submit(server.completion, 60_000, True) for _ in range(30)]
            eventually(lambda: server.running() == 30)
            for pid in apis * suspended:
                os.kill(pid, signal.SIGSTOP)
            os.kill(engine, signal.SIGKILL)
            eventually(lambda: not suspended or engine not in server.children())
            for pid in apis * suspended:
                os.kill(pid, signal.SIGCONT)
            assert all(b"the engine has ended" in each.result()[1] for each in answers)
        assert server.process.wait(PATIENCE) == 1
        assert server.process.stderr is not None
        lines = server.process.stderr.read().rstrip().splitlines()
        assert [line for line in lines if "pagoda: error" in line] == lines[-1:]
        assert all(map(gone, children))


def test_no_process_outlives_the_one_that_started_it(tmp_path: Path) -> None:
    with api_servers("fake:endless", tmp_path) as server:
        children = server.children()
        server.process.kill()
        assert server.process.wait(PATIENCE) == -signal.SIGKILL
        assert all(map(gone, children))


def test_no_process_outlives_one_that_has_not_read_what_it_was_sent(tmp_path: Path) -> None:
    with api_servers("fake:endless", tmp_path) as server:
        children = server.children()
        os.kill(server.process.pid, signal.SIGSTOP)
        streams = [server.begun_stream("/v1/completions") for _ in range(2 * COUNT)]
        server.process.kill()
        assert server.process.wait(PATIENCE) == -signal.SIGKILL
        eventually(lambda: all(map(gone, children)))
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_replaced_and_the_others_go_on(tmp_path: Path, victim: int) -> None:
    """Its streams end with an event and leave the engine; those of the others run, and the new process answers."""
    # Responses run in process 0, whichever takes their connection. The server ends first: its streams last for minutes.
    paths = ["/v1/responses" if index % 2 > victim else "/v1/completions" for index in range(6)]
    with ThreadPoolExecutor(60) as pool, api_servers("fake:endless", tmp_path, TRACKED) as server:
        before, sent = server.api_processes(), 0
        streams: list[Future[bytes]] = []
        while not all(server.report(index).running for index in range(COUNT)):
            sent += 6
            assert sent <= 60
            streams += [pool.submit(server.begun_stream(path).read) for path in paths]
            eventually(lambda count=sent: server.running() == count)
        running = [server.report(index).running for index in range(COUNT)]
        assert sum(running) == sent
        os.kill(before[victim], signal.SIGKILL)
        eventually(lambda: sum(stream.done() for stream in streams) == running[victim])
        ends = [stream.result().removesuffix(b"data: [DONE]\n\n")[-250:] for stream in streams if stream.done()]
        assert all(b"the process that sent this stream has ended" in end.split(b"\n\n")[-2] for end in ends), ends
        eventually(lambda: len(server.api_processes()) == COUNT and before[victim] not in server.api_processes())
        eventually(lambda: is_there(server, victim))
        assert server.report(victim).running == 0
        for _ in range(3 * COUNT):
            assert server.completion(1)[0] == 200, "no process takes connections before it can answer"
        assert [server.report(index).running for index in range(COUNT) if index != victim] == [
            count for index, count in enumerate(running) if index != victim
        ]
        eventually(lambda: server.metric("vllm:num_requests_running") == sent - running[victim])


def is_there(server: Server, index: int) -> bool:
    """Return whether a process reports."""
    try:
        return bool(server.report(index).metrics)
    except (OSError, msgspec.DecodeError):
        return False


def test_streams_that_have_ended_leave_nothing_in_the_process_that_watches(server: Server) -> None:
    descriptors = Path(f"/proc/{server.process.pid}/fd")
    before = len(list(descriptors.iterdir()))
    with ThreadPoolExecutor(8) as pool:
        assert {status for status, _ in pool.map(lambda _: server.completion(3, stream=True), range(40))} == {200}
    eventually(lambda: len(list(descriptors.iterdir())) == before)


async def test_a_stream_that_is_forwarded_is_kept_too(tmp_path: Path) -> None:
    kept: list[bytes] = []

    @contextmanager
    def keeping(ending: bytes) -> Iterator[None]:
        kept.append(ending)
        yield
        kept.append(b"released")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"5\r\nevent\r\n0\r\n\r\n")
        writer.close()

    requests = iter([{"type": "http.request"}])

    async def receive() -> Any:
        return next(requests, None) or await asyncio.Future()

    async def send(message: Any) -> None:
        if message.get("body"):
            kept.append(message["body"])

    path = str(tmp_path / "http")
    scope = {"type": "http", "method": "POST", "path": "/v1/responses", "raw_path": b"/v1/responses"}
    scope |= {"query_string": b"", "headers": [], KEEP_STREAM: keeping}
    async with await asyncio.start_unix_server(answer, path):
        await Forwarder(app=Any, path=path, prefix="")(scope, receive, send)
    assert kept == [LOST_RESPONSE, b"event", b"released"]


@pytest.mark.parametrize("lags", [False, True])
def test_a_stream_from_which_bytes_may_be_missing_is_cut(lags: bool) -> None:
    client, connection = socket.socketpair()
    connection.setblocking(False)
    sent = 0
    with suppress(BlockingIOError):
        while lags:
            sent += connection.send(bytes(10_000))
    streams = KeptStreams()
    streams.keep(number=b"1", descriptor=connection.detach(), ending=b"the end")
    streams.keep(number=b"2", descriptor=socket.socket().detach(), ending=b"of no peer")
    streams.keep(number=b"3", descriptor=os.open(os.devnull, os.O_RDONLY), ending=b"of no socket")
    streams.end()
    read = b""
    with client:
        while part := client.recv(1 << 20):
            read += part
    assert read == (bytes(sent) if lags else b"7\r\nthe end\r\n0\r\n\r\n")
    assert not len(streams)


class IdleEngine:
    """An engine that goes on, and the commands that it was sent."""

    def __init__(self, folder: Path) -> None:
        self.addresses, self.sent = (f"ipc://{folder}/engine",), list[ToEngine]()

    def listen(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[FromEngine], None]) -> None:
        pass

    def send(self, command: ToEngine) -> None:
        self.sent.append(command)


SERVES = "import socket, sys; socket.socket(fileno=int(sys.argv[-1])).send(b'r'); sys.stdin.read(); sys.exit(3)"
FAILS = "import sys; sys.stdin.read(); sys.exit(3)"
SERVES_AT_FIRST = f"import sys\nif 'first' in sys.argv: {SERVES}\n{FAILS}"


@pytest.mark.parametrize(("script", "replaced"), [(SERVES, MAX_RESTARTS), (SERVES_AT_FIRST, MAX_RESTARTS), (FAILS, 0)])
def test_processes_that_end_again_and_again_end_the_server(
    tmp_path_factory: pytest.TempPathFactory, script: str, replaced: int
) -> None:
    """One that ends before it has served is not replaced at all, unless it replaces one that had."""
    config = AsyncEngineArgs("fake").create_engine_config()
    engine: Any = IdleEngine(tmp_path_factory.mktemp("a"))
    supervisor = _Supervisor(config, ServerConfig(api_server_count=1), engine, start_time=0.0)
    program = (sys.executable, "-S", "-c", script)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        status = asyncio.run(supervisor.run(listener, lambda stop, hurry: nullcontext(), program))
    assert status == 3
    assert engine.sent == [Rejoin(0)] * replaced


@pytest.mark.parametrize(
    ("model", "flags", "line", "status"),
    [
        ("fake:config", (), "--dtype: not today; use another", 2),
        ("fake:bug", (), "KeyError: 'a bug'", 1),
        ("fake", ("--middleware", "nowhere.Thing"), "--middleware", 1),
    ],
)
def test_what_keeps_the_server_from_starting_is_one_line(
    model: str, flags: tuple[str, ...], line: str, status: int
) -> None:
    with served(model, "--api-server-count", "2", *flags) as (process, _):
        assert process.stderr is not None
        lines = process.stderr.read().rstrip().splitlines()
        assert process.wait(PATIENCE) == status
    errors = [each for each in lines if each.startswith("pagoda: error: ")]
    assert len(errors) == 1
    assert line in errors[0]


class FailedEngine:
    """An engine that has failed before any API server process listens to it."""

    def __init__(self, folder: Path) -> None:
        self.addresses = (f"ipc://{folder}/engine",)

    def listen(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[FromEngine], None]) -> None:
        on_message(Failed("ConfigError", "not today", "--dtype"))


def test_a_failure_that_no_process_reads_ends_the_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = AsyncEngineArgs("fake").create_engine_config()
    engine: Any = FailedEngine(tmp_path_factory.mktemp("a"))
    supervisor = _Supervisor(config, ServerConfig(api_server_count=2), engine, start_time=0.0)
    errors: list[ConfigError] = []

    def run(listener: socket.socket) -> None:
        try:
            asyncio.run(supervisor.run(listener, lambda stop, hurry: nullcontext(), ("true",)))
        except ConfigError as error:
            errors.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run, args=(listener,), daemon=True)
        thread.start()
        thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for processes that have ended"
    assert "not today" in str(errors[0])


@pytest.mark.parametrize("wanted", [0, 65])
def test_invalid_counts(wanted: int) -> None:
    with pytest.raises(ConfigError, match="--api-server-count"):
        ServerConfig(api_server_count=wanted)


@pytest.mark.parametrize("field", ["headless", "disable_frontend_multiprocessing", "server_dev_mode"])
def test_settings_of_a_single_process(field: str) -> None:
    with pytest.raises(ConfigError, match="--api-server-count"):
        ServerConfig(api_server_count=2, **{field: True})


def test_features_of_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    several = ServerConfig(api_server_count=2)
    asleep = AsyncEngineArgs("fake", enable_sleep_mode=True).create_engine_config()
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        check_processes(asleep, several)
    check_processes(asleep, ServerConfig())
    plain = AsyncEngineArgs("fake").create_engine_config()
    check_processes(plain, several)
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with pytest.raises(ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        check_processes(plain, several)
