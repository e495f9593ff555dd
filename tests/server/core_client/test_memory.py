"""Memory that requests freed goes back to the system."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from support.suite.watching import until

from pagoda.server.core_client import memory
from pagoda.server.core_client.memory import MIN_GROWTH, MemoryTrimmer, resident_bytes, trim_memory
from pagoda.server.processing.workers.child import child_env

MB = 1 << 20


def test_trims_after_growth_and_less_often_where_nothing_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    now, resident, freed, trims = 100.0, 200 * MB, 50 * MB, []
    monkeypatch.setattr(memory.time, "monotonic", lambda: now)

    def trim() -> None:
        nonlocal resident
        trims.append(now)
        resident -= freed

    trimmer = MemoryTrimmer(lambda: resident, trim)
    resident += MIN_GROWTH - 1
    trimmer.check()
    assert trims == []
    resident += 1
    trimmer.check()
    assert trims == [100.0]
    resident += MIN_GROWTH
    trimmer.check()
    assert len(trims) == 1, "too soon"
    now, freed = 110.0, 0
    for _ in range(40):
        trimmer.check()
        now += 5.0
    assert trims == [100.0, 110.0, 130.0, 170.0, 250.0]
    resident = 100 * MB
    trimmer.check()
    resident += MIN_GROWTH
    now, freed = 10_000.0, 50 * MB
    trimmer.check()
    assert trims[-1] == now, "growth counts from the lowest level"
    resident += MIN_GROWTH
    now += 10.0
    trimmer.check()
    assert trims[-1] == now, "after a trim that was worth it, the next is soon again"


def test_systems_without_the_call_are_left_alone() -> None:
    MemoryTrimmer(lambda: None, lambda: pytest.fail("nothing to trim")).check()


PROGRAM = """
import asyncio, json
from pagoda.server.core_client import memory
body = json.dumps([{"role": "user", "content": "x" * 200, "number": number} for number in range(60_000)])

def work():
    texts = [str(each) * 2 for each in json.loads(body)]  # by malloc, in an arena of this thread
    return [text + "z" for text in texts[-3:]]  # what survives at the end of an arena keeps all before it

async def main():
    trimmer, start, kept = memory.MemoryTrimmer(), memory.resident_bytes(), []
    for _ in range(3):
        kept += await asyncio.gather(*(asyncio.to_thread(work) for _ in range(4)))
    before = memory.resident_bytes()
    trimmer.check()
    print(json.dumps([before - start, memory.resident_bytes() - start]))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux" or resident_bytes() is None, reason="needs Linux's accounting")
def test_memory_of_large_bodies_is_returned() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, env=child_env(), check=True)
    kept, returned = json.loads(run.stdout)
    assert returned < 40 * MB
    assert kept > returned + 60 * MB, "otherwise there was nothing to return"


async def test_trimming_goes_on_until_its_task_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[MemoryTrimmer] = []
    monkeypatch.setattr(MemoryTrimmer, "check", lambda trimmer: checks.append(trimmer))
    task = asyncio.ensure_future(trim_memory(0.001))
    await until(lambda: len(checks) > 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
