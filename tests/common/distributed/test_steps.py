"""Two hosts over a socket pair: the follower runs the leader's steps, and each detects the other's failure."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeBackend, FakePending, FakeShards, hybrid_layout, row_items, scrambled
from support.engines.engine_runs import drained_tokens
from support.engines.replaying import Replaying, drafting
from support.engines.scripted_masks import add_masked

from pagoda.common.config.engine import Limits
from pagoda.common.distributed import leader as leader_module
from pagoda.common.distributed.follower import FollowingBackend
from pagoda.common.distributed.leader import LeadingBackend
from pagoda.common.distributed.messages import AgreedBlocks, BlockCount, Peer, WarmedUp, encode, send_frame
from pagoda.common.engine.core import SLEEP_TAGS, EngineCore, MakeScheduler, Sleeper, generation_core
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.steps.contract import EMBEDDED, StepPlan
from pagoda.common.errors import EngineDeadError, SleepError, WeightError
from pagoda.common.weights.lora.weights import AdapterWeights, LowRank

LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, media_rows=32)
Make = Callable[..., "Pair"]
RULES = SamplingRules(
    logit_bias=((3, 0.0),), bad_words=((1, 2),), min_tokens=1, stop_ids=(9,), logprobs=1, prompt_logprobs=0
)


class Pair:
    """Host 0 and host 1, whose `following` runs in a thread."""

    def __init__(self, pool: ThreadPoolExecutor, blocks: int = 40, fail_at: int | None = None, copies: int = 1) -> None:
        ours, theirs = socket.socketpair()
        self.left: list[str] = []
        self.here = FakeShards(hybrid_layout(), copies, num_blocks=48, next_token=scrambled)
        self.there = FakeShards(hybrid_layout(), copies, num_blocks=blocks, next_token=scrambled, fail_at=fail_at)
        self.leader, self.follower = Peer(theirs, "host 0 (a)", 0.3), Peer(ours, "host 1 (b)", 0.3)
        self.abandoned = threading.Event()
        self.leading = LeadingBackend(
            self.here,
            (self.follower,),
            lambda: self.left.append("leader"),
            abandon=self.abandoned.set,
            release=lambda: self.left.append("release"),
        )
        self.following = FollowingBackend(self.there, self.leader, lambda: self.left.append("follower"))
        self.pool = pool

    def follow(self) -> Future[None]:
        """Start host 1 and follow until the leader ends."""

        def run() -> None:
            try:
                self.following.load(iter(()))
                self.following.init_cache(self.following.plan_memory().num_blocks)
                self.following.warmup()
                core = generation_core(self.there, self.there.layout, LIMITS, self.there.num_blocks)
                self.following.follow(Sleeper(self.there, core, lambda: [("w", np.zeros(1))] * 2))
            finally:
                self.following.close()

        return self.pool.submit(run)

    def start(self, limits: Limits = LIMITS, make_scheduler: MakeScheduler = Scheduler) -> EngineCore:
        """Start up on host 0."""
        blocks = self.leading.plan_memory().num_blocks
        self.leading.init_cache(blocks)
        self.leading.warmup()
        return generation_core(self.leading, self.here.layout, limits, blocks, make_scheduler)


@pytest.fixture
def make() -> Iterator[Make]:
    """Creates pairs and closes them at the end, so that no thread waits forever."""
    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as ends:

        def made(**settings: int) -> Pair:
            pair = Pair(threads, **settings)
            ends.callback(pair.leader.close)
            return pair

        yield made


def answers(engine: EngineCore) -> dict[str, list[int]]:
    for number in range(5):
        prompt = [7 * number + place for place in range(1 + 4 * number)]
        rows = np.repeat(np.float32(prompt), 3).tobytes() if number == 3 else None
        engine_request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=prompt if rows is None else [EMBEDDED] * len(prompt),
            rules=RULES,
            max_tokens=6,
            media=() if rows is None else row_items([EMBEDDED] * len(prompt), rows),
        )
        if number in (2, 3):
            engine.add_request(engine_request)
        else:
            add_masked(engine, engine_request, 64)
    return drained_tokens(engine)


def test_adapters_reach_every_host_between_the_same_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of one matrix each; a host has the whole adapter, and its steps in order."""
    monkeypatch.setattr(leader_module, "ADAPTER_BYTES", 1)
    pair = make()
    seen: dict[str, list[tuple[int, int, AdapterWeights]]] = {"here": [], "there": []}
    for name, backend in (("here", pair.here), ("there", pair.there)):

        def load(slot: int, weights: AdapterWeights, name: str = name, backend: FakeShards = backend) -> None:
            seen[name].append((len(backend.plans), slot, weights))

        monkeypatch.setattr(backend, "load_adapter", load, raising=False)
    following = pair.follow()
    engine = pair.start()
    numbers = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    adapter = AdapterWeights(8, {name: LowRank(a, a.T.copy(), a[0]) for name, a in zip("qv", numbers)})
    for slot, weights in ((1, adapter), (0, AdapterWeights(1, {})), (1, adapter)):
        pair.leading.load_adapter(slot, weights)
        answers(engine)
    pair.leading.close()
    assert following.result() is None
    assert [each[:2] for each in seen["there"]] == [each[:2] for each in seen["here"]]
    for (_, _, here), (_, _, there) in zip(seen["here"], seen["there"]):
        assert there.rank == here.rank
        assert there.matrices.keys() == here.matrices.keys()
        for name, matrix in here.matrices.items():
            np.testing.assert_array_equal(there.matrices[name].a, matrix.a)
            np.testing.assert_array_equal(there.matrices[name].b, matrix.b)
            np.testing.assert_equal(there.matrices[name].copy, matrix.copy)
            np.testing.assert_array_equal(there.matrices[name].factor, matrix.factor)
    assert len(seen["there"]) == 3


