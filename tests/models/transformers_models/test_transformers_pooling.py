"""Pooling models that transformers computes, against the same models by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from model_support import POOLED_BY_FALLBACK
from models.cases import tiny
from models.cases.tiny_pooling import LABELS, SMALL_BERT
from models.test_pooling_parity import LENGTHS, LIMITS
from models.transformers_models.test_transformers_models import code_cache, write_code  # noqa: F401 (a fixture)
from support.devices.pooling_plans import plan_of
from support.engines.backend_options import make_pooling_options

from pagoda.backends.fallback.describe import describe_pooling
from pagoda.backends.reference import pooling as reference
from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.pooling import TorchCudaPooling
from pagoda.common.backend import PoolingBackend
from pagoda.common.engine.messages import pooling_request
from pagoda.common.engine.pooling.values import PoolingRules, PoolingTask
from pagoda.common.errors import ModelError, WeightError
from pagoda.common.models.family import PoolUse
from pagoda.common.models.registry import is_supported
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.checkpoint import open_checkpoint

TOLERANCE = 3e-5
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}


@dataclass(frozen=True)
class Case:
    architecture: str
    use: PoolUse
    kind: str  # of pooling, unless transformers' code pools
    extra: dict[str, Any]
    types: bool = False  # token types change its outputs
    together: bool = True  # prompts of all lengths are concatenated

    @property
    def tiny(self) -> tiny.Tiny:
        return tiny.Tiny(self.architecture, self.architecture, self.extra, SMALL_BERT)


CASES = [
    Case("ElectraForSequenceClassification", "classify", "first", {"embedding_size": 16, **LABELS}, types=True),
    Case("DebertaV2ForSequenceClassification", "classify", "first", {**DISENTANGLED, "num_labels": 1}, together=False),
    Case("MPNetModel", "embed", "first", {"pad_token_id": 1}, together=False),
    Case("RobertaModel", "embed", "first", {"pad_token_id": 1, "type_vocab_size": 1}),
    Case("BertForSequenceClassification", "classify", "first", LABELS, types=True),
    Case("AlbertForSequenceClassification", "classify", "first", {"embedding_size": 16}, types=True, together=False),
    Case("AlbertForTokenClassification", "token_classify", "all", {"embedding_size": 16, **LABELS}, types=True),
    Case("T5EncoderModel", "embed", "first", {"max_position_embeddings": 64, "d_kv": 8, "d_ff": 48}, together=False),
    Case("NanoChatForCausalLM", "embed", "last", {"num_key_value_heads": 2}),
    Case("GPTNeoXForSequenceClassification", "classify", "last", {**LABELS, "pad_token_id": None}),
    Case("LlamaModel", "reward", "all", {"num_key_value_heads": 2}),
]


@dataclass(frozen=True)
class Saved:
    case: Case
    model: transformers.PreTrainedModel
    folder: Path

    @classmethod
    def save(cls, case: Case, folder: Path) -> Saved:
        return cls(case, case.tiny.save(folder), folder)

    def spec(self) -> TransformersSpec:
        return describe_pooling(
            self.folder, open_checkpoint(self.folder).config(), self.case.use, trust_remote_code=False
        )

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return open_checkpoint(self.folder).tensors()

    @torch.inference_mode()
    def theirs(self, prompt: list[int], second: int | None) -> torch.Tensor:
        more: dict[str, Any] = {}
        if self.case.types:
            at = len(prompt) if second is None else second
            more["token_type_ids"] = (torch.arange(len(prompt)) >= at).long()[None]
        pools = self.case.use in ("embed", "reward")
        model = self.model.base_model if pools and "CausalLM" in self.case.architecture else self.model
        output = model(input_ids=torch.tensor([prompt]), **more)[0][0]
        return {"first": output[0], "last": output[-1], "all": output}[self.case.kind] if pools else output


def made(implementation: str, spec: TransformersSpec, dtype: str = "float32") -> PoolingBackend:
    if implementation == "torch_cuda":
        return TorchCudaPooling(spec, LIMITS, getattr(torch, dtype), CPU)
    return reference.create(make_pooling_options(spec, limits=LIMITS, dtype=dtype))


def answers(backend: PoolingBackend, prompts: list[list[int]], seconds: list[int | None], rules: PoolingRules) -> Any:
    requests = [
        pooling_request(str(index), prompt, replace(rules, second_text=second))
        for index, (prompt, second) in enumerate(zip(prompts, seconds))
    ]
    whole = backend.execute(plan_of(requests)).result().vectors
    return whole, [backend.execute(plan_of((request,))).result().vectors[0] for request in requests]


TASKS: dict[PoolUse, PoolingTask] = {"reward": "token_classify"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.architecture)
def test_outputs(case: Case, tmp_path: Path) -> None:
    """A batch of prompts, and each alone, against transformers with one prompt at a time."""
    saved = Saved.save(case, tmp_path)
    spec = saved.spec()
    assert spec.pooler is not None
    assert spec.pooler.kind == case.kind
    prompts = [[t % (tiny.VOCAB - 5) + 5 for t in tiny.tokens(n, seed=n + i)] for i, n in enumerate(LENGTHS)]
    seconds = [None, 9, 25, None, 2] if case.types else [None] * len(prompts)
    expected = [saved.theirs(prompt, second).numpy() for prompt, second in zip(prompts, seconds)]
    assert np.ptp(np.concatenate([vector.ravel() for vector in expected])) > 0.1, "a flat answer proves nothing"
    rules = PoolingRules(task=TASKS.get(case.use, case.use), use_activation=False)
    for implementation in ("reference", "torch_cuda"):
        backend = made(implementation, spec)
        try:
            backend.load(saved.weights())
            assert backend._pool.model.concatenates == case.together
            backend.warmup()
            batch, alone = answers(backend, prompts, seconds, rules)
        finally:
            backend.close()
        for vector, single, theirs in zip(batch, alone, expected):
            np.testing.assert_allclose(vector, theirs, atol=TOLERANCE, rtol=0)
            np.testing.assert_allclose(vector, single, atol=1e-5)


def test_a_classifier_does_not_round_to_16_bits(tmp_path: Path) -> None:
    saved = Saved.save(CASES[0], tmp_path)
    backend, prompt = made("torch_cuda", saved.spec(), "bfloat16"), tiny.tokens(12)
    backend.load(saved.weights())
    rules = PoolingRules(task="classify", use_activation=False)
    ((logits,), _) = answers(backend, [prompt], [None], rules)
    backend.close()
    np.testing.assert_allclose(logits, saved.theirs(prompt, None).numpy(), atol=0.1)
    assert not np.array_equal(logits, torch.from_numpy(logits).bfloat16().float().numpy())


def test_tensors_that_are_missing_or_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An embedder needs no pooler of the base model; a tensor of another head is logged."""
    saved = Saved.save(Case("MPNetModel", "embed", "first", {"pad_token_id": 1}), tmp_path)
    assert saved.spec().max_positions == 62  # after the row of the padding
    whole = dict(saved.weights())
    enough = {name: array for name, array in whole.items() if not name.startswith("pooler.")}
    backend = made("reference", saved.spec())
    backend.load(iter({**enough, "lm_head.bias": np.zeros(3, np.float32)}.items()))
    backend.warmup()
    backend.close()
    assert "1 tensors of the checkpoint are not used, one is lm_head.bias" in caplog.text
    del enough["encoder.layer.0.attention.attn.q.weight"]
    backend = made("reference", saved.spec())
    with pytest.raises(WeightError, match=r"1 missing tensors .* encoder.layer.0.attention.attn.q.weight"):
        backend.load(iter(enough.items()))
    backend.close()


