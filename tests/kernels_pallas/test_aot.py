"""The TPU compiler on this machine: every shape compiles, updates the cache in place and fits the chip."""

from __future__ import annotations

import importlib.util
import math

import pytest
from support.kernels.small_kernels import compile_for_tpu

from pagoda.benchmarks.tpu.aot.shapes.ragged_paged_attention import SPECS, RaggedAttentionArgs, spec
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout, plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler, is missing")
DEFAULT = ["v6e/decode-8kv", "v5e/mixed-hd64-sinks-window"]
MATRIX = [f"{chip}/{name}" for chip in ("v5e", "v5p", "v6e") for name in SPECS]


def compile_all(pairs: list[str]) -> None:
    for facts in compile_for_tpu(pairs):
        chip, name = facts["pair"].split("/")
        case = spec(name)
        cache = 4 * math.prod(case.layout.shape(case.layers, case.pages))
        assert facts["alias"] == cache, facts
        assert facts["temp"] < cache / 16, facts
        assert 0 < facts["vmem"] <= CHIPS[chip].vmem_bytes, facts


def test_shapes_compile_in_place() -> None:
    compile_all(DEFAULT)


def test_every_entry_of_a_width_is_compiled() -> None:
    """Each entry for a width is of a shape of the matrix; those of heads were compiled by the search."""
    cases = {f"{chip}/{kind(spec(name))}/{key(spec(name).layout)}" for chip, name in pairs(MATRIX)}
    entries = [line for line in plan._table() if "/w" in line]
    assert entries
    for line in entries:
        assert line in cases, f"no shape of SPECS compiles {line}"


def kind(case: RaggedAttentionArgs) -> str:
    return "decode" if case.decode_only else "mixed"


def key(layout: PagedKvLayout) -> str:
    return f"{layout.dtype}/w{layout.width}"


def pairs(names: list[str]) -> list[list[str]]:
    return [name.split("/") for name in names]


@pytest.mark.tpu_matrix
def test_every_shape_compiles_for_every_chip() -> None:
    compile_all([pair for pair in MATRIX if pair not in DEFAULT])
