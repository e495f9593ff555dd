"""Shared fixtures. Nothing here imports torch: engine and text tests stay framework-free."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import logging
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support.suite import budgets, fork_server, memory

# No test fails because the machine was busy, or by chance: part properties of `make test-full` draws other examples.
IS_RANDOM = os.environ.get("PAGODA_TEST_RANDOM") == "1"
hypothesis.settings.register_profile("pagoda", deadline=None, derandomize=not IS_RANDOM)
hypothesis.settings.load_profile("pagoda")

# A thread per test process: several spin on the cores of the other processes, and tiny products gain nothing from them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As the reference backend does for itself, but before any test module imports torch.
os.environ.setdefault("GOMP_SPINCOUNT", "8000")

# Triton decides when a kernel is defined: here its interpreter runs them, on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Meshes are tested on eight CPU devices, however early a test that needs one makes XLA's client.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

fork_server.install()

memory.use_small_heap()

# What a developer's shell says about models is not for the tests.
for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
    os.environ.pop(name, None)


pytest_plugins = ["support.suite.short_ids"]


@pytest.fixture(autouse=True)
def usual_logging() -> Iterator[None]:
    """What a test sets up in logging ends with it."""
    yield
    for logger in map(logging.getLogger, ("pagoda", "uvicorn", "vllm")):
        logger.handlers[:], logger.propagate = [], True
        logger.setLevel(logging.NOTSET)


TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    budgets.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    budgets.register(config)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a program which is not installed."""
    for marker in item.iter_markers("program"):
        if missing := [name for name in marker.args if not is_installed(name)]:
            pytest.skip(f"needs {', '.join(missing)}")


def is_installed(name: str) -> bool:
    """Whether there is a program or a Python package of this name."""
    return shutil.which(name) is not None or importlib.util.find_spec(name.replace("-", "_")) is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    return _never_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    return _never_skipped((yield))


def _never_skipped(report: Any) -> Any:
    """In `make test-full`, let a test that is skipped fail: what it needs is to be installed."""
    if report.skipped and os.environ.get("PAGODA_TEST_FULL") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped in make test-full: {report.longrepr[2] if report.longrepr else ''}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """In a fresh checkout let test processes collect one after another: the first compiles the tests for all."""
    if not hasattr(session.config, "workerinput") or sys.dont_write_bytecode or _is_compiled():
        return (yield)
    with budgets.TABLE.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


def _is_compiled() -> bool:
    """Whether an earlier run has left the tests compiled: the file that is collected last is."""
    last = max(TESTS.rglob("test_*.py"))
    return any((last.parent / "__pycache__").glob(f"{last.stem}.*-pytest-*.pyc"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files: those that load the real model first, as they were collected, while their process is small, for its
    memory is bounded; then those that take longest, so that no process is left alone with one at the end.
    """
    table = budgets.read()
    large = {item.path for item in items if item.get_closest_marker("model")}

    def place(item: pytest.Item) -> float:
        return -math.inf if item.path in large else -table.get(item.path.relative_to(TESTS).as_posix(), 0.0)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Keep the collector from going through modules and tests each time, and from working often."""
    memory.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Let a process that has grown large return memory."""
    result = yield
    if nextitem is not None:
        memory.shrink(budgets.recorder(item.config), ends_file=nextitem.path != item.path)
    return result


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The real small model, put on disk by `make`. Its absence is an error: a skipped test proves nothing."""
    path = Path(os.environ.get("PAGODA_TEST_MODEL", ".models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.is_file():
        pytest.fail(f"{path} is missing: run `make test`, or `python tools/smollm2.py .models`")
    return path.resolve()
