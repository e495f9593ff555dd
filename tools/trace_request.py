"""Count the product files and functions that one non-streamed chat request enters, and the types that carry it.

    python tools/trace_request.py [--list]

A server with a tiny engine (tests/support/servers/live_server.py) runs in this process; after two warm-up requests one
is traced in all threads but the client's. A file counts if a function of it is called by the product (calls by the
fake backend do not count), not if it is only imported. A coroutine that began before the request, such as the main loop
of the server, does not count when it goes on.
"""

from __future__ import annotations

import argparse
import dis
import inspect
import os
import sys
import threading
from collections import Counter, defaultdict
from types import CodeType, FrameType
from typing import Any, Final

ROOT: Final = os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir))
PRODUCT: Final = ("common/", "server/", "backends/", "kernels_pallas/")
PATH: Final = "/v1/chat/completions"
BODY: Final = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
WARM_UP: Final = 2
TESTS: Final = f"{os.sep}tests{os.sep}"

GENERATORS: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

CARRIERS_IN: Final = ("ChatCompletionRequest", "Conversation", "ChatPrompt", "PreparedRequest", "EngineRequest")
CARRIERS_OUT: Final = ("EngineOutput", "SequenceState", "CompletionOutput", "RequestOutput", "_ChatChoice")
"""Types into which a chat request and its output are packed on their way; each hand-off is one of them."""


class Tracer:
    """Counts calls of product functions by thread, while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.calls: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        self._paths: dict[str, str | None] = {}
        self._starts: dict[CodeType, int] = {}  # offset of a generator's first instruction

    def start(self) -> None:
        """Trace every thread that starts from now on."""
        threading.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.on and event == "call" and self._begins(frame):
            path = self._product_path(frame.f_code)
            if path is not None and not self._is_test(frame.f_back):
                self.calls[threading.current_thread().name][path, frame.f_code.co_qualname] += 1

    def _begins(self, frame: FrameType) -> bool:
        """Return whether a call is the first of its frame: a coroutine is called again each time that it goes on."""
        code = frame.f_code
        if not code.co_flags & GENERATORS:
            return True
        if code not in self._starts:
            self._starts[code] = next(each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")
        return frame.f_lasti <= self._starts[code]

    @staticmethod
    def _is_test(caller: FrameType | None) -> bool:
        return caller is not None and TESTS in caller.f_code.co_filename

    def _product_path(self, code: CodeType) -> str | None:
        name = code.co_filename
        if name not in self._paths:
            relative = os.path.relpath(os.path.realpath(name), ROOT)
            self._paths[name] = relative if relative.startswith(PRODUCT) else None
        return self._paths[name]


def trace() -> Tracer:
    """Trace one request. Raises RuntimeError if it is not answered with 200."""
    sys.path.insert(0, os.path.join(ROOT, "tests"))
    from support.servers.live_server import live_server

    tracer = Tracer()
    tracer.start()
    try:
        with live_server("fake") as server:
            for _ in range(WARM_UP):
                server.post(PATH, BODY)
            threading.current_thread().name = "client"
            tracer.on = True
            status, body = server.post(PATH, BODY)[:2]
            tracer.on = False
    finally:
        threading.setprofile(None)
    if status != 200:
        raise RuntimeError(f"the request was answered {status}: {body}")
    tracer.calls.pop("client", None)
    return tracer


def summary(tracer: Tracer) -> list[str]:
    """Return the counts, a line each."""
    functions = {key for calls in tracer.calls.values() for key in calls}
    return [
        f"files of one chat request          {len({path for path, _ in functions})}",
        f"functions of one chat request      {len(functions)}",
        f"types on its way in                {len(CARRIERS_IN)}: {', '.join(CARRIERS_IN)}",
        f"types on its way out               {len(CARRIERS_OUT)}: {', '.join(CARRIERS_OUT)}",
    ]


def main() -> int:
    """Print the counts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also print every file with its functions, by thread")
    args = parser.parse_args()
    tracer = trace()
    print(*summary(tracer), sep="\n")
    if args.list:
        for thread, calls in tracer.calls.items():
            print(f"\n{thread}")
            for (path, name), count in sorted(calls.items()):
                print(f"  {path:55} {name} x{count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
