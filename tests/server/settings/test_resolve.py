"""resolve: values, sources and reasons of all settings, which --explain-config shows and the engine uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.tiny_folder import write_model
from support.suite.rows import each_row

from pagoda.common.config.defaults import ResolvedRow, Usage
from pagoda.common.config.settings import ENGINE_GROUPS, settings_of
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.mixers.caches import WindowCache
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import Resolved, _dtype, resolve
from pagoda.server.startup.engine import build_engine
from pagoda.tests.common.weights.gguf.gguf_writing import convert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def resolved(model: object, usage: Usage = "server", **settings: Any) -> Resolved:
    args = EngineArgs(str(model), **settings)
    return resolve(args.create_engine_config(), usage, args.sources)


def rows(found: Resolved) -> dict[str, ResolvedRow]:
    return {row.name: row for row in found.rows}


def test_every_setting_of_the_engine_has_one_row(folder: Path) -> None:
    names = [row.name for row in resolved(folder).rows]
    assert names == [setting.name for group in ENGINE_GROUPS.values() for setting in settings_of(group)]
    assert len(names) == len(set(names))


@each_row(
    ("name", "value", "source", "why"),
    [
        ("dtype", "bfloat16", "model", "the checkpoint's dtype is float32, which auto serves in 16 bits"),
        ("max_model_len", 128, "model", "the model's maximum context length, if the KV cache is large enough"),
        ("max_num_batched_tokens", 256, "platform default", "for an API server on a CPU"),
        ("max_num_seqs", 128, "platform default", "for an API server on a CPU"),
        ("block_size", 32, "platform default", "preferred by the backend's kernels"),
        ("enable_prefix_caching", True, "model", "supported"),
        ("enable_chunked_prefill", True, "model", "supported"),
        ("backend", "reference", "platform default", "the first that can run on this machine"),
        ("generation_config", "auto", "default", "sets no default"),
        ("swap_space", 4.0, "default", ""),
        ("kv_cache_memory_bytes", None, "default", "computed from the memory left by the weights"),
    ],
)
def test_rows_of_unset_settings(folder: Path, name: str, value: object, source: str, why: str) -> None:
    row = rows(resolved(folder))[name]
    assert (row.value, row.source) == (value, source)
    assert row.reason.startswith(why)


def test_names_follow_the_model(folder: Path) -> None:
    found = rows(resolved(folder))
    assert found["served_model_name"].value == (str(folder),)
    assert found["tokenizer"] == ResolvedRow("tokenizer", str(folder), "model", "the model's tokenizer")


def test_rows_of_given_settings_name_their_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_MAX_NUM_SEQS", "3")
    found = rows(resolved(folder, dtype="half", max_model_len=64, generation_config="vllm"))
    assert found["dtype"] == ResolvedRow("dtype", "float16", "keyword", "half is float16")
    assert found["max_model_len"] == ResolvedRow("max_model_len", 64, "keyword")
    assert found["max_num_seqs"] == ResolvedRow("max_num_seqs", 3, "environment PAGODA_MAX_NUM_SEQS")
    assert found["max_num_batched_tokens"].reason == "max_num_seqs * max_model_len, below the default 256"
    assert found["generation_config"].source == "keyword"
    stated_as_auto = resolve(
        EngineArgs(str(folder)).create_engine_config(), "server", {"max_model_len": "flag", "dtype": "file x.yaml"}
    )
    row = rows(stated_as_auto)["max_model_len"]
    assert (row.value, row.source, row.reason) == (
        128,
        "flag",
        "the model's maximum context length, if the KV cache is large enough",
    )
    assert rows(stated_as_auto)["dtype"].source == "file x.yaml"


def test_local_folder_has_no_hub_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)  # a local folder is no hub model, however it is spelled
    assert rows(resolved(folder.name))["revision"] == ResolvedRow("revision", None, "default")


def test_hf_token_is_hidden(folder: Path) -> None:
    row = rows(resolved(folder, hf_token="secret"))["hf_token"]
    assert row == ResolvedRow("hf_token", "***", "keyword", "hidden")


def test_rows_of_a_gguf_file(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "m.gguf", "llama")
    found = rows(resolved(tmp_path / "m.gguf"))
    assert found["quantization"] == ResolvedRow("quantization", "gguf", "model", "the model is a GGUF file")
    assert found["load_format"] == ResolvedRow("load_format", "gguf", "model", "the model is a GGUF file")
    dummy = rows(resolved(tmp_path / "m.gguf", load_format="dummy"))
    assert dummy["load_format"] == ResolvedRow("load_format", "dummy", "keyword", "")
    assert dummy["quantization"].reason == "random blocks, of the types in the GGUF file"


def test_row_of_the_generation_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "max_new_tokens": 9}')
    assert rows(resolved(tmp_path))["generation_config"].reason == "sets temperature 0.6, max_tokens 9"


IN_16_BITS = "the checkpoint's dtype is float32, which auto serves in 16 bits"


@each_row(
    ("stated", "backend", "dtype", "why"),
    [
        ("float64", "reference", "bfloat16", "the checkpoint's dtype is float64, which reference does not support"),
        (None, "reference", "bfloat16", "the checkpoint names no dtype"),
        ("float16", "reference", "float16", "the checkpoint's dtype is float16"),
        ("float32", "reference", "bfloat16", IN_16_BITS),
        ("float32", "jax_tpu", "bfloat16", IN_16_BITS),
        ("float16", "jax_tpu", "bfloat16", "the checkpoint's dtype is float16, which jax_tpu does not support"),
    ],
)
def test_dtype_of_the_checkpoint(stated: str | None, backend: str, dtype: str, why: str, tmp_path: Path) -> None:
    found = resolved(write_model(tmp_path, torch_dtype=stated), backend=backend)
    assert (found.dtype, rows(found)["dtype"].reason) == (dtype, why)


@pytest.mark.setting("--dtype")
def test_models_that_overflow_in_float16(tmp_path: Path) -> None:
    gemma = {"model_type": "gemma2", "dtype": "float16"}
    assert _dtype("auto", gemma, "torch_cuda", pooling=False)[0] == "bfloat16"
    assert _dtype("auto", gemma, "torch_cuda", pooling=True)[0] == "bfloat16"
    assert _dtype("float32", gemma, "torch_cuda", pooling=False)[0] == "float32"
    for name in ("float16", "half"):
        with pytest.raises(ConfigError, match=r"^--dtype: gemma2 models overflow in float16; use bfloat16 or float32"):
            _dtype(name, gemma, "torch_cuda", pooling=False)
    assert _dtype("half", {"model_type": "llama"}, "torch_cuda", pooling=False)[0] == "float16"
    assert _dtype("auto", {"dtype": "float32"}, "torch_cuda", pooling=True)[0] == "float16"


@each_row(
    ("stated", "backend", "dtype"),
    [
        ("float32", "reference", "float32"),
        (None, "reference", "float32"),
        ("bfloat16", "reference", "bfloat16"),
        ("float32", "jax_tpu", "bfloat16"),
    ],
)
def test_dtype_of_a_pooling_model(stated: str | None, backend: str, dtype: str, tmp_path: Path) -> None:
    found = resolved(write_model(tmp_path, torch_dtype=stated), backend=backend, runner="pooling")
    assert found.dtype == dtype


@pytest.mark.parametrize("usage", ["llm", "server"])
def test_an_engine_runs_with_what_is_explained(folder: Path, usage: Usage) -> None:
    args = EngineArgs(str(folder), skip_tokenizer_init=True, max_num_batched_tokens=100, block_size=16)
    config = args.create_engine_config()
    explained, built = resolve(config, usage), build_engine(config, usage)
    built.backend.close()
    assert built.info.limits == explained.limits
    assert (built.info.backend, built.info.dtype) == (explained.backend, explained.dtype)
    assert (built.info.sampling_defaults, built.info.eos_token_ids) == ({}, (256,))
    shown = rows(explained)
    assert shown["max_num_seqs"].value == built.info.limits.max_num_seqs == 100


def test_no_weights_are_needed_and_no_framework_is_imported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    program = (
        "import sys; from pagoda.server.settings.flags import EngineArgs;"
        "from pagoda.server.settings.resolve import resolve;"
        f"config = EngineArgs({str(tmp_path)!r}).create_engine_config(); rows = resolve(config, 'server').rows;"
        "print(len(rows), *({'torch', 'jax', 'transformers', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(resolved(folder).rows))]


@each_row(
    ("settings", "error", "words"),
    [
        ({"backend": "none"}, ConfigError, "--backend: none is unknown"),
        ({"max_model_len": 129}, ConfigError, "--max-model-len: 129 exceeds the model's maximum context length, 128"),
        ({"load_format": "gguf"}, ModelError, r"no \.gguf file"),
        ({"generation_config": "/no/where"}, ConfigError, "--generation-config: /no/where"),
        ({"hf_overrides": {"architectures": ["Abacus"]}}, ModelError, "architecture Abacus is not supported"),
    ],
)
def test_resolve_raises_what_the_start_would(
    folder: Path, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        resolved(folder, **settings)


LLAMA4 = {
    **{"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "vocab_size": 257, "hidden_size": 32},
    **{"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 128, "head_dim": 8, "attention_chunk_size": 64, "no_rope_layers": [1, 0]},
    **{"floor_scale": 100, "rope_theta": 1e4},
}


@pytest.mark.parametrize(("length", "chunk", "grows"), [(128, 64, True), (99, 64, False), (64, None, False)])
def test_what_matters_in_longer_contexts_only_is_left_out(
    tmp_path: Path, length: int, chunk: int | None, grows: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA4))
    found = resolved(tmp_path, load_format="dummy", max_model_len=length)
    first, second = (layer.attention for layer in found.spec.layers)
    assert (first.chunk, second.query_growth is not None) == (chunk, grows)
    assert [group.spec.window for group in found.layout.groups if isinstance(group.spec, WindowCache)] == (
        [] if chunk is None else [chunk]
    )


GEMMA4 = {
    **{"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": 257, "hidden_size": 32},
    **{"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 128, "head_dim": 8, "global_head_dim": 16},
}


def test_prompt_embeddings_do_not_suffice_for_a_model_with_an_embedding_per_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4))
    with pytest.raises(ConfigError, match="--enable-prompt-embeds: each layer of the model embeds the token ids, too"):
        resolved(tmp_path, load_format="dummy", enable_prompt_embeds=True)
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA4, "hidden_size_per_layer_input": 0}))
    resolved(tmp_path, load_format="dummy", enable_prompt_embeds=True)
