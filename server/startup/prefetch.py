"""Read ahead: run an iterator of arrays in a thread, within a budget of bytes.

Reading and dequantising weights then goes on while the main thread imports the backend or packs the last tensor.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator

from pagoda.common.backend import Weight


class Prefetch:
    """Iterates over `weights`, at most `max_bytes` ahead. An exception of the source is raised in its place."""

    def __init__(self, weights: Iterable[Weight], max_bytes: int) -> None:
        self._source = weights
        self._max_bytes = max_bytes
        self._ready: deque[Weight] = deque()
        self._bytes = 0
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._read, name="pagoda-weights", daemon=True).start()

    def __iter__(self) -> Iterator[Weight]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._ended)
                if not self._ready:
                    break
                weight = self._ready.popleft()
                self._bytes -= weight[1].nbytes
                self._changed.notify_all()
            yield weight
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop reading."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            for weight in self._source:
                with self._changed:
                    self._changed.wait_for(lambda: self._bytes < self._max_bytes or self._ended)
                    if self._ended:
                        return
                    self._ready.append(weight)
                    self._bytes += weight[1].nbytes
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            self.close()
