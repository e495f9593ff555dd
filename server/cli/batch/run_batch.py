"""`pagoda run-batch`: answer a file of requests in OpenAI's batch format, in order, through the server's own routes.

An invalid line gets an error line and does not affect the others. The same command resumes an interrupted run. The exit
status is 0 if every line succeeded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from pagoda.common.config.commands import OWN_SETTINGS, BatchConfig
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.observability import LoggingConfig
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.config.settings import ENGINE_SETTINGS, ResolvedSettings, build
from pagoda.common.errors import ConfigError
from pagoda.common.observe.logs import configure
from pagoda.server.api.openai.batch.lines import LineError, answer_line, error_line, in_order, line_id, parse_line, post
from pagoda.server.cli.batch.files import BatchOutput, count_requests, open_source, shown
from pagoda.server.core_client import check_start, engine_processes, start_engine
from pagoda.server.parsers.registry import check_formats
from pagoda.server.settings.flags import AsyncEngineArgs, resolve_settings

if TYPE_CHECKING:
    from pagoda.common.observe.metrics import Metrics
    from pagoda.server.http.state import ServerState
    from pagoda.server.settings.resolve import Resolved

SETTINGS: Final = OWN_SETTINGS["run-batch"]
TERMINATED: Final = 128 + signal.SIGTERM
QUEUED_PER_RUNNING: Final = 4  # Requests submitted per running slot: they keep the engine full and the memory bounded.

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Answer the file. Returns 0 if every request succeeded, else 1. Raises the error that prevents the start."""
    _, engine_config, config, server_config = _prepared(args)
    with open_source(config.source) as source, BatchOutput(config.target, config.output_tmp_dir) as output:
        total = count_requests(source)
        batch = resumed(source, engine_config.model.model, output)
        if batch.answered:
            logger.info("%d requests were answered by a previous run", batch.answered)
        client = start_engine(engine_config, in_process=server_config.disable_frontend_multiprocessing)
        try:
            answered, failed = _run(engine_config, config, server_config, client, batch, total, output)
        except asyncio.CancelledError:
            return TERMINATED
        finally:
            client.close()
    if failed:
        print(f"{failed} of {answered} requests failed; see their lines in {shown(config.target)}", file=sys.stderr)
    return 1 if failed else 0


def check(args: argparse.Namespace) -> tuple[ResolvedSettings, Resolved]:
    """Return the settings and the resolved engine. Raises every error that `run` raises before it reads weights.

    The batch's files are not opened: the input may be a download, and an open output file is locked against other runs.
    """
    from pagoda.server.startup.engine import check_engine

    settings, engine_config, _, server_config = _prepared(args)
    check_start(engine_config, in_process=server_config.disable_frontend_multiprocessing)
    return settings, check_engine(engine_processes(engine_config)[0].config, "server", settings.sources)


def _prepared(args: argparse.Namespace) -> tuple[ResolvedSettings, EngineConfig, BatchConfig, ServerConfig]:
    """Return the settings and their configurations, after configuring the logs. Raises ConfigError."""
    settings = resolve_settings(args, ENGINE_SETTINGS, SETTINGS)
    configure(build(LoggingConfig, settings.values))
    engine = AsyncEngineArgs.from_resolved(settings).create_engine_config()
    batch = build(BatchConfig, settings.values)
    server = build(ServerConfig, settings.values)
    check_formats(engine, server)
    return settings, engine, batch, server


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
    metrics = llm.metrics = Metrics(llm.names[0], llm.config.parallel.data_parallel_size, llm.config.lora.slots)
    metrics_context = (
        metrics_server(metrics, config.url, server_config.port) if config.enable_metrics else contextlib.nullcontext()
    )
    with metrics_context:
        return asyncio.run(_answer_all(ServerState(llm, server_config, metrics), batch, total, output))


