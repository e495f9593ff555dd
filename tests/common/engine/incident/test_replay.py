"""A snapshot replays to the same plans and the same state, and says nothing about tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fakes import FakeBackend, blocks_of, full_layout, hybrid_layout, mixed_layout, row_items, scrambled, state_layout

from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import StateSnapshots
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.incident import journal as journal_module
from pagoda.common.engine.incident.files import read_snapshot, snapshot_of, write_snapshot
from pagoda.common.engine.incident.replay import Replay
from pagoda.common.engine.incident.snapshot import Added, Planned, Reported, Snapshot
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import EMBEDDED
from pagoda.common.errors import RequestError


def core_of(layout: KvLayout, blocks: int = 40, **settings: Any) -> EngineCore:
    defaults = {"max_model_len": 64, "max_num_batched_tokens": 24, "max_num_seqs": 5, "block_size": 4}
    defaults["snapshots"] = StateSnapshots(interval=16, min_distance=4)
    backend = FakeBackend(layout, num_blocks=blocks_of(layout, blocks), next_token=scrambled)
    return generation_core(backend, layout, Limits(**(defaults | settings)), backend.num_blocks)


def request(name: str, prompt: list[int], **settings: Any) -> EngineRequest:
    defaults = {"rules": SamplingRules(), "max_tokens": 8}
    return EngineRequest(request_id=name, prompt_token_ids=prompt, **(defaults | settings))


def run(core: EngineCore, steps: int, seed: int = 0) -> None:
    """Random requests of two keys with common prefixes, n sequences, stops and aborts; more than the cache holds.

    Where the engine has rows for media, a third of the prompts have some.
    """
    draw = random.Random(seed)
    live: list[str] = []
    for step in range(steps):
        for number in range(draw.choice([0, 0, 1, 2])):
            prompt = [draw.randrange(3)] * draw.randint(1, 30) + [draw.randrange(50) for _ in range(draw.randint(0, 9))]
            group = f"g{step}" if draw.random() < 0.3 else ""
            name = f"r{seed}-{step}-{number}"
            stops = frozenset(draw.sample(range(50), 4))
            more = {"stop_token_ids": stops, "max_tokens": draw.randint(1, 12), "owner": draw.choice("ab")}
            more["stable_tokens"] = draw.choice([None, len(prompt) // 2])
            if core.limits.media_rows and draw.random() < 0.3:
                start, count = draw.randrange(len(prompt)), draw.randint(1, 6)
                prompt[start : start + count] = [EMBEDDED] * count
                rows = np.full((count, 2), draw.randrange(3), np.float32)
                more["media"] = row_items(prompt, rows.tobytes(), most=4)
            core.add_request(request(name, prompt, group=group, **more))
            live.append(name)
        if live and draw.random() < 0.1:
            core.abort([live.pop(draw.randrange(len(live)))])
        if draw.random() < 0.02:
            core.reset_prefix_cache()
        core.step()


def step_until_it_fails(core: EngineCore) -> None:
    for _ in range(20):
        core.step()


def replayed(snapshot: Snapshot) -> Replay:
    """Replay a snapshot through a file's bytes; every call must be as recorded."""
    replay = Replay(msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot))
    calls = list(replay.recorded())
    assert len(calls) == len(snapshot.events)
    assert [call for call in calls if call.difference or call.error] == []
    return replay


def state_of(scheduler: Any) -> list[Any]:
    batch = scheduler._batch
    return [
        [
            (each.request_id, each.row, len(each.outputs), [group.table for group in each.groups])
            for each in scheduler.running
        ],
        sorted((each.request_id, each.status.name) for each in scheduler.requests.values()),
        batch.computed.tolist(),
        batch.total.tolist(),
        [(pool.num_free, pool._next, pool._prev, list(pool._refs)) for pool in scheduler.kv.pools],
        scheduler.stats().steps,
    ]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("layout", [full_layout(), hybrid_layout(), state_layout(), mixed_layout()])
