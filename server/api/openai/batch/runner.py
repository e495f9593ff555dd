"""Runs batches in turn by API key: checks the file's lines, answers them, and stores their answers in two files.

What is answered is in the files at once. With --files-dir a batch whose server ends, however that happens, goes on in
the next process after the last answer; without, it ends as failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import msgspec
from starlette.types import ASGIApp

from pagoda.common.errors import ConfigError
from pagoda.server.api.openai.batch.lines import BatchRequest, LineError, answer_line, in_order, parse_line, post
from pagoda.server.http.errors import HttpError
from pagoda.server.http.response import OWNER_KEY
from pagoda.server.http.state import ServerState
from pagoda.server.http.stores.files import FileWriter, StoredFile, write_json
from pagoda.server.processing.workers.waiting_lines import FairLine

MAX_BATCHES: Final = 1_000
"""Maximum number of batches kept; the oldest that has ended is dropped first."""

MAX_REQUESTS: Final = 50_000
"""Maximum number of requests of a batch."""

MAX_ERRORS: Final = 100
"""Maximum number of invalid lines that are described."""

RETRY_SECONDS: Final = 1.0
"""Pause before a request is repeated that the engine had no room for, or that came while it slept."""

_ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})

logger = logging.getLogger(__name__)


class Batch(msgspec.Struct):
    """One batch, as it is stored. Times are Unix times in seconds."""

    id: str
    owner: str  # See StoredFile.
    endpoint: str
    input_file_id: str
    completion_window: str
    window: int  # Seconds of completion_window.
    created_at: int
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None  # Seconds of output_expires_after.
    status: str = "validating"
    times: dict[str, int] = msgspec.field(default_factory=dict)  # Status -> the time since which the batch has had it.
    errors: list[dict[str, Any]] = msgspec.field(default_factory=list)
    files: dict[str, str] = msgspec.field(default_factory=dict)  # Kind of file, output or error -> file id.
    unfinished: dict[str, str] = msgspec.field(default_factory=dict)  # The same while the files are written.
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def has_ended(self) -> bool:
        return self.status in _ENDED

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.files.get("output"),
            "error_file_id": self.files.get("error"),
            "created_at": self.created_at,
            "expires_at": self.created_at + self.window,
            **{f"{name}_at": self.times.get(name) for name in times},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


@dataclass(frozen=True, slots=True)
class _Answer:
    line: bytes
    succeeded: bool


class _ServerStoppedError(Exception):
    """The server shuts down, or its engine has died."""


class BatchRunner:
    """The batches of a server. `app` answers their requests."""

    def __init__(self, state: ServerState, app: ASGIApp) -> None:
        self._state = state
        self._app = app
        self._batches: dict[str, Batch] = {}  # All batches, oldest first.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._line = FairLine(MAX_BATCHES, "batches")
        if state.config.files_dir is not None:
            self._restore()

    def batches(self, owner: str) -> list[Batch]:
        """Return the owner's batches, newest first."""
        return [batch for batch in reversed(self._batches.values()) if batch.owner == owner]

    def get(self, batch_id: str, owner: str) -> Batch:
        """Return the owner's batch. Raise HttpError (404), also for another owner's."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise HttpError(404, f"there is no batch {batch_id[:200]!r}", "batch_id")
        return batch

    def start(self, batch: Batch, file: StoredFile) -> None:
        """Start a batch. Raise HttpError (429) if too many wait."""
        if len(self._batches) >= MAX_BATCHES:
            self._drop_oldest()
        source = self._state.files.path(file).open("rb")  # The file stays readable if it is deleted.
        self._batches[batch.id] = batch
        self._save(batch)
        self._start(batch, source)

    def _start(self, batch: Batch, source: IO[bytes]) -> None:
        task = self._tasks[batch.id] = asyncio.ensure_future(self._run(batch, source))
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    def go_on(self) -> None:
        """Go on with the batches of an earlier process. Called once, in the event loop."""
        going_on = [batch for batch in self._batches.values() if not batch.has_ended]
        self._state.files.drop_unfinished([file_id for batch in going_on for file_id in batch.unfinished.values()])
        for batch in going_on:
            try:
                source = self._state.files.path(self._state.files.get(batch.input_file_id, batch.owner)).open("rb")
            except HttpError:
                _Outputs(self._state, batch, self._save).finish()
                self._fail(batch, "input_file_deleted", "the input file was deleted while the server was stopped")
            else:
                self._start(batch, source)

    def cancel(self, batch: Batch) -> None:
        """Cancel a batch that has not ended."""
        if not batch.has_ended and batch.status != "cancelling":
            self._set(batch, "cancelling")
            self._tasks[batch.id].cancel()

    def _drop_oldest(self) -> None:
        """Forget the oldest ended batch of the owner who has most of them. Raise HttpError (429) if none has ended."""
        counts = Counter(batch.owner for batch in self._batches.values() if batch.has_ended)
        most = max(counts, key=counts.__getitem__, default=None)
        ended = next((batch for batch in self._batches.values() if batch.has_ended and batch.owner == most), None)
        if ended is None:
            raise HttpError(429, f"{MAX_BATCHES} batches are waiting; try again when one has ended")
        del self._batches[ended.id]
        self._path(ended).unlink(missing_ok=True)

    # The state of a batch, in memory and in the folder.

    def _path(self, batch: Batch) -> Path:
        return self._state.files.folder / f"{batch.id}.json"

    def _save(self, batch: Batch) -> None:
        try:
            write_json(self._path(batch), batch)
        # A full disk: the next process has an older state, and goes on after the answers that it finds.
        except OSError:
            logger.exception("batch %s: its state cannot be stored", batch.id)

    def _set(self, batch: Batch, status: str) -> None:
        batch.status = status
        batch.times[status] = int(time.time())
        self._save(batch)

    def _restore(self) -> None:
        """Read the batches of an earlier server process."""
        batches = []
        for path in self._state.files.folder.glob("batch_*.json"):
            try:
                batches.append(msgspec.json.decode(path.read_bytes(), type=Batch))
            except msgspec.DecodeError as error:
                raise ConfigError("--files-dir", f"{path}: {error}; remove it, or use another folder") from None
        for batch in sorted(batches, key=lambda batch: batch.created_at):
            self._batches[batch.id] = batch

    def _fail(self, batch: Batch, code: str, message: str) -> None:
        batch.errors.append({"code": code, "message": message, "param": None, "line": None})
        self._set(batch, "failed")

    # Running.

    async def _run(self, batch: Batch, source: IO[bytes]) -> None:
        """Run a batch to its end."""
        ending = "completed"
        try:
            with source, self._state.stopping.notifying(lambda: self._stop(batch)):
                async with asyncio.timeout(batch.created_at + batch.window - time.time()):
                    if batch.status == "cancelling":  # The earlier process ended while it cancelled the batch.
                        raise asyncio.CancelledError
                    if await self._check(batch, source):
                        async with self._line.turn(batch.owner, MAX_BATCHES):
                            await self._answer_all(batch, source)
        except TimeoutError:
            ending = "expired"
        except (asyncio.CancelledError, _ServerStoppedError):
            if self._is_left(batch):
                return
            ending = "cancelled" if batch.status == "cancelling" else "failed"
        except HttpError as error:
            self._fail(batch, "storage_full", error.message)
        except Exception:
            logger.exception("batch %s failed", batch.id)
            self._fail(batch, "server_error", "internal error; see the server's log")
        if batch.status == "failed":
            return
        if ending == "failed":
            self._fail(batch, "server_stopped", "the server was stopped before the batch had ended")
        else:
            self._set(batch, ending)

    def _is_left(self, batch: Batch) -> bool:
        """Whether the next process goes on with a batch that is interrupted."""
        return self._state.files.outlives_process and batch.status != "cancelling"

    def _stop(self, batch: Batch) -> None:
        if batch.id in self._tasks:
            self._tasks[batch.id].cancel()

    async def _check(self, batch: Batch, source: IO[bytes]) -> bool:
        """Check all lines. Return whether they are valid; the batch has failed otherwise."""
        batch.total, batch.errors = await asyncio.to_thread(
            check_lines, source, batch.endpoint, self._state.config.max_body_bytes
        )
        source.seek(0)
        self._set(batch, "failed" if batch.errors else "in_progress")
        return not batch.errors

    async def _answer_all(self, batch: Batch, source: IO[bytes]) -> None:
        """Answer all lines. Their answers are stored in any case."""
        outputs = _Outputs(self._state, batch, self._save)
        scope = {OWNER_KEY: bytes.fromhex(batch.owner)}
        try:
            requests = islice(_requests(source), outputs.count, None)
            answers = in_order(requests, lambda request: self._answer(request, scope), self._max_running())
            async with aclosing(answers):
                async for answer in answers:
                    outputs.write(answer)
            self._set(batch, "finalizing")
        except (asyncio.CancelledError, _ServerStoppedError):
            if self._is_left(batch):
                outputs.leave()
                raise
            outputs.finish()
            raise
        except BaseException:
            outputs.finish()
            raise
        outputs.finish()

    def _max_running(self) -> int:
        """Return how many requests run at a time: half of what the engine runs, so that others find room."""
        llm = self._state.engine
        return max(1, llm.info.limits.max_num_seqs * llm.config.parallel.data_parallel_size // 2)

    async def _answer(self, request: BatchRequest, scope: dict[str, Any]) -> _Answer:
        while True:
            status, body = await post(self._app, request.url, bytes(request.body), scope)
            if self._state.draining or self._state.engine.errored:
                raise _ServerStoppedError
            if status not in (429, 503):
                break
            await asyncio.sleep(RETRY_SECONDS)
        line = answer_line(f"batch_req_{uuid.uuid4().hex}", request.custom_id, status, body)
        return _Answer(line, status < 400)


class _Outputs:
    """The files of a batch's answers and of its errors, each created with its first line.

    Those of an earlier process are continued. `save`: stores the batch, which names the files.
    """

    def __init__(self, state: ServerState, batch: Batch, save: Callable[[Batch], None]) -> None:
        self._state = state
        self._batch = batch
        self._save = save
        self._writers: dict[str, FileWriter] = {}
        for name, file_id in batch.unfinished.items():
            if (writer := state.files.resume(file_id, batch.owner)) is not None:
                self._writers[name] = writer
        lines = {name: writer.lines for name, writer in self._writers.items()}
        batch.completed = lines.get("output", 0)
        batch.failed = lines.get("error", 0)

    @property
    def count(self) -> int:
        """Answers that are there: those of the first requests, because they are written in order."""
        return self._batch.completed + self._batch.failed

    def write(self, answer: _Answer) -> None:
        """Append an answer and count it. Raise HttpError (413, 507) if there is no room."""
        name = "output" if answer.succeeded else "error"
        if name not in self._writers:
            self._writers[name] = self._state.files.write(self._batch.owner)
            self._batch.unfinished[name] = self._writers[name].id
            self._save(self._batch)
        self._writers[name].write(answer.line)
        self._batch.completed += answer.succeeded
        self._batch.failed += not answer.succeeded

    def finish(self) -> None:
        """Store the files."""
        batch = self._batch
        for name, writer in self._writers.items():
            filename = f"{batch.id}_{name}.jsonl"
            batch.files[name] = writer.finish(filename, "batch_output", batch.output_seconds).id
        batch.unfinished.clear()
        self._writers.clear()
        self._save(batch)

    def leave(self) -> None:
        """Leave the files to the next process."""
        for writer in self._writers.values():
            writer.leave()


def check_lines(source: IO[bytes], endpoint: str, max_bytes: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of requests of a file and what is wrong with it, at most MAX_ERRORS entries.

    `max_bytes`: of a line; a longer one is not read to its end.
    """
    errors: list[dict[str, Any]] = []
    custom_ids: set[str] = set()
    total = 0

    def note(code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        errors.append({"code": code, "message": message, "param": param, "line": line})

    for number, raw in enumerate(iter(lambda: source.readline(max_bytes + 1), b""), 1):
        if not raw.strip():
            continue
        total += 1
        if len(raw) > max_bytes:
            note("line_too_long", f"the line has more than {max_bytes} bytes (--max-body-bytes)", number)
            break
        if total > MAX_REQUESTS:
            note("too_many_requests", f"the file has more than {MAX_REQUESTS} requests; split it")
        if len(errors) >= MAX_ERRORS or total > MAX_REQUESTS:
            break
        try:
            request = parse_line(raw, number)
        except LineError as error:
            note("invalid_request", str(error), number)
            continue
        if request.url != endpoint:
            note("mismatched_url", f"url {request.url} is not the batch's endpoint {endpoint}", number, "url")
        if request.custom_id in custom_ids:
            message = f"custom_id {request.custom_id[:100]!r} is used by an earlier line"
            note("duplicate_custom_id", message, number, "custom_id")
        custom_ids.add(request.custom_id)
    if not total:
        note("empty_file", "the file has no requests")
    return total, errors


def _requests(source: IO[bytes]) -> Iterator[BatchRequest]:
    for number, raw in enumerate(source, 1):
        if raw.strip():
            yield parse_line(raw, number)
