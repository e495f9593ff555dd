"""The step loop over the reference backend with random weights, and greedy tokens from it."""

from __future__ import annotations

from support.backend_options import make_options
from support.reference_driver import random_weights

from pagoda.backends.registry import load_backend
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import KvLayout, kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.models.spec import ModelSpec


def reference_engine(
    spec: ModelSpec, limits: Limits, blocks: tuple[int, ...], layout: KvLayout | None = None
) -> EngineCore:
    layout = layout or kv_layout(spec, limits.block_size)
    backend = load_backend("reference").create(make_options(spec, limits=limits, layout=layout))
    backend.load(random_weights(spec))
    backend.init_cache(blocks)
    return generation_core(backend, layout, limits, blocks)


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
