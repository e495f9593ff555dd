"""Adapters together with drafts: the same outputs with and without drafts, on every backend, with every proposer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import support.devices.jax_devices
from support.checkpoints.adapted_models import random_adapter
from support.checkpoints.naive_drafters import random_drafter
from support.devices.thread_ranks import on_ranks
from support.engines.backend_options import make_options
from support.engines.engine_runs import drain, new_tokens
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.replaying import Replaying, drafting

from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.parallel.tensor_parallel import Comm
from pagoda.common.backend import Backend, RankLink
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.engine.lora.store import AdapterStore
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.models.drafters import (
    AttendedInputs,
    DrafterSpec,
    FeatureDrafter,
    HeadsDrafter,
    JoinedInputs,
    LanguageDrafter,
    captured_layers,
)
from pagoda.common.models.primitives import Norm
from pagoda.common.weights.lora.weights import AdapterWeights, LoraOptions

assert support.devices.jax_devices.DEVICES > 1

BACKENDS = ["reference", "torch_cuda", "jax_tpu"]
SPEC = tiny_spec(window=6)
NORM = Norm(1e-5)
SLOTS, RANK, BLOCKS = 2, 8, 80
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=24, max_num_seqs=5, block_size=8, max_loras=SLOTS)
RULES = (
    SamplingRules(logprobs=1),
    SamplingRules(temperature=0.8, seed=7, logprobs=1),
    SamplingRules(repetition_penalty=1.4, frequency_penalty=0.5, logprobs=1),
)
COMMON = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 22, 33, 44, 55, 66, 77]
LAYER = SPEC.layers[0]


def attended() -> FeatureDrafter:
    """A drafter that reads the inputs of layers of the target, which its adapters change."""
    attention = replace(LAYER.attention, beside_embedding=True, qk_norm=None, qkv_bias=False)
    layer = replace(LAYER, mixers=(), norms=replace(LAYER.norms, before_mixer=None))
    model = replace(SPEC, layers=(layer,), final_norm=NORM)
    inputs = AttendedInputs(attention, NORM, NORM, False)
    return FeatureDrafter(model, inputs, source_width=3 * SPEC.width, captured=(0, 1, 1), head_vocab=40, own_head=True)


def joined() -> FeatureDrafter:
    """A drafter with the target's embedding and head, whose adapters are not its own."""
    layer = replace(LAYER, norms=replace(LAYER.norms, before_mixer=None))
    return FeatureDrafter(
        replace(SPEC, layers=(layer,), final_norm=None), JoinedInputs(bias=True), source_width=SPEC.width
    )


DRAFTERS: dict[str, DrafterSpec] = {
    "language": LanguageDrafter(SPEC),
    "joined": joined(),
    "attended": attended(),
    "heads": HeadsDrafter(SPEC.vocab, SPEC.width, heads=3, blocks=1),
}


def requests() -> list[EngineRequest]:
    """Four adapters, more than there are slots, and none; half of the prompts begin alike."""
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=[*COMMON, number % 3] if number % 2 else [number + 1] * (1 + number),
            rules=RULES[number % len(RULES)],
            max_tokens=14 + number,
            adapter=Adapter(number=number % 5, name=f"a{number % 5}", path="") if number % 5 else None,
        )
        for number in range(12)
    ]


def store_of(backend: Backend) -> AdapterStore:
    matrices = backend.adaptable()  # type: ignore[attr-defined]

    def read(adapter: Adapter) -> AdapterWeights:
        return random_adapter(matrices, [8, 1][adapter.number % 2], adapter.number)

    return AdapterStore(read, 3)


def make_backend(name: str, limits: Limits, drafter: DrafterSpec | None = None, comm: Comm | None = None) -> Backend:
    layout = kv_layout(SPEC, limits.block_size, drafter=() if drafter is None else drafter.caches)
    device = {"device": CPU} if name == "torch_cuda" else {}
    lora = LoraOptions(SLOTS, RANK, "float32")
    shared = {} if comm is None else {"tensor": comm.size, "rank": RankLink(comm, comm.rank)}
    options = make_options(SPEC, limits=limits, layout=layout, lora=lora, drafter=drafter, **shared)
    backend = load_backend(name).create(options, **device)
    backend.load(random_weights(SPEC))
    if drafter is not None:
        own = dict(random_weights(SPEC)) if isinstance(drafter, LanguageDrafter) else random_drafter(drafter)
        backend.load_drafter(own.items())
    backend.plan_memory()
    backend.init_cache((BLOCKS,) * len(layout.pools))
    return backend


def make_core(backend: Backend, limits: Limits, drafter: DrafterSpec | None = None, **options) -> EngineCore:
    layout = kv_layout(SPEC, limits.block_size, drafter=() if drafter is None else drafter.caches)
    blocks = (BLOCKS,) * len(layout.pools)
    return generation_core(backend, layout, limits, blocks, store=store_of(backend), **options)


