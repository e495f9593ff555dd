"""The arithmetic of a step's cost: against the model's own figures, and what balancing and graphs change."""

from __future__ import annotations

import pytest

from pagoda.benchmarks.gpu import model
from pagoda.benchmarks.gpu.step_cost import BOUND_US, LAUNCH_US, PROGRAM, Step, decodes, main


def test_a_prompt_has_the_models_flop() -> None:
    flop = sum(kernel.flop for kernel in Step(prompt=512).kernels())
    assert flop == pytest.approx(model.prefill_flops(model.CONFIG, 512), rel=1e-6)


def test_a_decode_reads_the_matrices_and_its_context() -> None:
    kernels = {kernel.name: kernel for kernel in Step(contexts=(1024,) * 4).kernels()}
    assert kernels["decode attention"].bytes == 4 * 1024 * model.kv_bytes(model.CONFIG)
    products = sum(kernel.bytes for name, kernel in kernels.items() if "product" in name)
    assert products == pytest.approx(2 * model.matrix_elements(model.CONFIG), rel=0.01)


def test_one_long_request_no_longer_holds_up_the_others() -> None:
    contexts = decodes("1x131072+95x1024")
    assert (len(contexts), max(contexts), min(contexts)) == (96, 131072, 1024)
    before, after = (
        {kernel.name: kernel for kernel in Step(contexts, balanced=balanced).kernels()}["decode attention"]
        for balanced in (False, True)
    )
    assert before.ms > 25, "one program reads 128k tokens"
    assert after.ms < 8
    assert after.ms > 1e3 * after.longest / PROGRAM, "all of them read at the device's rate"


def test_the_host_launches_a_short_prompt_at_once() -> None:
    short, long = Step(prompt=512), Step(prompt=8192)
    kernels = list(short.kernels())
    assert short.host_ms(kernels) < 0.1 * Step(prompt=512, captured=False).host_ms(kernels)
    assert long.host_ms(kernels) == pytest.approx(
        BOUND_US / LAUNCH_US * Step(prompt=8192, captured=False).host_ms(kernels)
    )


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--decode", "2x1024", "--prefill", "64"])
    printed = capsys.readouterr().out
    assert printed.count("decode attention") == 1
    assert printed.count("prefill attention") == 1
    main(["--decode", "2x1024", "--prefill", "64", "--json"])
    assert capsys.readouterr().out.count('"kernel": "all"') == 2
