"""The requests of vLLM's own server tests, and what these tests want of the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rows import each_row
from support.vllm_requests.case import VllmCase, faults
from support.vllm_requests.differences import DIFFERENCES, Difference
from support.vllm_requests.servers import SERVERS, SMOL, Fleet, name_of
from support.vllm_requests.tables import CASES

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "coming-from-vllm.md"

REAL = [case for case in CASES if SERVERS[case.server].model == SMOL]
FAKE = [case for case in CASES if SERVERS[case.server].model != SMOL]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    found = Fleet(None)
    yield found
    found.close()


@pytest.fixture(scope="module")
def real(model_file: object) -> Iterator[Fleet]:
    found = Fleet(str(model_file))
    yield found
    found.close()


@each_row("case", FAKE, ids=lambda case: case.id)
def test_a_request_without_a_model(case: VllmCase, fleet: Fleet) -> None:
    check(case, fleet)


REPEATED = (
    "chat_completion/test_chat.py::test_structured_outputs_json_chat",
    "completion/test_completion.py::test_parallel_no_streaming",
    "completion/test_completion.py::test_single_completion",
    "responses/test_function_call.py::test_function_tool_use",
    "responses/test_simple.py::test_extra_sampling_params",
    "test_chunked_prompt.py::test_completion_stream_options_and_logprobs_with_long_prompts",
)
"""Tests whose requests a real model answers for seconds, and which ask for what others ask for, too."""


def usual_requests() -> set[str]:
    """Ids of the cases that `make test` sends to a real model: the first of each of vLLM's tests."""
    first: dict[str, str] = {}
    for case in REAL:
        first.setdefault(case.test, case.id)
    return {name for test, name in first.items() if not test.endswith(REPEATED)}


USUAL = usual_requests()
SLOW = pytest.mark.slow_matrix


@pytest.mark.model
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.id.rpartition(":")[2][:50], marks=() if case.id in USUAL else SLOW) for case in REAL],
)
def test_a_request_to_a_model(case: VllmCase, real: Fleet) -> None:
    check(case, real)


def test_cases_and_differences_are_told_apart() -> None:
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids)), sorted(one for one in set(ids) if ids.count(one) > 1)
    for difference in DIFFERENCES:
        for name in difference.cases:
            assert any(one.startswith(name) for one in ids), f"{name} is no case"
    for one in ids:
        assert len(found(one)) < 2, f"{one} differs for two reasons"


def test_the_guide_lists_the_differences() -> None:
    text = GUIDE.read_text()
    passed = sum(not found(case.id) for case in CASES)
    files = len({case.test.partition("::")[0] for case in CASES})
    assert f"{passed} of {len(CASES)} requests of {files} test files" in " ".join(text.split())
    table = text.partition("| vLLM's test |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [line.split(" | ")[1] for line in table]
    assert len(rows) == len(DIFFERENCES)
    for row, difference in zip(rows, DIFFERENCES):
        assert row.replace("`", "").lower().startswith(difference.name.lower())


def found(name: str) -> list[Difference]:
    return [one for one in DIFFERENCES if name.startswith(one.cases)]


def check(case: VllmCase, fleet: Fleet) -> None:
    """Send the requests; the answers are as vLLM's test wants them, or as the difference says."""
    views = case.answers(fleet[case.server], name_of(SERVERS[case.server]))
    if case.server == "crash":
        fleet.forget(case.server)
    differences = found(case.id)
    differing = case.faults(views)
    if not differences:
        assert not differing, "\n".join(differing)
        return
    assert differing, f"answered as in vLLM: take {case.id} from differences.py"
    left = list(faults(views, len(views) - 1, differences[0].instead))
    assert not left, "\n".join(left)
