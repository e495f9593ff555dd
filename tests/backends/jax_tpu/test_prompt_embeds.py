"""Steps with embeddings in place of tokens, on XLA's CPU client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flax")

import jax.numpy as jnp
import numpy as np
import support.devices.jax_devices  # noqa: F401
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights
from support.servers.embedded_requests import (
    BLOCKS,
    LIMITS,
    SPECS,
    answers,
    asked,
    assert_same,
    embedded,
    engine,
)

from pagoda.backends.jax_tpu import sampling
from pagoda.backends.jax_tpu.backend import create
from pagoda.backends.jax_tpu.execution.logit_programs import RankLogprobs, Sample
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.shapes import writers_first
from pagoda.backends.jax_tpu.execution.step_programs import Forward, ForwardEmbeds
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import EMBEDDED, RowStart, StepPlan
from pagoda.common.errors import ConfigError


def test_embeddings_on_several_devices() -> None:
    """Two replicas on two devices each."""
    spec, line = SPECS["scaled"], list(asked(8))
    expected = answers(engine(spec, "reference"), line)
    core = engine(spec, "jax_tpu", tensor=2, data=2, prompt_embeds=True)
    assert_same(answers(core, [embedded(spec, request) for request in line]), expected)


def test_only_the_setting_adds_programs_and_none_for_decoding() -> None:
    plain, more = (load_jax(embeds) for embeds in (False, True))
    assert [key for key in more if not isinstance(key, ForwardEmbeds)] == list(plain)
    prefill = [key.shape for key in plain if isinstance(key, Forward) and not key.shape.decode_only]
    assert [key.shape for key in more if isinstance(key, ForwardEmbeds)] == prefill
    for key in plain:
        assert plain.signature(key) == more.signature(key)


def test_bundles_with_prompt_embeds_are_refused(tmp_path: Path) -> None:
    spec = SPECS["scaled"]
    with pytest.raises(ConfigError, match="--compiled-bundle: bundles have no programs for embeddings"):
        create(make_options(spec, limits=LIMITS, prompt_embeds=True, bundle=tmp_path))


def load_jax(embeds: bool) -> StepProgramSet:
    spec = SPECS["scaled"]
    backend = create(make_options(spec, limits=LIMITS, prompt_embeds=embeds))
    return backend._program_set((BLOCKS,))


def test_nothing_is_compiled_while_serving() -> None:
    """A prompt of one embedding, a prompt cached except for its last token, and chunked prompts."""
    spec = SPECS["scaled"]
    limits = replace(LIMITS, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=8)
    layout = kv_layout(spec, limits.block_size)
    backend = create(make_options(spec, limits=limits, layout=layout, prompt_embeds=True, strict=True))
    backend.load(random_weights(spec))
    backend.init_cache((BLOCKS,))
    wanted = (Forward, ForwardEmbeds)
    choosing = (Sample(1, "greedy"), RankLogprobs(1))
    backend._serving.programs.prepare(
        key for key in backend._serving.programs.program_set if isinstance(key, wanted) or key in choosing
    )  # of all that warmup compiles
    core = generation_core(backend, layout, limits, (BLOCKS,))
    line = [
        EngineRequest(request_id=str(n), prompt_token_ids=[7] * size, rules=SamplingRules(logprobs=2), max_tokens=3)
        for n, size in enumerate((1, 13, 8, 8, 1, 9))
    ]
    expected = answers(engine(spec, "reference"), line)
    assert_same(answers(core, [embedded(spec, request) for request in line]), expected)
    assert core.stats.recompiles == 0


def test_an_embedding_is_no_token_to_a_penalty() -> None:
    """With a padded vocabulary, embeddings and two tokens."""
    history = np.full(40, EMBEDDED, np.int32)
    history[38:] = 3, 8
    counts = np.zeros((4, 96), np.uint8)
    counts[::2] = sampling.counts_of(history, 39, 96)
    packed = np.array([[0], [0], [0], [0]], np.int32)
    packed.view(np.float32)[1:] = [[1.7], [0.0], [0.5]]
    logits = np.ones((1, 96), np.float32)
    after = np.asarray(sampling.penalise(*map(jnp.asarray, (logits, counts, packed))))
    assert np.flatnonzero(after[0] != logits[0]).tolist() == [3, 8]


def test_rows_move_with_their_sequences() -> None:
    """A new sequence of one embedding is moved behind the sequence that writes its page in this step."""
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