def answers(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, list]]:
    """Tokens and log-probabilities of all requests."""
    for request in requests():
        core.add_request(request)
    outputs = drain(core)
    return {name: new_tokens(each) for name, each in outputs.items()}, {
        name: _logprobs(each) for name, each in outputs.items()
    }


def _logprobs(outputs: Sequence[EngineOutput]) -> list:
    return [
        (position.token_ids, [round(value, 3) for value in position.logprobs])
        for output in outputs
        for position in output.logprobs or ()
    ]


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, list[int]], dict[str, list]]:
    """Without drafts, on the reference backend."""
    return answers(make_core(make_backend("reference", LIMITS), LIMITS))


def limits_with_drafts(backend: str) -> Limits:
    """Return the limits of an engine with drafts; of jax_tpu with fewer step shapes."""
    return replace(LIMITS, max_drafts=3, max_num_batched_tokens=16 if backend == "jax_tpu" else 24)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[tuple[str, Backend]]:
    made = make_backend(request.param, limits_with_drafts(request.param))
    yield request.param, made
    made.close()


def test_adapters_change_the_answers(plain) -> None:
    """What the other tests compare is worth comparing."""
    backend = make_backend("reference", LIMITS)
    core = make_core(backend, LIMITS)
    for request in requests():
        core.add_request(replace(request, adapter=None))
    bare = {name: new_tokens(each) for name, each in drain(core).items()}
    assert [name for name in bare if bare[name] == plain[0][name]] == ["0", "5", "10"]


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_drafts_change_no_answer(backend: tuple[str, Backend], ahead: bool, plain) -> None:
    name, made = backend
    limits = replace(limits_with_drafts(name), async_scheduling=ahead)
    proposer = Replaying(plain[0], lambda request, place: (place * 7 + int(request)) % 4 == 0)
    core = make_core(made, limits, make_scheduler=drafting(proposer, SPEC.vocab))
    accepted = count_accepted(core)
    assert answers(core) == plain
    assert accepted["drafted"] > accepted["accepted"] > 60


def count_accepted(core: EngineCore) -> dict[str, int]:
    """Return counts of drafts, which grow as the engine steps."""
    counts, update = {"drafted": 0, "accepted": 0}, core._scheduler.update

    def count(plan, result):
        if plan.num_drafts is not None:
            counts["drafted"] += int(plan.num_drafts.sum())
            counts["accepted"] += int(((result.token_ids >= 0).sum(1) - 1)[plan.samples].sum())
        return update(plan, result)

    core._scheduler.update = count
    return counts


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", ["reference", "torch_cuda"])
def test_drafter_models_change_no_answer(name: str, kind: str, plain) -> None:
    """The drafter is the base model's: adapters change what it reads of the target, not its own matrices."""
    drafter = DRAFTERS[kind]
    limits = replace(LIMITS, max_drafts=3, device_drafts=True)
    backend = make_backend(name, limits, drafter)
    backend.warmup()
    core = make_core(backend, limits, drafter)
    counts = count_accepted(core)
    assert answers(core) == plain
    assert counts["drafted"] > 60
    if kind == "language":  # the target itself, so that greedy requests without an adapter accept all
        assert counts["accepted"] > 15
    backend.close()


def test_drafter_models_on_ranks_change_no_answer(plain) -> None:
    limits = replace(LIMITS, max_drafts=3, device_drafts=True)

    def ask(comm: Comm) -> object:
        return answers(make_core(make_backend("torch_cuda", limits, joined(), comm), limits, joined()))

    assert on_ranks(2, ask) == [plain, plain]


@pytest.mark.parametrize("name", ["reference", "torch_cuda"])
def test_captured_layers_are_those_with_the_adapter(name: str) -> None:
    """Guesses of a drafter over captured layers differ between adapters, and are the same on both backends."""
    drafter = attended()
    assert captured_layers(drafter)
    limits = replace(LIMITS, max_drafts=3, device_drafts=True)
    guesses = {}
    for each in {name, "reference"}:
        backend = make_backend(each, limits, drafter)
        core = make_core(backend, limits, drafter)
        kept: list[list[int]] = []
        update = core._scheduler.update

        def keep(plan, result, kept=kept, update=update):
            if result.guesses is not None:
                kept += result.guesses.tolist()
            return update(plan, result)

        core._scheduler.update = keep
        adapters = [None, Adapter(number=1, name="a1", path=""), Adapter(number=2, name="a2", path="")]
        first: list[list[list[int]]] = []
        for number, adapter in enumerate(adapters):
            core.add_request(replace(requests()[1], request_id=f"x{number}", adapter=adapter, max_tokens=8))
            drain(core)
            first.append(list(kept))
            kept.clear()
        guesses[each] = first
        backend.close()
    assert guesses[name] == guesses["reference"]
    assert len({str(each) for each in guesses[name]}) == 3
