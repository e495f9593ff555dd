"""Random traffic over the whole engine and the strict fake backend.

Whatever comes in whatever order: no block is lost or held twice, every request ends, its tokens are those it would get
alone, and an idle engine holds nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from fakes import (
    FakeBackend,
    FakeShards,
    full_layout,
    hybrid_layout,
    mixed_layout,
    pools_layout,
    scrambled,
    snapshots_every,
    state_layout,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.engines.replaying import Replaying, drafting
from support.engines.scripted_masks import FINAL, SlowLibrary, add_masked, allowed
from support.suite.clock import Clock

from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import StateSnapshots
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.media.items import MediaItem, media_digest
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.steps.contract import EMBEDDED
from pagoda.common.models.mixers.caches import FullCache, StateCache

STOPS = frozenset({3, 4})
MAX_LEN = 48

# Few distinct beginnings, so that prefixes are shared, and few lengths around page borders.
PROMPT = st.builds(
    lambda base, length, tail: ([base] * length + tail)[: MAX_LEN - 1] or [base],
    st.integers(10, 11),
    st.sampled_from([1, 4, 8, 9, 12, 16, 21]),
    st.lists(st.integers(5, 8), max_size=6),
)
REQUEST = st.builds(
    lambda prompt, max_tokens, min_tokens, priority, salt, unstable, logprobs, prompt_logprobs: EngineRequest(
        request_id="",
        prompt_token_ids=prompt,
        rules=SamplingRules(min_tokens=min_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
        max_tokens=max_tokens,
        stop_token_ids=STOPS,
        eos_token_ids=frozenset({3}),
        priority=priority,
        cache_salt=salt,
        stable_tokens=None if unstable is None else max(len(prompt) - unstable, 0),
    ),
    PROMPT,
    st.integers(1, 24),
    st.sampled_from([0, 0, 4]),
    st.integers(0, 2),
    st.sampled_from([None, None, None, "s"]),
    st.sampled_from([None, None, 3, 9]),
    st.sampled_from([None, None, 0]),
    st.sampled_from([None, None, None, 0]),
)


SNAPSHOTS = [
    snapshots_every(4),
    snapshots_every(8),
    StateSnapshots(interval=0, min_distance=4),
    StateSnapshots(interval=0, min_distance=1),
    StateSnapshots(interval=12, min_distance=8),
    StateSnapshots(unit=8, interval=16, min_distance=2),
    StateSnapshots(mode="none"),
]
"""Where recurrent state is kept."""


VOCAB = 64
"""Of masked requests; scripted tokens are below 50."""


def with_media(request: EngineRequest, items: list[tuple[int, int, int, int]]) -> EngineRequest:
    """The request with those items (first position, rows, positions between the halves, content) that fit its prompt.

    Items of one content have the same rows, and a picture's encoder computes them; others are rows of the caller.
    """
    prompt = list(request.prompt_token_ids)
    media = []
    for start, count, gap, content in items:
        spans = [(start, count)] if not gap or count < 2 else [(start, 1), (start + 1 + gap, count - 1)]
        places = [place for first, length in spans for place in range(first, first + length)]
        if places[-1] >= len(prompt) or any(prompt[place] == EMBEDDED for place in places):
            continue
        for place in places:
            prompt[place] = EMBEDDED
        payload = np.arange(count, dtype=np.float32) + 10 * content + 5
        shape = count, 4
        kind = "image" if content % 2 else "rows"
        digest = media_digest(kind=kind, shape=shape, dtype="float32", payload=payload.tobytes(), options=())
        media.append(
            MediaItem(
                digest=digest,
                kind=kind,
                payload=payload.tobytes(),
                shape=shape,
                dtype="float32",
                grid=(1, 1, count),
                spans=tuple(spans),
            )
        )
    rules = replace(request.rules, prompt_logprobs=None) if media else request.rules
    return replace(request, prompt_token_ids=prompt, media=tuple(media), rules=rules)


def said(request: EngineRequest) -> list[int]:
    """What the prompt's positions say: their tokens, or the first numbers of their rows."""
    prompt = list(request.prompt_token_ids)
    for item in request.media:
        places = [place for first, length in item.spans for place in range(first, first + length)]
        for place, number in zip(places, np.frombuffer(item.payload, np.float32).tolist()):
            prompt[place] = int(number)
    return prompt


