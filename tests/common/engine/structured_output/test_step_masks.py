"""Masks that take long: other sequences go on, and the answers are those of quick masks."""

from __future__ import annotations

from functools import partial

import pytest
from fakes import FakeBackend, full_layout, scrambled
from support.engines.replaying import Replaying, drafting
from support.engines.scripted_masks import SlowLibrary, add_masked
from support.suite.clock import Clock

from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler

VOCAB = 64
MASKED = [f"m{number}" for number in range(24)]


class Machine:
    """An engine whose time is what its masks take."""

    def __init__(self, slow: int, ahead: bool = True, drafts: dict[str, list[int]] | None = None) -> None:
        self.clock = Clock()
        self.library = SlowLibrary(self.clock, slow)
        limits = Limits(
            max_model_len=64,
            max_num_batched_tokens=256,
            max_num_seqs=32,
            block_size=4,
            async_scheduling=ahead,
            max_drafts=3 if drafts else 0,
        )
        backend = FakeBackend(full_layout(), num_blocks=600, next_token=scrambled)
        make = partial(Scheduler, clock=self.clock)
        if drafts:
            make = drafting(Replaying(drafts), VOCAB, self.clock)
        self.engine: EngineCore = generation_core(backend, backend.layout, limits, backend.num_blocks, make)
        self.answers: dict[str, list[int]] = {}
        self.last: dict[str, EngineOutput] = {}

    def step(self) -> float:
        """Return the seconds that a step took."""
        begin = self.clock()
        for output in self.engine.step().outputs:
            self.answers.setdefault(output.request_id, []).extend(output.new_token_ids)
            self.last[output.request_id] = output
        return self.clock() - begin

    def run(self) -> list[float]:
        gaps = []
        while self.engine.has_work:
            gaps.append(self.step())
        self.engine.check_integrity()
        return gaps

    def add_masked(self, *names: str) -> None:
        for name in names:
            add_masked(self.engine, request(name), VOCAB, self.library)


def request(name: str, prompt: int = 3) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=[10] * prompt + [int(name[1:])], rules=SamplingRules(), max_tokens=12
    )


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_neighbour_waits_for_few_masks_at_a_time(ahead: bool, drafts: bool) -> None:
    def run(slow: int, texts: dict[str, list[int]] | None = None) -> tuple[Machine, list[float]]:
        machine = Machine(slow, ahead, texts)
        machine.engine.add_request(request("n99"))
        machine.add_masked(*MASKED)
        return machine, machine.run()

    quick, _ = run(0)
    slow, gaps = run(100, quick.answers if drafts else None)
    assert slow.answers == quick.answers
    assert len(slow.answers) == 1 + len(MASKED)
    # One group of four where it turns out that they are slow, then late masks one at a time; drafts need three more.
    *others, longest = sorted(gaps)
    assert longest <= (7.0 if drafts else 4.0)
    assert max(others) <= 1.0
    assert sum(gaps) >= sum(len(slow.answers[name]) - 1 for name in MASKED), "the library was asked for each mask"


def test_quick_masks_come_before_slow_ones() -> None:
    machine = Machine(100)
    machine.add_masked(*MASKED)
    for _ in range(8):
        machine.step()
    machine.library = SlowLibrary(machine.clock, 0)
    add_masked(machine.engine, request("q77"), VOCAB, machine.library)
    before = {name: len(answer) for name, answer in machine.answers.items()}
    while "q77" not in machine.last or machine.last["q77"].finish_reason is None:
        machine.step()
    gained = [len(machine.answers[name]) - before.get(name, 0) for name in MASKED]
    assert sum(gained) < 12 * 3, "the quick answer took three times as many masks as its own"


def test_a_grammar_that_fails_in_a_late_mask_ends_its_request_alone() -> None:
    machine = Machine(100)
    machine.add_masked(*MASKED)
    while not machine.engine._scheduler.masks.has_late:
        machine.step()
    victim = next(iter(machine.engine._scheduler.masks._late.values()))
    state, usual = victim.mask_state, victim.mask_state.refresh

    def fail(grammar, outputs):
        usual(grammar, outputs)
        state.error = "too complex"

    state.refresh = fail
    machine.run()
    last = machine.last[victim.request_id]
    assert (last.finish_reason, last.new_token_ids) == ("error", [])
    assert last.error == ("structured_outputs", "structured_outputs: too complex")
    others = {name: len(answer) for name, answer in machine.answers.items() if name != victim.request_id}
    quick = Machine(0)
    quick.add_masked(*MASKED)
    quick.run()
    assert others == {name: len(answer) for name, answer in quick.answers.items() if name != victim.request_id}


def test_a_late_request_can_be_aborted() -> None:
    machine = Machine(100)
    machine.add_masked(*MASKED)
    while not machine.engine._scheduler.masks.has_late:
        machine.step()
    machine.engine.abort(MASKED)
    assert not machine.engine._scheduler.masks.num_withheld
    machine.run()
    machine.engine.check_integrity()
