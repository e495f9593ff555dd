"""Supervised restart: an engine that ended is replaced by a new one, for --restart-engine."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from pagoda.common.errors import EngineDeadError, EngineUnavailableError
from pagoda.server.core_client.client import Listener, StartingClient, restarting
from pagoda.server.core_client.ipc_messages import EngineInfo, Failed, FromEngine, OtherUse, Ready, Restarting, ToEngine

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 3600.0
"""The limit of restarts is for any period of this length."""

PAUSE_SECONDS: Final = 1.0
MAX_PAUSE_SECONDS: Final = 60.0
"""The pause before an engine that did not start is started again, and what it is doubled up to. The cause, such as
memory that another program uses, may pass."""

START_SECONDS: Final = 1800.0
"""How long a new engine may take to be warm until the restart is taken to have failed by who supervises the server."""


class RestartingClient:
    """Implements EngineClient: an engine that ends after it was ready is replaced, at most `limit` times per hour.

    `start`: starts an engine and returns at once; called in a thread later on. The listener gets Restarting when the
    engine has ended and Ready when the new one is warm. It gets Failed in place of Restarting once the limit is
    reached, or when no new engine could be started. `clock`: seconds. `pause`: see PAUSE_SECONDS.
    """

    def __init__(
        self,
        start: Callable[[], StartingClient],
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        pause: float = PAUSE_SECONDS,
    ) -> None:
        self._start = start
        self._limit = limit
        self._clock = clock
        self._pause = pause
        self._client = start()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._restarts: deque[float] = deque()  # Times of the latest restarts.
        self._cause: str | None = None  # Why the engine is being replaced.
        self._failed: Failed | None = None
        self._thread: threading.Thread | None = None
        self._starting: StartingClient | None = None
        self._closed = False
        self._closing = threading.Event()

    @property
    def current(self) -> StartingClient:
        """The client of the newest engine that was ready."""
        return self._client

    @property
    def others(self) -> OtherUse:
        return self._client.others

    def wait_ready(self) -> EngineInfo:
        return self._client.wait_ready()

    def poll_ready(self, timeout_ms: int) -> EngineInfo | None:
        return self._client.poll_ready(timeout_ms)

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self._loop = loop
        self._listener = listener
        if self._cause is None:
            self._client.listen(loop, self._relay)

    def send(self, command: ToEngine) -> None:
        with self._noticing_the_end():
            self._client.send(command)

    def check(self) -> None:
        with self._noticing_the_end():
            self._client.check()

    def kill(self, cause: str) -> None:
        if self._cause is None:
            self._client.kill(cause)

    def close(self, timeout: float = 2.0) -> None:
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        if self._thread is not None:
            starting = self._starting
            if starting is not None:
                starting.kill("the engine was shut down")  # Its thread then closes it.
            self._thread.join(timeout)
        self._client.close(timeout)

    @contextmanager
    def _noticing_the_end(self) -> Iterator[None]:
        """Replace the engine if a call in this context finds it dead. Raises EngineUnavailableError meanwhile."""
        self._raise_if_replacing()
        try:
            yield
        except EngineUnavailableError:
            raise
        except EngineDeadError as error:
            self._relay(Failed("EngineDeadError", str(error)))
            self._raise_if_replacing()
            raise

    def _raise_if_replacing(self) -> None:
        if self._failed is not None:
            raise EngineDeadError(self._failed.message)
        if self._cause is None:
            return
        seconds = self._clock() - self._restarts[-1]
        if seconds > START_SECONDS:
            raise EngineUnavailableError(f"the engine has been restarting for {seconds:.0f} s: {self._cause}")
        raise restarting(self._cause)

    def _relay(self, message: FromEngine) -> None:
        if not isinstance(message, Failed) or self._closed:
            self._tell(message)
        elif self._cause is None and self._failed is None:
            if self._loop is not None and self._count_restart():
                self._replace(message.message, self._loop)
            else:
                self._fail(message)

    def _tell(self, message: FromEngine) -> None:
        if self._listener is not None:
            self._listener(message)

    def _fail(self, message: Failed) -> None:
        self._failed = message
        self._tell(message)

    def _count_restart(self) -> bool:
        """Count a restart now; False if the limit is reached."""
        now = self._clock()
        while self._restarts and now - self._restarts[0] > PERIOD_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) >= self._limit:
            return False
        self._restarts.append(now)
        return True

    def _replace(self, cause: str, loop: asyncio.AbstractEventLoop) -> None:
        """Free what is left of the engine and start another in a thread."""
        self._cause = cause
        logger.error("restarting the engine (%d of %d per hour): %s", len(self._restarts), self._limit, cause)
        self._client.close(timeout=0)
        self._tell(Restarting(cause))
        self._thread = threading.Thread(target=self._start_again, args=(loop,), name="pagoda-restart", daemon=True)
        self._thread.start()

    def _start_again(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start an engine and hand it to the loop once it is warm. Tries again while the limit allows."""
        pause = self._pause
        while not self._closed:
            try:
                client, info = self._started()
            except Exception as error:
                if self._closed or self._count_restart():
                    logger.error("the engine did not start again: %s", error)
                    self._closing.wait(pause)
                    pause = min(2 * pause, MAX_PAUSE_SECONDS)
                    continue
                cause = f"{self._cause}; it did not start again: {error}"
                _call(loop, self._fail, Failed("EngineDeadError", cause))
                return
            if self._closed or not _call(loop, self._adopt, client, info):
                client.close(timeout=0)
            return

    def _started(self) -> tuple[StartingClient, EngineInfo]:
        """Start an engine and return it once it is warm. Raises what keeps it from that; it is then closed."""
        client = self._starting = self._start()
        try:
            if self._closed:
                raise EngineDeadError("the engine was shut down")
            return client, client.wait_ready()
        except BaseException:
            self._starting = None
            client.close(timeout=0)
            raise

    def _adopt(self, client: StartingClient, info: EngineInfo) -> None:
        """Use the new engine from now on. Runs in the loop."""
        self._starting = None
        if self._closed or self._loop is None:
            client.close(timeout=0)
            return
        self._client = client
        self._cause = None
        client.listen(self._loop, self._relay)
        self._tell(Ready(info))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> bool:
    """Call a function in the loop. False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True