@pytest.mark.parametrize("segment", [7, 100_000])
def test_replay_gives_the_same_plans_and_state(
    monkeypatch: pytest.MonkeyPatch, layout: KvLayout, ahead: bool, segment: int
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_STEPS", segment)
    for policy in ("fcfs", "priority"):
        core = core_of(layout, async_scheduling=ahead, policy=policy)
        for seed in range(4):
            run(core, 60, seed)
            snapshot = snapshot_of(core, "on demand")
            assert sum(isinstance(each, Planned) for each in snapshot.events) <= (
                2 * segment * 3 if segment < 100 else 9999
            )
            replay = replayed(snapshot)
            assert core.journal is not None
            assert state_of(replay.scheduler) == state_of(core.journal._scheduler)
            replay.scheduler.check_integrity()
            list(replay.further(500))
            assert replay.scheduler.num_unfinished == 0, "it goes on to the end"


def test_media_replay_without_their_payloads() -> None:
    """Rows and encodes are compared; a snapshot names items by keyed digests."""
    core = core_of(full_layout(), media_rows=9, max_num_batched_tokens=16)
    for seed in range(4):
        run(core, 60, seed)
        snapshot = snapshot_of(core, "on demand")
        replay = replayed(snapshot)
        assert core.journal is not None
        assert state_of(replay.scheduler) == state_of(core.journal._scheduler)
        replay.scheduler.check_integrity()
        list(replay.further(500))
        assert replay.scheduler.num_unfinished == 0, "it goes on to the end"
    assert any(plan.encodes for plan in snapshot.plans)
    assert not [encode for plan in core.journal._plans for encode in plan.encodes if encode.item.payload]
    replay = Replay(snapshot)
    (first,) = [plan for plan in snapshot.plans if plan.encodes][:1]
    replay._details[first.step] = msgspec.structs.replace(first, encodes={})
    assert [call.difference for call in replay.recorded()][-1] == f"encodes of step {first.step} differ"


def test_snapshot_has_no_tokens_unless_asked() -> None:
    core = core_of(full_layout())
    core.add_request(request("secret", [987654] * 9, max_tokens=4))
    core.step()
    text = msgspec.json.encode(snapshot_of(core, "c")).decode()
    assert "987654" not in text
    digest = core.journal._scheduler.requests["secret"].hashes[0].hex()  # type: ignore[union-attr]
    assert digest[:24] not in text, "a plain digest could be compared with that of a guess"
    first, second = (snapshot_of(core, "c").events[0] for _ in range(2))
    assert isinstance(first, Added)
    assert isinstance(second, Added)
    assert first.digests != second.digests, "the key is not kept"
    asked = snapshot_of(core, "c", tokens=True).events[0]
    assert isinstance(asked, Added)
    assert (asked.token_ids or [])[:9] == [987654] * 9


def test_failure_of_the_backend_is_at_the_end_of_the_record() -> None:
    core = core_of(full_layout())
    core.add_request(request("a", [1, 2, 3]))
    core.step()
    backend = core._execute.__self__  # type: ignore[attr-defined]
    backend.fail_at = 3
    with pytest.raises(RuntimeError, match="the device is gone"):
        step_until_it_fails(core)
    snapshot = snapshot_of(core, "failed")
    last = [each for each in snapshot.events if isinstance(each, Planned | Reported)][-1]
    assert last.failed or isinstance(last, Planned)
    replayed(snapshot)


def test_failure_of_the_scheduler_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(full_layout())
    run(core, 10)
    core.add_request(request("a", [1, 2, 3]))
    scheduler = core.journal._scheduler  # type: ignore[union-attr]

    plan, steps = type(scheduler)._plan, scheduler.stats().steps

    def broken(self: Any, budget: Any, starts: Any) -> Any:
        if self.stats().steps < steps:
            return plan(self, budget, starts)
        raise RuntimeError("a bug in the plan")

    monkeypatch.setattr(type(scheduler), "_plan", broken)
    with pytest.raises(RuntimeError, match="a bug in the plan"):
        step_until_it_fails(core)
    calls = list(Replay(snapshot_of(core, "failed")).recorded())
    assert "a bug in the plan" in calls[-1].error
    assert calls[-1].difference == "", "it raised then, too"
    monkeypatch.undo()
    calls = list(Replay(snapshot_of(core, "failed")).recorded())
    assert calls[-1].difference == "the scheduler raised at the incident, now it does not"


def test_a_different_scheduler_is_noticed() -> None:
    core = core_of(full_layout())
    run(core, 40)
    snapshot = snapshot_of(core, "c")
    smaller = msgspec.structs.replace(snapshot, limits=replace(snapshot.limits, max_num_batched_tokens=8))
    calls = list(Replay(smaller).recorded())
    assert "it was" in calls[-1].difference


def test_snapshots_of_other_schedulers_say_why_they_cannot_be_replayed() -> None:
    core = core_of(full_layout(), max_drafts=2)
    snapshot = snapshot_of(core, "c")
    assert snapshot.why_not == "speculative decoding"
    with pytest.raises(RequestError, match="cannot be replayed: speculative decoding"):
        Replay(snapshot)


def test_files_are_private_and_few(tmp_path: Path) -> None:
    core = core_of(full_layout())
    folder = tmp_path / "incidents"
    paths = [write_snapshot(folder, snapshot_of(core, str(number))) for number in range(20)]
    assert paths[-1].stat().st_mode & 0o777 == 0o600
    assert len(list(folder.iterdir())) == 16
    assert read_snapshot(paths[-1]).cause == "19"
    for content, match in ((b"{}", "its format is None"), (b"x", "not an incident"), (b'{"format": 2}', "not an inc")):
        paths[-1].write_bytes(content)
        with pytest.raises(RequestError, match=match):
            read_snapshot(paths[-1])
    with pytest.raises(RequestError, match="give a file"):
        read_snapshot(tmp_path / "none")
