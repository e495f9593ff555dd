"""Incident snapshots of engine processes, and `pagoda replay` of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import PROGRAM, build
from support.suite.watching import until

from pagoda.common.engine.incident.files import read_snapshot
from pagoda.common.errors import ConfigError, EngineDeadError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.cli.main import main
from pagoda.server.core_client.engine import ThreadClient
from pagoda.server.core_client.process_client import SNAPSHOT_SIGNAL, ProcessClient
from pagoda.server.settings.flags import AsyncEngineArgs

Make = Callable[..., AsyncLLM]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    started: list[AsyncLLM] = []

    def start(model: str, *, thread: bool = False, **args: Any) -> AsyncLLM:
        args = {"incident_dir": str(tmp_path / "incidents")} | args
        config = AsyncEngineArgs(model, **args).create_engine_config()
        client = ThreadClient(config, build) if thread else ProcessClient(config, PROGRAM)
        started.append(AsyncLLM(config, client=client, open_text=lambda _: byte_tokenizer()))
        return started[-1]

    yield start
    for llm in started:
        llm.shutdown()


async def text_of(llm: AsyncLLM, prompt: str, **params: Any) -> str:
    text = ""
    async for output in llm.generate(prompt, SamplingParams(**params), "request"):
        text = output.outputs[0].text
    return text


async def written(tmp_path: Path) -> Path:
    """The only snapshot, once it is written."""

    def files() -> list[Path]:
        return list((tmp_path / "incidents").glob("*.json"))

    await until(lambda: files() and files()[0].read_bytes().endswith(b"}"))
    (path,) = files()
    return path


@pytest.mark.setting("--incident-dir", "--steps", "--verbose")
@pytest.mark.command("replay")
@pytest.mark.parametrize("thread", [False, True], ids=["process", "thread"])
async def test_crash_leaves_a_snapshot_that_replays(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], thread: bool
) -> None:
    llm = make("fake:crash", thread=thread)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        await text_of(llm, "secretword", max_tokens=9)
    path = await written(tmp_path)
    content = path.read_text()
    assert "secretword" not in content
    snapshot = read_snapshot(path)
    assert snapshot.cause == "the device is gone"
    assert any("in execute" in line for line in snapshot.traceback)
    assert snapshot.config["model"]["model"] == "fake:crash"
    assert [plan.step for plan in snapshot.plans] == [0, 1, 2, 3]
    capsys.readouterr()
    assert main(["replay", str(path), "--verbose", "--steps", "50"]) == 0
    shown = capsys.readouterr().out
    for part in ("the device is gone", "plan step 0: 1 sequences, 10 tokens", "calls as recorded", "free blocks: "):
        assert part in shown, shown
    assert "row 0" in shown


@pytest.mark.setting("--incident-tokens")
async def test_tokens_are_written_if_asked(make: Make, tmp_path: Path) -> None:
    llm = make("fake:crash", incident_tokens=True)
    with pytest.raises(EngineDeadError):
        await text_of(llm, "abc", max_tokens=9)
    event = read_snapshot(await written(tmp_path)).events[0]
    assert event.token_ids[:3] == list(b"abc")  # type: ignore[union-attr]


async def test_stuck_engine_writes_a_snapshot_on_a_signal(make: Make, tmp_path: Path) -> None:
    llm = make("fake:hang")
    request = asyncio.ensure_future(text_of(llm, "abc", max_tokens=9))
    client = llm._engine._client
    assert isinstance(client, ProcessClient)
    await until(lambda: client._supervisor._busy)
    os.kill(client.pid, SNAPSHOT_SIGNAL)
    path = await written(tmp_path)
    assert read_snapshot(path).cause == "on demand, by signal"
    assert main(["replay", str(path)]) == 0
    request.cancel()


async def test_snapshot_on_demand(make: Make, tmp_path: Path) -> None:
    llm = make("fake:endless")
    request = asyncio.ensure_future(text_of(llm, "abc", max_tokens=300))
    await until(lambda: llm.stats.running)
    path = Path(await llm.take_snapshot())
    assert path.parent == tmp_path / "incidents"
    assert read_snapshot(path).cause == "on demand"
    assert main(["replay", str(path), "--steps", "100"]) == 0
    assert await request


async def test_folder_that_cannot_be_written_is_named(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    llm = make("fake", incident_dir=str(tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match=r"--incident-dir: .*file"):
        await llm.take_snapshot()
    assert await text_of(llm, "abc", max_tokens=1) == "d"


async def test_replay_says_where_it_differs(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make("fake:crash")
    with pytest.raises(EngineDeadError):
        await text_of(llm, "abcdefgh", max_tokens=9)
    path = await written(tmp_path)
    content = json.loads(path.read_text())
    next(each for each in content["events"] if each["type"] == "plan")["num_tokens"] = 7
    path.write_text(json.dumps(content))
    assert main(["replay", str(path)]) == 1
    assert "DIFFERENT: (step, sequences, tokens) is (0, 1, 8), it was (0, 1, 7)" in capsys.readouterr().out


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none.json")]) == 1
    assert "give a file that the server wrote" in capsys.readouterr().err


def test_signal_is_not_that_of_the_stacks() -> None:
    assert SNAPSHOT_SIGNAL is signal.SIGUSR1