@contextlib.contextmanager
def metrics_server(metrics: Metrics, address: str, port: int) -> Iterator[None]:
    """Serve GET /metrics from a thread. Raises ConfigError if the address is in use or invalid."""

    class MetricsHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text, content_type = metrics.exposition(self.headers.get("accept", ""))
            self.send_response(200)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug(format, *args)

    class MetricsServer(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    try:
        server = MetricsServer((address, port), MetricsHandler)
    except OSError as error:
        flag = "--port" if error.errno in (98, 48, 13) else "--url"
        raise ConfigError(flag, f"cannot listen on {address}:{port}: {error.strerror}; choose another {flag}") from None
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    logger.info("metrics at http://%s:%d/metrics", address, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def _answer_all(state: ServerState, batch: BatchFile, total: int | None, output: BatchOutput) -> tuple[int, int]:
    """Answer all remaining lines. Returns the numbers of answers and of errors, previous runs included.

    Raises EngineDeadError if the engine dies; unanswered lines are left to the next run.
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
        answered = batch.answered
        failed = batch.failed
        with tqdm(total=total, initial=answered, desc="Batch", unit=" requests", disable=None) as bar:
            async with contextlib.aclosing(_answers(state, batch.lines)) as answers:
                async for line, succeeded in answers:
                    if not succeeded and state.engine.errored:
                        raise state.engine.dead_error
                    output.write(line)
                    answered = answered + 1
                    failed = failed + (not succeeded)
                    bar.update()
        output.finish()
        return answered, failed
    finally:
        if statistics is not None:
            statistics.cancel()
        state.engine.shutdown()


async def _answers(state: ServerState, lines: Iterator[Line]) -> AsyncGenerator[tuple[bytes, bool], None]:
    """Yield (answer line, whether it succeeded) per request, in order."""
    from pagoda.server.api.app import create_app

    app = create_app(state)
    config = state.engine.config
    limits = state.engine.info.limits
    max_queued = QUEUED_PER_RUNNING * limits.max_num_seqs * config.parallel.data_parallel_size
    max_queued = min(max_queued, config.scheduler.max_num_queued_reqs or max_queued)
    async with contextlib.aclosing(in_order(lines, lambda line: _answer(app, line), max_queued)) as answers:
        async for answer in answers:
            yield answer


async def _answer(app: Any, line: Line) -> tuple[bytes, bool]:
    try:
        request = parse_line(line.raw, line.number)
    except LineError as error:
        return error_line(line.id, error), False
    status, body = await post(app, request.url, bytes(request.body))
    return answer_line(line.id, request.custom_id, status, body), status < 400


# Resuming after a partial output.


class _Response(msgspec.Struct):
    status_code: int


class _Answered(msgspec.Struct):
    id: str
    response: _Response


def read_answer(raw: bytes) -> tuple[str, bool] | None:
    """Return an answer line's id and whether it succeeded; None if the line is not a complete answer."""
    try:
        answer = msgspec.json.decode(raw, type=_Answered)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return answer.id, answer.response.status_code < 400


@dataclass(frozen=True, slots=True)
class Line:
    """A raw request line."""

    number: int
    raw: bytes
    id: str  # Id of its answer.


@dataclass(frozen=True, slots=True)
class BatchFile:
    """The remaining lines of a batch, and the counts of a previous run."""

    lines: Iterator[Line]
    answered: int
    failed: int  # Number of answered requests that failed.


def resumed(source: IO[bytes], model: str, output: BatchOutput) -> BatchFile:
    """Return the lines of `source` not yet answered in `output`, and truncate `output` after its last valid answer.

    Answers are in the order of the requests. Raises ConfigError if the answers belong to another batch.
    """
    lines = (Line(number, raw, line_id(model, number, raw)) for number, raw in enumerate(source, 1) if raw.strip())
    answered = failed = end = 0
    remaining: Iterator[Line] = lines
    for raw in output.answers():
        line = next(lines, None)
        if line is None:
            break
        if (answer := read_answer(raw)) is None or answer[0] != line.id:
            remaining = chain([line], lines)
            break
        answered = answered + 1
        failed = failed + (not answer[1])
        end = end + len(raw)
    output.resume(answered, end)
    return BatchFile(remaining, answered, failed)
