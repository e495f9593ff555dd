"""Stand-ins for the parts that need weights or files: a backend with scripted tokens, a byte tokenizer, tiny specs.

FakeBackend is strict. It keeps a simulated KV cache in which each slot holds a digest of the *whole* token history up
to it, writes through the block tables, and before it samples reads the context back through them. A block that was
shared wrongly, reused too early or not filled therefore fails at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from pagoda.common.backend import Capabilities, MemoryPlan, Weight
from pagoda.common.config.groups.cache import StateSnapshots
from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout, layout_of
from pagoda.common.engine.media.items import MediaItem, media_digest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import (
    EMBEDDED,
    FIRST_ROW,
    GUESSED,
    NULL_BLOCK,
    PREVIOUS,
    RowStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)
from pagoda.common.models.mixers import Attention
from pagoda.common.models.mixers.caches import FullCache, IndexCache, LatentCache, StateCache, WindowCache
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Norms

NextToken = Callable[[list[int]], int]
"""The history so far (prompt and generated) -> the next token."""

EMPTY_SLOT = -1


def counting(history: list[int]) -> int:
    """The last token plus one, below 1000."""
    return (history[-1] + 1) % 1000


def scrambled(history: list[int]) -> int:
    """Depends on every token of the history: a wrong one anywhere changes the answer. Below 50."""
    digest = 17
    for token in history:
        digest = (digest * 31 + token) % 1_000_003
    return digest % 50


def row_items(prompt: Sequence[int], values: bytes, most: int = 16) -> tuple[MediaItem, ...]:
    """Items of at most `most` of the rows `values`, all of one size, of a prompt's EMBEDDED positions."""
    positions = [position for position, token in enumerate(prompt) if token == EMBEDDED]
    size = len(values) // len(positions)
    spans: list[tuple[int, int]] = []
    for position in positions:
        if spans and sum(spans[-1]) == position and spans[-1][1] < most:
            spans[-1] = spans[-1][0], spans[-1][1] + 1
        else:
            spans.append((position, 1))
    items, start = [], 0
    for span in spans:
        payload = values[start : start + span[1] * size]
        start += span[1] * size
        shape = span[1], size
        digest = media_digest(kind="rows", shape=shape, dtype="float32", payload=payload, options=())
        items.append(
            MediaItem(
                digest=digest,
                kind="rows",
                payload=payload,
                shape=shape,
                dtype="float32",
                grid=(1, 1, span[1]),
                spans=(span,),
            )
        )
    return tuple(items)


def full_layout(block_size: int = 4) -> KvLayout:
    return KvLayout((KvGroup(FullCache(1, 8), (0,)),), block_size)


def hybrid_layout(block_size: int = 4, window: int = 6) -> KvLayout:
    return KvLayout((KvGroup(FullCache(1, 8), (0,)), KvGroup(WindowCache(1, 8, window), (1,))), block_size)


def snapshots_every(tokens: int) -> StateSnapshots:
    """Recurrent state is kept after so many tokens and their multiples."""
    return StateSnapshots(mode="all", unit=tokens)


def state_layout(block_size: int = 4) -> KvLayout:
    """Recurrent state, and a full cache."""
    return KvLayout((KvGroup(StateCache(64, inputs=0), (0,)), KvGroup(FullCache(1, 8), (1,), pool=1)), block_size)


def pools_layout(block_size: int = 4) -> KvLayout:
    """Every kind of cache but recurrent state, in two pools."""
    kinds = {WindowCache(1, 8, 6): [0, 1], LatentCache(8, 4): [2], FullCache(1, 8): [3], WindowCache(1, 8, 3): [4]}
    return layout_of(kinds, block_size)


def mixed_layout(block_size: int = 4) -> KvLayout:
    """Every kind of cache; two groups share a pool of states, and two a pool of K and V."""
    kinds = {
        WindowCache(1, 8, 6): [0, 1],
        StateCache(64, inputs=0): [2, 3],
        LatentCache(8, 4): [4],
        FullCache(1, 8): [5],
        StateCache(32, inputs=0): [6],
        IndexCache(8): [8],
    }
    layout = layout_of(kinds, block_size)
    second = KvGroup(StateCache(64, inputs=0), (7,), pool=1)
    return KvLayout((*layout.groups, second), block_size)


def blocks_of(layout: KvLayout, number: int) -> tuple[int, ...]:
    """That many blocks in every pool."""
    return (number,) * len(layout.pools)


