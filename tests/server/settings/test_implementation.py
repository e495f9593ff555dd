"""--model-impl and --trust-remote-code: which code computes a model, and what is refused."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models.cases import tiny
from models.cases.tiny_pooling import SMALL_BERT
from models.transformers_models.test_transformers_models import (  # noqa: F401 (a fixture)
    NANO,
    code_cache,
    expected_greedy,
    write_code,
)
from safetensors.torch import save_file
from support.checkpoints.byte_text import byte_tokenizer
from support.checkpoints.tiny_encoder import WORDS, word_pieces, write_modules
from support.suite.rows import each_row

from pagoda import PoolingParams
from pagoda.backends import registry
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.registry import ModelRegistry
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.transformers_spec import TransformersSpec, own_spec
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.server.llm import LLM
from pagoda.server.settings import implementation
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import Resolved, resolve

Saved = tuple[Path, transformers.PreTrainedModel]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A model of an architecture that has no specification."""
    folder = tmp_path_factory.mktemp("nano")
    model = NANO.save(folder)
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    return folder, model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("llama")
    return folder, tiny.llama("plain").save(folder)


def resolved(folder: Path, **more: Any) -> Resolved:
    settings = {"skip_tokenizer_init": True, "backend": "reference", "num_gpu_blocks_override": 64} | more
    return resolve(EngineArgs(str(folder), **settings).create_engine_config(), "llm")


def answer(folder: Path, prompt: list[int], **more: Any) -> list[int]:
    settings = {"skip_tokenizer_init": True, "backend": "reference", "num_gpu_blocks_override": 64} | more
    llm = LLM(str(folder), max_num_batched_tokens=16, max_num_seqs=4, dtype="float32", **settings)
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )
    llm.shutdown()
    return list(output.outputs[0].token_ids)


@pytest.mark.setting("--model-impl")
def test_auto_falls_back_and_says_what_is_lost(nano: Saved, caplog: pytest.LogCaptureFixture) -> None:
    folder, model = nano
    with caplog.at_level(logging.WARNING, "pagoda"):
        prompt = tiny.tokens(count=40)
        assert answer(folder, prompt) == expected_greedy(model, prompt, 6)
    (line,) = [record.getMessage() for record in caplog.records if "transformers" in record.getMessage()]
    assert line == (
        "pagoda does not implement NanoChatForCausalLM: transformers computes it, over the paged KV cache. Lost: speed "
        "(layers in plain torch, no CUDA graphs), tensor parallelism, data parallelism, quantised weights, measured "
        "scales of the KV cache, sleep mode, CPU offload, batch invariance, random weights, new weights while serving "
        "and GGUF files"
    )
    row = next(row for row in resolved(folder).rows if row.name == "model_impl")
    assert (row.value, row.source) == ("transformers", "model")


@pytest.mark.parametrize("implementation", ["pagoda", "transformers"])
def test_packed_weights_of_bitnet(implementation: str, tmp_path: Path) -> None:
    """Four rows to a byte: the tokens of transformers' model with the values that they mean."""
    model = tiny.Tiny("BitNetForCausalLM", "BitNetForCausalLM").save(tmp_path)
    stored = {}
    for name, weight in model.state_dict().items():
        stored[name] = weight.clone()
        if name.endswith("_proj.weight"):
            scale = weight.abs().mean()
            numbers = (weight / scale).round().clamp(-1, 1)
            blocks = (numbers + 1).to(torch.uint8).chunk(4)
            stored[name] = blocks[0] | blocks[1] << 2 | blocks[2] << 4 | blocks[3] << 6
            stored[f"{name}_scale"] = scale.reshape(1)
            weight.copy_(numbers * scale)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = tiny.tokens(count=20)
    assert answer(tmp_path, prompt, model_impl=implementation) == expected_greedy(model, prompt, 6)


