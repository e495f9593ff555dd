"""Requests whose prompts are embeddings of their tokens, and engines of any backend that answer them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from fakes import row_items
from support.devices.jax_requests import requests
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec

from pagoda.backends.registry import load_backend
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.steps.contract import EMBEDDED
from pagoda.common.models.spec import Embedding, ModelSpec

SPECS = {
    "scaled": replace(tiny_spec(window=6), embedding=Embedding(scale=3.5)),
    "narrow": replace(tiny_spec(), embedding=Embedding(scale=2.5, positions=64, position_offset=2, width=16)),
}
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=8, media_rows=40)
BLOCKS = 13


def engine(spec: ModelSpec, backend: str, **make: Any) -> EngineCore:
    """With too few blocks for four long requests, so that some are preempted."""
    layout = kv_layout(spec, LIMITS.block_size)
    device = {"device": make.pop("device")} if "device" in make else {}
    made = load_backend(backend).create(make_options(spec, limits=LIMITS, layout=layout, **make), **device)
    made.load(random_weights(spec))
    made.init_cache((BLOCKS,))
    if make.get("data", 1) > 1:
        return sharded_core(made, layout, LIMITS, (BLOCKS,), make["data"])
    return generation_core(made, layout, LIMITS, (BLOCKS,))


def asked(count: int) -> Iterator[EngineRequest]:
    """Random requests, without what looks at the tokens of a prompt."""
    for request in requests(count, seed=3):
        yield replace(request, rules=replace(request.rules, prompt_logprobs=None, repetition_penalty=1.0, logprobs=2))


def embedded(spec: ModelSpec, request: EngineRequest) -> EngineRequest:
    """The same with the rows of its tokens, looked up and scaled; of every third request some tokens stay."""
    table = dict(random_weights(spec))["embed"] * np.float32(spec.embedding.scale)
    tokens = np.array(request.prompt_token_ids)
    stay = np.arange(len(tokens)) % 5 == 2 if int(request.request_id) % 3 == 0 else np.zeros(len(tokens), np.bool_)
    ids = np.where(stay, tokens, EMBEDDED).tolist()
    return replace(
        request,
        prompt_token_ids=ids,
        media=row_items(ids, table[tokens[~stay]].tobytes()),
    )


def answers(core: EngineCore, line: Iterable[EngineRequest]) -> dict[str, list[EngineOutput]]:
    found: dict[str, list[EngineOutput]] = {}
    waiting = list(line)
    while waiting or core.has_work:
        for request in waiting[:3]:
            core.add_request(request)
        del waiting[:3]
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).append(output)
    core.check_integrity()
    return found


def assert_same(found: dict[str, list[EngineOutput]], expected: dict[str, list[EngineOutput]]) -> None:
    assert found.keys() == expected.keys()
    for name, outputs in expected.items():
        assert [o.new_token_ids for o in found[name]] == [o.new_token_ids for o in outputs], name
        ours, theirs = ([o.logprobs[0].logprobs for o in each] for each in (found[name], outputs))
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def check_rows_say_what_tokens_say(kind: str, backend: str, count: int, **make: Any) -> None:
    """In chunks, beside token prompts, with preemption, and from the prefix cache; as `reference` answers tokens."""
    spec, line = SPECS[kind], list(asked(count))
    expected = answers(engine(spec, "reference"), line)
    core = engine(spec, backend, **make)
    mixed = [request if int(request.request_id) % 4 == 1 else embedded(spec, request) for request in line]
    assert_same(answers(core, mixed), expected)
    assert core.stats.preemptions or count < 20
    longest = max(mixed, key=lambda request: len(request.prompt_token_ids))
    for _ in range(2):
        hits = core.stats.prefix_hits
        assert_same(answers(core, [longest]), {longest.request_id: expected[longest.request_id]})
    assert core.stats.prefix_hits > hits