def tiny_spec(*, vocab: int = 257, layers: int = 2, window: int | None = None) -> ModelSpec:
    """A Llama-like spec of a few thousand parameters; with `window`, every second layer slides."""
    norm = Norm(1e-5)

    def layer(index: int) -> Layer:
        mixer = Attention(
            heads=2, kv_heads=1, head_dim=8, scale=8**-0.5, rope=None, window=window if index % 2 else None
        )
        return Layer((mixer,), Mlp(32, "silu", gated=True), Norms(before_mixer=norm, before_ffn=norm))

    return ModelSpec(
        vocab=vocab,
        width=16,
        layers=tuple(layer(index) for index in range(layers)),
        final_norm=norm,
        tied=True,
        max_positions=256,
    )


@dataclass
class FakeRow:
    """What the device knows of a row. `embedded`: position -> what the embedding there says, its first number."""

    history: list[int]
    num_prompt: int
    rules: SamplingRules
    sampled_at: int = -2
    rejected: int = 0
    """Drafts of its newest step that were wrong."""
    accepted: int = 0
    """Likewise those that were right, which recurrent state does not include."""
    had_drafts: bool = False
    digests: list[int] = field(default_factory=list)
    embedded: dict[int, int] = field(default_factory=dict)
    root: int = 7
    """What all digests begin with: rows with the same tokens but another root share nothing."""
    guesses: list[int] = field(default_factory=list)
    """Of the drafter, after its newest tokens."""

    def said(self) -> list[int]:
        return [self.embedded.get(position, token) for position, token in enumerate(self.history)]

    def digest(self, position: int, drafts: Sequence[int] = ()) -> int:
        """Of all tokens up to that position; `drafts` follow the history."""
        while len(self.digests) <= min(position, len(self.history) - 1):
            self.digests.append(
                chained(self.digests[-1] if self.digests else self.root, self.history[len(self.digests)])
            )
        drafted = position + 1 - len(self.history)
        if drafted <= 0:
            return self.digests[position]
        return reduce(chained, drafts[:drafted], self.digests[-1])


def chained(digest: int, token: int) -> int:
    return hash((digest, token)) & 0x7FFFFFFF


@dataclass
class FakePending:
    """Samples at once, or when its masks are bound."""

    backend: FakeBackend
    plan: StepPlan
    prompt_logprobs: dict[int, TokenLogprobs]
    answer: StepResult | None = None

    def __post_init__(self) -> None:
        if self.plan.masked is None:
            self._sample(None)

    def bind_masks(self, masks: TokenMasks) -> None:
        assert self.plan.masked is not None, "no sequence waits for a mask"
        assert self.answer is None, "the masks are bound already"
        assert np.isin(masks.sequences, self.plan.masked).all(), "a mask that was not announced"
        assert len(masks.sequences) == len(masks.after) == len(masks.bits)
        places = list(zip(masks.sequences.tolist(), masks.after.tolist()))
        assert places == sorted(set(places)), "each place once, in order"
        self.backend.masks[self.plan.step] = masks
        self._sample(masks)

    def result(self) -> StepResult:
        assert self.answer is not None, "masks are bound before the result is awaited"
        return self.answer

    def _sample(self, masks: TokenMasks | None) -> None:
        self.answer = self.backend.sample(self.plan, self.prompt_logprobs, masks)


def allowed_from(masks: TokenMasks | None, index: int, token: int, after: int = 0) -> int:
    """Return the token, or the next higher id that the sequence's mask at this position allows."""
    if masks is None or (index, after) not in zip(masks.sequences, masks.after):
        return token
    bits = masks.bits[list(zip(masks.sequences, masks.after)).index((index, after))]
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert len(allowed), "a mask leaves no token"
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


