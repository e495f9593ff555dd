"""Shared fixtures. Nothing here imports torch: engine and text tests stay framework-free."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# No test fails because the machine was busy.
hypothesis.settings.register_profile("pagoda", deadline=None)
hypothesis.settings.load_profile("pagoda")

# As the reference backend does for itself, but before any test module imports torch.
os.environ.setdefault("GOMP_SPINCOUNT", "8000")

# Triton decides when a kernel is defined: here its interpreter runs them, on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Meshes are tested on eight CPU devices, however early a test that needs one makes XLA's client.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

# What a developer's shell says about models is not for the tests.
for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
    os.environ.pop(name, None)


pytest_plugins = ["support.short_ids"]


@pytest.fixture(autouse=True)
def usual_logging() -> Iterator[None]:
    """What a test sets up in logging ends with it."""
    yield
    for logger in map(logging.getLogger, ("pagoda", "uvicorn", "vllm")):
        logger.handlers[:], logger.propagate = [], True
        logger.setLevel(logging.NOTSET)


TESTS = Path(__file__).parent
LONG = (
    *("models/test_parity.py", "models/test_real_model.py", "benchmarks/gpu/test_run.py"),
    *(
        "server/vllm_compat/test_requests_of_server_tests.py",
        "models/test_quantized.py",
        "server/cli/test_api_servers.py",
    ),
    *("server/vllm_compat/test_examples.py", "kernels_pallas/test_kernel.py", "backends/jax_tpu/test_mixers.py"),
    *(
        "kernels_pallas/test_latent_attention.py",
        "kernels_pallas/test_token_selection.py",
        "server/test_lora_rotation.py",
    ),
    *("backends/torch_cuda/test_warmup.py", "server/test_lora_accelerators.py", "backends/test_drafts.py"),
    *(
        "backends/jax_tpu/test_backend.py",
        "backends/jax_tpu/test_decoder_forms.py",
        "backends/jax_tpu/test_quantize.py",
    ),
    *("backends/jax_tpu/test_checkpoint.py", "models/test_eight_bits.py", "server/cli/test_serve_stop.py"),
    *("server/startup/test_hosts.py", "server/startup/test_tensor_parallel.py", "server/cli/test_convert.py"),
)
"""Files that take longest, which start first, so that no process is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests of `LONG` to the front; the order is otherwise kept."""
    if missing := [name for name in LONG if not (TESTS / name).is_file()]:
        raise pytest.UsageError(f"tests/conftest.py: LONG has files that do not exist: {missing}")
    places = {TESTS / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


def pytest_collection_finish() -> None:
    """Keep the collector from going through modules and tests each time: hundreds of thousands of objects that stay."""
    gc.collect()
    gc.freeze()


MEMORY_LIMIT = 1 << 30  # bytes


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    """Return a large process's memory after each module: compiled programs, weights in reference cycles, freed heap."""
    yield
    pages = Path("/proc/self/statm")
    if pages.exists() and int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > MEMORY_LIMIT:
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The real small model, put on disk by `make`. Its absence is an error: a skipped test proves nothing."""
    path = Path(os.environ.get("PAGODA_TEST_MODEL", ".models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.is_file():
        pytest.fail(f"{path} is missing: run `make test`, or `python tools/smollm2.py .models`")
    return path.resolve()
