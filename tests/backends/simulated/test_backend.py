"""The simulated backend: its clock, its tokens, its memory plan, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import tiny_spec
from support.engines.backend_options import make_options
from support.engines.engine_runs import drained_tokens
from support.engines.simulated_device import StatedDevice, StatedTimes, simulated_core, with_limits

from pagoda.backends.simulated.backend import SimulatedBackend, create
from pagoda.backends.simulated.device import HostCosts
from pagoda.common.backend import BackendOptions
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.simulation import SimulationConfig
from pagoda.common.engine.kv_cache.sizing import max_blocks
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.logit_edits import allowed_bits
from pagoda.common.engine.sampling.rules import OUTPUT_TOKENS, SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.speculative.proposer import AssumedProposer, Drafter
from pagoda.common.engine.steps.contract import RowStart, StepPlan, TokenMasks
from pagoda.common.engine.workload.drive import TimedRequest, VirtualClock, drive
from pagoda.common.errors import ConfigError
from pagoda.common.weights.lora.weights import LoraOptions

LIMITS = Limits(max_model_len=128, max_num_batched_tokens=32, max_num_seqs=4, block_size=4)
VOCAB = 257


def options_of(simulation: SimulationConfig | None = None, **limits: Any) -> BackendOptions:
    own = {} if simulation is None else {"simulation": simulation}
    return make_options(tiny_spec(vocab=VOCAB), limits=replace(LIMITS, **limits), **own)


def request(name: str, prompt: list[int], max_tokens: int = 8, **rules: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=prompt, rules=SamplingRules(**rules), max_tokens=max_tokens)


def tokens_of(*requests: EngineRequest, options: BackendOptions | None = None, **more: Any) -> dict[str, list[int]]:
    core, _, _ = simulated_core(options or options_of(), StatedDevice(), (64,), **more)
    for each in requests:
        core.add_request(each)
    return drained_tokens(core)


# --- time ---


def run_times(host: HostCosts, asynchronous: bool, times: StatedTimes | None = None) -> list[float]:
    """When the tokens of one request with a prompt of one chunk come."""
    device = StatedDevice(times=times or StatedTimes(1.0), host=host)
    core, _, clock = simulated_core(options_of(async_scheduling=asynchronous), device, (64,))
    return drive(core, [TimedRequest(2.0, request("r", [1, 2, 3], 4))], clock).requests[0].times


def test_steps_follow_each_other_from_the_arrival_on() -> None:
    assert run_times(HostCosts(), asynchronous=False) == [3.0, 4.0, 5.0, 6.0]
    assert run_times(HostCosts(), asynchronous=True) == [3.0, 4.0, 5.0, 6.0]


def test_the_engine_thread_waits_for_results_unless_it_plans_ahead() -> None:
    """0.25 s to plan, 0.125 s to report: between two steps, or while the device computes."""
    host = HostCosts(plan_step=0.125, plan_sequence=0.125, report_step=0.0625, report_sequence=0.0625)
    assert run_times(host, asynchronous=False) == [2.0 + 1.375 * n for n in (1, 2, 3, 4)]
    assert run_times(host, asynchronous=True) == [2.375 + 1.0 * n for n in (1, 2, 3, 4)]


def test_requests_that_start_cost_the_engine_thread() -> None:
    assert run_times(HostCosts(start_request=0.5), asynchronous=False) == [3.5, 4.5, 5.5, 6.5]


def test_a_step_after_a_pause_is_longer() -> None:
    """The request arrives after 2 s; its other steps follow each other."""
    assert run_times(HostCosts(after_pause=0.5), asynchronous=False) == [3.5, 4.5, 5.5, 6.5]


def test_a_slow_host_is_what_a_fast_device_waits_for() -> None:
    host = HostCosts(plan_step=1.0)
    assert run_times(host, asynchronous=True, times=StatedTimes(0.25)) == [4.0, 5.0, 6.0, 6.25]


def test_the_model_of_step_times_gets_the_lengths_of_the_step() -> None:
    times = StatedTimes()
    core, _, clock = simulated_core(options_of(async_scheduling=False), StatedDevice(times=times), (64,))
    drive(core, [TimedRequest(0.0, request("r", list(range(40)), 3))], clock)
    assert [each.query_lens.tolist() for each in times.loads] == [[32], [8], [1], [1]]
    assert [each.context_lens.tolist() for each in times.loads] == [[32], [40], [41], [42]]
    assert [each.num_sampled for each in times.loads] == [0, 1, 1, 1]


def test_a_server_s_steps_take_real_time_or_none() -> None:
    class Slept(VirtualClock):
        waits = 0

        def wait_until(self, when: float) -> None:
            self.waits += 1

    for simulated_time, waits in (("real", True), ("none", False)):
        options = options_of(SimulationConfig(simulated_time=simulated_time))
        backend = SimulatedBackend(options, StatedDevice())
        backend._clock = clock = Slept()
        plan = plan_of_one()
        backend.execute(plan).result()
        assert bool(clock.waits) is waits


def plan_of_one() -> StepPlan:
    return StepPlan(
        step=0,
        starts=(RowStart(0, np.array([5], np.int32), 1, SamplingRules()),),
        rows=np.zeros(1, np.int32),
        query_start=np.array([0, 1], np.int32),
        context=np.zeros(1, np.int32),
        token_ids=np.array([5], np.int32),
        block_tables=(np.ones((1, 1), np.int32),),
        samples=np.ones(1, np.bool_),
    )


# --- tokens ---


def test_tokens_depend_on_prompt_and_seed_and_are_ordinary_ones() -> None:
    answers = tokens_of(
        request("a", [1, 2, 3], 40),
        request("same", [1, 2, 3], 40),
        request("greedy", [1, 2, 3], 40, seed=9),
        request("order", [3, 2, 1], 40),
        request("seed", [1, 2, 3], 40, temperature=1.0, seed=1),
        request("other seed", [1, 2, 3], 40, temperature=1.0, seed=2),
    )
    assert answers["a"] == answers["same"] == answers["greedy"]
    distinct = [tuple(answers[name]) for name in ("a", "order", "seed", "other seed")]
    assert len(set(distinct)) == 4
    assert all(VOCAB // 4 <= token < 3 * VOCAB // 4 for tokens in distinct for token in tokens)
    assert len(set(distinct[0])) > 20
    assert {len(tokens) for tokens in distinct} == {40}


def test_tokens_survive_a_preemption() -> None:
    requests = [request(name, [n, 2, 3, 4, 5, 6, 7], 60) for n, name in enumerate("abc")]
    alone = {each.request_id: tokens_of(each)[each.request_id] for each in requests}
    core, _, _ = simulated_core(options_of(), StatedDevice(), (30,))
    for each in requests:
        core.add_request(each)
    assert drained_tokens(core) == alone
    assert core.stats.preemptions > 0


def test_prescribed_tokens_are_the_answer() -> None:
    prescribed = [200, 3, 200, 5]
    assert tokens_of(request("r", [1], 4, extra_args={OUTPUT_TOKENS: prescribed}))["r"] == prescribed
    longer = tokens_of(request("r", [1], 6, extra_args={OUTPUT_TOKENS: prescribed}))["r"]
    assert longer[:4] == prescribed
    assert len(longer) == 6


def test_logprobs_are_made_up_for_whoever_wants_them() -> None:
    core, _, _ = simulated_core(options_of(), StatedDevice(), (64,))
    core.add_request(request("r", list(range(40)), 3, logprobs=2, prompt_logprobs=0))
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    assert [len(each.logprobs[0].token_ids) for each in outputs] == [3, 3, 3]
    assert [each.logprobs[0].token_ids[0] for each in outputs] == [each.new_token_ids[0] for each in outputs]
    assert outputs[0].prompt_logprobs is not None
    assert [each.token_ids[0] for each in outputs[0].prompt_logprobs] == list(range(1, 40))


def test_masks_decide() -> None:
    backend = SimulatedBackend(options_of(), StatedDevice(), VirtualClock())
    pending = backend.execute(replace(plan_of_one(), masked=np.zeros(1, np.int32)))
    with pytest.raises(RuntimeError, match="call bind_masks"):
        pending.result()
    bits = allowed_bits({0: [7]}, 1, VOCAB)
    pending.bind_masks(TokenMasks(np.zeros(1, np.int32), np.zeros(1, np.int32), bits))
    assert pending.result().token_ids.tolist() == [7]


# --- drafts ---


@pytest.mark.parametrize(("rate", "length"), [(0.0, 1.0), (0.5, 1.875), (0.8, 2.952), (1.0, 4.0)])
def test_drafts_are_accepted_at_the_assumed_rate(rate: float, length: float) -> None:
    """With 3 drafts a step makes 1 + p + p^2 + p^3 tokens."""
    options = options_of(SimulationConfig(acceptance_rate=rate), max_drafts=3, max_num_batched_tokens=64)
    options = with_limits(options, max_model_len=8192)
    core, recording, _ = simulated_core(
        options,
        StatedDevice(),
        (4096,),
        make_scheduler=lambda limits, kv: Scheduler(
            limits, kv, drafter=Drafter(AssumedProposer(), VOCAB, plans_ahead=False)
        ),
    )
    for number in range(4):
        core.add_request(request(str(number), [number + 1], 800))
    answers = drained_tokens(core)
    assert {len(tokens) for tokens in answers.values()} == {800}
    assert core.stats.drafts is not None
    assert core.stats.drafts.mean_length == pytest.approx(length, rel=0.05)
    assert len(recording.plans) == pytest.approx(800 / length, rel=0.1)


def test_rejected_drafts_are_no_context_of_the_next_step() -> None:
    """Planned ahead, a plan counts drafts in flight; the load has the true length."""
    times = StatedTimes()
    options = options_of(SimulationConfig(acceptance_rate=0.0), max_drafts=2)
    core, _, _ = simulated_core(
        options,
        StatedDevice(times=times),
        (64,),
        make_scheduler=lambda limits, kv: Scheduler(limits, kv, drafter=Drafter(AssumedProposer(), VOCAB)),
    )
    core.add_request(request("r", [1, 2, 3], 8))
    drained_tokens(core)
    true = [int(each.context_lens[0]) - each.num_drafts for each in times.loads]
    assert true == list(range(3, 3 + len(true)))
    assert any(each.num_drafts for each in times.loads)


# --- memory and refusals ---


def test_the_cache_is_as_large_as_the_device_says() -> None:
    backend = SimulatedBackend(options_of(), StatedDevice(blocks=50))
    assert backend.plan_memory().num_blocks == (50,)
    roomy = SimulatedBackend(options_of(), StatedDevice(blocks=10_000))
    assert roomy.plan_memory().num_blocks == max_blocks(options_of().layout, LIMITS)


def test_stated_sizes_of_the_cache_hold() -> None:
    for cache, blocks in ((CacheConfig(num_gpu_blocks_override=33), 33), (CacheConfig(kv_cache_memory_bytes=44), 44)):
        options = make_options(tiny_spec(), limits=LIMITS, cache=cache)
        assert SimulatedBackend(options, StatedDevice()).plan_memory().num_blocks == (blocks,)
    options = make_options(tiny_spec(), limits=LIMITS, cache=CacheConfig(kv_cache_memory_bytes=1))
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes: 1 KV blocks leave no room for a request"):
        SimulatedBackend(options, StatedDevice()).plan_memory()


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(ConfigError, match="--hardware: required with --backend simulated"):
        create(options_of())
    with pytest.raises(ConfigError, match="--enable-lora: is not simulated; drop it"):
        create(make_options(tiny_spec(), limits=LIMITS, lora=LoraOptions(1, 8, "float32")))
    with pytest.raises(ConfigError, match="--enable-prompt-embeds: is not simulated"):
        create(make_options(tiny_spec(), limits=replace(LIMITS, media_rows=40)))
    with pytest.raises(ConfigError, match="--data-parallel-size: is not simulated"):
        create(make_options(tiny_spec(), limits=LIMITS, data=2))
    with pytest.raises(ConfigError, match=r"--acceptance-rate: 1.5 is not a probability"):
        SimulationConfig(acceptance_rate=1.5)