class FakeBackend:
    """A backend without a model. `next_token` decides every token; `fail_at`: the step whose result raises.

    `guesses_right`: whether the drafter guesses a token right, by its position.
    """

    def __init__(
        self,
        layout: KvLayout,
        *,
        num_blocks: int | tuple[int, ...] = 64,  # a number: of each pool
        next_token: NextToken = counting,
        prefers_extents: bool = False,
        fail_at: int | None = None,
        guesses_right: Callable[[int], bool] = lambda position: True,
    ) -> None:
        self.layout, self.guesses_right = layout, guesses_right
        self.next_token = next_token
        self.capabilities = Capabilities("fake", "none", layout.block_size, prefers_extents)
        self.fail_at = fail_at
        self.num_blocks = blocks_of(layout, num_blocks) if isinstance(num_blocks, int) else num_blocks
        self.plans: list[StepPlan] = []
        self.masks: dict[int, TokenMasks] = {}  # bound so far, by step
        self.newest: FakePending | None = None
        self.rows: dict[int, FakeRow] = {}
        self.said: dict[tuple[int, int, int], int] = {}  # pool, block, offset -> what a row of media there says
        self.media_rows: dict[int, int] = {}  # row of the row cache -> the first number of its embedding
        self.closed = False
        self.weights = "loaded"
        self.cache_away = False
        self.full = False
        """No memory is left on the device."""
        self.init_cache(self.num_blocks)

    def load(self, weights: Iterable[Weight]) -> None:
        for _ in weights:
            pass

    def update_weights(self, weights: Iterable[Weight]) -> None:
        self.weights = f"read {len(list(weights))}"

    def plan_memory(self) -> MemoryPlan:
        return MemoryPlan(0, 0, self.num_blocks, (1,) * len(self.num_blocks))

    def init_cache(self, num_blocks: tuple[int, ...]) -> None:
        """One store for all groups of a pool, as on a device: a block that two groups use at once is caught."""
        assert len(num_blocks) == len(self.layout.pools)
        self.num_blocks = num_blocks
        self.slots = [np.full((number, self.layout.block_size), EMPTY_SLOT, np.int64) for number in num_blocks]

    def warmup(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def sleep(self, level: int) -> None:
        self.weights = "on the host" if level == 1 else "gone"
        self.cache_away = True

    def wake_weights(self, read: Callable[[], Iterable[Weight]]) -> None:
        self._need_room()
        if self.weights == "on the host":
            self.weights = "loaded"
        else:
            self.update_weights(read())

    def wake_kv_cache(self) -> None:
        self._need_room()
        self.cache_away = False
        self.init_cache(self.num_blocks)

    def _need_room(self) -> None:
        if self.full:
            raise MemoryError("the device is out of memory")

    def execute(self, plan: StepPlan) -> FakePending:
        """Runs at once; steps come in order, so that is what a device does as well.

        Sampling of a plan with `masked` runs once its masks are bound.
        """
        assert self.newest is None or self.newest.answer is not None, "the masks of the step before are not bound"
        assert plan.step == len(self.plans), "steps must be numbered in order"
        assert not self.cache_away, "the KV cache is asleep"
        assert self.weights not in ("on the host", "gone"), "the weights are asleep"
        self.plans.append(plan)
        if plan.step == self.fail_at:
            raise RuntimeError("the device is gone")
        self._check_shape(plan)
        self._copy_states(plan)
        self._encode(plan)
        for start in plan.starts:
            self._start(start)
        plan = self._with_guesses(plan)
        for index in range(plan.num_seqs):
            self._write(plan, index)
        for index in range(plan.num_seqs):
            self._recall_media(plan, index)
            self._read(plan, index)
        self.newest = FakePending(self, plan, self._prompt_logprobs(plan))
        return self.newest

    def sample(self, plan: StepPlan, prompt_logprobs: dict[int, TokenLogprobs], masks: TokenMasks | None) -> StepResult:
        tokens = [self._sample(plan, index, masks) if plan.samples[index] else [] for index in range(plan.num_seqs)]
        width = 1 if plan.num_drafts is None else 1 + int(plan.num_drafts.max())
        padded = np.array([ids + [-1] * (width - len(ids)) for ids in tokens], np.int32)
        ids = padded[:, 0] if plan.num_drafts is None else padded
        return StepResult(plan.step, ids, self._logprobs(plan, tokens), prompt_logprobs, guesses=self._guess(plan))

    def _encode(self, plan: StepPlan) -> None:
        written = [row for encode in plan.encodes for row in encode.rows.tolist()]
        assert len(set(written)) == len(written), "a row has two contents"
        for encode in plan.encodes:
            numbers = np.frombuffer(encode.item.payload, np.float32).reshape(len(encode.rows), -1)
            self.media_rows |= zip(encode.rows.tolist(), numbers[:, 0].astype(int).tolist())

    def _with_guesses(self, plan: StepPlan) -> StepPlan:
        """The plan with the guesses of each row in place of GUESSED."""
        ids = plan.token_ids.copy()
        for index in range(plan.num_seqs):
            drafts, end = self._drafts(plan, index), int(plan.query_start[index + 1])
            if GUESSED in drafts:
                assert set(drafts) == {GUESSED}
                guesses = self.rows[int(plan.rows[index])].guesses
                assert len(drafts) <= len(guesses), "more drafts than guesses"
                ids[end - len(drafts) : end] = guesses[: len(drafts)]
        assert GUESSED not in ids, "only drafts are guessed"
        return replace(plan, token_ids=ids)

    def _guess(self, plan: StepPlan) -> np.ndarray | None:
        """Guess after each sequence; the drafter writes to the slots after its tokens, which no other sequence has."""
        for row in self.rows.values():
            if row.sampled_at == plan.step:
                row.guesses = []
        if plan.num_guesses is None:
            return None
        assert plan.num_guesses.any(), "no sequence has guesses"
        guesses = np.full((plan.num_seqs, plan.num_guesses.max()), -1, np.int32)
        for index in np.flatnonzero(plan.num_guesses).tolist():
            assert plan.samples[index], "what does not sample has no guesses"
            row, count = self.rows[int(plan.rows[index])], int(plan.num_guesses[index])
            for _ in range(count):
                history = row.said() + row.guesses
                right = self.next_token(history)
                row.guesses.append(right if self.guesses_right(len(history)) else (right + 1) % 5)
            guesses[index, :count] = row.guesses
            first = len(row.history) - 1
            for group, table in zip(self.layout.groups, plan.block_tables):
                if isinstance(group.spec, StateCache):
                    continue
                for position in range(first, first + count):
                    block = int(table[index, position // self.layout.block_size])
                    assert block != NULL_BLOCK, "a guess has no block"
                    self.slots[group.pool][block, position % self.layout.block_size] = EMPTY_SLOT
            row.had_drafts = True
        return guesses

    def _check_shape(self, plan: StepPlan) -> None:
        counts = np.diff(plan.query_start)
        assert plan.num_seqs
        assert (counts > 0).all()
        if plan.masked is not None:
            assert plan.masked.dtype == np.int32
            assert len(plan.masked)
            assert (np.diff(plan.masked) > 0).all()
            assert plan.samples[plan.masked].all(), "a masked sequence samples"
        assert plan.query_start[-1] == plan.num_tokens
        assert len(set(plan.rows.tolist())) == plan.num_seqs, "a row appears twice"
        kinds = np.where(counts > 1, 2, 0)
        if plan.num_drafts is not None:
            assert plan.num_drafts.dtype == np.int32
            assert plan.num_drafts.any(), "no sequence has drafts"
            assert (plan.num_drafts >= 0).all()
            drafted = plan.num_drafts > 0
            assert (counts[drafted] == 1 + plan.num_drafts[drafted]).all(), "drafts follow the newest token alone"
            assert plan.samples[drafted].all()
            kinds[drafted] = 1
        assert (np.diff(kinds) >= 0).all(), "sequences with one token stand first, then those with drafts"
        ends = plan.context + counts + (0 if plan.num_guesses is None else plan.num_guesses)
        pages = -(-int(ends.max()) // self.layout.block_size)
        for table in plan.block_tables:
            assert table.shape == (plan.num_seqs, pages)
            assert table.dtype == np.int32
        for array in (plan.rows, plan.query_start, plan.context, plan.token_ids):
            assert array.dtype == np.int32

    def _copy_states(self, plan: StepPlan) -> None:
        assert len(plan.state_copies) in (0, len(self.layout.pools))
        for pairs, slots in zip(plan.state_copies, self.slots):
            assert pairs.dtype == np.int32
            source, to = pairs.T
            assert len(set(to.tolist())) == len(to), "a block has two contents"
            assert pairs.size == 0 or 0 < pairs.min() <= pairs.max() < len(slots)
            slots[to] = slots[source]

    def _start(self, start: RowStart) -> None:
        assert 0 < start.num_prompt <= len(start.token_ids)
        self.rows[start.row] = FakeRow(start.token_ids.tolist(), start.num_prompt, start.rules)

    def _first(self, plan: StepPlan, index: int) -> int:
        """The position of the sequence's first token in this step."""
        row = self.rows[int(plan.rows[index])]
        known = plan.token_ids[plan.query_start[index]] != PREVIOUS
        return int(plan.context[index]) - (0 if known else row.rejected)

    def _drafts(self, plan: StepPlan, index: int) -> list[int]:
        if plan.num_drafts is None:
            return []
        end = int(plan.query_start[index + 1])
        return plan.token_ids[end - plan.num_drafts[index] : end].tolist()

    def _write(self, plan: StepPlan, index: int) -> None:
        row = self.rows[int(plan.rows[index])]
        first, size, drafts = self._first(plan, index), self.layout.block_size, self._drafts(plan, index)
        begin, end = plan.query_start[index : index + 2]
        ids = plan.token_ids[begin:end].tolist()
        for token in plan.media_tokens.tolist():
            if begin <= token < end:
                position = first + token - begin
                row.embedded[position] = self.media_rows[int(plan.token_ids[token]) - FIRST_ROW]
                ids[token - begin] = row.history[position]
        if drafts:
            assert first + 1 == len(row.history), "drafts follow the newest token"
        for position, token in enumerate(ids, start=first):
            if token == PREVIOUS:
                assert row.sampled_at == plan.step - 1, "PREVIOUS names the step before"
                assert position == len(row.history) - 1
            elif position < first + len(ids) - len(drafts):
                assert token == row.history[position], f"row {plan.rows[index]}: wrong token at {position}"
            for group, table in zip(self.layout.groups, plan.block_tables):
                if isinstance(group.spec, StateCache):
                    continue
                block = int(table[index, position // size])
                assert 0 < block < self.num_blocks[group.pool], "a token is written into no block"
                self.slots[group.pool][block, position % size] = row.digest(position, drafts)
                if position in row.embedded:
                    self.said[group.pool, block, position % size] = row.embedded[position]
        for group, table in zip(self.layout.groups, plan.block_tables):
            if isinstance(group.spec, StateCache):
                self._advance_state(self.slots[group.pool], int(table[index, 0]), row, first, len(ids) - len(drafts))
                assert not table[index, 1:].any(), "a state is one block"

    def _recall_media(self, plan: StepPlan, index: int) -> None:
        """Learn what cached pages say at positions of media: another request computed them."""
        row = self.rows[int(plan.rows[index])]
        first, size = self._first(plan, index), self.layout.block_size
        for group, table in zip(self.layout.groups, plan.block_tables):
            if not isinstance(group.spec, FullCache):
                continue
            for position in range(first):
                if row.history[position] == EMBEDDED and position not in row.embedded:
                    row.embedded[position] = self.said[group.pool, int(table[index, position // size]), position % size]

    def _advance_state(self, slots: np.ndarray, block: int, row: FakeRow, first: int, count: int) -> None:
        """The state before the step lacks the accepted drafts of the row's last one, the state after it the drafts."""
        included = first - row.accepted
        assert included == 0 or slots[block, 0] == row.digest(included - 1), "the state is not that of the context"
        slots[block, 0] = row.digest(first + count - 1)

    def _read(self, plan: StepPlan, index: int) -> None:
        """Every slot that any token of this step sees holds the digest of the true history, then of its drafts."""
        row = self.rows[int(plan.rows[index])]
        first, size, drafts = self._first(plan, index), self.layout.block_size, self._drafts(plan, index)
        end = first + int(plan.query_start[index + 1] - plan.query_start[index])
        for group, table in zip(self.layout.groups, plan.block_tables):
            if isinstance(group.spec, StateCache):
                continue
            oldest = max(0, first - group.spec.window + 1) if isinstance(group.spec, WindowCache) else 0
            for position in range(oldest, end):
                block = int(table[index, position // size])
                assert block != NULL_BLOCK, f"position {position} is visible but has no block"
                assert self.slots[group.pool][block, position % size] == row.digest(position, drafts), (
                    f"step {plan.step}, row {plan.rows[index]}: block {block} does not hold position {position}"
                )
            used = -(-end // size)
            guesses = plan.num_guesses is not None and plan.num_guesses[index]
            assert row.had_drafts or guesses or not table[index, used:].any(), "entries past the end are null"

    def _sample(self, plan: StepPlan, index: int, masks: TokenMasks | None) -> list[int]:
        """The accepted drafts and the token after them."""
        row, drafts = self.rows[int(plan.rows[index])], self._drafts(plan, index)
        end = self._first(plan, index) + plan.query_start[index + 1] - plan.query_start[index] - len(drafts)
        assert end == len(row.history), "only the newest token is sampled from"
        tokens: list[int] = []
        while len(tokens) <= len(drafts) and tokens == drafts[: len(tokens)]:
            tokens.append(allowed_from(masks, index, self.next_token(row.said() + tokens), len(tokens)))
        row.history += tokens
        row.sampled_at = plan.step
        row.rejected = 1 + len(drafts) - len(tokens)
        row.accepted = len(tokens) - 1
        row.had_drafts = row.had_drafts or bool(drafts)
        return tokens

    def _logprobs(self, plan: StepPlan, tokens: list[list[int]]) -> dict[int, TokenLogprobs]:
        """Logprob of a token: minus its position."""
        found = {}
        for index, ids in enumerate(tokens):
            row = self.rows[int(plan.rows[index])]
            if ids and row.rules.logprobs is not None:
                positions = list(range(len(row.history) - len(ids), len(row.history)))
                found[index] = _fake_logprobs(ids, positions, row.rules.logprobs)
        return found

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, TokenLogprobs]:
        found = {}
        for index in range(plan.num_seqs):
            row = self.rows[int(plan.rows[index])]
            first = int(plan.context[index])
            end = first + int(plan.query_start[index + 1] - plan.query_start[index])
            positions = [p + 1 for p in range(first, end) if p + 1 < row.num_prompt]
            if row.rules.prompt_logprobs is not None and positions:
                tokens = [row.history[p] for p in positions]
                found[index] = _fake_logprobs(tokens, positions, row.rules.prompt_logprobs)
        return found


@dataclass(frozen=True)
class FakeShardsPending:
    steps: tuple[FakePending | None, ...]

    def bind_masks(self, masks: tuple[TokenMasks | None, ...]) -> None:
        for step, own in zip(self.steps, masks, strict=True):
            if own is not None:
                assert step is not None, "masks of a shard without a plan"
                step.bind_masks(own)

    def result(self) -> tuple[StepResult | None, ...]:
        return tuple(None if step is None else step.result() for step in self.steps)


class FakeShards(FakeBackend):
    """Several fake backends that step together; itself the first of them."""

    def __init__(self, layout: KvLayout, shards: int, **settings: Any) -> None:
        super().__init__(layout, **settings)
        self.shards = [self, *(FakeBackend(layout, **settings) for _ in range(1, shards))]

    def execute_shards(self, plans: tuple[StepPlan | None, ...]) -> FakeShardsPending:
        assert len(plans) == len(self.shards)
        assert any(plan is not None for plan in plans), "a step of nobody"
        return FakeShardsPending(
            tuple(None if plan is None else shard.execute(plan) for shard, plan in zip(self.shards, plans))
        )


def _fake_logprobs(tokens: list[int], positions: list[int], best: int) -> TokenLogprobs:
    """The chosen token, then it and its successors, equally likely; of the whole vocabulary (-1), each less likely."""
    if best < 0:
        ids = [[token, *((token + rank) % 257 for rank in range(257))] for token in tokens]
        values = [[-float(p), *(-float(p) - rank for rank in range(257))] for p in positions]
        return TokenLogprobs(np.array(ids, np.int32), np.array(values, np.float32), np.ones(len(tokens), np.int32))
    columns = 1 + best
    return TokenLogprobs(
        np.array([[token + column for column in range(columns)] for token in tokens], np.int32),
        np.array([[-float(p)] * columns for p in positions], np.float32),
        np.ones(len(tokens), np.int32),
    )


class ByteTokenizer:
    """One token per UTF-8 byte; 256 ends a text."""

    vocab_size = 257
    eos_token_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        kept = bytes(token for token in token_ids if token < 256)
        end = "" if skip_special_tokens or 256 not in token_ids else "<eos>"
        return kept.decode(errors="replace") + end


class FakeTracer:
    """A tracer of a FakeBackend, whose traces are lists of step numbers. `failure`: what the next call raises."""

    def __init__(self, backend: FakeBackend) -> None:
        self.failure: Exception | None = None
        self.traces: dict[str, list[int]] = {}
        self._backend, self._name, self._first = backend, "", 0

    def start(self, name: str) -> None:
        assert not self._name, "one trace at a time"
        self._raise()
        self._name, self._first = name, len(self._backend.plans)

    def stop(self) -> Path:
        name, self._name = self._name, ""
        assert name, "a trace was started"
        self._raise()
        self.traces[name] = [plan.step for plan in self._backend.plans[self._first :]]
        return Path(name)

    def _raise(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
