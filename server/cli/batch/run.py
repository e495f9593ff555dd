"""`pagoda run-batch`: answer a file of requests in OpenAI's batch format, in order, with the server's own routes.

A bad line is answered with an error and costs the others nothing. A run that was cut off is gone on with by the same
command. The exit status is 0 when every line was answered well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any, Final

from starlette.types import ASGIApp

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.commands import OWN_SETTINGS, BatchConfig
from pagoda.common.config.groups.observability import LoggingConfig
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.config.settings import ENGINE_SETTINGS, Settled, build
from pagoda.common.errors import ConfigError
from pagoda.common.observe.logs import configure
from pagoda.server.cli.batch.io import BatchOutput, count_requests, open_source, shown
from pagoda.server.cli.batch.lines import BatchFile, Line, resumed
from pagoda.server.core_client.start import check_start, start_engine
from pagoda.server.parsers.registry import check_formats
from pagoda.server.settings.args import AsyncEngineArgs, settle_all
from pagoda.server.settings.flags import FlagParser, add_settings

if TYPE_CHECKING:
    from pagoda.common.observe.metrics import Metrics
    from pagoda.server.http.state import ServerState
    from pagoda.server.settings.resolve import Resolved


SETTINGS: Final = OWN_SETTINGS["run-batch"]
TERMINATED: Final = 128 + signal.SIGTERM
WAITING_PER_RUNNING: Final = 4
"""Requests kept ready for each that may run: enough for a full engine, and memory stays bounded."""

logger = logging.getLogger(__name__)


def add_arguments(parser: FlagParser) -> None:
    """The batch's own flags, and the engine's."""
    add_settings(parser, SETTINGS.values())
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the file; 0 when every request was answered, 1 when one failed. Raises what keeps it from starting."""
    engine_config, config, server_config = configurations(args)
    with open_source(config.source) as source, BatchOutput(config.target, config.output_tmp_dir) as output:
        total = count_requests(source)
        batch = resumed(source, engine_config.model.model, output)
        if batch.answered:
            logger.info("%d requests were answered by an earlier run", batch.answered)
        client = start_engine(engine_config, in_process=server_config.disable_frontend_multiprocessing)
        try:
            answered, failed = _run(engine_config, config, server_config, client, batch, total, output)
        except asyncio.CancelledError:
            return TERMINATED
        finally:
            client.close()
    if failed:
        print(f"{failed} of {answered} requests failed; their lines in {shown(config.target)} say why", file=sys.stderr)
    return 1 if failed else 0


def check(args: argparse.Namespace) -> tuple[Settled, Resolved]:
    """What was said, and what it comes to. Raises what `run` raises before weights are read, but for the batch's files.

    Those are not opened: the input may be a download, and the output's place is kept from other runs while it is open.
    """
    from pagoda.server.startup.engine import check_engine

    settled, engine_config, _, server_config = _prepared(args)
    check_start(engine_config, in_process=server_config.disable_frontend_multiprocessing)
    return settled, check_engine(engine_config, "server", settled.sources)


def configurations(args: argparse.Namespace) -> tuple[EngineConfig, BatchConfig, ServerConfig]:
    """What flags, file and environment ask for. Raises ConfigError."""
    _, engine, batch, server = _prepared(args)
    return engine, batch, server


def _prepared(args: argparse.Namespace) -> tuple[Settled, EngineConfig, BatchConfig, ServerConfig]:
    settled = settle_all(args, ENGINE_SETTINGS, SETTINGS)
    configure(build(LoggingConfig, settled.values, ENGINE_SETTINGS.values()))
    engine = AsyncEngineArgs.from_settled(settled).create_engine_config()
    batch = build(BatchConfig, settled.values, SETTINGS.values())
    server = build(ServerConfig, settled.values, SETTINGS.values())
    check_formats(engine, server)
    return settled, engine, batch, server


