"""The same requests at the same steps give the same plans on a simulated and on a real backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from fakes import tiny_spec
from support.engines.backend_options import make_options
from support.engines.simulated_device import RecordingBackend, StatedDevice, assert_same_plans, simulated_core

from pagoda.backends.reference.backend import ReferenceBackend, create
from pagoda.common.backend import BackendOptions
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling.rules import OUTPUT_TOKENS, SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.speculative.ngram import NgramProposer
from pagoda.common.engine.speculative.proposer import Drafter
from pagoda.common.engine.workload.drive import RequestTimes, TimedRequest, drive
from pagoda.common.models.shapes import params
from pagoda.server.startup.parameters import dummy_weights

SPEC = tiny_spec(layers=3, window=24)
NUM_BLOCKS = (48,)


def options_of(**limits: object) -> BackendOptions:
    usual = {"max_model_len": 96, "max_num_batched_tokens": 24, "max_num_seqs": 6, "block_size": 4}
    return make_options(SPEC, limits=Limits(**usual | limits))  # type: ignore[arg-type]


class StepClock:
    """A clock of a real backend that counts steps: requests arrive while a step runs."""

    def __init__(self) -> None:
        self.backend: RecordingBackend | None = None

    @property
    def now(self) -> float:
        return 0.0 if self.backend is None else float(len(self.backend.plans))

    def wait_until(self, when: float) -> None:
        raise AssertionError("the workload leaves no pause")


def workload(seed: int, temperature: float = 1.0) -> list[TimedRequest]:
    """Requests with shared beginnings, one of a length at a time; more than fit the KV cache at once."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 200, 40).tolist()
    requests, at = [], 0.0
    for number in range(12):
        prompt = shared[: int(rng.choice([0, 8, 23, 40]))] + rng.integers(0, 200, int(rng.integers(1, 24))).tolist()
        request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            rules=SamplingRules(temperature=temperature, seed=number),
            max_tokens=int(rng.integers(1, 30)),
        )
        requests.append(TimedRequest(at, request))
        at += float(rng.integers(0, 4))
    return requests


@pytest.fixture(scope="module")
def weights() -> dict[str, object]:
    return dict(dummy_weights(params(SPEC), dtype="float32"))


@pytest.fixture
def make_reference(weights: dict[str, object]) -> Iterator[Callable[[BackendOptions], ReferenceBackend]]:
    made: list[ReferenceBackend] = []

    def make(options: BackendOptions) -> ReferenceBackend:
        made.append(create(options))
        made[-1].load(weights.items())  # type: ignore[arg-type]
        made[-1].init_cache(NUM_BLOCKS * len(options.layout.pools))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def collecting(core: object) -> dict[str, list[int]]:
    """The tokens of each request, as the core reports them from now on."""
    tokens: dict[str, list[int]] = {}
    step = core.step  # type: ignore[attr-defined]

    def recorded() -> object:
        result = step()
        output: EngineOutput
        for output in result.outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return result

    core.step = recorded  # type: ignore[attr-defined]
    return tokens


def with_outputs(requests: list[TimedRequest], times: tuple[RequestTimes, ...], tokens: dict[str, list[int]]) -> list:
    """The requests, each arriving after the result after which it came, with the tokens that it generated."""
    steps = {each.request_id: each.steps_before for each in times}
    repeated = []
    for each in requests:
        request, output = each.request, tokens[each.request.request_id]
        rules = SamplingRules(temperature=1.0, seed=request.rules.seed, extra_args={OUTPUT_TOKENS: output})
        again = EngineRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            rules=rules,
            max_tokens=request.max_tokens,
        )
        repeated.append(TimedRequest(float(steps[request.request_id]), again))
    return repeated


def drafting_scheduler(limits: Limits, kv: object) -> Scheduler:
    drafter = Drafter(NgramProposer(1, 2), SPEC.vocab, plans_ahead=False)
    return Scheduler(limits, kv, drafter=drafter)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("caching", "asynchronous", "drafts"),
    [(True, True, 0), (False, False, 0), (True, True, 3)],
    ids=["prefixes", "plain", "drafts"],
)
def test_plans_are_those_of_the_reference_backend(
    make_reference: Callable[[BackendOptions], ReferenceBackend], caching: bool, asynchronous: bool, drafts: int
) -> None:
    options = options_of(prefix_caching=caching, async_scheduling=asynchronous, max_drafts=drafts)
    blocks = NUM_BLOCKS * len(options.layout.pools)
    more = {"make_scheduler": drafting_scheduler} if drafts else {}
    real, clock = RecordingBackend(make_reference(options)), StepClock()
    clock.backend = real
    core = generation_core(real, options.layout, options.limits, blocks, **more)  # type: ignore[arg-type]
    tokens, requests = collecting(core), workload(seed=drafts, temperature=0.0 if drafts else 1.0)
    measured = drive(core, requests, clock)
    assert [each.error for each in measured.requests if each.error] == []
    device = StatedDevice(prefers_extents=True)
    simulated, recorded, _ = simulated_core(options, device, blocks, **more)
    again = drive(simulated, with_outputs(requests, measured.requests, tokens), simulated_clock(recorded))
    assert_same_plans(recorded.plans, real.plans)
    assert measured.stats == again.stats
    assert measured.stats.preemptions, "blocks are scarce"
    assert bool(measured.stats.prefix_hits) is caching
    if drafts:
        assert measured.stats.drafts is not None
        assert 0 < measured.stats.drafts.num_accepted < measured.stats.drafts.tokens


def simulated_clock(recorded: RecordingBackend) -> object:
    return recorded.backend._clock


def test_another_arrival_gives_other_plans(
    make_reference: Callable[[BackendOptions], ReferenceBackend],
) -> None:
    """The comparison sees a request that comes two steps later."""
    options = options_of()
    blocks = NUM_BLOCKS * len(options.layout.pools)
    run = partial(simulated_core, options, StatedDevice(prefers_extents=True), blocks)
    requests = workload(seed=0)
    core, one, clock = run()
    drive(core, requests, clock)
    core, other, clock = run()
    later = [TimedRequest(each.at + 2, each.request) if number == 1 else each for number, each in enumerate(requests)]
    drive(core, sorted(later, key=lambda each: each.at), clock)
    with pytest.raises(AssertionError):
        assert_same_plans(one.plans, other.plans)
