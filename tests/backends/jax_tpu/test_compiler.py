"""What XLA is told beside a program."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("flax")

import support.jax_devices  # noqa: F401

from pagoda.backends.jax_tpu.execution.program_keys import compiler_options
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.kernels_pallas.chips import CHIPS

ON_V6E = KernelChoice(128, "bfloat16", use_kernel=True, chip=CHIPS["v6e"])


def test_half_of_vmem_is_for_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert compiler_options(ON_V6E) == {"xla_tpu_scoped_vmem_limit_kib": "65536"}
    assert compiler_options(replace(ON_V6E, chip=CHIPS["v5p"])) == {"xla_tpu_scoped_vmem_limit_kib": "32768"}


def test_the_options_are_a_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert compiler_options(replace(ON_V6E, use_kernel=False)) is None
    assert compiler_options(replace(ON_V6E, interpret=True)) is None


def test_what_the_operator_told_libtpu_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other=1 --xla_tpu_scoped_vmem_limit_kib=98304")
    assert compiler_options(ON_V6E) is None
