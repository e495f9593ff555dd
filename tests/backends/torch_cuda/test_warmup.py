"""After the warm-up nothing is compiled: Triton is asked, in a process without its interpreter."""

from __future__ import annotations

import pytest
from support.reference_driver import random_weights, tiny_spec
from support.warm_launches import compiled

from pagoda.backends.torch_cuda.backend import create
from pagoda.backends.torch_cuda.device import CPU
from pagoda.common.config.cache import CacheConfig
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_spec import kv_layout


@pytest.mark.parametrize("model", ["windows", "experts, int8", "full norms, int4"])
def test_serving_compiles_nothing(model: str) -> None:
    before, after = compiled(model)
    assert len(before) > 15
    assert not after


@pytest.mark.parametrize("seqs", [64, 96, 192, 256])
def test_captures_do_not_read_what_steps_left_behind(seqs: int) -> None:
    """As on a GPU, where memory is measured by large steps before the captures: other sizes lie otherwise."""
    limits = Limits(max_model_len=128, max_num_batched_tokens=512, max_num_seqs=seqs, block_size=4)
    spec = tiny_spec()
    layout = kv_layout(spec, limits.block_size)
    backend = create(spec, limits=limits, layout=layout, cache=CacheConfig(), dtype="float32", device=CPU)
    backend.load(random_weights(spec))
    backend.init_cache(1)
    for plan in backend._plans.largest():
        backend.execute(plan).result()
    backend.warmup()
