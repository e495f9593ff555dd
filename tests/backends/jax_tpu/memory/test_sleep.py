"""Sleep mode of jax_tpu: weights and KV cache leave the devices, and answers are the same after waking up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("flax")

import support.devices.jax_devices  # noqa: F401
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec

from pagoda.backends.jax_tpu.backend import JaxBackend, create
from pagoda.backends.jax_tpu.model import model as model_module
from pagoda.common.backend import Weight
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import SLEEP_TAGS, EngineCore, Sleeper, generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.errors import SleepError

SPEC = tiny_spec()
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=1, block_size=16)
BLOCKS = 9


def engine(read: list[Weight]) -> tuple[JaxBackend, EngineCore, Sleeper]:
    """Return an engine that compiles the programs that it needs when it needs them. `read`: what waking up reads."""
    layout = kv_layout(SPEC, LIMITS.block_size)
    backend = create(make_options(SPEC, limits=LIMITS, layout=layout, sleep_mode=True))
    backend.load(iter(read))
    backend.init_cache((BLOCKS,))
    core = generation_core(backend, layout, LIMITS, (BLOCKS,))
    return backend, core, Sleeper(backend, core, lambda: iter(read))


def answer(core: EngineCore) -> list[int]:
    prompt = np.arange(5, 17).tolist()
    core.add_request(
        EngineRequest(request_id="a", prompt_token_ids=prompt, rules=SamplingRules(temperature=0.0), max_tokens=4)
    )
    tokens: list[int] = []
    while core.has_work:
        for output in core.step().outputs:
            tokens += output.new_token_ids
    return tokens


@pytest.fixture(scope="module")
def weights() -> Iterator[list[Weight]]:
    return list(random_weights(SPEC))


@pytest.mark.setting("--enable-sleep-mode")
def test_answers_are_the_same_after_every_kind_of_sleep(weights: list[Weight], monkeypatch: pytest.MonkeyPatch) -> None:
    read = list(weights)
    backend, core, sleeper = engine(read)
    want = answer(core)
    for level in (1, 2):
        leaves, caches = backend._leaves, backend._caches
        sleeper.sleep(level)
        assert all(array.is_deleted() for array in (*leaves, *caches))
        sleeper.wake_up(SLEEP_TAGS)
        assert answer(core) == want
    read.pop()
    sleeper.sleep(2)
    with pytest.raises(SleepError, match="weights cannot wake up"):
        sleeper.wake_up(SLEEP_TAGS)
    read.extend(weights[-1:])
    sleeper.wake_up(SLEEP_TAGS)
    monkeypatch.setattr(model_module, "available_bytes", lambda: 0)
    with pytest.raises(SleepError, match="the engine stays awake: no room in host memory"):
        sleeper.sleep(1)
    assert answer(core) == want
