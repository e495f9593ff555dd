"""Steps with embeddings in place of tokens: on every backend, and for embeddings of every kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import support.jax_devices  # noqa: F401
from support.jax_requests import requests
from support.reference_driver import random_weights, tiny_spec

from pagoda.backends.jax_tpu.batch import writers_first
from pagoda.backends.jax_tpu.catalogue import Catalogue, Choose, Forward, ForwardRows, OnLogits
from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.device import CPU
from pagoda.common.config.cache import CacheConfig
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.kv_spec import kv_layout
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.sharded import Engine, ShardedCore
from pagoda.common.engine.step import EMBEDDED, RowStart, StepPlan
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import Embedding, ModelSpec

SPECS = {
    "scaled": replace(tiny_spec(window=6), embedding=Embedding(scale=3.5)),
    "narrow": replace(tiny_spec(), embedding=Embedding(scale=2.5, positions=64, position_offset=2, width=16)),
}
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=8)
BLOCKS = 13
MAKE = {"reference": {}, "torch_cuda": {"device": CPU}, "jax_tpu": {"prompt_embeds": True}}


def engine(spec: ModelSpec, backend: str, **make: int) -> Engine:
    """With too few blocks for four long requests, so that some are preempted."""
    layout = kv_layout(spec, LIMITS.block_size)
    made = load_backend(backend).create(
        spec, limits=LIMITS, layout=layout, cache=CacheConfig(), dtype="float32", **MAKE[backend], **make
    )
    made.load(random_weights(spec))
    made.init_cache(BLOCKS)
    if make.get("data", 1) > 1:
        return ShardedCore(made, layout, LIMITS, BLOCKS, make["data"])
    return EngineCore(made, layout, LIMITS, BLOCKS)


def asked(count: int) -> Iterator[EngineRequest]:
    """Random requests, without what looks at the tokens of a prompt."""
    for request in requests(count, seed=3):
        yield replace(request, rules=replace(request.rules, prompt_logprobs=None, repetition_penalty=1.0, logprobs=2))


def embedded(spec: ModelSpec, request: EngineRequest) -> EngineRequest:
    """The same with the rows of its tokens, looked up and scaled; of every third request some tokens stay."""
    table = dict(random_weights(spec))["embed"] * np.float32(spec.embedding.scale)
    tokens = np.array(request.prompt_token_ids)
    stay = np.arange(len(tokens)) % 5 == 2 if int(request.request_id) % 3 == 0 else np.zeros(len(tokens), np.bool_)
    return replace(
        request,
        prompt_token_ids=np.where(stay, tokens, EMBEDDED).tolist(),
        prompt_embeds=table[tokens[~stay]].tobytes(),
    )


def answers(core: Engine, line: Iterable[EngineRequest]) -> dict[str, list[EngineOutput]]:
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


@pytest.mark.parametrize(
    ("kind", "backend", "count"),
    [(kind, backend, 40) for kind in SPECS for backend in ("reference", "torch_cuda")] + [("narrow", "jax_tpu", 12)],
)
def test_rows_say_what_tokens_say(kind: str, backend: str, count: int) -> None:
    spec, line = SPECS[kind], list(asked(count))
    expected = answers(engine(spec, "reference"), line)
    core = engine(spec, backend)
    mixed = [request if int(request.request_id) % 4 == 1 else embedded(spec, request) for request in line]
    assert_same(answers(core, mixed), expected)
    if count > 20:
        assert core.stats.preemptions
    longest = max(mixed, key=lambda request: len(request.prompt_token_ids))
    for _ in range(2):
        hits = core.stats.prefix_hits
        assert_same(answers(core, [longest]), {longest.request_id: expected[longest.request_id]})
    assert core.stats.prefix_hits > hits


def test_devices_share_rows() -> None:
    """Two copies of the model on two devices each."""
    spec, line = SPECS["scaled"], list(asked(8))
    expected = answers(engine(spec, "reference"), line)
    core = engine(spec, "jax_tpu", tensor=2, data=2)
    assert_same(answers(core, [embedded(spec, request) for request in line]), expected)


def test_only_the_setting_adds_programs_and_none_for_decoding() -> None:
    plain, more = (load_jax(embeds) for embeds in (False, True))
    assert [key for key in more if not isinstance(key, ForwardRows)] == list(plain)
    prefill = [key.shape for key in plain if isinstance(key, Forward) and not key.shape.decode_only]
    assert [key.shape for key in more if isinstance(key, ForwardRows)] == prefill
    for key in plain:
        assert plain.signature(key) == more.signature(key)


def test_a_bundle_has_no_such_programs(tmp_path: Path) -> None:
    spec = SPECS["scaled"]
    with pytest.raises(ConfigError, match="--compiled-bundle: holds no programs that take embeddings"):
        load_backend("jax_tpu").create(
            spec,
            limits=LIMITS,
            layout=kv_layout(spec, LIMITS.block_size),
            cache=CacheConfig(),
            dtype="float32",
            prompt_embeds=True,
            bundle=tmp_path,
        )


def load_jax(embeds: bool) -> Catalogue:
    spec = SPECS["scaled"]
    backend = load_backend("jax_tpu").create(
        spec,
        limits=LIMITS,
        layout=kv_layout(spec, LIMITS.block_size),
        cache=CacheConfig(),
        dtype="float32",
        prompt_embeds=embeds,
    )
    return backend._catalogue(BLOCKS)


def test_nothing_is_compiled_while_serving() -> None:
    """A prompt of one row, a page that is there already but for its last row, and prompts in chunks."""
    spec = SPECS["scaled"]
    limits = replace(LIMITS, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=8)
    layout = kv_layout(spec, limits.block_size)
    backend = load_backend("jax_tpu").create(
        spec, limits=limits, layout=layout, cache=CacheConfig(), dtype="float32", prompt_embeds=True, strict=True
    )
    backend.load(random_weights(spec))
    backend.init_cache(BLOCKS)
    wanted = (Forward, ForwardRows)
    choosing = (Choose(1, "greedy"), OnLogits("logprobs", 1))
    backend._programs.prepare(
        key for key in backend._programs.catalogue if isinstance(key, wanted) or key in choosing
    )  # of all that warmup compiles
    core = EngineCore(backend, layout, limits, BLOCKS)
    line = [
        EngineRequest(request_id=str(n), prompt_token_ids=[7] * size, rules=SamplingRules(logprobs=2), max_tokens=3)
        for n, size in enumerate((1, 13, 8, 8, 1, 9))
    ]
    expected = answers(engine(spec, "reference"), line)
    assert_same(answers(core, [embedded(spec, request) for request in line]), expected)
    assert core.stats.recompiles == 0


def test_rows_move_with_their_sequences() -> None:
    """A new sequence of one row, whose page the longer one fills in this step, comes after it."""
    tokens = np.array([EMBEDDED, 5, EMBEDDED, EMBEDDED, 6], np.int32)
    plan = StepPlan(
        step=0,
        starts=(RowStart(3, np.zeros(5, np.int32), 5, SamplingRules()),),
        rows=np.array([3, 1], np.int32),
        query_start=np.array([0, 1, 5], np.int32),
        context=np.array([4, 0], np.int32),
        token_ids=tokens,
        block_tables=(np.zeros((2, 1), np.int32),),
        samples=np.ones(2, np.bool_),
        embeds=np.array([[1], [2], [3]], np.uint8),
    )
    moved, order = writers_first(plan)
    assert order.tolist() == [1, 0]
    assert moved.token_ids.tolist() == [5, EMBEDDED, EMBEDDED, 6, EMBEDDED]
    assert moved.embeds is not None
    assert moved.embeds[:, 0].tolist() == [2, 3, 1]
    assert moved.embedded.tolist() == [1, 2, 4]
