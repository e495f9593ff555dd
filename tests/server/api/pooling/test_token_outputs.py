"""Models with outputs per token and rerankers made of language models, served from a folder over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from support.checkpoints.tiny_encoder import write_encoder
from support.checkpoints.tiny_folder import write_model
from support.servers.live_server import live_server

from pagoda.common.pooling_params import PoolingParams
from pagoda.server.llm import LLM

TEXT = "the cat sat"
CPU = {"backend": "reference", "served_model_name": ["m"]}


def add_tensors(folder: Path, **tensors: np.ndarray) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})


def data(answer: tuple[int, Any], key: str = "data") -> list[np.ndarray]:
    status, body = answer
    assert status == 200, body
    return [np.array(entry[key]) for entry in body["data"]]


def hidden_states(folder: Path, **engine: Any) -> np.ndarray:
    """Of TEXT, with its special tokens."""
    with live_server(str(folder), engine={**CPU, **engine}) as server:
        return data(server.post("/pooling", {"input": TEXT, "task": "token_embed", "use_activation": False}))[0]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def test_bge_m3(tmp_path: Path) -> None:
    folder, noise = write_encoder(tmp_path, pad_token_id=0, bos_token_id=2, eos_token_id=3), np.random.default_rng(1)
    plain = {"hf_overrides": {"architectures": ["XLMRobertaModel"]}}
    hidden = hidden_states(folder, **plain)
    shapes = {"colbert_linear": (16, 16), "sparse_linear": (1, 16)}
    heads = {name: (noise.normal(size=shape), noise.normal(size=shape[0])) for name, shape in shapes.items()}
    for name, (weight, bias) in heads.items():
        torch.save({"weight": torch.tensor(weight).float(), "bias": torch.tensor(bias).float()}, folder / f"{name}.pt")
    vectors, weights = (hidden @ weight.T + bias for weight, bias in heads.values())
    engine = {**CPU, "hf_overrides": {"architectures": ["BgeM3EmbeddingModel"]}}
    with live_server(str(folder), engine=engine) as server:
        (embedding,) = data(server.post("/v1/embeddings", {"input": TEXT}), "embedding")
        np.testing.assert_allclose(embedding, unit(hidden[0]), atol=1e-5)
        (ours,) = data(server.post("/pooling", {"input": TEXT, "task": "token_embed"}))
        np.testing.assert_allclose(ours, unit(vectors)[1:], atol=1e-5)  # without [CLS]
        (ours,) = data(server.post("/pooling", {"input": TEXT, "task": "token_classify"}))
        np.testing.assert_allclose(ours, np.maximum(weights, 0)[1:-1], atol=1e-5)  # nor [SEP]
        (ours,) = data(server.post("/pooling", {"input": TEXT, "task": "embed&token_classify"}))
        np.testing.assert_allclose(ours, [*unit(hidden[0]), *np.maximum(weights, 0)[1:-1, 0]], atol=1e-5)
        (score,) = data(server.post("/score", {"text_1": TEXT, "text_2": TEXT}), "score")
        np.testing.assert_allclose(score, 1, atol=1e-6)


def test_colbert(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    hidden, linear = hidden_states(folder), np.random.default_rng(2).normal(size=(6, 16)).astype(np.float32)
    add_tensors(folder, **{"linear.weight": linear})
    engine = {**CPU, "hf_overrides": {"architectures": ["HF_ColBERT"], "dim": 6}}
    with live_server(str(folder), engine=engine) as server:
        one, other = data(server.post("/pooling", {"input": [TEXT, "a dog"]}))
        np.testing.assert_allclose(one, unit(hidden @ linear.T), atol=1e-5)
        (score,) = data(server.post("/score", {"text_1": TEXT, "text_2": "a dog"}), "score")
        np.testing.assert_allclose(score, (one @ other.T).max(1).sum(), atol=1e-5)
        status, body = server.post("/rerank", {"query": TEXT, "documents": ["a dog", TEXT]})
        assert (status, [result["index"] for result in body["results"]]) == (200, [1, 0])


def test_multi_vector_modules_without_pooling(tmp_path: Path) -> None:
    """As PyLate writes them: a dense layer for every token."""
    folder = write_encoder(tmp_path)
    hidden, linear = hidden_states(folder), np.random.default_rng(3).normal(size=(6, 16)).astype(np.float32)
    kinds = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    listed = [{"idx": index, "name": "", "path": path, "type": kind} for index, (path, kind) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Dense").mkdir()
    dense = {"in_features": 16, "out_features": 6, "bias": False}
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense | identity))
    save_file({"linear.weight": linear}, folder / "1_Dense" / "model.safetensors")
    np.testing.assert_allclose(hidden_states(folder), hidden @ linear.T, atol=1e-5)


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}|"


@pytest.mark.parametrize("tied", [False, True])
def test_reranker_made_of_a_language_model(tmp_path: Path, tied: bool) -> None:
    folder = write_model(tmp_path, max_position_embeddings=256, tie_word_embeddings=tied)
    names = {"architectures": ["LlamaForSequenceClassification"], "classifier_from_token": ["a", "b"]}
    overrides = {**names, "method": "from_2_way_softmax"}
    with live_server(str(folder), engine={**CPU, "dtype": "float32"}) as server:
        body = {"prompt": "<query>cat<document>dog|", "max_tokens": 1, "logprobs": 5, "logprob_token_ids": [97, 98]}
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        chosen = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        shares = np.exp([chosen["a"], chosen["b"]])
    with live_server(str(folder), chat_template=TEMPLATE, engine={**CPU, "hf_overrides": overrides}) as server:
        pair = {"queries": "cat", "documents": ["dog"]}
        (score,) = data(server.post("/score", pair), "score")
        np.testing.assert_allclose(score, shares[1] / shares.sum(), atol=1e-5)
        status, body = server.post("/rerank", {"query": "cat", "documents": ["dog", "ox"]})
        assert status == 200
        assert {result["index"]: result["relevance_score"] for result in body["results"]}[0] == pytest.approx(score)
        assert server.llm.pooling_inputs.pooling.pairs == "concatenated"  # without a template


@pytest.mark.field("PoolingParams.step_tag_id")
def test_process_rewards_are_those_of_the_step_tags(tmp_path: Path) -> None:
    folder = write_model(tmp_path, architectures=["LlamaForTokenClassification"], num_labels=2)
    weight = np.random.default_rng(4).normal(size=(2, 32)).astype(np.float32)
    add_tensors(folder, **{"score.weight": weight, "score.bias": np.ones(2, np.float32)})
    text = "one.two."
    with live_server(str(folder), engine=CPU) as server:
        (every,) = data(server.post("/pooling", {"input": text}))
    with live_server(
        str(folder), engine={**CPU, "pooler_config": {"pooling_type": "STEP", "step_tag_id": 46}}
    ) as server:
        steps, none = data(server.post("/pooling", {"input": [text, "no step"]}))
    np.testing.assert_allclose(steps, every[[3, 7]], atol=1e-6)
    assert none.tolist() == []
    llm = LLM(str(folder), backend="reference")
    (output,) = llm.encode(text, PoolingParams(step_tag_id=ord("t")), use_tqdm=False)
    np.testing.assert_allclose(output.outputs.data, every[[4]], atol=1e-6)
