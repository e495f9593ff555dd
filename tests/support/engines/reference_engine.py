"""An engine core over the reference backend, or another one, with random weights."""

from __future__ import annotations

from dataclasses import replace

from fakes import snapshots_every
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.registry import load_backend
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.models.spec import ModelSpec

LIMITS = Limits(max_model_len=64, max_num_batched_tokens=10, max_num_seqs=6, block_size=4)
"""Prompts longer than 10 tokens are prefilled in chunks."""


def engine(
    spec: ModelSpec,
    blocks: int | tuple[int, ...],
    *,
    limits: Limits = LIMITS,
    snapshot_tokens: int | None = None,
    name: str = "reference",
) -> EngineCore:
    """`blocks`: of each pool; `snapshot_tokens`: where recurrent state is kept; `name`: of the backend."""
    if snapshot_tokens is not None:
        limits = replace(limits, snapshots=snapshots_every(snapshot_tokens))
    layout = kv_layout(spec, limits.block_size)
    backend = load_backend(name).create(make_options(spec, limits=limits, layout=layout))
    backend.load(random_weights(spec))
    num_blocks = blocks if isinstance(blocks, tuple) else (blocks,) * len(layout.pools)
    backend.init_cache(num_blocks)
    return generation_core(backend, layout, limits, num_blocks)


def greedy_request(name: str, prompt: list[int], count: int) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=prompt, rules=SamplingRules(), max_tokens=count)


def generate(core: EngineCore, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of each prompt; one request joins per step."""
    waiting = [greedy_request(str(index), prompt, count) for index, prompt in enumerate(prompts)]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in waiting}
    waiting.reverse()
    finished = 0
    while finished < len(prompts):
        if waiting:
            core.add_request(waiting.pop())
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
            finished += output.finish_reason is not None
    core.check_integrity()
    return [tokens[str(index)] for index in range(len(prompts))]


def assert_naive_tokens(spec: ModelSpec, prompt: list[int], blocks: int, *, preempts: bool) -> None:
    """Check that prompts with a common beginning, prefilled in chunks, get the naive model's tokens."""
    prompts = [prompt + [(7 * i + j * j) % 96 for j in range(3 + 4 * i)] for i in range(6)]
    core = engine(spec, blocks)
    naive = NaiveModel(spec, random_weights(spec), max_len=LIMITS.max_model_len)
    assert generate(core, prompts, 9) == [naive.greedy(each, 9) for each in prompts]
    assert (core.stats.preemptions > 0) == preempts
    assert core.stats.prefix_hits > 0
