"""Pooling engines: which models pool, their EngineInfo, and the effect of their settings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.checkpoints.tiny_encoder import CONFIG, write_encoder, write_modules
from support.checkpoints.tiny_folder import write_model

from pagoda.common.engine.messages import pooling_request
from pagoda.common.engine.pooling.scheduler import PoolingScheduler
from pagoda.common.engine.pooling.values import PoolingRules, PoolingTask
from pagoda.common.errors import ConfigError, ModelError, RequestError, WeightError
from pagoda.common.models.spec import ModelSpec, Pooler
from pagoda.server import ipc_messages
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import resolve
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.startup.engine import BuiltEngine, build_engine
from pagoda.tests.common.weights.gguf.gguf_writing import convert

LABELS = {"id2label": {"0": "bad", "1": "so so", "2": "good"}}
CLASSIFIER = {"architectures": ["BertForSequenceClassification"], **LABELS}
SCORER = {"architectures": ["BertForSequenceClassification"], "num_labels": 1, "id2label": {"0": "relevance"}}


def args(folder: Path, **more: Any) -> EngineArgs:
    return EngineArgs(folder, **{"backend": "reference"} | more)


def offered(folder: Path, **more: Any) -> ipc_messages.PoolingInfo | None:
    """Return what the model offers, without building it; None: it generates."""
    return resolve(args(folder, **more).create_engine_config(), "llm").pooling


class Engine:
    """A built engine for one text at a time."""

    def __init__(self, folder: Path, **more: Any) -> None:
        config = args(folder, **more).create_engine_config()
        self.built: BuiltEngine = build_engine(config, "llm")
        self.tokenizer = open_tokenizer(config)
        self.info = self.built.info

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.built.backend.close()

    def __call__(self, *texts: str, task: PoolingTask = "embed", **rules: Any) -> np.ndarray:
        """Return the output of a text, or of a pair."""
        assert self.tokenizer is not None
        assert self.info.pooling is not None
        ids, second = self.tokenizer.encode_within(self.info.limits.max_model_len, *texts)
        resolved = {"use_activation": self.info.pooling.use_activation, "second_text": second} | rules
        self.built.core.add_request(pooling_request("r", ids, PoolingRules(task=task, **resolved)))
        (output,) = self.built.core.step().outputs
        assert output.pooled is not None
        return output.pooled.array


def test_an_encoder_embeds(tmp_path: Path) -> None:
    with Engine(write_encoder(tmp_path)) as engine:
        assert isinstance(engine.built.core._scheduler, PoolingScheduler)
        assert engine.info.runner == "pooling"
        assert engine.info.pooling == ipc_messages.PoolingInfo(tasks=("embed", "token_embed"), embedding_size=16)
        assert engine.info.num_blocks == 0
        assert engine.info.limits.max_model_len == 32
        assert engine.info.dtype == "float32"
        whole, raw = engine("the cat sat"), engine("the cat sat", use_activation=False)
        np.testing.assert_allclose(whole, raw / np.linalg.norm(raw), atol=1e-6)
        assert abs(np.linalg.norm(raw) - 1) > 0.1
        tokens = engine("the cat sat", task="token_embed", use_activation=False)
        np.testing.assert_allclose(tokens[0], raw, atol=1e-6)
        assert tokens.shape == (5, 16)
        cut = engine("the cat sat", dimensions=6)
        np.testing.assert_allclose(cut, raw[:6] / np.linalg.norm(raw[:6]), atol=1e-6)
        assert not np.allclose(engine("the cat", "the dog"), engine("the cat", "the dog", second_text=None))


def test_engine_info_round_trips_as_a_message(tmp_path: Path) -> None:
    folder = write_modules(write_encoder(tmp_path), "cls_token", "Normalize")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "q: "}}))
    with Engine(folder, served_model_name=("tiny",)) as engine:
        ready = ipc_messages.decode_from_engine(ipc_messages.encode(ipc_messages.Ready(engine.info)))
        assert isinstance(ready, ipc_messages.Ready)
        assert ready.info == engine.info
        assert engine.info.pooling is not None
        assert engine.info.pooling.prompts == {"query": "q: "}
        request = pooling_request("r", [2, 5, 3], PoolingRules(task="embed", use_activation=True, second_text=1))
        assert ipc_messages.decode_to_engine(
            ipc_messages.encode(ipc_messages.AddRequest(request))
        ) == ipc_messages.AddRequest(request)
        engine.built.core.add_request(request)
        step = ipc_messages.StepReply(engine.built.core.step())
        assert ipc_messages.decode_from_engine(ipc_messages.encode(step)) == step


def test_a_classifier_classifies(tmp_path: Path) -> None:
    with Engine(write_encoder(tmp_path, **CLASSIFIER)) as engine:
        info = engine.info.pooling
        assert info is not None
        assert (info.tasks, info.labels, info.num_labels) == (
            ("classify", "token_classify"),
            ("bad", "so so", "good"),
            3,
        )
        assert not info.is_cross_encoder
        raw = engine("the cat", task="classify", use_activation=False)
        np.testing.assert_allclose(engine("the cat", task="classify"), np.exp(raw) / np.exp(raw).sum(), atol=1e-6)
        assert engine("the cat", task="token_classify").shape == (4, 3)
        with pytest.raises(RequestError, match="task embed is not one of this model's: classify, token_classify"):
            engine("the cat")


def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    with Engine(write_encoder(tmp_path, **SCORER)) as engine:
        info = engine.info.pooling
        assert info is not None
        assert (info.tasks, info.is_cross_encoder, info.pairs) == (
            ("classify", "score", "token_classify"),
            True,
            "tokenizer",
        )
        raw = engine("the cat", "a dog", task="score", use_activation=False)
        np.testing.assert_allclose(engine("the cat", "a dog", task="score"), 1 / (1 + np.exp(-raw)), atol=1e-6)


@pytest.mark.parametrize(
    ("noted", "raw_equals"),
    [
        ({"problem_type": "regression"}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, False),
    ],
)
def test_activation_comes_from_the_checkpoint(tmp_path: Path, noted: dict[str, Any], raw_equals: bool) -> None:
    with Engine(write_encoder(tmp_path, **SCORER, **noted)) as engine:
        raw, active = (engine("the", "a", task="score", use_activation=on) for on in (False, True))
        assert np.allclose(raw, active) == raw_equals


def test_pooling_follows_sentence_transformers_modules(tmp_path: Path) -> None:
    folder = write_modules(write_encoder(tmp_path / "m"), "mean_tokens", max_seq_length=6, do_lower_case=True)
    with Engine(folder) as engine:
        assert engine.info.limits.max_model_len == 6
        assert engine.info.pooling is not None
        assert not engine.info.pooling.use_activation  # no Normalize among the modules
        tokens = engine("the cat", task="token_embed")
        np.testing.assert_allclose(engine("the cat"), tokens.mean(0), atol=1e-6)
        np.testing.assert_allclose(engine("THE CAT"), tokens.mean(0), atol=1e-6)
        assert len(engine("the cat sat on the mat", task="token_embed")) == 6


def test_dense_modules_are_applied(tmp_path: Path) -> None:
    """They have their own files and run in order, after pooling and before normalising."""
    folder = write_modules(write_encoder(tmp_path), "mean_tokens", "Dense", "Dense", "Normalize")
    noise = np.random.default_rng(1)
    weights = {"2_Dense": noise.normal(size=(24, 16)), "3_Dense": noise.normal(size=(5, 24))}
    bias = noise.normal(size=24).astype(np.float32)
    for name, weight in weights.items():
        first = name == "2_Dense"
        kind = "activation.Tanh" if first else "linear.Identity"
        config = {"out_features": len(weight), "bias": first, "activation_function": f"torch.nn.modules.{kind}"}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        tensors = {"linear.weight": weight.astype(np.float32)} | ({"linear.bias": bias} if first else {})
        save_file(tensors, folder / name / "model.safetensors")
    with Engine(folder) as engine:
        assert engine.info.pooling is not None
        assert (engine.info.pooling.embedding_size, engine.info.pooling.use_activation) == (5, True)
        with Engine(write_modules(write_encoder(tmp_path / "plain"), "mean_tokens")) as plain:
            mean = plain("the cat sat")
        expected = weights["3_Dense"] @ np.tanh(weights["2_Dense"] @ mean + bias)
        np.testing.assert_allclose(engine("the cat sat"), expected / np.linalg.norm(expected), atol=1e-5)


@pytest.mark.setting("--runner")
def test_decoder_with_sentence_transformers_modules_embeds_by_default(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    assert offered(folder) is None
    assert offered(folder, runner="pooling") is not None
    (folder / "modules.json").write_text((write_modules(write_encoder(tmp_path / "e")) / "modules.json").read_text())
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    assert offered(folder) is not None
    assert offered(folder, runner="generate") is None
    with Engine(folder) as engine:
        tokens = engine("abc", task="token_embed")
        np.testing.assert_allclose(engine("abc"), tokens[-1], atol=1e-6)
        np.testing.assert_allclose(engine("abcd", task="token_embed")[:3], tokens, atol=1e-5)  # causal


@pytest.mark.setting("--convert")
def test_convert_of_a_decoder(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **LABELS)
    tasks = {convert: offered(folder, convert=convert) for convert in ("none", "embed", "classify", "reward")}
    assert {convert: info and info.tasks for convert, info in tasks.items()} == {
        "none": None,
        "embed": ("embed", "token_embed"),
        "classify": ("classify", "token_classify"),
        "reward": ("token_classify",),
    }
    with Engine(folder, convert="reward") as engine:
        assert engine("abc", task="token_classify").shape == (3, 32)
    with pytest.raises(WeightError, match=r"pooler\.classifier .*: the checkpoint lacks score\.weight"):
        build_engine(args(folder, convert="classify").create_engine_config(), "llm")


@pytest.mark.setting("--pooler-config")
def test_pooler_config_is_applied(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, is_matryoshka=True)
    stated = {"seq_pooling_type": "MEAN", "use_activation": False, "dimensions": 4}
    with Engine(folder, pooler_config=stated) as engine:
        assert engine.info.pooling is not None
        assert engine.info.pooling.default_dimensions == 4
        tokens = engine("the cat", task="token_embed")
        np.testing.assert_allclose(engine("the cat"), tokens.mean(0), atol=1e-6)
    with Engine(folder, pooler_config={"task": "token_embed"}) as engine:
        assert engine.info.pooling is not None
        assert engine.info.pooling.tasks[0] == "token_embed"
    whole = offered(folder, pooler_config={"pooling_type": "ALL"})
    assert whole is not None
    assert whole.tasks == ("token_embed",)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"pooling_type": "SUM"}, "pooling_type is 'SUM'; use CLS, LAST, MEAN, ALL, STEP"),
        ({"pooling_type": 3}, "pooling_type is 3"),
        ({"seq_pooling_type": "CLS", "pooling_type": "MEAN"}, "pooling_type and seq_pooling_type contradict"),
        ({"normalize": "yes"}, "normalize is 'yes'; use true or false"),
        ({"normalise": True}, "normalise is unknown; did you mean normalize?"),
        ({"dimensions": 0}, "dimensions is 0; use an integer of at least 1"),
        ({"dimensions": 4}, "dimensions is 4, but the model does not support Matryoshka embeddings"),
        ({"step_tag_id": -1}, "step_tag_id is -1; use an integer of at least 0"),
        (
            {"returned_token_ids": [5]},
            "returned_token_ids: a choice of labels is not in this version; .*from_token",
        ),
        ({"task": "classify"}, "task is 'classify'; this model offers embed, token_embed"),
        ({"task": 1}, "task is 1; use a text such as embed"),
    ],
)
def test_invalid_pooler_config_is_refused(tmp_path: Path, stated: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        offered(write_encoder(tmp_path), pooler_config=stated)
    assert refused.value.setting == "--pooler-config"


def test_default_dimensions_must_be_supported_by_the_model(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, matryoshka_dimensions=[4, 8])
    info = offered(folder, pooler_config={"dimensions": 8})
    assert info is not None
    assert (info.is_matryoshka, info.dimensions, info.default_dimensions) == (True, (4, 8), 8)
    with pytest.raises(ConfigError, match="dimensions is 6; the model supports 4 or 8"):
        offered(folder, pooler_config={"dimensions": 6})
    with pytest.raises(ModelError, match="matryoshka_dimensions is 8, not a list"):
        offered(write_encoder(tmp_path, matryoshka_dimensions=8))


@pytest.mark.parametrize(
    ("more", "setting", "words"),
    [
        ({"runner": "generate"}, "--runner", "BertModel is a pooling model and cannot generate"),
        ({"runner": "draft"}, "--runner", "speculative decoding"),
        ({"runner": "generate", "convert": "embed"}, "--convert", "embed needs --runner pooling"),
        ({"quantization": "fp8", "backend": "reference"}, "--quantization", "is not supported for pooling models"),
        ({"cpu_offload_gb": 1.0}, "--cpu-offload-gb", "reference"),
    ],
)
def test_settings_that_do_not_suit_the_model_are_refused(
    tmp_path: Path, more: dict[str, Any], setting: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        offered(write_encoder(tmp_path), **more)
    assert refused.value.setting == setting


def test_convert_none_refuses_to_pool_a_generative_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM is generative; use embed, classify or reward"):
        offered(write_model(tmp_path), runner="pooling", convert="none")


def test_settings_without_effect_log_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pagoda"):
        offered(write_encoder(tmp_path / "e"), num_gpu_blocks_override=7, enable_prefix_caching=True)
        offered(write_model(tmp_path / "d"), pooler_config={"pooling_type": "MEAN"})
    assert "--num-gpu-blocks-override, --enable-prefix-caching: no effect on a pooling model" in caplog.text
    assert "--pooler-config has no effect: the model generates" in caplog.text


def test_a_gguf_file_states_its_pooling(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "hf")
    convert(folder, tmp_path / "model.gguf", "bert", {"pooling_type": 1, "attention.causal": False})
    resolved = resolve(args(tmp_path / "model.gguf").create_engine_config(), "llm")
    assert isinstance(resolved.spec, ModelSpec)
    assert resolved.spec.pooler == Pooler("mean")
    assert resolved.pooling is not None
    assert (resolved.pooling.tasks, resolved.pooling.use_activation) == (("embed", "token_embed"), True)


def test_unknown_encoder_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"BertForPreTraining is not supported; the nearest .* BertFor"):
        offered(write_encoder(tmp_path, architectures=["BertForPreTraining"], num_labels=2))
    assert CONFIG["architectures"] == ["BertModel"]


def test_prompt_longer_than_max_num_batched_tokens_is_served(tmp_path: Path) -> None:
    with Engine(write_encoder(tmp_path), max_num_batched_tokens=8, max_num_seqs=2) as engine:
        long = " ".join("abcdefghijklmnop")
        assert engine(long, task="token_embed").shape == (18, 16)
