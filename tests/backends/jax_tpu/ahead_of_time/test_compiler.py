"""XLA compiler options."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("flax")

import support.devices.jax_devices  # noqa: F401

from pagoda.backends.jax_tpu.execution.program_kind import compiler_options
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.kernels_pallas.chips import CHIPS

ON_V6E = KernelChoice(128, "bfloat16", use_kernel=True, chip=CHIPS["v6e"])


def test_one_operation_may_use_half_of_vmem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert compiler_options(ON_V6E) == {"xla_tpu_scoped_vmem_limit_kib": "65536"}
    assert compiler_options(replace(ON_V6E, chip=CHIPS["v5p"])) == {"xla_tpu_scoped_vmem_limit_kib": "32768"}
    assert compiler_options(replace(ON_V6E, chip=CHIPS["v7x"])) == {
        "xla_tpu_scoped_vmem_limit_kib": "32768",
        "xla_tpu_control_large_2nd_minor_layout_for_x16": "false",
    }


def test_exchanges_of_pieces_overlap_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    options = compiler_options(ON_V6E, overlaps=True) or {}
    assert options["xla_tpu_enable_async_collective_fusion"] == "true"
    assert options["xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"] == "true"


def test_options_apply_to_tpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert compiler_options(replace(ON_V6E, use_kernel=False)) is None
    assert compiler_options(replace(ON_V6E, interpret=True)) is None


def test_libtpu_init_args_take_precedence_option_by_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other=1 --xla_tpu_scoped_vmem_limit_kib=98304")
    on_v7x = replace(ON_V6E, chip=CHIPS["v7x"])
    assert compiler_options(on_v7x) == {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
    assert "xla_tpu_enable_async_collective_fusion" in (compiler_options(ON_V6E, overlaps=True) or {})
    for stated in ("--xla_{}=false", "--xla_{}", "--noxla_{}", "-xla_{}", "--xla_{} true"):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--other {stated.format('tpu_enable_async_collective_fusion')}")
        options = compiler_options(ON_V6E, overlaps=True) or {}
        assert options["xla_tpu_scoped_vmem_limit_kib"] == "65536"
        assert "xla_tpu_enable_async_collective_fusion" not in options
