"""The requests of vLLM's own server tests, and what these tests want of the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.checkpoints.twin_model import write_twin
from support.servers.vllm_requests.case import VllmCase, faults
from support.servers.vllm_requests.servers import SERVERS, SMOL, Fleet, name_of
from support.servers.vllm_requests.tables import CASES, DIFFERENCES, FOLDER, TABLES, Difference

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "coming-from-vllm.md"

REAL = [case for case in CASES if SERVERS[case.server].model == SMOL]
FAKE = [case for case in CASES if SERVERS[case.server].model != SMOL]


OF_WEIGHTS = (
    "entrypoints/openai/chat_completion/test_chat.py::test_more_than_one_prompt_logprobs_chat",
    "entrypoints/openai/chat_completion/test_chat.py::test_response_format_json_object",
)
"""Tests that want what only a trained model answers."""


def by_file(cases: Sequence[VllmCase]) -> dict[str, list[VllmCase]]:
    """The cases of each of vLLM's test files, by a short name of the file."""
    files: dict[str, list[VllmCase]] = {}
    for case in cases:
        name = (
            case.test.partition(".py::")[0]
            .removeprefix("entrypoints/")
            .replace("test_", "")
            .replace("chat_completion/", "chat/")
        )
        files.setdefault(name, []).append(case)
    return files


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    found = Fleet(None)
    yield found
    found.close()


@pytest.fixture(scope="module")
def twins(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A model with the tokenizer of the real one."""
    found = Fleet(str(write_twin(tmp_path_factory.mktemp("twin"), model_file)))
    yield found
    found.close()


@pytest.fixture(scope="module")
def real(model_file: Path) -> Iterator[Fleet]:
    found = Fleet(str(model_file))
    yield found
    found.close()


@pytest.mark.parametrize("file", by_file(FAKE))
def test_without_a_model(file: str, fleet: Fleet) -> None:
    check(by_file(FAKE)[file], fleet)


@pytest.mark.model
@pytest.mark.parametrize("file", by_file(REAL))
def test_with_random_weights(file: str, twins: Fleet) -> None:
    check([case for case in by_file(REAL)[file] if case.test not in OF_WEIGHTS], twins)


@pytest.mark.model
@pytest.mark.slow_matrix
@pytest.mark.parametrize("file", by_file(REAL))
def test_with_a_model(file: str, real: Fleet) -> None:
    check(by_file(REAL)[file], real)


def test_cases_and_differences_are_told_apart() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == {*TABLES, "differences"}
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


def check(cases: Sequence[VllmCase], fleet: Fleet) -> None:
    """Send the requests; the answers are as vLLM's tests want them, or as the differences say."""
    wrong = {case.id: fault for case in cases if (fault := fault_of(case, fleet))}
    assert not wrong, "\n".join(f"{name}: {fault}" for name, fault in wrong.items())


def fault_of(case: VllmCase, fleet: Fleet) -> str:
    """Return what is wrong with the answers; empty: nothing."""
    views = case.answers(fleet[case.server], name_of(SERVERS[case.server]))
    if case.server == "crash":
        fleet.forget(case.server)
    differences, differing = found(case.id), case.faults(views)
    if not differences:
        return "; ".join(differing)
    if not differing:
        return "answered as in vLLM: take it from differences.json"
    return "; ".join(faults(views, len(views) - 1, differences[0].instead))