def answers_for_ever(engine: EngineCore) -> None:
    while True:
        answers(engine)


def arrays(plan: StepPlan) -> list[np.ndarray]:
    starts = [start.token_ids for start in plan.starts]
    encodes = [part for encode in plan.encodes for part in (encode.rows, np.frombuffer(encode.item.payload, np.uint8))]
    numbers = [plan.rows, plan.query_start, plan.context, plan.token_ids, plan.samples]
    optional = [each for each in (plan.masked, plan.num_drafts) if each is not None]
    return [*numbers, *plan.block_tables, *starts, *optional, *encodes]


@pytest.mark.parametrize("drafts", [0, 3])
def test_every_host_runs_the_same_steps(make: Make, drafts: int) -> None:
    pair = make()
    following = pair.follow()
    alone = FakeBackend(hybrid_layout(), num_blocks=40, next_token=scrambled)
    want = answers(generation_core(alone, alone.layout, LIMITS, (40,)))
    proposer = Replaying(want, wrong=lambda name, place: place == 3)
    tokens_of = answers(pair.start(replace(LIMITS, max_drafts=drafts), drafting(proposer, 64)))
    pair.leading.close()
    assert following.result() is None
    assert tokens_of == want
    assert any(plan.num_drafts is not None for plan in pair.there.plans) == (drafts > 0)
    assert len(pair.there.plans) == len(pair.here.plans) > 6
    assert any(plan.encodes for plan in pair.there.plans)
    assert pair.here.masks.keys() == pair.there.masks.keys()
    assert len(pair.here.masks) > 3
    for step, masks in pair.here.masks.items():
        np.testing.assert_array_equal(masks.sequences, pair.there.masks[step].sequences)
        np.testing.assert_array_equal(masks.after, pair.there.masks[step].after)
        np.testing.assert_array_equal(masks.bits, pair.there.masks[step].bits)
    for ours, theirs in zip(pair.here.plans, pair.there.plans):
        assert [start.rules for start in ours.starts] == [start.rules for start in theirs.starts]
        for mine, other in zip(arrays(ours), arrays(theirs), strict=True):
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(mine, other)
    assert sorted(pair.left) == ["follower", "leader", "release"]
    assert not pair.abandoned.is_set()
    assert pair.here.closed
    assert pair.there.closed