def alone(request: EngineRequest, room: int, masked: bool = False) -> list[int]:
    """What the request must answer: the scripted tokens, up to a stop, its limit or the end of the room.

    With `masked` each is the scripted token or the next one that the mask allows.
    """
    history, answer = said(request), []
    while len(answer) < request.max_tokens and len(history) < room:
        token = scrambled(history)
        if masked:
            token = min(allowed(answer, VOCAB), key=lambda each: (each < token, each))
        history.append(token)
        answer.append(token)
        if token in request.stop_token_ids and len(answer) >= request.rules.min_tokens:
            break
        if masked and token == FINAL:
            break
    return answer


class Traffic(RuleBasedStateMachine):
    """One engine with drawn settings, and a record of what each request must answer."""

    @initialize(
        layout=st.sampled_from(
            [
                full_layout(),
                hybrid_layout(window=6),
                hybrid_layout(window=1),
                pools_layout(),
                state_layout(),
                mixed_layout(),
            ]
        ),
        num_blocks=st.sampled_from([11, 14, 18, 24, 40]),
        num_states=st.sampled_from([3, 5, 9, 30]),
        rows=st.sampled_from([1, 3, 4, 6]),
        chunk=st.sampled_from([6, 7, 16, 64]),
        chunked=st.booleans(),
        threshold=st.sampled_from([0, 3]),
        caching=st.sampled_from([True, True, False]),
        snapshots=st.sampled_from(SNAPSHOTS),
        policy=st.sampled_from(["fcfs", "priority"]),
        ahead=st.booleans(),
        extents=st.booleans(),
        drafts=st.sampled_from([0, 1, 2, 3, 5, 7]),
        accuracy=st.sampled_from([0, 30, 70, 90, 100]),
        slow=st.sampled_from([0, 0, 20, 60, 100]),
    )
    def start(
        self,
        layout,
        num_blocks,
        num_states,
        rows,
        chunk,
        chunked,
        threshold,
        caching,
        snapshots,
        policy,
        ahead,
        extents,
        drafts,
        accuracy,
        slow,
    ):
        self.clock = Clock()
        self.library = SlowLibrary(self.clock, slow)
        limits = Limits(
            max_model_len=MAX_LEN,
            max_num_batched_tokens=chunk if chunked else max(chunk, MAX_LEN),
            max_num_seqs=rows,
            block_size=layout.block_size,
            chunked_prefill=chunked,
            prefix_caching=caching,
            snapshots=snapshots,
            long_prefill_token_threshold=threshold if chunked else 0,
            policy=policy,
            async_scheduling=ahead,
            max_drafts=min(drafts, 5),
        )
        states = (isinstance(pool.kind, StateCache) for pool in layout.pools)
        blocks = tuple(num_states if state else num_blocks for state in states)
        self.expected: dict[str, list[int]] = {}
        self.accuracy = accuracy
        self.proposer = Replaying(
            self.expected,
            wrong=lambda name, place: place * 37 % 101 * (1 + int(name)) % 100 >= accuracy,
            most=lambda name, place: (place * 13 + int(name)) % 11,
        )
        self.engine = self.make(limits, layout, blocks, next_token=scrambled, prefers_extents=extents)
        self.requests: dict[str, EngineRequest] = {}
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.gone: set[str] = set()
        self.room = min(MAX_LEN, self.kv(self.engine).max_tokens + 1)

    def make(self, limits: Limits, layout: KvLayout, num_blocks: tuple[int, ...], **fake: Any) -> EngineCore:
        self.backend = backend = FakeBackend(layout, num_blocks=num_blocks, **fake)
        return generation_core(backend, layout, limits, backend.num_blocks, drafting(self.proposer, VOCAB, self.clock))

    def kv(self, engine: Any) -> KvManager:
        """The manager of any shard."""
        return engine._kv_managers[0]

    @rule(requests=st.lists(st.tuples(REQUEST, st.booleans()), min_size=2, max_size=6))
    def add(self, requests):
        self.add_requests(requests)

    def add_requests(self, requests):
        for drawn, masked in requests:
            if not self.kv(self.engine).fits(len(drawn.prompt_token_ids) + 1):
                continue
            request = replace(drawn, request_id=str(len(self.expected)))
            if masked:
                add_masked(self.engine, request, VOCAB, self.library)
            else:
                self.engine.add_request(request)
            self.requests[request.request_id] = request
            self.expected[request.request_id] = alone(request, self.room, masked)
            self.answers[request.request_id] = []

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            for output in self.engine.step().outputs:
                name = output.request_id
                assert name not in self.gone, "an aborted request spoke"
                assert name not in self.ended, "a finished request spoke"
                request = self.requests[name]
                if request.rules.prompt_logprobs is not None and not self.answers[name]:
                    assert [p.token_ids[0] for p in output.prompt_logprobs] == request.prompt_token_ids[1:]
                else:
                    assert output.prompt_logprobs is None
                if request.rules.logprobs is not None:
                    length = len(request.prompt_token_ids) + len(self.answers[name])
                    places = range(length, length + len(output.new_token_ids))
                    assert [p.logprobs[0] for p in output.logprobs] == [-float(place) for place in places]
                    assert [p.token_ids[0] for p in output.logprobs] == output.new_token_ids
                self.answers[name] += output.new_token_ids
                if output.finish_reason:
                    self.ended[name] = output.finish_reason

    @precondition(lambda self: len(self.expected) > len(self.ended) + len(self.gone))
    @rule(data=st.data())
    def abort(self, data):
        alive = [name for name in self.expected if name not in self.ended and name not in self.gone]
        name = data.draw(st.sampled_from(alive))
        self.engine.abort([name])
        self.gone.add(name)

    @rule()
    def reset_cache(self):
        self.engine.reset_prefix_cache()

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        assert all(plan.num_tokens <= self.engine.limits.max_num_batched_tokens for plan in self.backend.plans[-6:])
        for name, answer in self.answers.items():
            assert answer == self.expected[name][: len(answer)]

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.has_work:
            self.step(1)
            steps += 1
            assert steps < 5000, "the engine does not come to rest"
        assert set(self.ended) | self.gone == set(self.expected)
        for name, reason in self.ended.items():
            assert self.answers[name] == self.expected[name]
            stopped = self.answers[name][-1] in STOPS | {FINAL} and reason == "stop"
            assert stopped or reason == "length"
        assert self.engine.stats.kv_blocks_used == 0
        self.engine.check_integrity()


