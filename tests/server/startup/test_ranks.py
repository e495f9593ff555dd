"""Ranks as processes start, follow rank 0 and end with it, however it ends. No framework is imported."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from fakes import FakeBackend, full_layout, scrambled
from support.engines import fake_ranks
from support.engines.fake_ranks import LIMITS, fake_backend, lead
from support.servers.served import environment
from support.suite.watching import Children, children, gone

from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.errors import ConfigError, EngineDeadError
from pagoda.server.startup import executors
from pagoda.server.startup.engine import BuiltEngine


@pytest.fixture(autouse=True)
def ranks_are_fake() -> Iterator[None]:
    with fake_backend():
        yield


@pytest.fixture
def young() -> Children:
    """Processes started since the test began."""
    return Children()


def answers(core: EngineCore) -> list[int]:
    core.add_request(EngineRequest(request_id="r", prompt_token_ids=[1, 2, 3], rules=SamplingRules(), max_tokens=9))
    tokens: list[int] = []
    while core.has_work:
        for output in core.step().outputs:
            tokens += output.new_token_ids
    return tokens


def answers_for_ever(core: EngineCore) -> None:
    while True:
        answers(core)


def core_of(built: BuiltEngine) -> EngineCore:
    assert isinstance(built.core, EngineCore)
    return built.core


def test_ranks_follow_rank_0_and_end_with_it(capfd: pytest.CaptureFixture[str], young: Children) -> None:
    built = lead("fake")
    assert len(young()) == 2
    for rank in young():
        os.kill(rank, signal.SIGINT)  # as Ctrl-C in a terminal does
    assert core_of(built).stats.kv_blocks_total == 37  # rank 2 has least room: 38 with the null block
    alone = FakeBackend(full_layout(), num_blocks=38, next_token=scrambled)
    assert answers(core_of(built)) == answers(generation_core(alone, alone.layout, LIMITS, (38,)))
    built.backend.close()
    built.backend.close()
    assert young() == []
    assert capfd.readouterr().err == ""


def test_killed_rank_is_named_at_once_and_the_others_end(young: Children) -> None:
    built = lead("fake")
    deaths: queue.SimpleQueue[EngineDeadError] = queue.SimpleQueue()
    assert built.hosts is not None
    built.hosts.watch(deaths.put)
    first, _ = young()
    os.kill(first, signal.SIGKILL)
    assert str(deaths.get(timeout=60)).startswith("rank 1 (GPU 1) was killed by SIGKILL: out of memory?")
    with pytest.raises(EngineDeadError, match=r"^rank 1 \(GPU 1\) was killed by SIGKILL"):
        answers(core_of(built))
    built.backend.close()
    assert young() == []


def test_failed_step_on_a_rank_is_reported(capfd: pytest.CaptureFixture[str], young: Children) -> None:
    built = lead("fake:step")
    with pytest.raises(EngineDeadError, match=r"^rank 1 \(GPU 1\): RuntimeError: the device is gone$"):
        answers_for_ever(core_of(built))
    built.backend.close()
    assert young() == []
    assert "RuntimeError: the device is gone" in capfd.readouterr().err  # a bug keeps its traceback


def test_load_error_of_a_rank_fails_the_start(capfd: pytest.CaptureFixture[str], young: Children) -> None:
    with pytest.raises(EngineDeadError, match=r"^rank 2 \(GPU 2\): the checkpoint lacks 3 parameters$"):
        lead("fake:load")
    assert young() == []
    assert capfd.readouterr().err == ""


def test_error_of_rank_0_ends_ranks_without_a_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], young: Children
) -> None:
    def refuse(size: int) -> None:
        raise ConfigError("--tensor-parallel-size", f"{size} are too many")

    monkeypatch.setattr(fake_ranks, "check_devices", refuse)
    with pytest.raises(ConfigError, match=r"^--tensor-parallel-size: 2 are too many$"):
        lead("fake", 2)
    assert young() == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("place", ["import", "meet"])
def test_rank_that_dies_before_it_joins_fails_the_start(
    place: str, monkeypatch: pytest.MonkeyPatch, young: Children
) -> None:
    monkeypatch.setenv("RANK_ENDS_IN", place)
    with pytest.raises(EngineDeadError, match=r"^rank 1 \(GPU 1\) ended with exit status 7$"):
        lead("fake", 2)
    assert young() == []


def test_exit_status_is_known_before_the_process_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    assert executors._status(process) is None
    process.kill()
    assert gone(process.pid)  # but not waited for
    with monkeypatch.context() as patch:
        patch.setattr(process, "poll", lambda: None)
        assert executors._exit_status(process).startswith("was killed by SIGKILL: out of memory?")
    process.wait()


def test_rank_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, young: Children) -> None:
    monkeypatch.setattr(executors, "_SHUTDOWN_SECONDS", 0.05)
    built = lead("fake:stay", 2)
    built.backend.close()
    assert young() == []


def lead_until_killed() -> None:
    """The engine of the next test: its ranks hang in a step."""
    built = lead("fake:hang")
    core = core_of(built)
    core.add_request(EngineRequest(request_id="r", prompt_token_ids=[1, 2, 3], rules=SamplingRules(), max_tokens=9))
    core.step()
    print(*children(), flush=True)
    threading.Event().wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_when_the_engine_is_killed(number: int) -> None:
    process = subprocess.Popen([sys.executable, "-P", __file__], stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    ranks = [int(word) for word in process.stdout.readline().split()]
    assert len(ranks) == 2
    process.send_signal(number)
    process.wait()
    assert all(map(gone, ranks))
    process.stdout.close()


def test_ranks_outlive_the_thread_that_started_them() -> None:
    engines: list[BuiltEngine] = []
    thread = threading.Thread(target=lambda: engines.append(lead("fake", 2)))
    thread.start()
    thread.join()
    assert len(answers(core_of(engines[0]))) == 9
    engines[0].backend.close()


if __name__ == "__main__":
    with fake_ranks.fake_backend():
        lead_until_killed()
