"""Child processes that are forked from a process which has imported pagoda already.

A fresh interpreter needs one to four processor seconds to import the server, torch and their like. `install` replaces
`subprocess.Popen` by a class that forks programs of Python (`[sys.executable, "-P", path, ...]` of these tests, `[...,
"-m", module, ...]` of pagoda) from such a process, the fork server, and starts everything else as before:

    client                fork server (a child of the client)      the new process
    ------                ----------------------------------       ---------------
    become subreaper
    argv, environment,  ->  fork  ->  fork again, exit         ->  is adopted by the client, which can wait for it
    file descriptors                                               as for any child; dup2, chdir, environ, run
    <- process id  ------------------------------------------------

Each forked process has a fork server of its own, so that the engine of a server is forked, too. A program behaves as in
a fresh interpreter except that modules are imported already; `PAGODA_TEST_FORK=0` starts fresh interpreters everywhere.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

TESTS: Final = Path(__file__).resolve().parents[2]
ROOT: Final = TESTS.parent

MODULES: Final = (
    *(
        "support.servers.fake_serve",
        "support.engines.fake_engine",
        "support.engines.fake_ranks",
        "support.engines.fake_batch",
    ),
    *(
        "pagoda.server.api.app",
        "pagoda.server.cli.main",
        "pagoda.server.cli.serving.serve",
        "pagoda.server.cli.serving.api_process",
    ),
    *("pagoda.server.llm", "pagoda.server.core_client.engine", "pagoda.backends.reference.backend"),
    *("pagoda.backends.torch_cuda.backend", "tokenizers", "llguidance"),
)
"""What the fork server imports. Neither jax nor transformers: they would read the environment too early."""

READ_AT_IMPORT: Final = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHONHASHSEED", "TRITON_", "TORCH")
"""Beginnings of environment variables that imported libraries have read: a program with others gets an interpreter."""

_MAX_REQUEST: Final = 1 << 20
"""Bytes of arguments and environment."""

SERVER_NAME: Final = "fork-server"
"""Name of a fork server's process in /proc/PID/comm; that of other forked ones is the beginning of their program's."""

_M_ARENA_MAX: Final = -8
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

_libc = ctypes.CDLL(None)
_plain_popen = subprocess.Popen


def install() -> None:
    """Fork the Python programs that this process starts from now on."""
    is_single = os.environ.get("OMP_NUM_THREADS") == "1"  # else an import of numpy starts threads
    if sys.platform == "linux" and is_single and os.environ.get("PAGODA_TEST_FORK", "1") != "0":
        subprocess.Popen = _ForkingPopen  # type: ignore[misc]


class FreshPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A process with an interpreter of its own, also where others are forked."""


class _Client:
    """The connection to this process's fork server."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.pid = pid

    @classmethod
    def start(cls) -> _Client:
        """Start a fork server with an interpreter of its own."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            paths = [str(TESTS), *(path for path in sys.path if path)]
            words = [sys.executable, "-P", __file__, str(other.fileno()), *paths]
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            server = _plain_popen(words, pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL)
        return cls(own, server.pid)

    @classmethod
    def fork(cls) -> _Client:
        """Fork a fork server from this process, which must have no other thread. Returns in both."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if server := os.fork():
            other.close()
            return cls(own, server)
        own.close()
        _run(_serve(other))

    def spawn(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the process id of a new child of this process. Raises OSError if the fork server has ended."""
        report, theirs = os.pipe()
        with self._lock, os.fdopen(report, "rb") as reader:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                data = json.dumps(request | {"parent": os.getpid()}).encode()
                socket.send_fds(self._connection, [data], [theirs, *descriptors])
                os.close(theirs)
                answer = reader.read()
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise OSError("the fork server started no process")
        return int(answer)


