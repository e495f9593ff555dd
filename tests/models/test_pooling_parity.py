"""Every family that pools, in every implementation, against transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models.cases import nomic_mixture, renames, tiny, tiny_pooling
from models.cases.tiny_pooling import CASES, Case
from safetensors.torch import load_file, save_file
from support.devices.pooling_plans import plan_of
from support.engines.backend_options import make_pooling_options

from pagoda.backends.reference import pooling as reference
from pagoda.common.backend import PoolingBackend, Weight
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.nested.pooler import PoolerConfig
from pagoda.common.engine.messages import pooling_request
from pagoda.common.engine.pooling.values import PoolingRules, PoolingTask
from pagoda.common.errors import ModelError
from pagoda.common.models.registry import ENCODERS, find, pooling_spec
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.rules import apply_rules, merge_adapter
from pagoda.common.weights.sentence_modules import side_tensors

TOLERANCE = 3e-5
LENGTHS = (1, 12, 30, 12, 3)
"""Lengths of the prompts: longer than the windows, two equal ones, one token."""
LIMITS = Limits(max_model_len=40, max_num_batched_tokens=64, max_num_seqs=8, block_size=16)

Make = Callable[[ModelSpec], PoolingBackend]


def torch_cuda(spec: ModelSpec) -> PoolingBackend:
    from pagoda.backends.torch_cuda.device import CPU
    from pagoda.backends.torch_cuda.pooling import TorchCudaPooling

    return TorchCudaPooling(spec, LIMITS, torch.float32, CPU)


def jax_tpu(spec: ModelSpec) -> PoolingBackend:
    import support.devices.jax_devices  # noqa: F401

    from pagoda.backends.jax_tpu import pooling

    return pooling.create(make_pooling_options(spec, limits=LIMITS))


IMPLEMENTATIONS: dict[str, Make] = {
    "reference": lambda spec: reference.create(make_pooling_options(spec, limits=LIMITS)),
}
if find_spec("triton") is not None:
    IMPLEMENTATIONS["torch_cuda"] = torch_cuda
if find_spec("flax") is not None:
    IMPLEMENTATIONS["jax_tpu"] = jax_tpu


@dataclass
class Saved:
    case: Case
    model: transformers.PreTrainedModel
    folder: Path

    def built(self) -> tuple[ModelSpec, Iterator[Weight]]:
        checkpoint = open_checkpoint(self.folder)
        spec, family = pooling_spec(checkpoint.config(), self.case.use, None, PoolerConfig())
        return spec, apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored)


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param.name)
    return Saved(request.param, request.param.tiny.save(folder), folder)


def rules_of(case: Case, second: int | None) -> PoolingRules:
    task = {"embed": "embed", "classify": "classify", "token_classify": "token_classify"}[case.use]
    return PoolingRules(task=task, use_activation=False, second_text=second)


COMPILED = (
    "bert-classify",
    "modernbert-mean",
    "gte-classify",
    "jina-v2",
    "gemma3-both-ways",
    "qwen3-score",
    "cohere2",
)
"""Cases that have every mechanism; jax_tpu, which compiles for seconds, runs the others with `slow_matrix`."""


@pytest.mark.parametrize(
    ("saved", "implementation"),
    [
        pytest.param(
            *(case, name),
            id=f"{case.name}-{name}",
            marks=() if name != "jax_tpu" or case.name in COMPILED else pytest.mark.slow_matrix,
        )
        for case in CASES
        for name in IMPLEMENTATIONS
    ],
    indirect=["saved"],
)
def test_answers(saved: Saved, implementation: str):
    """A batch of prompts against one prompt at a time."""
    prompts = [tiny.tokens(length, seed=length + index) for index, length in enumerate(LENGTHS)]
    if saved.case.base is tiny_pooling.SMALL_BERT or saved.case.architecture.startswith(
        ("Llama", "GPT2", "Qwen", "Deepseek", "Jina")
    ):
        prompts = [[token % (tiny.VOCAB - 5) + 5 for token in prompt] for prompt in prompts]  # none is padding
    seconds = [None, 9, 25, None, 2] if saved.case.types else [None] * len(prompts)
    spec, weights = saved.built()
    backend = IMPLEMENTATIONS[implementation](spec)
    try:
        backend.load(weights)
        if implementation != "jax_tpu":  # which compiles each program when it is first needed, as well
            backend.warmup()
        requests = tuple(
            pooling_request(str(index), prompt, rules_of(saved.case, second))
            for index, (prompt, second) in enumerate(zip(prompts, seconds))
        )
        ours = backend.execute(plan_of(requests)).result().vectors
        alone = [backend.execute(plan_of((request,))).result().vectors[0] for request in requests]
    finally:
        backend.close()
    for prompt, second, answer, single in zip(prompts, seconds, ours, alone):
        theirs = tiny_pooling.theirs(saved.case, saved.model, prompt, second)
        np.testing.assert_allclose(answer, theirs.numpy(), atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(answer, single, atol=1e-5)
    assert np.ptp(np.concatenate([answer.ravel() for answer in ours])) > 0.1, "a flat answer proves nothing"


def reward_folder(architecture: str, folder: Path, hidden: Path) -> dict[str, torch.Tensor]:
    """Write a reward model with the layers saved in `hidden`; the tensors of its head."""
    rows = torch.Generator().manual_seed(3)
    labels = 2 if "Process" in architecture else 1
    shapes = {
        "score.0.weight": (32, 32),
        "score.0.bias": (32,),
        "score.2.weight": (labels, 32),
        "score.2.bias": (labels,),
    }
    internlm = architecture.startswith("InternLM2")
    head = {name: torch.randn(*shape, generator=rows) / 4 for name, shape in shapes.items()}
    if internlm:
        head = {"v_head.weight": torch.randn(1, 32, generator=rows) / 4}
    layers = {f"model.{name}": tensor for name, tensor in load_file(hidden / "model.safetensors").items()}
    folder.mkdir()
    save_file({**(renames.internlm2(layers) if internlm else layers), **head}, folder / "model.safetensors")
    config = {**json.loads((hidden / "config.json").read_text()), "architectures": [architecture]}
    if internlm:
        config = {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")}
        config["bias"] = False
    (folder / "config.json").write_text(json.dumps(config))
    return head


@pytest.mark.parametrize(
    ("architecture", "base"),
    [
        ("Qwen2ForRewardModel", "Qwen2Model"),
        ("Qwen2ForProcessRewardModel", "Qwen2Model"),
        ("InternLM2ForRewardModel", "LlamaModel"),
    ],
)
def test_reward_models_rate_every_token(architecture: str, base: str, tmp_path: Path):
    model = tiny.Tiny(architecture, base).save(tmp_path / "hidden")
    head = reward_folder(architecture, tmp_path / "reward", tmp_path / "hidden")
    tokens = tiny.tokens(20)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).last_hidden_state[0]
        if "v_head.weight" in head:
            expected = expected @ head["v_head.weight"].T
        else:
            inner = torch.relu(expected @ head["score.0.weight"].T + head["score.0.bias"])
            expected = inner @ head["score.2.weight"].T + head["score.2.bias"]
    use = find(architecture)[1]
    assert use == "token_classify"
    checkpoint = open_checkpoint(tmp_path / "reward")
    spec, family = pooling_spec(checkpoint.config(), use, None, PoolerConfig())
    backend = IMPLEMENTATIONS["reference"](spec)
    try:
        backend.load(apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored))
        for activated in (False, True):
            rules = PoolingRules(task="token_classify", use_activation=activated)
            (ours,) = backend.execute(plan_of((pooling_request("r", tokens, rules),))).result().vectors
            softmax = activated and "Process" in architecture
            np.testing.assert_allclose(ours, expected.softmax(-1) if softmax else expected, atol=TOLERANCE)
    finally:
        backend.close()


@pytest.mark.parametrize("task", [None, "retrieval.query"])
def test_adapters_of_tasks(task: str | None, tmp_path: Path):
    """Jina v3 as published: the adapter of a task, by default text matching, is merged into every matrix."""
    number = 0 if task else 1
    case = next(case for case in CASES if case.name == "jina-v3")
    model, noise = case.tiny.save(tmp_path), torch.Generator().manual_seed(9)
    stored: dict[str, torch.Tensor] = {}
    merged = load_file(tmp_path / "model.safetensors")
    for name, tensor in dict(merged).items():
        if tensor.ndim != 2 or "token_type" in name:
            stored[f"roberta.{name}"] = tensor
            continue
        base, rows, columns = f"roberta.{name}".removesuffix("weight") + "parametrizations.weight.", *tensor.shape
        shapes = ((2, rows, 4), (2, 4, columns)) if "embeddings" in name else ((2, 4, columns), (2, rows, 4))
        first, second = (torch.randn(shape, generator=noise) / 8 for shape in shapes)
        stored |= {f"{base}original": tensor, f"{base}0.lora_A": first, f"{base}0.lora_B": second}
        product = first[number] @ second[number] if "embeddings" in name else second[number] @ first[number]
        merged[name] = tensor + 3 / 4 * product
    save_file(merged, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = type(model).from_pretrained(tmp_path)
    config = {
        **{key: value for key, value in open_checkpoint(tmp_path).config().items() if key != "rope_parameters"},
        **{"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary"},
        **{"rotary_emb_base": 20_000.0, "lora_adaptations": ["retrieval.query", "text-matching"], "lora_rank": 4},
        **{"lora_alpha": 3, "lora_dropout_p": 0.0, "lora_main_params_trainable": False, "use_reg_tokens": False},
        **{"load_trained_adapters": True, "emb_pooler": None, "task_instructions": {"text-matching": ""}},
        **({"jina_task": task} if task else {}),
    }
    spec, family = pooling_spec(config, "embed", None, PoolerConfig())
    assert family.adapter is not None
    with pytest.raises(ModelError, match=r"jina_task is separation; .* adapters for retrieval.query, text-matching"):
        pooling_spec({**config, "jina_task": "separation"}, "embed", None, PoolerConfig())
    tensors = merge_adapter(((name, tensor.numpy()) for name, tensor in stored.items()), family.adapter)
    backend, prompt = IMPLEMENTATIONS["reference"](spec), tiny.tokens(12)
    try:
        backend.load(apply_rules(family.rules, params(spec), tensors, family.ignored))
        rules = PoolingRules(task="embed", use_activation=False)
        (ours,) = backend.execute(plan_of((pooling_request("r", prompt, rules),))).result().vectors
    finally:
        backend.close()
    np.testing.assert_allclose(ours, tiny_pooling.theirs(case, model, prompt, None).numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "jax_tpu"])
def test_nomic_mixture(implementation: str):
    """Nomic Embed 2: every second layer a mixture of experts with one bias."""
    tensors, prompts = nomic_mixture.tensors(), [tiny.tokens(length, seed=length) for length in (12, 30, 1)]
    spec, family = pooling_spec(nomic_mixture.CONFIG, "embed", None, PoolerConfig())
    backend = IMPLEMENTATIONS[implementation](spec)
    try:
        stored = ((name, tensor.numpy()) for name, tensor in tensors.items())
        backend.load(apply_rules(family.rules, params(spec), stored, family.ignored))
        rules = PoolingRules(task="embed", use_activation=False)
        requests = tuple(pooling_request(str(index), prompt, rules) for index, prompt in enumerate(prompts))
        for prompt, answer in zip(prompts, backend.execute(plan_of(requests)).result().vectors):
            np.testing.assert_allclose(answer, nomic_mixture.embedding(tensors, prompt), atol=TOLERANCE)
    finally:
        backend.close()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_heads_of_tokens(implementation: str, tmp_path: Path):
    """BGE-M3: the embedding of a prompt, vectors of its tokens and their weights, in one batch."""
    case = tiny_pooling.roberta("bge-m3", "XLMRobertaModel", "embed", tiny_pooling.first_token)
    model = case.tiny.save(tmp_path)
    shapes = {"colbert_linear": (24, 32), "sparse_linear": (1, 32)}
    noise = torch.Generator().manual_seed(5)
    heads = {
        name: {"weight": torch.randn(shape, generator=noise) / 4, "bias": torch.randn(shape[0], generator=noise)}
        for name, shape in shapes.items()
    }
    for name, head in heads.items():
        torch.save(head, tmp_path / f"{name}.pt")
    checkpoint = open_checkpoint(tmp_path)
    config = {**checkpoint.config(), "architectures": ["BgeM3EmbeddingModel"], "colbert_dim": 24}
    spec, family = pooling_spec(config, "embed", None, PoolerConfig())
    stored = chain(checkpoint.tensors(), side_tensors(tmp_path, family.side_files))
    prompts = [[token % (tiny.VOCAB - 5) + 5 for token in tiny.tokens(length, seed=length)] for length in (9, 9, 9, 4)]
    tasks: tuple[PoolingTask, ...] = ("embed", "token_embed", "token_classify", "token_classify")
    backend = IMPLEMENTATIONS[implementation](spec)
    try:
        backend.load(apply_rules(family.rules, params(spec), stored, family.ignored))
        requests = tuple(
            pooling_request(str(index), prompt, PoolingRules(task=task, use_activation=True))
            for index, (prompt, task) in enumerate(zip(prompts, tasks))
        )
        ours = backend.execute(plan_of(requests)).result().vectors
    finally:
        backend.close()
    normal = torch.nn.functional.normalize
    for prompt, task, answer in zip(prompts, tasks, ours):
        with torch.inference_mode():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
        vectors, weights = (torch.nn.functional.linear(hidden, *head.values()) for head in heads.values())
        theirs = {"embed": normal(hidden[0], dim=0), "token_embed": normal(vectors), "token_classify": weights.relu()}
        np.testing.assert_allclose(answer, theirs[task].numpy(), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("architecture", "tied", "method"),
    [
        ("Qwen3ForCausalLM", True, {"is_original_qwen3_reranker": True}),
        ("LlamaForCausalLM", False, {"method": "from_2_way_softmax"}),
        ("GemmaForCausalLM", True, {"method": "no_post_processing"}),
    ],
)
def test_classifiers_made_of_tokens(architecture: str, tied: bool, method: dict[str, Any], tmp_path: Path):
    """Rerankers: logits of two tokens, or their difference."""
    model = tiny.Tiny(architecture, architecture, {"tie_word_embeddings": tied, "head_dim": 12}).save(tmp_path)
    checkpoint, prompt = open_checkpoint(tmp_path), tiny.tokens(20)
    with torch.inference_mode():
        no, yes = model(torch.tensor([prompt])).logits[0, -1, [7, 3]].tolist()
    config = {
        **checkpoint.config(),
        "architectures": [architecture.replace("CausalLM", "SequenceClassification")],
        "classifier_from_token": [7, 3],
        **method,
    }
    spec, family = pooling_spec(config, "classify", None, PoolerConfig())
    backend = IMPLEMENTATIONS["reference"](spec)
    try:
        backend.load(apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored))
        for activated in (False, True):
            rules = PoolingRules(task="classify", use_activation=activated)
            (ours,) = backend.execute(plan_of((pooling_request("r", prompt, rules),))).result().vectors
            logits = np.array([no, yes]) if method.get("method") == "no_post_processing" else np.array([yes - no])
            shares = np.exp([no, yes]) / np.exp([no, yes]).sum()
            np.testing.assert_allclose(ours, shares[-len(logits) :] if activated else logits, atol=TOLERANCE)
    finally:
        backend.close()


def test_step_rewards_made_of_tokens(tmp_path: Path):
    """Math-Shepherd: at the tokens that end a step, the softmax of the logits of two tokens."""
    model = tiny.Tiny("prm", "MistralForCausalLM", {"head_dim": 12}).save(tmp_path)
    checkpoint, prompt, step = open_checkpoint(tmp_path), tiny.tokens(20), tiny.tokens(20)[4]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :, [7, 3]].softmax(-1)
    config = {
        **checkpoint.config(),
        "architectures": ["MistralForTokenClassification"],
        "classifier_from_token": [7, 3],
        "method": "no_post_processing",
    }
    spec, family = pooling_spec(config, "token_classify", None, PoolerConfig(step_tag=step))
    assert spec.pooler is not None
    backend = IMPLEMENTATIONS["reference"](spec)
    try:
        backend.load(apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored))
        rules = PoolingRules(task="token_classify", use_activation=True, selection=spec.pooler.selection)
        (ours,) = backend.execute(plan_of((pooling_request("r", prompt, rules),))).result().vectors
    finally:
        backend.close()
    expected = logits[[token == step for token in prompt]].numpy()
    np.testing.assert_allclose(rules.select(ours, np.array(prompt)), expected, atol=TOLERANCE)


def test_every_encoder_is_covered():
    covered = {id(find(case.architecture)[0]) for case in CASES}
    assert {id(find(f"{stem}Model")[0]) for stem in ENCODERS} <= covered