@pytest.mark.setting("--model-impl")
def test_the_implementation_can_be_chosen(llama: Saved) -> None:
    folder, model = llama
    for impl, kind in (
        ("auto", ModelSpec),
        ("pagoda", ModelSpec),
        ("vllm", ModelSpec),
        ("transformers", TransformersSpec),
    ):
        assert type(resolved(folder, model_impl=impl).spec) is kind
    prompt = tiny.tokens(count=30)
    expected = expected_greedy(model, prompt, 6)
    assert answer(folder, prompt, model_impl="transformers") == answer(folder, prompt, model_impl="pagoda") == expected
    with pytest.raises(ConfigError, match=r"^--model-impl: 'terratorch' is not supported: .*; use auto"):
        resolved(folder, model_impl="terratorch")


def test_without_the_fallback_an_architecture_is_refused(nano: Saved) -> None:
    words = (
        r"NanoChatForCausalLM is not supported; the nearest supported ones are (\w+, ){2}\w+; --model-impl transformers"
    )
    with pytest.raises(ModelError, match=words):
        resolved(nano[0], model_impl="pagoda")


def test_a_family_that_cannot_be_loaded_is_not_replaced(nano: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_families", {"NanoChatForCausalLM": "nowhere:NANO"})
    with pytest.raises(ModelError, match=r"nowhere:NANO of pagoda.models cannot be imported"):
        resolved(nano[0])


def test_auto_keeps_multimodal_checkpoints(llama: Saved, tmp_path: Path) -> None:
    """Their text models have specifications, though no architecture of the registry has their name."""
    text = json.loads((llama[0] / "config.json").read_text())
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert isinstance(resolved(tmp_path, load_format="dummy").spec, ModelSpec)


# --- pooling ---

ELECTRA: dict[str, Any] = {"embedding_size": 16, "vocab_size": len(WORDS), "pad_token_id": 0}


def pooling_llm(folder: Path, **more: Any) -> LLM:
    word_pieces().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    return LLM(str(folder), backend="reference", **more)


@pytest.mark.setting("--model-impl")
def test_auto_pools_and_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cross-encoder without a specification, of two texts with token types."""
    case = tiny.Tiny("score", "ElectraForSequenceClassification", {**ELECTRA, "num_labels": 1}, SMALL_BERT)
    model = case.save(tmp_path)
    with caplog.at_level(logging.WARNING, "pagoda"):
        llm = pooling_llm(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if "transformers" in record.getMessage()]
    assert line == (
        "pagoda does not implement ElectraForSequenceClassification: transformers computes it. Lost: speed (layers "
        "in plain torch), tensor parallelism, data parallelism, quantised weights, random weights, outputs per token "
        "and GGUF files"
    )
    (first, second) = llm.score("the cat", ["sat on mat", "dogs"], use_tqdm=False)
    llm.shutdown()
    ids = torch.tensor([[2, 4, 5, 3, 9, 10, 3]])  # [CLS] the cat [SEP] dog ##s [SEP]
    with torch.inference_mode():
        theirs = model(ids, token_type_ids=torch.tensor([[0, 0, 0, 0, 1, 1, 1]])).logits.sigmoid().item()
    assert second.outputs.score == pytest.approx(theirs, abs=1e-5)
    assert first.outputs.score != second.outputs.score


def test_modules_of_an_embedder(tmp_path: Path) -> None:
    """Mean pooling and a dense layer of a sentence-transformers folder; the limit of its texts."""
    model = tiny.Tiny("modules", "ElectraModel", ELECTRA, SMALL_BERT).save(tmp_path)
    write_modules(tmp_path, "mean_tokens", "Dense", max_seq_length=20)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (tmp_path / "2_Dense").mkdir()
    dense = {"in_features": 32, "out_features": 6, "activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(dense))
    layer = torch.nn.Linear(32, 6)
    tensors = {f"linear.{name}": tensor.detach() for name, tensor in layer.named_parameters()}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    settings = resolved(tmp_path)
    assert settings.limits.max_model_len == 20
    assert settings.pooling is not None
    assert settings.pooling.tasks == ("embed", "token_embed")
    assert settings.pooling.embedding_size == 6
    llm = pooling_llm(tmp_path)
    (output,) = llm.encode({"prompt_token_ids": [2, 4, 5, 3]}, PoolingParams(use_activation=False), use_tqdm=False)
    llm.shutdown()
    with torch.inference_mode():
        mean = model(torch.tensor([[2, 4, 5, 3]])).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(output.outputs.data, torch.tanh(layer(mean)), atol=1e-5)


def test_a_generator_is_pooled(nano: Saved) -> None:
    folder, model = nano
    for more, tasks in (
        ({"runner": "pooling"}, ("embed", "token_embed")),
        ({"convert": "embed", "pooler_config": {"pooling_type": "ALL"}}, ("token_embed",)),
        ({"convert": "reward"}, ("token_classify",)),
    ):
        info = resolved(folder, **more).pooling
        assert info is not None
        assert info.tasks == tasks
    llm = LLM(str(folder), backend="reference", runner="pooling", skip_tokenizer_init=True)
    (output,) = llm.encode({"prompt_token_ids": [5, 6, 7]}, PoolingParams(use_activation=False), use_tqdm=False)
    llm.shutdown()
    with torch.inference_mode():
        theirs = model.base_model(torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1]
    np.testing.assert_allclose(output.outputs.data, theirs, atol=3e-5)
    with pytest.raises(ConfigError, match=r"^--runner: ElectraModel is a pooling model and cannot generate"):
        resolved(folder, hf_overrides={"architectures": ["ElectraModel"]}, runner="generate")


def test_a_window_can_be_disabled(tmp_path: Path) -> None:
    tiny.Tiny("windows", "Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": 7}).save(tmp_path)
    full = resolved(tmp_path, model_impl="transformers", disable_sliding_window=True)
    assert isinstance(full.spec, TransformersSpec)
    assert {attention.window for attention in full.spec.attention} == {None}
    assert full.limits.max_model_len == 7


# --- what the fallback cannot do ---


@each_row(
    ("more", "error", "words"),
    [
        ({"backend": "torch_cuda", "tensor_parallel_size": 2}, ConfigError, "--tensor-parallel-size: is not supported"),
        ({"backend": "torch_cuda", "quantization": "int8"}, ConfigError, "--quantization: is not supported"),
        ({"backend": "torch_cuda", "enable_sleep_mode": True}, ConfigError, "--enable-sleep-mode: is not supported"),
        ({"backend": "torch_cuda", "cpu_offload_gb": 1.0}, ConfigError, "--cpu-offload-gb: is not supported"),
        (
            {"backend": "torch_cuda", "kv_cache_dtype": "fp8", "calculate_kv_scales": True},
            ConfigError,
            "--calculate-kv-scales: is not supported",
        ),
        (
            {"backend": "jax_tpu", "runner": "pooling"},
            ConfigError,
            "--model-impl: transformers: jax_tpu does not pool its models; use --backend torch_cuda or reference",
        ),
        (
            {"convert": "classify", "pooler_config": {"pooling_type": "MEAN"}},
            ConfigError,
            "--pooler-config: transformers' own code pools the texts that it classifies; drop the pooling type",
        ),
        (
            {"runner": "pooling", "hf_overrides": {"classifier_from_token": [1, 2]}},
            ConfigError,
            "--hf-overrides: classifier_from_token is not supported with --model-impl transformers",
        ),
        ({"load_format": "dummy"}, ConfigError, "--load-format: is not supported"),
        ({"batch_invariant": True}, ConfigError, "--batch-invariant: is not supported"),
        ({"backend": "jax_tpu", "data_parallel_size": 2}, ConfigError, "--data-parallel-size: is not supported"),
        (
            {"hf_overrides": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}},
            ModelError,
            "fp8 weights are not read by --model-impl transformers; serve the unquantised model",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_settings_that_it_lacks_are_refused(
    llama: Saved,
    more: dict[str, Any],
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    monkeypatch.setattr(registry, "_installed", lambda package: True)  # torchax need not be
    with pytest.raises(error, match=words):
        resolved(llama[0], model_impl="transformers", **more)


def test_converted_folders_are_refused(llama: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "ShardedCheckpoint", type(open_checkpoint(llama[0])))
    with pytest.raises(ModelError, match="folders of pagoda convert are not read by --model-impl transformers"):
        resolved(llama[0], model_impl="transformers")


def test_other_commands_need_a_specification(nano: Saved) -> None:
    with pytest.raises(ConfigError, match=r"^--model-impl: transformers is not supported by pagoda compile; serve"):
        own_spec(resolved(nano[0]).spec, "pagoda compile")


def test_a_missing_library_names_its_extra(nano: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = registry._installed
    monkeypatch.setattr(registry, "_installed", lambda package: package != "transformers" and installed(package))
    words = (
        r"NanoChatForCausalLM is not supported; .* transformers is not installed; pip install 'pagoda\[transformers\]'"
    )
    with pytest.raises(ModelError, match=words):
        resolved(nano[0])
    with pytest.raises(ConfigError, match=r"^--model-impl: transformers is not installed"):
        resolved(nano[0], model_impl="transformers")


def test_jax_tpu_needs_torchax(nano: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_installed", lambda package: package != "torchax")
    words = r"torchax is not installed; pip install 'pagoda\[torchax\]', or use --backend reference$"
    with pytest.raises(ModelError, match=rf"NanoChatForCausalLM is not supported; .* --model-impl: {words}"):
        resolved(nano[0], backend="jax_tpu")
    with pytest.raises(ConfigError, match=rf"^--model-impl: {words}"):
        resolved(nano[0], backend="jax_tpu", model_impl="transformers")


def test_transformers_is_imported_by_the_fallback_alone(llama: Saved) -> None:
    script = (
        "import sys\n"
        "from pagoda.server.settings.flags import EngineArgs\n"
        "from pagoda.server.startup.engine import build_engine\n"
        "import pagoda.backends.torch_cuda.backend\n"
        "more = {'backend': 'reference', 'skip_tokenizer_init': True, 'num_gpu_blocks_override': 9}\n"
        f"args = EngineArgs({str(llama[0])!r}, **more)\n"
        "build_engine(args.create_engine_config(), 'llm').backend.close()\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", script], check=False).returncode == 0


# --- code of a model's folder ---


@pytest.mark.usefixtures("code_cache")
@pytest.mark.setting("--trust-remote-code")
def test_code_of_a_folder_runs_only_if_it_is_trusted(llama: Saved, tmp_path: Path) -> None:
    folder, model = llama
    marker = tmp_path / "executed"
    custom = write_code(tmp_path / "pebble", folder, f"open({str(marker)!r}, 'w').close()")
    words = (
        r"PebbleForCausalLM is not supported; the nearest .*: PebbleForCausalLM is defined by .* --trust-remote-code"
    )
    for impl in ("auto", "transformers"):
        with pytest.raises(ModelError, match=words):
            resolved(custom, model_impl=impl)
    assert not marker.exists()
    prompt = tiny.tokens(count=30)
    assert answer(custom, prompt, trust_remote_code=True) == expected_greedy(model, prompt, 6)
    assert marker.exists()


def test_a_folder_may_have_code_that_is_not_needed(llama: Saved, tmp_path: Path) -> None:
    """Code is executed only if neither pagoda nor transformers has the architecture."""
    custom = write_code(tmp_path / "pebble", llama[0], "raise SystemExit('sprung')")
    config = json.loads((custom / "config.json").read_text())
    (custom / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    for impl in ("auto", "transformers"):
        assert len(answer(custom, [5, 6, 7], model_impl=impl, trust_remote_code=True)) == 6
