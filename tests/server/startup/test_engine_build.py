import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import tiny_folder

from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.startup.engine import BuiltEngine, build_engine

CONFIG = tiny_folder.CONFIG | {"vocab_size": 96, "eos_token_id": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def generation_config(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def args(folder: Path, **more: Any) -> EngineArgs:
    return EngineArgs(folder, **{"load_format": "dummy", "skip_tokenizer_init": True} | more)


def build(folder: Path, **more: Any) -> BuiltEngine:
    built = build_engine(args(folder, **more).create_engine_config(), "llm")
    built.backend.close()
    return built


def test_a_model_without_weights_or_tokenizer_generates(folder: Path) -> None:
    engine = LLMEngine.from_engine_args(args(folder, num_gpu_blocks_override=16))
    engine.add_request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs[-1].outputs[0].token_ids) == 4
    assert outputs[-1].outputs[0].text == ""
    engine.shutdown()


def test_a_model_that_does_not_exist_is_refused_before_the_framework_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    imported: list[str] = []
    monkeypatch.setattr("pagoda.server.startup.engine.import_backend", imported.append)
    for model, reason in (
        (str(tmp_path / "none"), "no such file or folder"),
        ("org/none", "not downloaded before, and HF_HUB_OFFLINE is set"),
    ):
        with pytest.raises(ModelError, match=reason):
            build(Path(model), download_dir=str(tmp_path))
    assert imported == []


def test_engine_info_of_a_built_engine(folder: Path) -> None:
    info = build(folder, served_model_name=["a", "b"]).info
    assert (info.names, info.vocab_size, info.limits.max_model_len, info.dtype) == (("a", "b"), 96, 128, "bfloat16")
    assert (info.backend, info.device, info.eos_token_ids) == ("reference", "cpu", (2,))
    assert info.sampling_defaults == {}
    assert [name for name, _ in info.phases] == [
        "open checkpoint",
        "import reference",
        "load weights",
        "allocate KV cache",
        "warm up",
    ]


def test_generation_config(folder: Path) -> None:
    generation_config(folder, eos_token_id=[7, 2], temperature=0.6, top_p=None, max_new_tokens=9, do_sample=True)
    info = build(folder).info
    assert info.eos_token_ids == (7, 2)
    assert info.sampling_defaults == {"temperature": 0.6, "max_tokens": 9}
    info = build(folder, generation_config="vllm").info
    assert (info.eos_token_ids, info.sampling_defaults) == ((2,), {})


def test_generation_config_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    generation_config(other, top_k=3)
    assert build(folder, generation_config=other).info.sampling_defaults == {"top_k": 3}
    with pytest.raises(ConfigError, match=r"--generation-config: .*nowhere"):
        build(folder, generation_config="nowhere")
    generation_config(other, top_k="three")
    with pytest.raises(ModelError, match="top_k is 'three', not a number"):
        build(folder, generation_config=other)


def test_dtype_and_max_model_len_are_applied(folder: Path) -> None:
    info = build(folder, dtype="half", max_model_len=64).info
    assert (info.dtype, info.limits.max_model_len) == ("float16", 64)


def test_unset_max_model_len_is_reduced_to_the_kv_cache(folder: Path) -> None:
    info = build(folder, block_size=16, num_gpu_blocks_override=4).info
    assert info.limits.max_model_len == 48
    with pytest.raises(ConfigError, match="lower --max-model-len to 48 or raise --num-gpu-blocks-override"):
        build(folder, block_size=16, num_gpu_blocks_override=4, max_model_len=128)
    with pytest.raises(ConfigError, match=r"lower --max-model-len to [0-9]+ or raise --kv-cache-memory-bytes"):
        build(folder, block_size=16, kv_cache_memory_bytes=1 << 14, max_model_len=128)


SPARSE_LATENT = CONFIG | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
    "index_n_heads": 2,
    "index_head_dim": 12,
    "index_topk": 9,
}
WINDOWS = CONFIG | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 40}


def test_a_model_with_two_caches_per_layer(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SPARSE_LATENT))
    info = build(folder, block_size=16, num_gpu_blocks_override=4).info
    assert info.limits.max_model_len == 48
    words = (
        "--max-model-len: a sequence of 128 tokens does not fit the KV cache: it needs 9 + 9 blocks, 4 + 4 have room "
        "for 48 tokens; lower --max-model-len to 48 or raise --num-gpu-blocks-override"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
        build(folder, block_size=16, num_gpu_blocks_override=4, max_model_len=128)


def test_a_cache_without_room_for_a_window_and_a_step(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(WINDOWS))
    more = {"block_size": 16, "max_num_batched_tokens": 16, "max_model_len": 128}
    assert build(folder, num_gpu_blocks_override=6, **more).info.limits.max_model_len == 128
    with pytest.raises(ConfigError, match="it needs 6 blocks, 5 have room for 64 tokens; lower --max-model-len to 64"):
        build(folder, num_gpu_blocks_override=5, **more)


def test_a_cache_without_room_for_a_single_page(folder: Path) -> None:
    with pytest.raises(ConfigError, match="1 have room for 0 tokens; raise --num-gpu-blocks-override"):
        build(folder, block_size=16, num_gpu_blocks_override=1)


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"backend": "simulated"}, ConfigError, "--hardware: required with --backend simulated: name an accelerator"),
        (
            {"max_model_len": 129},
            ConfigError,
            "--max-model-len: 129 exceeds the model's maximum context length, 128; use 128 or less, or set",
        ),
        ({"load_format": "auto"}, ModelError, "no weights|holds no|safetensors"),
    ],
)
def test_startup_errors_name_the_cause(folder: Path, more: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build(folder, **more)


def test_tables_beyond_the_address_space_are_refused_with_a_remedy(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 1 << 30}))
    with pytest.raises(ModelError, match=r"does not fit the memory of this machine \(.*lower --max-model-len"):
        build(folder, max_num_seqs=1 << 16, max_num_batched_tokens=1 << 16)


def test_an_unknown_architecture_names_the_nearest_and_what_transformers_lacks(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamooForCausalLM"]}))
    words = (
        r"LlamooForCausalLM is not supported; the nearest supported ones are LlamaForCausalLM, .*; "
        r"--model-impl transformers: transformers 5[\d.]+ has no causal language model LlamooForCausalLM either$"
    )
    with pytest.raises(ModelError, match=words):
        build(folder)


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        open_tokenizer(args(folder, skip_tokenizer_init=False).create_engine_config())
    assert open_tokenizer(args(folder).create_engine_config()) is None


def test_tokenizer_of_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"some\.gguf"):
        open_tokenizer(args(tmp_path, skip_tokenizer_init=False).create_engine_config())
    (tmp_path / "mmproj-some.gguf").touch()
    with pytest.raises(ModelError, match=r"/some\.gguf"):
        open_tokenizer(args(tmp_path, skip_tokenizer_init=False).create_engine_config())
    (tmp_path / "more.gguf").touch()
    with pytest.raises(ModelError, match=r"several GGUF files; .*more\.gguf, some\.gguf"):
        open_tokenizer(args(tmp_path, skip_tokenizer_init=False).create_engine_config())
