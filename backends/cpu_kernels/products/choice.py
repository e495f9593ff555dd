"""Which bfloat16 products serve a model on this processor: compiled ones or oneDNN's, by measurement.

Both are timed once for one token, few tokens and many. The result is kept in a file, so that the next start computes
with the same kernels even if it would measure otherwise.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from math import log
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.cpu_kernels.products import paired_products as products
from pagoda.backends.cpu_kernels.products.panels import COLUMNS

ROWS: Final = (1, 16, 256)
"""Tokens that are timed."""

PREFERENCE: Final = 1.1
"""Compiled products serve unless oneDNN's are this much faster: they give a row the same numbers in every batch."""

_SMALL: Final = 256
"""Number of inputs below which nothing is timed."""

_WEIGHTS: Final = 1 << 20
"""Number of weights of the matrix that is timed."""

_REPEATS: Final = 4

logger = logging.getLogger(__name__)
_lock: Final = threading.Lock()


def serves(width: int) -> bool:
    """Return whether compiled products serve matrices with that many inputs."""
    if not products.supported(width) or width < _SMALL or not torch.backends.mkldnn.is_available():
        return products.supported(width)
    with _lock:
        return _choice(width, cache_file())


def cache_file() -> Path:
    """Return where choices are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pagoda" / "cpu_products.json"


@cache
def _choice(width: int, path: Path) -> bool:
    key = f"{_processor()}, torch {torch.__version__}, {width} inputs, {products.instructions(width)}"
    known = _read(path)
    if key not in known:
        known[key] = faster(width)
        _write(path, known)
    logger.info("bfloat16 products of %d inputs: %s", width, "compiled" if known[key] else "oneDNN")
    return known[key]


@torch.inference_mode()
def faster(width: int, clock: Callable[[], float] = time.thread_time) -> bool:
    """Time both products on one thread, by its processor time, and return whether compiled ones serve."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratios = _ratios(width, clock)
    finally:
        torch.set_num_threads(threads)
    logger.info("compiled products of %d inputs run %s of oneDNN's rate with %s tokens", width, _words(ratios), ROWS)
    return sum(map(log, ratios)) > -len(ROWS) * log(PREFERENCE)


def _ratios(width: int, clock: Callable[[], float]) -> list[float]:
    weight = torch.randn(max(COLUMNS, _WEIGHTS // width), width).bfloat16()
    compiled = products.PackedProduct(weight, None, torch.bfloat16)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS[1])

    def onednn(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")
        return result

    ratios = []
    for rows in ROWS:
        x = torch.randn(rows, width).bfloat16()
        own, other = (_seconds(product, x, clock) for product in (compiled, onednn))
        ratios.append(other / own)
    return ratios


def _seconds(product: Callable[[Tensor], Tensor], x: Tensor, clock: Callable[[], float]) -> float:
    product(x)
    times = []
    for _ in range(_REPEATS):
        begin = clock()
        product(x)
        times.append(clock() - begin)
    return max(min(times), 1e-9)


def _words(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            fields = dict(line.split(":", 1) for line in lines.read().split("\n\n")[0].splitlines() if ":" in line)
        own = {name.strip(): value.strip() for name, value in fields.items()}
        return f"{own['model name']} {own['cpu family']}.{own['model']}"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def _read(path: Path) -> dict[str, bool]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in known.items() if isinstance(value, bool)} if isinstance(known, dict) else {}


def _write(path: Path, known: dict[str, bool]) -> None:
    """Replace the file; a folder that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(known, indent=1))
        new.replace(path)
    except OSError as error:
        logger.debug("choices of kernels are not kept: %s", error)
