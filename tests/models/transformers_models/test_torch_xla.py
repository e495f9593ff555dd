"""Layers of transformers' models through torch-xla, attention by the reference backend."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.cases import tiny
from support.engines.backend_options import make_options

from pagoda.backends.fallback.describe import describe
from pagoda.backends.reference import backend as reference
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.errors import ConfigError
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.checkpoint import open_checkpoint

LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel, TransformersSpec]:
    folder = tmp_path_factory.mktemp("nano")
    model = tiny.Tiny("nano", "NanoChatForCausalLM").save(folder)
    return folder, model, describe(folder, open_checkpoint(folder).config(), trust_remote_code=False)


@pytest.mark.variable("PAGODA_TRANSFORMERS_DEVICE")
def test_a_missing_torch_xla_names_its_extra(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    for value, words in (
        ("xla", r"torch_xla cannot be imported .* pip install 'pagoda\[torch-xla\]'"),
        ("tpu", "unknown"),
    ):
        monkeypatch.setenv("PAGODA_TRANSFORMERS_DEVICE", value)
        with pytest.raises(ConfigError, match=rf"^PAGODA_TRANSFORMERS_DEVICE: .*{words}"):
            reference.create(make_options(saved[2], limits=LIMITS))


@pytest.mark.skipif(find_spec("torch_xla") is None, reason="make test-torch-xla has torch_xla")
def test_greedy_tokens(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decodes, on torch-xla's CPU device."""
    folder, model, spec = saved
    monkeypatch.setenv("PAGODA_TRANSFORMERS_DEVICE", "xla")
    backend, layout = reference.create(make_options(spec, limits=LIMITS)), kv_layout(spec, LIMITS.block_size)
    backend.load(open_checkpoint(folder).tensors())
    assert backend._layer_device.type == "xla"
    backend.init_cache((30,))
    core = generation_core(backend, layout, LIMITS, (30,))
    prompts = {"a": tiny.tokens(count=27, seed=1), "b": [5, 9, 3]}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        core.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, rules=SamplingRules(), max_tokens=5))
    while core.has_work:
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
    for name, prompt in prompts.items():
        ids = list(prompt)
        for _ in range(5):
            with torch.inference_mode():
                ids.append(int(tiny.logits(model, ids)[-1].argmax()))
        assert tokens[name] == ids[len(prompt) :]
