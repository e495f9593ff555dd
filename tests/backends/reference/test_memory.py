"""Memory that is taken at start, so that no step has to wait for the kernel to clear it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.engines.reference_driver import random_weights, tiny_spec
from support.suite import memory

from pagoda.backends.reference.memory import allocate
from pagoda.backends.reference.model.numerics import numerics
from pagoda.backends.reference.weights.load import Packer
from pagoda.common.engine.kv_cache.spec import layout_of
from pagoda.common.models.mixers.caches import FullCache

MIB = 1 << 20
BLOCKS, BLOCK = 4096, 16


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("map_pages", [True, False])
def test_pages_of_the_cache_are_mapped_at_once_or_when_written(map_pages: bool) -> None:
    layout = layout_of({FullCache(2, 64): (0,)}, BLOCK)
    size = 2 * BLOCKS * BLOCK * 2 * 64 * 4  # keys and values
    memory.trim()  # what others left in the heap is no memory of this cache
    before = _resident()
    caches = allocate(layout, (BLOCKS,), torch.float32, map_pages=map_pages)
    grown = _resident() - before
    assert not any(array.any() for array in caches[0].arrays)
    assert (grown > 0.9 * size) == map_pages, f"{grown} of {size}"


def test_a_page_that_is_written_takes_no_huge_page() -> None:
    caches = allocate(layout_of({FullCache(8, 64): (0,)}, BLOCK), (BLOCKS,), torch.float32)
    before = _resident()
    for array in caches[0].arrays:
        array[:, 7] = 1.0  # a slot of each of 8 heads, 16 MiB apart
    assert _resident() - before < MIB


FAULTS = f"""
import resource, numpy as np
from pagoda.backends.reference.memory import keep_freed_memory, map_scratch
keep_freed_memory()
map_scratch(64 * {MIB})
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for piece in [np.empty(2 * {MIB}, np.uint8) for _ in range(24)]:
    piece[:: resource.getpagesize()] = 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_scratch_is_kept_for_the_tensors_of_steps() -> None:
    """In a process of its own: what others have left in the heap counts."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 24 * 2 * MIB // resource.getpagesize() // 4


def test_vectors_do_not_keep_the_file_that_they_came_from() -> None:
    spec = tiny_spec()
    weights = dict(random_weights(spec))
    model = Packer(spec, numerics("float32")).pack(weights.items())
    norm = model.parts["final_norm"]
    before = norm.clone()
    weights["final_norm"][:] = 7
    assert torch.equal(norm, before)