def test_every_copy_of_the_model_runs_on_every_host(make: Make) -> None:
    pair = make(blocks=48, copies=2)
    following = pair.follow()
    pair.start()
    tokens_of = answers(sharded_core(pair.leading, pair.here.layout, LIMITS, (48,), 2))
    pair.leading.close()
    following.result()
    alone = FakeBackend(hybrid_layout(), num_blocks=48, next_token=scrambled)
    assert tokens_of == answers(generation_core(alone, alone.layout, LIMITS, (48,)))
    for ours, theirs in zip(pair.here.shards, pair.there.shards, strict=True):
        assert len(ours.plans) == len(theirs.plans) > 3
        assert ours.masks.keys() == theirs.masks.keys()
    assert all(shard.masks for shard in pair.there.shards)


def test_the_host_with_least_memory_sets_the_block_count(make: Make) -> None:
    pair = make(blocks=33)
    following = pair.follow()
    pair.start()
    assert (pair.here.num_blocks, pair.there.num_blocks) == ((33,), (33,))
    pair.leading.close()
    following.result()


def test_a_followers_error_is_reported(make: Make) -> None:
    pair = make()
    heard: queue.SimpleQueue[EngineDeadError] = queue.SimpleQueue()
    pair.leading.watch(heard.put)

    def fail() -> None:
        with contextlib.closing(pair.following):
            raise WeightError("the checkpoint lacks 3 parameters")

    failing = pair.pool.submit(fail)
    with pytest.raises(EngineDeadError, match=r"^host 1 \(b\): the checkpoint lacks 3 parameters$"):
        pair.leading.plan_memory()
    assert str(heard.get()) == "host 1 (b): the checkpoint lacks 3 parameters"
    pair.leading.close()
    assert isinstance(failing.exception(), WeightError)
    assert pair.left == ["release"]


def test_an_error_of_host_0_ends_the_others(make: Make) -> None:
    pair = make()
    following = pair.follow()
    pair.start()
    with pytest.raises(KeyError), contextlib.closing(pair.leading):
        raise KeyError("a bug")
    with pytest.raises(EngineDeadError, match=r"^host 0 \(a\): KeyError: 'a bug'$"):
        following.result()
    assert pair.left == ["release"]


def test_a_lost_host_is_the_root_cause_of_a_failed_step(make: Make) -> None:
    pair = make()
    following = pair.follow()
    engine = pair.start()
    pair.here.fail_at = 1
    engine.add_request(EngineRequest(request_id="r", prompt_token_ids=[1, 2], rules=RULES, max_tokens=6))
    pair.leader.close()
    with pytest.raises(EngineDeadError, match=r"^host 1 \(b\) is gone: "):
        answers(engine)
    assert following.exception() is not None
    pair.leading.close()


def test_a_step_that_was_abandoned_has_no_result(make: Make) -> None:
    """A collective that was aborted may return a wrong result instead of raising."""
    pair = make()
    following = pair.follow()
    engine = pair.start()
    heard: queue.SimpleQueue[EngineDeadError] = queue.SimpleQueue()
    pair.leading.watch(heard.put)
    execute = pair.here.execute

    def lose(plan: StepPlan) -> FakePending:
        pending = execute(plan)
        pair.leader.close()
        heard.get(timeout=60)
        return pending

    pair.here.execute = lose  # type: ignore[method-assign]
    pending = []
    lead = pair.leading.execute
    engine._execute = lambda plan: pending.append(lead(plan)) or pending[-1]
    with pytest.raises(EngineDeadError, match=r"^host 1 \(b\) is gone: "):
        answers(engine)
    with pytest.raises(EngineDeadError, match=r"^host 1 \(b\) is gone: "):
        pending[0].result()
    assert pair.abandoned.wait(60)
    assert following.exception() is not None
    pair.leading.close()
    assert pair.left == ["release"]


def test_a_failed_step_of_a_follower_is_its_own_when_host_0_lives(make: Make) -> None:
    pair = make(fail_at=2)
    following = pair.follow()
    engine = pair.start()
    with pytest.raises(EngineDeadError, match=r"^host 1 \(b\): RuntimeError: the device is gone$"):
        answers_for_ever(engine)
    assert isinstance(following.exception(), RuntimeError)
    pair.leading.close()


