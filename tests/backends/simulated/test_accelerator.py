"""Accelerators by their data sheets: memory, and step times from a compile report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines.simulated_engines import make_options, read_spec

from pagoda.backends.simulated.accelerator import Accelerator, activation_bytes
from pagoda.backends.simulated.backend import create, open_device
from pagoda.backends.simulated.hardware import CHIPS, EFFICIENCY
from pagoda.backends.simulated.step_time import StepLoad
from pagoda.common.backend import ParallelSizes
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.simulation import SimulationConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.errors import ConfigError

LLAMA = read_spec("llama-3.1-8b")
QWEN = read_spec("qwen3-8b")


def test_memory_is_what_weights_activations_and_runtime_leave() -> None:
    options = make_options(LLAMA, "h100")
    plan = create(options).plan_memory()
    chip = CHIPS["h100"]
    assert plan.weights == 2 * 8_030_261_248
    assert plan.block_bytes == (16 * 32 * 2 * 1024 * 2,)
    memory = Accelerator(chip).cache_bytes(options)
    usable = int(chip.memory * 0.9)
    assert memory.total == pytest.approx(usable - chip.reserved - plan.weights - activation_bytes(options), abs=1)


def test_tensor_parallel_devices_share_blocks() -> None:
    options = replace(make_options(LLAMA, "h100"), parallel=ParallelSizes(tensor=4))
    assert create(options).plan_memory().block_bytes == (16 * 32 * 2 * 1024 * 2 // 4,)
    many = replace(make_options(LLAMA, "v6e"), parallel=ParallelSizes(tensor=16))
    assert create(many).plan_memory().block_bytes == (16 * 32 * 2 * 1024 * 2 // 8,)


def test_an_8_bit_cache_has_blocks_of_half_the_size() -> None:
    options = replace(make_options(LLAMA, "h100"), cache=CacheConfig(cache_dtype="fp8"))
    assert create(options).plan_memory().block_bytes == (16 * 32 * 2 * 1024,)


def test_windows_and_full_layers_share_a_pool() -> None:
    window = read_spec("llama-3.1-8b", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=512)
    options = make_options(window)
    assert create(replace(options, layout=kv_layout(window, 16))).plan_memory().block_bytes == (16 * 32 * 2 * 1024 * 2,)


def test_a_model_that_does_not_fit_is_refused_with_its_parts() -> None:
    with pytest.raises(ConfigError, match=r"does not fit 1 x v5e: of 15\.8 GiB .* weights take 15\.0, .* more devices"):
        create(make_options(LLAMA, "v5e")).plan_memory()


def test_one_of_calibration_and_hardware() -> None:
    with pytest.raises(ConfigError, match=r"--hardware: .* --calibration already"):
        SimulationConfig(calibration="a.json", hardware="h100")
    with pytest.raises(ConfigError, match=r"--compile-report: .* add --hardware"):
        open_device(SimulationConfig(compile_report="a.json"))
    with pytest.raises(ConfigError, match=r"--hardware: required"):
        open_device(SimulationConfig())


# Compile reports.


def program(tokens: int, seqs: int, context: int, cycles: int | None, *, decode: bool = False) -> dict[str, Any]:
    shape = {"tokens": tokens, "seqs": seqs, "context": context, "decode_only": decode}
    return {"program": "forward", "cycles": cycles, "shape": shape}


def write_report(folder: Path, *programs: dict[str, Any], **changes: Any) -> Path:
    path = folder / "report.json"
    sample = {"program": "sample", "cycles": 1750, "sampled_rows": 64}
    report = {"tensor_parallel_size": 1, "clock_hz": 1.75e9, "programs": [*programs, sample]}
    path.write_text(json.dumps(report | changes))
    return path


PROGRAMS = (
    program(8, 8, 8192, 17_500_000, decode=True),
    program(64, 64, 8192, 19_000_000, decode=True),
    program(256, 8, 8192, 22_000_000),
    program(2048, 64, 8192, 84_000_000),
    program(4096, 64, 8192, None),
)


def step(*lens: int) -> StepLoad:
    query = np.array(lens)
    return StepLoad(query, query + 100, len(lens))


@pytest.mark.setting("--compile-report")
def test_a_step_takes_the_cycles_of_the_smallest_program_that_holds_it(tmp_path: Path) -> None:
    options = replace(
        make_options(LLAMA, "v6e"),
        simulation=SimulationConfig(hardware="v6e", compile_report=str(write_report(tmp_path, *PROGRAMS))),
    )
    compiled = open_device(options.simulation).step_time(options)
    roofline = open_device(SimulationConfig(hardware="v6e")).step_time(options)
    beside = EFFICIENCY["tpu"].step_seconds + 1e-6
    for lens, cycles in [((1,) * 5, 17.5e6), ((1,) * 9, 19e6), ((200, 1), 22e6), ((300,), 84e6), ((90,) * 10, 84e6)]:
        load = step(*lens)
        attention = roofline.attention_seconds(load)  # type: ignore[attr-defined]
        assert compiled.seconds(load) == pytest.approx(cycles / 1.75e9 + attention + beside)
    with pytest.raises(ConfigError, match=r"--compile-report: .* no program for a step of 3000 tokens of 1 sequences"):
        compiled.seconds(step(3000))


def test_a_report_that_does_not_serve_is_refused(tmp_path: Path) -> None:
    for path, words in [
        (tmp_path / "none.json", "No such file"),
        (write_report(tmp_path, *PROGRAMS, tensor_parallel_size=4), "is for 4 devices, not 1"),
    ]:
        options = replace(
            make_options(LLAMA, "v6e"), simulation=SimulationConfig(hardware="v6e", compile_report=str(path))
        )
        with pytest.raises(ConfigError, match=f"--compile-report: .*{words}"):
            create(options)
    options = replace(
        make_options(LLAMA, "v6e"),
        simulation=SimulationConfig(hardware="v6e", compile_report=str(write_report(tmp_path))),
    )
    with pytest.raises(ConfigError, match="no cycles of steps"):
        create(options)
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not a report"):
        create(options)