def processor_seconds() -> float:
    """Return the user and system time of this process's fork server; 0 before its first use."""
    if _client is None:
        return 0.0
    fields = Path(f"/proc/{_client.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime


_client: _Client | None = None
_client_lock = threading.Lock()


def _connected() -> _Client:
    global _client
    with _client_lock:
        _client = _client or _Client.start()
    return _client


class _ForkingPopen(_plain_popen):  # type: ignore[type-arg]
    """`subprocess.Popen` whose Python programs are forked. Everything but the start is the same."""

    def _execute_child(self, *args: Any) -> None:
        start = super()._execute_child  # type: ignore[misc]
        values = inspect.signature(start).bind(*args).arguments
        words = _words(values["args"])
        environment = os.environ if values["env"] is None else values["env"]
        if not _can_fork(words, environment) or values["shell"] or values["preexec_fn"] or values["executable"]:
            start(*args)
            return
        standard = (values["p2cread"], values["c2pwrite"], values["errwrite"])
        descriptors = [own if given == -1 else given for own, given in enumerate(standard)]
        request = {
            "words": words[1:],
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
            "folder": os.fspath(values["cwd"] or os.getcwd()),
            "group": values["process_group"],
            "session": bool(values["start_new_session"]),
            "passed": list(values["pass_fds"]),
            "ignored": _ignored_signals(),
        }
        self.pid = _connected().spawn(request, [*descriptors, *values["pass_fds"]])
        self._child_created = True
        pipes = (values["p2cread"], values["p2cwrite"], values["c2pread"], values["c2pwrite"])
        self._close_pipe_fds(*pipes, values["errread"], values["errwrite"])  # type: ignore[attr-defined]


def _ignored_signals() -> list[int]:
    """Return the signals that this process ignores, and which programs that it starts therefore ignore, too."""
    mask = int(Path("/proc/self/status").read_text().partition("SigIgn:")[2].split()[0], 16)
    return [number for number in signal.valid_signals() if mask >> (number - 1) & 1]


def _words(args: Any) -> list[str]:
    return [] if isinstance(args, str | bytes | os.PathLike) else [os.fsdecode(word) for word in args]


def _can_fork(words: Sequence[str], environment: Any) -> bool:
    """Whether this is a program of this repository, which finds the imported libraries as it wants them."""
    if words[:1] != [sys.executable]:
        return False
    if any(environment.get(name) != os.environ.get(name) for name in {*environment, *os.environ} if _is_read(name)):
        return False
    match words[1:]:
        case ["-P", path, *_] | [path, *_] if path.endswith(".py"):
            return Path(path).resolve().is_relative_to(ROOT)
        case ["-P", "-m", module, *_] | ["-m", module, *_]:
            return module.startswith("pagoda.")
    return False


def _is_read(name: str) -> bool:
    return name.startswith(READ_AT_IMPORT)


# The fork server's side.


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request until EOF, then exit. Returns the request in the new process."""
    _set_name(SERVER_NAME)
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, 1 << 16)
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 253)
        if not data:
            os._exit(0)
        if middle := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(middle, 0)
            continue
        if os.fork():
            os._exit(0)
        connection.close()
        request: dict[str, Any] = json.loads(data)
        _become(request, *descriptors)
        return request


def _become(request: dict[str, Any], report: int, *descriptors: int) -> None:
    """Take over the request's files, folder, environment and place among the processes; then report the process id."""
    while os.getppid() != request["parent"]:  # the process between has not ended yet
        os.sched_yield()
    if request["session"]:
        os.setsid()
    elif request["group"] is not None and request["group"] >= 0:
        os.setpgid(0, request["group"])
    else:
        os.setpgid(0, os.getpgid(request["parent"]))
    _set_signals(request["ignored"])
    _place(dict(zip((0, 1, 2, *request["passed"]), descriptors)), report)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if "MALLOC_ARENA_MAX" in os.environ:
        _libc.mallopt(_M_ARENA_MAX, int(os.environ["MALLOC_ARENA_MAX"]))


def _set_signals(ignored: Sequence[int]) -> None:
    """Handle signals as a fresh interpreter: what its parent ignores stays so, an interrupt is an exception."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ):
            continue
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _place(wanted: dict[int, int], report: int) -> None:
    """Give the descriptors the numbers that the program expects, close the others, and report the process id."""
    safe = max([*wanted, *wanted.values(), report]) + 1
    moved: dict[int, int] = {}
    for number, descriptor in wanted.items():
        moved[number] = safe + len(moved)
        os.dup2(descriptor, moved[number])
    told = safe + len(moved)
    os.dup2(report, told)
    for descriptor in {*wanted.values(), report}:
        os.close(descriptor)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    os.write(told, str(os.getpid()).encode())
    os.close(told)


def _set_name(name: str) -> None:
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _run(request: dict[str, Any]) -> NoReturn:
    """Run a program as `python` would, with a fork server of its own for what it starts."""
    global _client, _client_lock
    words: list[str] = request["words"]
    is_safe = words[0] == "-P"
    target, *rest = words[1:] if is_safe else words
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    _client_lock = threading.Lock()
    if os.environ.get("PAGODA_TEST_FORK", "1") == "0":
        subprocess.Popen = _plain_popen  # type: ignore[misc]
    else:
        _client = _Client.fork()
        subprocess.Popen = _ForkingPopen  # type: ignore[misc]
    _set_name(Path(rest[0] if target == "-m" else target).name)
    sys.path[:] = [*paths, *(path for path in _OWN_PATH if path not in paths)]
    status: int | str | None = None
    try:
        if target == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            if not is_safe:
                sys.path.insert(0, str(Path(target).parent))
            sys.argv = [target, *rest]
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    _exit(status)


def _exit(status: int | str | None) -> NoReturn:
    """End as an interpreter does, but do not tear down every imported module, which takes a second."""
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


_OWN_PATH: Final = tuple(sys.path)
"""Where an interpreter without PYTHONPATH finds modules, in a fork server and its processes."""


def main() -> NoReturn:
    """Serve requests that come by the socket whose descriptor is the first argument; the others are import paths."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:0] = [path for path in sys.argv[2:] if path not in _OWN_PATH]
    for module in MODULES:
        import_module(module)
    warnings.filterwarnings("ignore", ".*found in sys.modules after import", RuntimeWarning)  # of `runpy`
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"an import of the fork server has started threads: {threads}"
    _run(_serve(connection))


if __name__ == "__main__":
    # One module object for this file, whose globals the forked processes change.
    sys.modules["support.suite.fork_server"] = sys.modules["__main__"]
    main()
