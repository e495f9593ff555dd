"""Steps with embeddings in place of tokens, on XLA's CPU client."""

from __future__ import annotations

from dataclasses import replace

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
from pagoda.backends.jax_tpu.execution.step_programs import Forward, WriteRows
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import EMBEDDED


def test_embeddings_on_several_devices() -> None:
    """Two replicas on two devices each."""
    spec, line = SPECS["scaled"], list(asked(8))
    expected = answers(engine(spec, "reference"), line)
    core = engine(spec, "jax_tpu", tensor=2, data=2)
    assert_same(answers(core, [embedded(spec, request) for request in line]), expected)


def test_an_engine_with_rows_has_the_same_steps_and_programs_that_write_rows() -> None:
    plain, more = (program_set(rows) for rows in (0, 40))
    assert [key for key in more if not isinstance(key, WriteRows)] == list(plain)
    assert [key.count for key in more if isinstance(key, WriteRows)] == [40, 16]
    assert not [key for key in plain if isinstance(key, WriteRows)]
    differ = {type(key) for key in plain if plain.signature(key) != more.signature(key)}
    assert differ == {Forward}
    assert more.facts == plain.facts | {"media_rows": 40}


def program_set(rows: int) -> StepProgramSet:
    backend = create(make_options(SPECS["scaled"], limits=replace(LIMITS, media_rows=rows)))
    return backend._program_set((BLOCKS,))


def test_nothing_is_compiled_while_serving() -> None:
    """A prompt of one embedding, a prompt cached except for its last token, and chunked prompts."""
    spec = SPECS["scaled"]
    limits = replace(LIMITS, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=8)
    layout = kv_layout(spec, limits.block_size)
    backend = create(make_options(spec, limits=limits, layout=layout, strict=True))
    backend.load(random_weights(spec))
    backend.init_cache((BLOCKS,))
    wanted = (Forward, WriteRows)
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