class GuessedTraffic(Traffic):
    """The same with drafts that the backend guesses."""

    def make(self, limits: Limits, layout: KvLayout, num_blocks: tuple[int, ...], **fake: Any) -> EngineCore:
        limits = replace(limits, device_drafts=limits.max_drafts > 0)
        right = self.accuracy
        self.backend = backend = FakeBackend(
            layout, num_blocks=num_blocks, guesses_right=lambda position: position * 37 % 101 < right, **fake
        )
        return generation_core(backend, layout, limits, backend.num_blocks, partial(Scheduler, clock=self.clock))


class MediaTraffic(Traffic):
    """The same with media in prompts, and rows for few of them."""

    def make(self, limits: Limits, layout: KvLayout, num_blocks: tuple[int, ...], **fake: Any) -> EngineCore:
        whole = 0 if limits.chunked_prefill else MAX_LEN
        if not any(isinstance(group.spec, FullCache) for group in layout.groups):
            layout = full_layout()  # the fake backend recalls media by its pages
            num_blocks = num_blocks[:1]
        limits = replace(limits, media_rows=whole + 9 + self.accuracy // 10, max_encoder_rows=limits.max_num_seqs * 2)
        return super().make(limits, layout, num_blocks, **fake)

    @rule(
        requests=st.lists(st.tuples(REQUEST, st.booleans()), min_size=2, max_size=6),
        items=st.lists(
            st.tuples(st.integers(0, 20), st.integers(1, 9), st.sampled_from([0, 0, 2]), st.integers(0, 3)),
            min_size=1,
            max_size=5,
        ),
    )
    def add_media(self, requests, items):
        items_of = items, items[1:]
        self.add_requests([(with_media(drawn, items_of[n % 2]), masked) for n, (drawn, masked) in enumerate(requests)])


class ShardedTraffic(Traffic):
    """The same over two copies of the model."""

    def make(self, limits: Limits, layout: KvLayout, num_blocks: tuple[int, ...], **fake: Any) -> EngineCore:
        self.backend = backend = FakeShards(layout, 2, num_blocks=num_blocks, **fake)
        return sharded_core(backend, layout, limits, backend.num_blocks, 2, drafting(self.proposer, VOCAB, self.clock))

    def kv(self, engine: Any) -> KvManager:
        return engine._scheduler.shards[0].kv


SETTINGS = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
Traffic.TestCase.settings = SETTINGS
ShardedTraffic.TestCase.settings = settings(SETTINGS, max_examples=40)
GuessedTraffic.TestCase.settings = settings(SETTINGS, max_examples=60)
MediaTraffic.TestCase.settings = settings(SETTINGS, max_examples=25)
TestEngine = Traffic.TestCase
TestMedia = MediaTraffic.TestCase
TestGuesses = GuessedTraffic.TestCase
TestShards = ShardedTraffic.TestCase