def _run(
    engine_config: EngineConfig,
    config: BatchConfig,
    server_config: ServerConfig,
    client: Any,
    batch: BatchFile,
    total: int | None,
    output: BatchOutput,
) -> tuple[int, int]:
    from pagoda.common.observe.metrics import Metrics
    from pagoda.server.async_llm import AsyncLLM
    from pagoda.server.http.state import ServerState

    llm = AsyncLLM(engine_config, wait=False, client=client)
    metrics = Metrics(llm.names[0])
    llm.on_step = metrics.on_step
    watched = (
        metrics_server(metrics, config.url, server_config.port) if config.enable_metrics else contextlib.nullcontext()
    )
    with watched:
        return asyncio.run(_answer_all(ServerState(llm, server_config, metrics), batch, total, output))


@contextlib.contextmanager
def metrics_server(metrics: Metrics, address: str, port: int) -> Iterator[None]:
    """GET /metrics in a thread of its own. Raises ConfigError when the address is taken or impossible."""
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, address, metrics.registry)
    except OSError as error:
        flag = "--port" if error.errno in (98, 48, 13) else "--url"
        raise ConfigError(flag, f"cannot listen on {address}:{port}: {error.strerror}; choose another {flag}") from None
    logger.info("metrics at http://%s:%d/metrics", address, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def _answer_all(state: ServerState, batch: BatchFile, total: int | None, output: BatchOutput) -> tuple[int, int]:
    """Answer every line that is left; how many answers there are then, and how many of them are errors.

    Raises EngineDeadError when the engine dies: what it did not answer is left to the next run.
    """
    from tqdm import tqdm

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    statistics = None
    try:
        await state.wait_until_ready()
        info = state.engine.info
        logger.info("%s on %s (%s): %s", info.backend, info.device, info.dtype, info.memory)
        if not state.engine.config.observability.disable_log_stats:
            statistics = asyncio.ensure_future(state.log_stats())
        answered, failed = batch.answered, batch.failed
        with tqdm(total=total, initial=answered, desc="BatchFile", unit=" requests", disable=None) as bar:
            async with contextlib.aclosing(_answers(state, batch.lines)) as answers:
                async for line, good in answers:
                    if not good and state.engine.errored:
                        raise state.engine.dead_error
                    output.write(line)
                    answered, failed = answered + 1, failed + (not good)
                    bar.update()
        output.finish()
        return answered, failed
    finally:
        if statistics is not None:
            statistics.cancel()
        state.engine.shutdown()


async def _answers(state: ServerState, lines: Iterator[Line]) -> AsyncGenerator[tuple[bytes, bool], None]:
    """(answer line, whether it is a good one) for every request, in their order."""
    from pagoda.server.app import create_app

    app = create_app(state)
    config, limits = state.engine.config, state.engine.info.limits
    most = WAITING_PER_RUNNING * limits.max_num_seqs * config.parallel.data_parallel_size
    most = min(most, config.scheduler.max_num_queued_reqs or most)
    waiting: deque[asyncio.Task[tuple[bytes, bool]]] = deque()
    try:
        for line in lines:
            if len(waiting) >= most:
                yield await waiting.popleft()
            waiting.append(asyncio.ensure_future(_answer(app, line)))
        while waiting:
            yield await waiting.popleft()
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _answer(app: Any, line: Line) -> tuple[bytes, bool]:
    pass  # DROPPED
    from pagoda.server.cli.batch.lines import LineError, answer_line, error_line, parse_line

    try:
        request = parse_line(line.raw, line.number)
    except LineError as error:
        return error_line(line.id, error), False
    status, body = await post(app, request.url, bytes(request.body))
    return answer_line(line.id, request.custom_id, status, body), status < 400


# A request to the HTTP application from inside its own process: no socket, the same routes, the same answer.


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to a POST of JSON. What the application breaks on is logged, and answered 500."""
    answer = _Answer(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": {},
    }
    try:
        await app(scope, answer.receive, answer.send)
    except Exception:
        if not answer.status:
            raise
        logger.exception("%s failed", path)
    return answer.status, bytes(answer.body)


class _Answer:
    """The client's end: sends one body, then stays connected, and gathers what comes back."""

    def __init__(self, request: bytes) -> None:
        self._request: bytes | None = request
        self.status = 0
        self.body = bytearray()

    async def receive(self) -> dict[str, Any]:
        """The request, once; after it nothing comes."""
        if self._request is None:
            await asyncio.Event().wait()
        request, self._request = self._request, None
        return {"type": "http.request", "body": request, "more_body": False}

    async def send(self, message: Any) -> None:
        """Take in a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
