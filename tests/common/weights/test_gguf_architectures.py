"""Every architecture: a model saved by transformers, written as GGUF, reads back as the same spec and tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pagoda.common.errors import ModelError, WeightError
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.rules import apply_rules
from pagoda.tests.common.weights.gguf_writing import convert
from pagoda.tests.models.tiny import TINY, Tiny

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-gqa": ("llama", "llama-gqa", {}),
    "llama-biased-tied-head-dim": ("llama", "llama-biased", {}),
    "llama-linear": ("llama", "llama-linear", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "mistral": ("llama", "mistral-window", {"attention.sliding_window": 7}),
    "mixtral": ("llama", "mixtral-full", {}),
    "qwen2": ("qwen2", "qwen2-tied", {}),
    "qwen3": ("qwen3", "qwen3-tied", {}),
    "gemma2": ("gemma2", "gemma2", {}),
    "gemma3": ("gemma3", "gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    "phi3": ("phi3", "phi3", {}),
    "phi3-long": ("phi3", "phi3-long", {"rope.scaling.attn_factor": 1.2247449}),
    "gpt2": ("gpt2", "gpt2", {}),
    "olmo2": ("olmo2", "olmo2", {}),
}
OVERRIDES: dict[str, dict[str, Any]] = {
    # What GGUF does not state, llama.cpp fixes: the query scale and the window pattern.
    "gemma2": {"query_pre_attn_scalar": 12},
    "gemma3": {"query_pre_attn_scalar": 12, "sliding_window_pattern": 6, "num_hidden_layers": 7},
    "phi3-long": {"max_position_embeddings": 64},
}
MOE = {
    "head_dim": 16,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def _tiny(case: str) -> Tiny:
    if case == "qwen3moe":
        return Tiny(case, "Qwen3MoeForCausalLM", MOE)
    base = next(tiny for tiny in TINY if tiny.name == CASES[case][1])
    return Tiny(base.name, base.architecture, {**base.extra, **OVERRIDES.get(case, {})}, base.base)


def _close(mine: object, theirs: object) -> bool:
    """Equal specs, up to what float32 metadata loses."""
    return _rounded(repr(mine)) == _rounded(repr(theirs))


def _rounded(text: str) -> list[str]:
    words = text.replace("=", " ").replace(",", " ").replace("(", " ").replace(")", " ").split()
    return [f"{float(word):.5g}" if word[0].isdigit() else word for word in words]


@pytest.mark.parametrize("case", [*CASES, "qwen3moe"])
def test_reads_back_what_transformers_saved(case: str, tmp_path: Path) -> None:
    arch, _, extra = CASES.get(case, ("qwen3moe", "", {}))
    _tiny(case).save(tmp_path / "hf")
    expected = convert(tmp_path / "hf", tmp_path / "model.gguf", arch, extra)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    tensors = dict(checkpoint.tensors())

    assert tensors.keys() == expected.keys()
    for name, array in tensors.items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=3e-7, err_msg=name)
    assert checkpoint.num_tensors == len(tensors)
    assert checkpoint.num_bytes == sum(array.nbytes for array in tensors.values())

    spec, family = spec_from_config(checkpoint.config())
    assert _close(spec, spec_from_config(open_checkpoint(tmp_path / "hf").config())[0])
    names = [name for name, _ in apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored)]
    assert sorted(names) == sorted(params(spec))


LLAMA = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 16,
    "feed_forward_length": 24,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def _write(path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        writer.add_key_value(
            key if "." in key and key.startswith("tokenizer") else f"{arch}.{key}", value, _type(value)
        )
    for name, array in {"token_embd.weight": np.ones((10, 16), np.float32), **(tensors or {})}.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type(value: object) -> gguf.GGUFValueType:
    return gguf.GGUFValueType.get_type(value)


def _llama(path: Path, extra: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    return open_checkpoint(_write(path / "m.gguf", "llama", {**LLAMA, **extra}, tensors)).config()


def test_llama3_scaling_is_recovered_from_frequency_factors(tmp_path: Path) -> None:
    # The rule of Llama 3.1 (arXiv 2407.21783) for head_dim 8, theta 10000, factor 8, bands 1 and 4 over 8192 tokens.
    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(0, 128, 2) / 128)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    extra = {"attention.key_length": 128, "attention.value_length": 128}
    assert _llama(tmp_path, extra, {"rope_freqs.weight": factors})["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_frequency_factors_become_equal_lists(tmp_path: Path) -> None:
    scaling = _llama(tmp_path, {}, {"rope_freqs.weight": np.array([2, 3], np.float32)})["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == [2.0, 3.0]
    assert scaling["attention_factor"] == 1.0


def test_two_scalings_at_once_are_refused(tmp_path: Path) -> None:
    extra = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    with pytest.raises(ModelError, match=r"both rope.scaling and rope_freqs"):
        _llama(tmp_path, extra, {"rope_freqs.weight": np.array([2, 3], np.float32)})


def test_yarn_metadata(tmp_path: Path) -> None:
    extra = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_beta_fast": 30.0,
    }
    assert _llama(tmp_path, extra)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 30.0,
        "beta_slow": 1.0,
    }


def test_unknown_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", "bloom", {"block_count": 1})
    with pytest.raises(ModelError, match=r"architecture bloom is not supported; supported: llama, qwen2, .*gpt2"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"logit_scale": 2.0}, r"llama.logit_scale = 2.0 is not supported"),
        ({"rope.scaling.type": "other"}, "rope scaling other is not supported"),
        ({"rope.scaling.attn_factor": 2.0}, "attn_factor is not supported without yarn"),
        ({"attention.value_length": 8}, "keys and values differ"),
        ({"attention.causal": False}, "non-causal attention"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5},
            "yarn_ext_factor",
        ),
        ({"rope.dimension_count": 2, "attention.key_length": 4}, "a part of each head"),
        ({"attention.head_count": "four"}, "attention.head_count is 'four', expected one int"),
        ({"expert_count": 2, "expert_used_count": 1}, "experts in separate tensors"),
        ({"attention.head_count": [4, 2]}, "expected one int"),
        ({"attention.head_count": 0}, "head_count is 0"),
    ],
)
def test_unread_metadata_that_changes_the_computation_is_refused(
    extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        _llama(tmp_path, extra)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    metadata = {key: value for key, value in LLAMA.items() if key != "context_length"}
    with pytest.raises(ModelError, match=r"metadata llama\.context_length is missing"):
        open_checkpoint(_write(tmp_path / "m.gguf", "llama", metadata))


@pytest.mark.parametrize("name", ["blk.0.surprise.weight", "blk.x", "token_embd.scale", "v.patch_embd.weight"])
def test_unknown_tensor_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=f"tensor {name} is unknown in a llama model"):
        _llama(tmp_path, {}, {name: np.ones(4, np.float32)})


def test_rotary_rows_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", "llama", LLAMA, {"blk.0.attn_q.weight": np.ones((18, 16), np.float32)})
    with pytest.raises(WeightError, match="18 rows"):
        list(open_checkpoint(path).tensors())


def test_end_of_text_ids(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<|im_end|>", "<|eot|>", "<|end|>"],
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1],
    }
    checkpoint = open_checkpoint(_write(tmp_path / "m.gguf", "llama", {**LLAMA, **extra}))
    # <|end|> is an ordinary token here, so it ends nothing.
    assert checkpoint.generation_config() == {"bos_token_id": 0, "eos_token_id": [1, 3, 2]}
    assert checkpoint.gguf_metadata is not None
    assert checkpoint.gguf_metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.ones((8, 16), np.float32), "float32"),
        (np.ones((8, 16), np.float16), "float16"),
    ],
)
def test_dtype_follows_the_matrices(array: np.ndarray, dtype: str, tmp_path: Path) -> None:
    assert _llama(tmp_path, {}, {"blk.0.attn_v.weight": array})["dtype"] == dtype


def test_dummy_opens_without_tensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(_write(tmp_path / "m.gguf", "llama", LLAMA), "dummy")
    assert (checkpoint.num_tensors, list(checkpoint.tensors())) == (0, [])
    assert checkpoint.config()["hidden_size"] == 16