@pytest.mark.parametrize(
    ("architecture", "use", "changes", "words"),
    [
        ("BartModel", "embed", {}, "is an encoder-decoder model, which is not supported; use an encoder or a decoder"),
        ("BartForSequenceClassification", "classify", {}, "is an encoder-decoder model, which is not supported"),
        ("T5ForConditionalGeneration", "embed", {}, "is an encoder-decoder model.*T5EncoderModel.* for its encoder"),
        ("T5Model", "embed", {}, "is an encoder-decoder model.* --hf-overrides .*T5EncoderModel.* for its encoder"),
        ("NanoChatForCausalLM", "classify", {}, "transformers .* has no sequence classifier NanoChatForCausalLM"),
        ("BloomModel", "embed", {"max_position_embeddings": None}, "states no maximum context; use --hf-overrides"),
        (
            "ElectraModel",
            "embed",
            {"num_attention_heads": 5},
            "transformers cannot build or run it: .* same reduction dim",
        ),
    ],
)
def test_refusals(architecture: str, use: PoolUse, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    model_type = getattr(transformers, architecture).config_class.model_type
    config = {**SMALL_BERT, **changes, "architectures": [architecture], "model_type": model_type}
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(ModelError, match=rf"^(?=.*{architecture}).*{words}"):
        describe_pooling(tmp_path, config, use, trust_remote_code=False)


@pytest.mark.usefixtures("code_cache")
def test_custom_code(tmp_path: Path) -> None:
    """Custom code needs trust; its errors are reported at load; prompts run one by one if they influence each other."""
    saved = Saved.save(Case("LlamaForCausalLM", "embed", "last", {"num_key_value_heads": 2}), tmp_path / "llama")
    mixed = "inputs_embeds = inputs_embeds + inputs_embeds.cumsum(1)"
    prompts = [tiny.tokens(12), tiny.tokens(5)]
    vectors = {}
    for folder, change in (("works", "pass"), ("mixes", mixed), ("fails", "assert inputs_embeds.is_meta, 'no values'")):
        custom = replace(saved, folder=write_code(tmp_path / folder, saved.folder, change))
        config = open_checkpoint(custom.folder).config()
        with pytest.raises(ModelError, match=r"PebbleForCausalLM is defined by Python code .* --trust-remote-code"):
            describe_pooling(custom.folder, config, "embed", trust_remote_code=False)
        backend = made("reference", describe_pooling(custom.folder, config, "embed", trust_remote_code=True))
        if folder == "fails":
            with pytest.raises(ModelError, match="PebbleForCausalLM: transformers cannot run it: no values"):
                backend.load(custom.weights())
            continue
        backend.load(custom.weights())
        assert backend._pool.model.concatenates == (folder == "works")
        vectors[folder], alone = answers(
            backend, prompts, [None, None], PoolingRules(task="embed", use_activation=False)
        )
        np.testing.assert_allclose(vectors[folder], alone, atol=1e-5)
    for vector, prompt in zip(vectors["works"], prompts):
        np.testing.assert_allclose(vector, saved.theirs(prompt, None).numpy(), atol=TOLERANCE)
    assert not np.allclose(vectors["works"][0], vectors["mixes"][0], atol=0.1)


def test_the_documented_architectures_are_tested() -> None:
    assert {case.architecture for case in CASES if not is_supported(case.architecture)} == {
        *POOLED_BY_FALLBACK,
        "NanoChatForCausalLM",
    }