def test_other_followers_receive_which_host_failed(make: Make) -> None:
    pair = make()
    ours, theirs = socket.socketpair()
    third, gone = Peer(ours, "host 2 (c)", 0.3), Peer(theirs, "host 0 (a)", 0.3)
    leading = LeadingBackend(pair.here, (pair.follower, third), lambda: pair.left.append("leader"))
    gone.close()
    with pytest.raises(EngineDeadError):
        third.receive()
    leading.close()
    with pytest.raises(EngineDeadError, match=r"^host 0 \(a\): host 2 \(c\) is gone: the connection ended$"):
        pair.leader.receive()
    assert pair.left == []


def test_a_failure_before_watch_is_reported_by_watch(make: Make) -> None:
    pair = make()
    pair.leader.close()
    heard: list[EngineDeadError] = []
    with pytest.raises(EngineDeadError, match="is gone"):
        pair.follower.receive()
    pair.leading.watch(heard.append)
    assert [str(each) for each in heard] == ["host 1 (b) is gone: the connection ended"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (encode(WarmedUp()), "host 1 (b) sent WarmedUp instead of BlockCount"),
        (b"\xc1", "host 1 (b) is gone: not a message of version 8: "),
        (
            encode(AgreedBlocks((3,))).replace(b"num_blocks", b"num_clocks"),
            "host 1 (b) is gone: not a message of version 8: ",
        ),
    ],
)
def test_unexpected_messages(data: bytes, words: str) -> None:
    ours, theirs = socket.socketpair()
    peer = Peer(ours, "host 1 (b)")
    send_frame(theirs, data)
    with pytest.raises(EngineDeadError) as error:
        peer.expect(BlockCount)
    assert str(error.value).startswith(words)
    theirs.close()


def test_every_host_sleeps_and_wakes_up(make: Make) -> None:
    pair = make()
    following, core = pair.follow(), pair.start()
    want = answers(core)
    sleeper = Sleeper(pair.leading, core, lambda: [("w", np.zeros(1))])
    for level, here, there in ((1, "loaded", "loaded"), (2, "read 1", "read 2")):
        sleeper.sleep(level)
        assert pair.here.weights == pair.there.weights == ("on the host" if level == 1 else "gone")
        sleeper.wake_up(["weights"])
        assert (pair.here.weights, pair.there.weights) == (here, there)
        assert pair.there.cache_away
        sleeper.wake_up(["kv_cache"])
        assert answers(core) == want
    pair.leading.close()
    assert following.result() is None


def test_weights_of_several_hosts_are_not_updated_one_by_one(make: Make) -> None:
    pair = make()
    pair.follow()
    pair.start()
    for rank in (pair.leading, pair.following):
        with pytest.raises(WeightError, match=r"cannot be updated on several hosts or ranks.*sleep at level 2"):
            rank.update_weights([("w", np.zeros(1))])
    assert pair.here.weights == pair.there.weights == "loaded"
    pair.leading.close()


def test_a_host_that_cannot_sleep_is_named_and_all_stay_awake(make: Make) -> None:
    pair = make()
    pair.follow()
    core = pair.start()
    want = answers(core)
    sleeper = Sleeper(pair.leading, core, lambda: [])

    def no_room(level: int) -> None:
        raise MemoryError("no room in host memory")

    pair.there.sleep = no_room  # type: ignore[method-assign]
    with pytest.raises(SleepError, match=r"^the engine stays awake: host 1 \(b\): no room in host memory$"):
        sleeper.sleep(1)
    assert (pair.here.weights, pair.here.cache_away, sleeper.asleep) == ("loaded", False, ())
    assert answers(core) == want
    del pair.there.sleep
    sleeper.sleep(1)
    pair.there.full = True
    with pytest.raises(SleepError, match=r"^weights cannot wake up: host 1 \(b\): the device is out of memory; free"):
        sleeper.wake_up(SLEEP_TAGS)
    assert sleeper.asleep == SLEEP_TAGS
    pair.there.full = False
    sleeper.wake_up(SLEEP_TAGS)
    assert answers(core) == want
    pair.leading.close()
