"""Device memory for earlier tokens: allocated by the first request that reads them, or that request is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.engines.backend_options import make_options
from support.engines.reference_driver import Driver, random_weights, tiny_spec

from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda import sampling
from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.sampling import CudaSampler, TokenHistory
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling.processors import SamplerOptions
from pagoda.common.engine.sampling.rules import PENALISED, SamplingRules

PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
WORDS = SamplingRules(bad_words=((1, 2), (7,)))
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=24, max_num_seqs=6, block_size=4)


def make_core(backend: str) -> EngineCore:
    """Return an engine whose steps are captured."""
    spec, layout = tiny_spec(), kv_layout(tiny_spec(), LIMITS.block_size)
    device = {"device": CPU} if backend == "torch_cuda" else {}
    loaded = load_backend(backend).create(make_options(spec, limits=LIMITS, layout=layout), **device)
    loaded.load(random_weights(spec))
    loaded.init_cache((60,))
    loaded.warmup()
    return generation_core(loaded, layout, LIMITS, (60,))


def history_of(core: EngineCore) -> TokenHistory:
    return core._execute.__self__._runner.programs.parts.sampler.kept


def answer(core: EngineCore, *rules: SamplingRules) -> list[list[EngineOutput]]:
    """Return the outputs of a request with each of the rules, all at once."""
    for number, each in enumerate(rules):
        core.add_request(
            EngineRequest(request_id=str(number), prompt_token_ids=[*PROMPT, number], rules=each, max_tokens=20)
        )
    outputs: list[list[EngineOutput]] = [[] for _ in rules]
    while any(not each or each[-1].finish_reason is None for each in outputs):
        for output in core.step().outputs:
            outputs[int(output.request_id)].append(output)
    return outputs


def tokens_of(outputs: list[list[EngineOutput]]) -> list[list[int]]:
    return [[token for output in each for token in output.new_token_ids] for each in outputs]


@pytest.mark.parametrize("rules", [PENALISED, WORDS], ids=["penalties", "words"])
def test_the_first_request_that_reads_earlier_tokens_allocates(rules: SamplingRules) -> None:
    """In an engine whose graphs are captured and that has sampled before; `reference` keeps them from the start."""
    core, reference = make_core("torch_cuda"), make_core("reference")
    captures = core._execute.__self__._stream.captures
    plain = SamplingRules(bad_words=((7,),))
    assert tokens_of(answer(core, plain, plain)) == tokens_of(answer(reference, plain, plain))
    assert history_of(core).tokens is None
    mixed = plain, rules, plain, rules
    assert tokens_of(answer(core, *mixed)) == tokens_of(answer(reference, *mixed))
    assert history_of(core).tokens is not None
    assert tokens_of(answer(core, *mixed)) == tokens_of(answer(reference, *mixed))
    assert core._execute.__self__._stream.captures == captures


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        (PENALISED, "presence_penalty"),
        (SamplingRules(frequency_penalty=0.1), "frequency_penalty"),
        (SamplingRules(repetition_penalty=1.1), "repetition_penalty"),
        (WORDS, "bad_words"),
    ],
)
def test_without_memory_the_request_is_refused_and_others_go_on(
    rules: SamplingRules, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core("torch_cuda")
    plain = SamplingRules()
    [[*want]] = tokens_of(answer(core, plain))
    monkeypatch.setattr(sampling, "available_bytes", lambda: history_of(core).num_bytes - 1)
    first, refused = answer(core, plain, rules)
    assert tokens_of([first]) == [want]
    assert refused[-1].finish_reason == "error"
    name, message = refused[-1].error
    assert name == field
    assert message.startswith(f"{field}: the earlier tokens of 6 requests of 64 tokens take 0 MiB, ")
    assert "a lower --gpu-memory-utilization" in message
    monkeypatch.undo()
    assert answer(core, plain, rules)[1][-1].error is None, "memory was freed"
    core.check_integrity()


def test_warm_up_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Driver(tiny_spec(), "scattered", backend="torch_cuda", device=CPU).backend
    history, allocated = backend._runner.programs.parts.sampler.kept, []
    plan = backend._warmup_plans.decode(1, PENALISED)
    monkeypatch.setattr(type(backend._warmup_plans), "minimal", lambda self: [plan])
    release = TokenHistory.release

    def watched(history: TokenHistory) -> None:
        allocated.append(history.tokens is not None)
        release(history)

    monkeypatch.setattr(TokenHistory, "release", watched)
    backend.warmup()
    assert allocated == [True]
    assert history.tokens is None


def test_ranks_allocate_together_or_not_at_all() -> None:
    short = SimpleNamespace(rank=0, size=2, all_reduce=lambda own: own + 1)  # the other rank has no memory
    history = TokenHistory(6, 64, CPU, short, always=False)
    assert history.allocate() is not None
    assert history.tokens is None


@pytest.mark.parametrize("always", [{"options": SamplerOptions(processors=(("any", object()),))}, {"guesses": True}])
def test_logits_processors_and_drafters_read_it_always(always: dict) -> None:
    sampler = CudaSampler(96, 6, 64, CPU, max_drafts=1, **always)
    sampler.kept.release()
    assert sampler.kept.tokens is not None
    assert np.prod(sampler.history.shape) * torch.int32.itemsize == sampler.kept.num_bytes
