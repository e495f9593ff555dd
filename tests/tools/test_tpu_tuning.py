"""The search for block sizes of the TPU attention kernel, with a made-up compiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("jax")

import tpu_tuning
from tpu_tuning import CandidateError, Figures, Problem

from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout, plan

KEY = "v6e/decode/bfloat16/8x4x128"
FORMULA = {"queries": 8, "fetch": 2048, "tokens": 512, "heads": 8}


class Compiler:
    """Refuses passes of 1024 tokens; passes of 256 tokens and four heads are the fastest."""

    def __init__(self, tokens: float = 100, memory: float = 1) -> None:
        self.tokens, self.memory, self.calls = tokens, memory, 0

    def __call__(self, problem: Problem, settings: plan.Settings) -> Figures:
        self.calls += 1
        if settings["tokens"] == 1024:
            raise CandidateError("VMEM")
        slow = self.tokens * (settings["tokens"] != 256) + 10 * (settings["heads"] != 4)
        return Figures(1000 + slow, self.memory)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.json"
    path.write_text('{"blocks": {"v6e/mixed/bfloat16/w128": {"heads": 8}}}')
    return path


def run(table: Path, compiler, *more: str) -> int:
    flags = ["--chip", "v6e", "--heads", "32,8,128", "--dtype", "bfloat16", "--variant", "decode"]
    return tpu_tuning.main([*flags, *more, "--results", str(table.with_name("results.jsonl"))], compiler, table)


def entries(table: Path) -> dict[str, dict[str, int]]:
    return json.loads(table.read_text())["blocks"]


def test_the_fastest_candidate_is_written(table: Path) -> None:
    assert run(table, Compiler()) == 0
    assert entries(table) == {
        KEY: FORMULA | {"tokens": 256, "heads": 4},
        "v6e/mixed/bfloat16/w128": {"heads": 8},
    }
    assert len(table.read_text().splitlines()) == 6, "an entry per line"


def test_a_small_gain_keeps_the_formula_and_records_the_search(table: Path) -> None:
    assert run(table, Compiler(tokens=1)) == 0
    assert entries(table)[KEY] == FORMULA
    assert run(table, Compiler(memory=5000)) == 0, "bound by memory: bundles do not matter"
    assert entries(table)[KEY] == FORMULA


def test_a_second_run_compiles_nothing_again(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Compiler(), Compiler()
    assert run(table, first) == 0 == run(table, second)
    assert (first.calls > 5, second.calls) == (True, 0)
    monkeypatch.setattr(tpu_tuning, "sources", lambda: "another kernel")
    assert run(table, second) == 0
    assert second.calls == first.calls


def test_a_limited_run_continues_where_it_stopped(table: Path) -> None:
    whole, parts = Compiler(), Compiler()
    before = entries(table)
    assert run(table, parts, "--limit", "3") == 0
    assert (parts.calls, entries(table)) == (3, before)
    assert run(table, parts, "--limit", "3") == 0 == run(table, parts)
    found = entries(table)
    table.with_name("results.jsonl").unlink()
    assert run(table, whole) == 0
    assert (parts.calls, found) == (whole.calls, entries(table))


def test_a_search_in_which_nothing_compiles_fails(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = table.read_text()

    def refuse(problem: Problem, settings: plan.Settings) -> Figures:
        raise CandidateError("unsupported")

    assert run(table, refuse) == 1
    assert table.read_text() == before
    assert "no candidate compiles" in capsys.readouterr().err
    assert run(table, refuse) == 1, "failures are known, too"


@pytest.mark.parametrize("tokens", [512, 256])
def test_a_schedule_that_cannot_be_read_is_no_reason_for_an_entry(table: Path, tokens: int) -> None:
    compiler, before = Compiler(), entries(table)

    def read(problem: Problem, settings: plan.Settings) -> Figures:
        if settings["tokens"] == tokens:
            raise tpu_tuning.UnreadableError("misparsed")
        return compiler(problem, settings)

    for _ in range(2):  # compiled, then from the results
        if tokens == FORMULA["tokens"]:
            assert run(table, read) == 1
            assert entries(table) == before
        else:
            assert run(table, read) == 0
            assert entries(table)[KEY] == FORMULA


def test_heads_must_be_three_numbers(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(table, Compiler(), "--heads", "30,8,128") == 2
    assert "QUERY_HEADS,KV_HEADS,HEAD_DIM" in capsys.readouterr().err


def test_heads_with_the_same_matrices_are_searched_once() -> None:
    both = list(tpu_tuning.problems(["v6e"], ["32,8,64", "32,4,128"], ["bfloat16"], ["decode", "mixed"]))
    assert [problem.key for problem in both] == ["v6e/decode/bfloat16/4x8x128", "v6e/mixed/bfloat16/4x8x128"]


def test_every_entry_is_one_that_the_kernel_reads() -> None:
    """The keys of all entries are found by some heads, and entries of one width serve other heads of that width."""
    searched = tpu_tuning.problems(list(CHIPS), list(tpu_tuning.HEADS), list(tpu_tuning.DTYPES), ["decode", "mixed"])
    own = {problem.key: problem for problem in searched}
    for key, entry in plan._table().items():
        if "/w" in key:
            continue
        problem = own[key]
        chosen = plan.block_entry(CHIPS[problem.chip], problem.layout, problem.group_rows, decode=problem.decode)
        assert (chosen.source, chosen.settings) == (plan.BlockSource.TUNED, entry)


def test_heads_without_an_entry_use_that_of_their_width_and_then_the_formula() -> None:
    layout = PagedKvLayout(24, 128, "bfloat16", 128)
    other = plan.block_entry(CHIPS["v6e"], layout, 3, decode=False)
    assert (other.source, other.settings["heads"]) == (plan.BlockSource.WIDTH, 8)
    formula = plan.block_entry(CHIPS["v6e"], layout, 3, decode=True)
    assert formula == plan.BlockEntry(plan.block_formula(layout, 3, decode=True), plan.BlockSource.FORMULA)
